"""Targets and bits of mHC on the status page: pure functions of the records."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.speed import Speed
from ..core.tables import Bench, kept, latest, sizes_row
from . import cases

TITLE = "mHC"
BENCHES = ("mhc",)
SPEED = (
    Speed(
        "mHC site, both passes", "mhc", ("site fwd", "site bwd"), "te", "TransformerEngine, atomics"
    ),
)
_CN = cases.of_sizes()
#: Of the layout that nobody else has, one number of tokens.
_NC = cases.cases(cases.OPS, [(8192, c) for c in cases.CHANNELS], "nc")
#: Layout -> (product, label) of its cases.
_KEYS = {
    name: [(case.product, case.label) for case in of_layout]
    for name, of_layout in (("cn", _CN), ("nc", _NC))
}
CASES = [*_KEYS["cn"], *_KEYS["nc"]]
_MEASURE = "`python -m perf bench mhc`"
_STEP = "docs/notes/mhc_sm90.md"


@dataclass(frozen=True)
class Target:
    """TransformerEngine's time over ours, or the copy's bandwidth, at every size."""

    product: str
    at_least: float
    of_copy: bool = False
    layout: str = "cn"

    @property
    def text(self) -> str:
        if self.of_copy:
            name = self.product if self.layout == "cn" else f"{self.product}, {self.layout}"
            return f"{name}: at least {self.at_least:.0%} of the copy's bandwidth"
        return f"{self.product}: at least {self.at_least:.2f}x TransformerEngine with atomics"

    def values(self, bench: Bench) -> list[float]:
        """Values of the sizes that were measured."""
        values = []
        for key in (key for key in _KEYS[self.layout] if key[0] == self.product):
            item = bench.get(key) or {}
            values.append(item.get("floor_fraction") if self.of_copy else bench.ratio(key, "te"))
        return [value for value in values if value is not None]


TARGETS = (
    Target("projection fwd", 1.15),
    Target("projection bwd", 2.5),
    Target("projection_norm bwd", 1.4),
    Target("scale_sinkhorn fwd", 2.0),
    Target("scale_sinkhorn bwd", 2.0),
    Target("aggregate fwd", 1.0),
    Target("aggregate bwd", 1.0),
    Target("expand fwd", 1.0),
    Target("expand bwd", 1.05),
    Target("site fwd", 1.15),
    Target("site bwd", 2.5),
    Target("aggregate fwd", 0.94, True),
    Target("expand fwd", 0.93, True),
    Target("expand bwd", 0.90, True),
    Target("projection fwd", 0.88, True),
    Target("projection fwd", 0.88, True, "nc"),
    Target("projection bwd", 0.80, True),
)


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Bits over all cases."""
    return [["bits", kept(latest(records, "mhc"), CASES)]]


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target."""
    bench = latest(records, "mhc")
    return [
        sizes_row(t.text, t.values(bench), t.at_least, t.of_copy, (_MEASURE, _STEP))
        for t in TARGETS
    ]
