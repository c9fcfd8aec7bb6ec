"""The status page of mHC: a pure function of the records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core import section
from ..core.counts import timed
from ..core.section import Section, benched
from ..core.speed import Speed
from ..core.tables import NOT_RUN, Bench, bits, folded, kept, latest, times, where
from . import cases

TITLE = "mHC"
KERNELS = (
    "mhc_project_sm90",
    "mhc_project_bwd_wgmma_sm90",
    "mhc_project_bwd_sm90",
    "mhc_combine_sm90",
    "mhc_recompute_sm90",
    "mhc_reduce_sm90",
    "mhc_coefficients_sm90",
    "mhc_coefficients_bwd_sm90",
    "mhc_sums_sm90",
)
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
#: Cases beside a copy of as many bytes.
OTHERS = [
    (case.product, case.label)
    for case in dict.fromkeys((*cases.of_kinds(), *cases.of_few_tokens()))
    if (case.product, case.label) not in CASES
]
COUNTS = (timed("mHC: ops and sites timed", "mhc", set(CASES)),)
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
        section.target_row(t.text, t.values(bench), t.at_least, t.of_copy, (_MEASURE, _STEP))
        for t in TARGETS
    ]


def _rows(bench: Bench) -> list[list[str]]:
    rows = []
    for key in CASES:
        item = bench.get(key)
        if item is None or "median_us" not in item:
            continue
        ratios = [times(bench.ratio(key, name), "-") for name in ("te", "te_ordered")]
        share = f"{item['floor_fraction']:.0%}"
        rows.append([*key, f"{item['median_us']:.1f}", share, *ratios, bits(item), where(item)])
    return rows


def _ops(records: list[dict]) -> list[str]:
    head = ["op", "tokens x C", "us", "of the copy", "TE", "TE ordered", "bits", "ran on"]
    rows = _rows(latest(records, "mhc"))
    return folded(head, rows, ("bits", "ran on")) if rows else [NOT_RUN]


def _others(records: list[dict]) -> list[str]:
    bench = latest(records, "mhc")
    rows = []
    for key in OTHERS:
        item = bench.get(key)
        if item is not None and "median_us" in item:
            ratios = [times(bench.ratio(key, name), "-") for name in ("copy", "te", "te_ordered")]
            rows.append([*key, f"{item['median_us']:.1f}", *ratios, bits(item), where(item)])
    head = ["op", "tokens x C", "us", "copy", "TE", "TE ordered", "bits", "ran on"]
    return folded(head, rows, ("bits", "ran on")) if rows else [NOT_RUN]


SECTIONS = (
    Section(
        "Ops and sites",
        """
        n = 4, bf16 streams (..., C, n) or, where it says nc, (..., n, C); fp32 weights; cold L2,
        in turns. Targets are of the first layout, TransformerEngine's. Of the copy: the bytes
        that the op must move, at the bandwidth of a copy in that run. TE: TransformerEngine's
        Triton kernels with atomics, and without them in the projection; their time over ours.
        """,
        _ops,
        benched("mhc"),
    ),
    Section(
        "Other ops, streams, dtypes and few tokens",
        """
        `python -m perf bench mhc --list kinds,few`. copy: a copy of as many bytes as the op must
        move, in the same run; its time over ours.
        """,
        _others,
        benched("mhc"),
    ),
    section.targets(target_rows, benched("mhc")),
    section.profiles("mhc"),
)


def plots(records: list[dict], folder: Path) -> list[Path]:
    """None so far."""
    return []
