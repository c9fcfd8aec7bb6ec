"""The part of norm on the status page: a pure function of the records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.counts import timed
from ..core.speed import Speed
from ..core.tables import NOT_RUN, Bench, bits, by_card, folded, kept, latest, table, times, where
from . import cases

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
_MEASURE = "`python -m perf bench norm` on an H200"
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
        """Of the sizes that were measured."""
        found = []
        for size in _SIZES:
            case = (self.product, size)
            if self.rival == _LARGE:
                found.append((bench.get(case) or {}).get("floor_fraction"))
            else:
                found.append(bench.ratio(case, self.rival))
        return [value for value in found if value is not None]


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
    return [["[bits of norms](#norms)", kept(latest(records, "norm"), CASES)]]


def _cards(records: list[dict]) -> dict[str, Bench]:
    """Each GPU model that norms were timed on, and its records."""
    return by_card(records, "norm")


def _target_rows(cards: dict[str, Bench]) -> list[list[str]]:
    """Of each target on each card."""
    if not cards:
        return [[target.text, NOT_RUN, NOT_RUN, NOT_RUN, _MEASURE] for target in TARGETS]
    rows = []
    for target in TARGETS:
        for name, bench in cards.items():
            have = target.values(bench)
            if not have:
                rows.append([target.text, name, NOT_RUN, NOT_RUN, _MEASURE])
                continue
            ok = min(have) >= target.at_least
            form = "{:.0%}" if target.share else "{:.2f}x"
            shown = f"{form.format(min(have))} to {form.format(max(have))}, {len(have)} sizes"
            verdict = ["held", "none"] if ok else ["missed", _STEP]
            rows.append([target.text, name, shown, *verdict])
    return rows


def target_verdicts(records: list[dict]) -> tuple[str, list[str]]:
    """Of each target on each card."""
    return "[targets of norms](#norms)", [row[3] for row in _target_rows(_cards(records))]


def _rows(bench: Bench) -> list[list[str]]:
    rows = []
    for key in CASES:
        own = bench.get(key)
        if own is None or "median_us" not in own:
            continue
        ratios = [
            ", ".join(times(bench.ratio(key, name), "-") for name in names) for names in _RIVALS
        ]
        taken = f"{own['median_us']:.1f} us, {own['floor_fraction']:.0%}"
        rows.append([*key, taken, *ratios, bits(own), where(own)])
    return rows


def images(records: list[dict]) -> list[str]:
    """None so far."""
    return []


def render(records: list[dict]) -> list[str]:
    """The lines of this system."""
    names = map(", ".join, _RIVALS)
    head = ["op", "rows x D", "time, of the copy", *names, "bits", "ran on"]
    cards = _cards(records)
    tables = [folded(head, _rows(bench), ("bits", "ran on")) for bench in cards.values()]
    return [
        "## Norms",
        "",
        "bf16 rows and weights; cold L2, in turns.  Of the copy: the bytes that the op must move,",
        "at the bandwidth of a large copy in that run.  Rivals: their time over ours; copy: one of",
        "as many bytes, which has a kernel's start and end in it too.",
        "",
        *(line for lines in tables or [[NOT_RUN]] for line in (*lines, "")),
        "### Targets of norms",
        "",
        *table(["target", "on", "measured", "verdict", "next step"], _target_rows(cards)),
    ]


def plots(records: list[dict], folder: Path) -> list[Path]:
    """None so far."""
    return []
