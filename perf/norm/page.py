"""Targets and bits of norms on the status page: pure functions of the records."""

from __future__ import annotations

from ..core.speed import Speed
from ..core.tables import Target, field_of, page_of, ratio_to
from . import cases

TITLE = "Norms"
BENCHES = ("norm",)
SPEED = (
    Speed("`rms_norm`, both passes", "norm", ("rms_norm fwd", "rms_norm bwd"), "quack", "quack"),
    Speed(
        "`layer_norm`, both passes", "norm", ("layer_norm fwd", "layer_norm bwd"), "liger", "Liger"
    ),
)
_ALL = cases.cases(list(cases.OPS), list(cases.SIZES))
CASES = [(case.product, case.label) for case in _ALL]
#: The sizes that targets are of.
_SIZES = ("8192x4096", "32768x2048")


def _target(product: str, at_least: float, rival: str) -> Target:
    """A rival's time over ours; or ours as a share of a copy."""
    cases_of = [(product, size) for size in _SIZES]
    if rival == "large copy":
        text = f"{product}: at least {at_least:.0%} of the bandwidth of a large copy"
        return Target(text, cases_of, at_least, field_of("floor_fraction"), share=True)
    if rival == "copy":
        text = f"{product}: at least {at_least:.0%} of a copy of as many bytes"
        return Target(text, cases_of, at_least, ratio_to(rival), share=True)
    return Target(
        f"{product}: at least {at_least:.2f}x {rival}", cases_of, at_least, ratio_to(rival)
    )


_LEAST = {"fwd": 0.90, "bwd": 0.85}
TARGETS = (
    *(
        _target(f"{op} {way}", least, copy)
        for copy in ("copy", "large copy")
        for op in ("rms_norm", "layer_norm")
        for way, least in _LEAST.items()
    ),
    *(
        _target(f"{op} {way}", 1.0, rival)
        for op, rival in (("rms_norm", "liger"), ("rms_norm", "quack"), ("layer_norm", "liger"))
        for way in _LEAST
    ),
)
bits_kept, target_rows = page_of(
    "norm", CASES, TARGETS, ("`python -m perf bench norm`", "docs/notes/norm_sm90.md")
)
