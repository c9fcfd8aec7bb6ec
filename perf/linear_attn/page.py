"""Targets and bits of linear attention on the status page: pure functions of the records."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.speed import Speed
from ..core.tables import Bench, kept, latest, sizes_row
from . import cases

TITLE = "Linear attention"
BENCHES = ("linear_attn",)
#: No line of the README's table: `perf headline` has no time for a rival's tuning.
SPEED: tuple[Speed, ...] = ()
CASES = [(case.product, case.label) for case in cases.ALL]
_STEPS = ("`python -m perf bench linear_attn`", "docs/linear_attention.md")


@dataclass(frozen=True)
class Target:
    """A rival's time over ours, ours as a share of a copy, or a rival's error over ours."""

    product: str
    at_least: float
    rival: str
    error: bool = False

    @property
    def share(self) -> bool:
        return self.rival == "copy"

    @property
    def text(self) -> str:
        if self.error:
            return f"{self.product}: no result farther from float64 than {self.rival}'s"
        if self.share:
            return f"{self.product}: at least {self.at_least:.0%} of a copy of as many bytes"
        return f"{self.product}: at least {self.at_least:.2f}x {self.rival}"

    def values(self, bench: Bench) -> list[float]:
        """Values of the sizes that were measured."""
        some = [case for case in CASES if case[0] == self.product]
        values = [self._error(bench, c) if self.error else bench.ratio(c, self.rival) for c in some]
        return [value for value in values if value is not None]

    def _error(self, bench: Bench, case: tuple[str, str]) -> float | None:
        """The least ratio of a result's errors, the rival's over ours."""
        ours, theirs = (
            ((bench.get(case, name) or {}).get("check") or {}).get("errors")
            for name in ("ours", self.rival)
        )
        if not ours or not theirs:
            return None
        return min(theirs[name] / ours[name] for name in ours)


_FASTER = {"fwd": 1.5, "bwd": 1.3}
TARGETS = (
    *(Target(f"{op} {way}", least, "fla") for op in cases.DELTAS for way, least in _FASTER.items()),
    *(Target(f"{op} {way}", 0.85, "copy") for op in cases.MOVED for way in _FASTER),
    *(Target(f"{op} {way}", 1.0, "fla", error=True) for op in cases.DELTAS for way in _FASTER),
)


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Bits over all cases."""
    return [["bits", kept(latest(records, "linear_attn"), CASES)]]


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target."""
    bench = latest(records, "linear_attn")
    return [sizes_row(t.text, t.values(bench), t.at_least, t.share, _STEPS) for t in TARGETS]
