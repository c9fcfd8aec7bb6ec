"""Targets and bits of linear attention on the status page: pure functions of the records."""

from __future__ import annotations

from ..core.speed import Speed
from ..core.tables import Bench, Case, Target, Value, page_of, ratio_to
from . import cases

TITLE = "Linear attention"
BENCHES = ("linear_attn",)
#: No line of the README's table: `perf headline` has no time for a rival's tuning.
SPEED: tuple[Speed, ...] = ()
CASES = [(case.product, case.label) for case in cases.ALL]


def _errors(bench: Bench, case: Case) -> float | None:
    """The least ratio of a result's errors, FLA's over ours."""
    ours, theirs = (
        ((bench.get(case, name) or {}).get("check") or {}).get("errors") for name in ("ours", "fla")
    )
    if not ours or not theirs:
        return None
    return min(theirs[name] / ours[name] for name in ours)


def _target(product: str, at_least: float, text: str, value: Value, share: bool = False) -> Target:
    some = [case for case in CASES if case[0] == product]
    return Target(f"{product}: {text}", some, at_least, value, share)


_FASTER = {"fwd": 1.5, "bwd": 1.3}
_COPY, _CLOSER = (
    "at least 85% of a copy of as many bytes",
    "no result farther from float64 than fla's",
)
_DECODED = [case for case in CASES if case[0] == "decode fwd" and case[1].split("x")[0] != "1"]
TARGETS = (
    Target("decode: at least 1.30x fla at 64 and 256", _DECODED, 1.3, ratio_to("fla"), False),
    Target("decode: at least 70% of a copy", _DECODED, 0.7, ratio_to("copy"), True),
    *(
        _target(f"{op} {way}", least, f"at least {least:.2f}x fla", ratio_to("fla"))
        for op in cases.DELTAS
        for way, least in _FASTER.items()
    ),
    *(
        _target(f"{op} {way}", 0.85, _COPY, ratio_to("copy"), share=True)
        for op in cases.MOVED
        for way in _FASTER
    ),
    *(_target(f"{op} {way}", 1.0, _CLOSER, _errors) for op in cases.DELTAS for way in _FASTER),
)
bits_kept, target_rows = page_of(
    "linear_attn",
    CASES,
    TARGETS,
    ("`python -m perf bench linear_attn`", "docs/linear_attention.md"),
)
