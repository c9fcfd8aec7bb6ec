"""The status page of norms: a pure function of the records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core import section
from ..core.counts import timed
from ..core.section import Section, benched
from ..core.speed import Speed
from ..core.tables import NOT_RUN, Bench, bits, folded, kept, latest, times, where
from . import cases

TITLE = "Norms"
KERNELS = ("norm_fwd_sm90", "norm_bwd_sm90", "norm_sums_sm90")
SPEED = (
    Speed("`rms_norm`, both passes", "norm", ("rms_norm fwd", "rms_norm bwd"), "quack", "quack"),
    Speed(
        "`layer_norm`, both passes", "norm", ("layer_norm fwd", "layer_norm bwd"), "liger", "Liger"
    ),
)
_ALL = cases.cases(list(cases.OPS), list(cases.SIZES))
CASES = [(case.product, case.label) for case in _ALL]
COUNTS = (timed("norms timed", "norm", set(CASES)),)
_MEASURE = "`python -m perf bench norm`"
_STEP = "docs/notes/norm_sm90.md"
#: Side by side in a column each.
_RIVALS = (("torch", "compiled"), ("liger", "quack"), ("copy",))
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
        section.target_row(t.text, t.values(bench), t.at_least, t.share, (_MEASURE, _STEP))
        for t in TARGETS
    ]


def _rows(bench: Bench) -> list[list[str]]:
    rows = []
    for key in CASES:
        item = bench.get(key)
        if item is None or "median_us" not in item:
            continue
        ratios = [
            ", ".join(times(bench.ratio(key, name), "-") for name in names) for names in _RIVALS
        ]
        time = f"{item['median_us']:.1f} us, {item['floor_fraction']:.0%}"
        rows.append([*key, time, *ratios, bits(item), where(item)])
    return rows


def _ops(records: list[dict]) -> list[str]:
    head = ["op", "rows x D", "time, of the copy", *map(", ".join, _RIVALS), "bits", "ran on"]
    rows = _rows(latest(records, "norm"))
    return folded(head, rows, ("bits", "ran on")) if rows else [NOT_RUN]


SECTIONS = (
    Section(
        "Ops",
        """
        bf16 rows and weights; cold L2, in turns. Of the copy: the bytes that the op must move, at
        the bandwidth of a large copy in that run. Rivals: their time over ours; copy: one of as
        many bytes, which has a kernel's start and end in it too.
        """,
        _ops,
        benched("norm"),
    ),
    section.targets(target_rows, benched("norm")),
    section.profiles("norm"),
)


def plots(records: list[dict], folder: Path) -> list[Path]:
    """None so far."""
    return []
