"""The part of `linear_logp` on the status page: a pure function of the records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.counts import timed
from ..core.speed import Speed
from ..core.tables import NOT_RUN, Bench, bits, folded, kept, latest, table, times, where
from . import cases

KERNELS = ("logp_fwd_sm90", "logp_few_sm90", "logp_grad_sm90", "logp_finish_sm90")
SPEED = (
    Speed("`linear_logp`, both passes", "logp", ("both",), "liger", "Liger"),
    Speed("`linear_logp`, both passes", "logp", ("both",), "quack", "quack, a sum only"),
)
CASES = [(c.which, c.label) for c in cases.cases(list(cases.SHAPES), list(cases.PASSES))]
WIDE = [case for case in CASES if case[1] in cases.SHAPES]
DECODE = [case for case in CASES if case not in WIDE]
COUNTS = (timed("`linear_logp`: passes timed", "logp", set(CASES)),)
_MEASURE = "`python -m perf bench logp` on an H200"
_STEP = "docs/notes/logp_sm90.md"


@dataclass(frozen=True)
class Target:
    """At every shape, the rival's time over ours is at least ``at_least`` in one pass."""

    which: str
    rival: str
    at_least: float
    text: str


TARGETS = (
    Target("fwd", "liger", 1 / 1.02, "at most 1.02x the time of Liger's SM90 kernel"),
    Target("bwd", "liger", 1 / 1.05, "at most 1.05x the time of Liger's SM90 kernel"),
    Target("both", "liger_triton", 5.0, "at least 5x as fast as Liger's Triton kernel"),
    Target("both", "cce", 1.0, "faster than Apple's CCE"),
    Target("both", "quack", 1 / 1.6, "at most 1.6x the time of quack (no per-token gradient)"),
)
#: Pass -> MiB beyond the outputs.
MEMORY = {"fwd": 16.0, "bwd": 256.0}


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Bits over all cases."""
    return [["[bits of `linear_logp`](#linear_logp)", kept(latest(records, "logp"), CASES)]]


def _row(text: str, values: list[float | None], held, shown: str) -> list[str]:
    have = [value for value in values if value is not None]
    if len(have) < len(values):
        return [text, NOT_RUN, NOT_RUN, _MEASURE]
    ok = all(held(value) for value in have)
    found = ", ".join(shown.format(value) for value in have)
    return [text, found, "held" if ok else "missed", "none" if ok else _STEP]


def _target_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for target in TARGETS:
        values = [bench.ratio((target.which, name), target.rival) for name in cases.SHAPES]
        text = f"{target.which}: {target.text}"
        rows.append(_row(text, values, lambda v, t=target: v >= t.at_least, "{:.2f}x"))
    for which, most in MEMORY.items():
        values = [(bench.get((which, name)) or {}).get("extra_mib") for name in cases.SHAPES]
        text = f"{which}: at most {most:.0f} MiB beyond its outputs"
        rows.append(_row(text, values, lambda v, m=most: v <= m, "{:.1f} MiB"))
    return rows


def target_verdicts(records: list[dict]) -> tuple[str, list[str]]:
    """Of each target."""
    rows = _target_rows(latest(records, "logp"))
    return "[targets of `linear_logp`](#linear_logp)", [row[2] for row in rows]


def _cells(item: dict | None) -> list[str]:
    if item is None or "median_us" not in item:
        return [NOT_RUN] * 3
    time = f"{item['median_us'] / 1e3:.2f}"
    return [time, f"{item['tflops']:.0f}", f"{item['extra_mib']:.0f}"]


def _wide_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for case in WIDE:
        own, tree = bench.get(case), bench.get(case, "ours_tree")
        rows.append([*case, *_cells(own), _cells(tree)[0], bits(own), where(own)])
    return rows


def _ratio_rows(bench: Bench) -> list[list[str]]:
    """A rival that has not the pass, or was not asked, has no ratio."""
    rivals = ("liger", "liger_triton", "quack", "cce", "torch")
    return [[*case, *(times(bench.ratio(case, name), "-") for name in rivals)] for case in WIDE]


def _decode_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for case in DECODE:
        own = bench.get(case)
        share = (own or {}).get("of_copy")
        cells = [_cells(own)[0], NOT_RUN if share is None else f"{share:.0%}"]
        cells += [times(bench.ratio(case, rival)) for rival in ("liger", "torch")]
        rows.append([case[1], *cells, bits(own), where(own)])
    return rows


def images(records: list[dict]) -> list[str]:
    """None so far."""
    return []


def render(records: list[dict]) -> list[str]:
    """The lines of this system."""
    bench = latest(records, "logp")
    head = ["pass", "shape", "ms", "TFLOP/s", "extra MiB", "`tree` ms"]
    head += ["bits", "ran on"]
    against = ["pass", "shape", "Liger SM90", "Liger Triton", "quack", "CCE", "torch"]
    few = ["shape", "ms", "of copy", "Liger SM90", "torch", "bits", "ran on"]
    return [
        "## linear_logp",
        "",
        "bf16, cold L2, in turns; 128k: 4096 tokens x 4096 x 131072, 152k: 8192 x 4096 x 151936.",
        "Bits: those of repeats, and of the first tokens alone.  torch: bf16 logits, fp32 softmax.",
        "",
        *folded(head, _wide_rows(bench), ("bits", "ran on")),
        "",
        *table(against, _ratio_rows(bench)),
        "",
        "### Steps of decoding",
        "",
        *folded(few, _decode_rows(bench), ("bits", "ran on")),
        "",
        "### Targets of linear_logp",
        "",
        *table(["target", "measured", "verdict", "next step"], _target_rows(bench)),
    ]


def plots(records: list[dict], folder: Path) -> list[Path]:
    """None so far."""
    return []
