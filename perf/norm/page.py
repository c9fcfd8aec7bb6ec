"""Targets and bits of norms on the status page: pure functions of the records."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.speed import Speed
from ..core.tables import Bench, kept, latest, sizes_row
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
_MEASURE = "`python -m perf bench norm`"
_STEP = "docs/notes/norm_sm90.md"
#: The sizes that targets are of.
_SIZES = ("8192x4096", "32768x2048")
#: A copy's bandwidth, as a share of which a norm's is told, and a copy of as many bytes.
_LARGE, _EQUAL = "large copy", "copy"


@dataclass(frozen=True)
class Target:
    """A rival's time over ours; or ours as a share of a copy."""

    product: str
    at_least: float
    rival: str

    @property
    def share(self) -> bool:
        return self.rival in (_LARGE, _EQUAL)

    @property
    def text(self) -> str:
        if not self.share:
            return f"{self.product}: at least {self.at_least:.2f}x {self.rival}"
        copy = {_LARGE: "the bandwidth of a large copy", _EQUAL: "a copy of as many bytes"}
        return f"{self.product}: at least {self.at_least:.0%} of {copy[self.rival]}"

    def values(self, bench: Bench) -> list[float]:
        """Values of the sizes that were measured."""
        ratios = []
        for size in _SIZES:
            case = (self.product, size)
            if self.rival == _LARGE:
                ratios.append((bench.get(case) or {}).get("floor_fraction"))
            else:
                ratios.append(bench.ratio(case, self.rival))
        return [value for value in ratios if value is not None]


_LEAST = {"fwd": 0.90, "bwd": 0.85}
TARGETS = (
    *(
        Target(f"{op} {way}", least, copy)
        for copy in (_EQUAL, _LARGE)
        for op in ("rms_norm", "layer_norm")
        for way, least in _LEAST.items()
    ),
    *(
        Target(f"{op} {way}", 1.0, rival)
        for op, rival in (("rms_norm", "liger"), ("rms_norm", "quack"), ("layer_norm", "liger"))
        for way in _LEAST
    ),
)


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Bits over all cases."""
    return [["bits", kept(latest(records, "norm"), CASES)]]


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target."""
    bench = latest(records, "norm")
    return [
        sizes_row(t.text, t.values(bench), t.at_least, t.share, (_MEASURE, _STEP)) for t in TARGETS
    ]
