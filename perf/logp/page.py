"""The status page of `linear_logp`: a pure function of the records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core import section
from ..core.counts import timed
from ..core.section import Section, benched
from ..core.speed import Speed
from ..core.tables import (
    MET,
    MISSED,
    NOT_RUN,
    Bench,
    bits,
    folded,
    kept,
    latest,
    table,
    times,
    where,
)
from . import cases

TITLE = "`linear_logp`"
KERNELS = ("logp_fwd_sm90", "logp_few_sm90", "logp_grad_sm90", "logp_finish_sm90")
SPEED = (
    Speed("`linear_logp`, both passes", "logp", ("both",), "liger", "Liger"),
    Speed("`linear_logp`, both passes", "logp", ("both",), "quack", "quack, a sum only"),
)
CASES = [(c.which, c.label) for c in cases.cases(list(cases.SHAPES), list(cases.PASSES))]
WIDE = [case for case in CASES if case[1] in cases.SHAPES]
DECODE = [case for case in CASES if case not in WIDE]
COUNTS = (timed("`linear_logp`: passes timed", "logp", set(CASES)),)
ALL = tuple(cases.SHAPES)
_MEASURE = "`python -m perf bench logp`"
_STEP = "docs/notes/logp_sm90.md"


@dataclass(frozen=True)
class Target:
    """A target: in one pass, the rival's time over ours is at least ``at_least`` at every shape."""

    which: str
    rival: str
    at_least: float
    text: str
    ours: str = "ours"
    shapes: tuple[str, ...] = cases.LARGE


TARGETS = (
    Target("fwd", "liger", 1 / 1.02, "at most 1.02x the time of Liger's SM90 kernel"),
    Target("bwd", "liger", 1 / 1.05, "at most 1.05x the time of Liger's SM90 kernel"),
    Target("both", "liger_triton", 5.0, "at least 5x as fast as Liger's Triton kernel"),
    Target("both", "cce", 1.0, "faster than Apple's CCE"),
    Target("both", "quack", 1 / 1.6, "at most 1.6x the time of quack (no per-token gradient)"),
    Target("both", "quack", 0.9, "4 GiB of logits kept, 0.90 of quack's speed", "ours_kept", ALL),
    Target("both", "quack", 0.97, "fused loss, 0.97 of quack's speed", "ours_fused", ALL),
    Target("both", "liger_grpo", 1.3, "fused GRPO loss, 1.3 of Liger's speed", "ours_grpo", ALL),
    Target("both", "torch", 1.0, "4 GiB of logits kept, torch is not faster", "ours_kept", ALL),
    Target("fwd", "ours_tree", 1 / 1.1, "order tree, at most 1.10x the time of chain", shapes=ALL),
)
#: TFLOP/s of a forward, at least.
FORWARD_TFLOPS = 720.0
#: Pass -> MiB beyond the outputs.
MEMORY = {"fwd": 16.0, "bwd": 256.0}


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Bits over all cases."""
    return [["bits", kept(latest(records, "logp"), CASES)]]


def _row(text: str, values: list[float | None], is_met, form: str) -> list[str]:
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return [text, NOT_RUN, NOT_RUN, _MEASURE]
    ok = all(is_met(value) for value in present)
    measured = ", ".join(form.format(value) for value in present)
    return [text, measured, MET if ok else MISSED, "none" if ok else _STEP]


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target."""
    bench, rows = latest(records, "logp"), []
    for target in TARGETS:
        keys = [(target.which, name) for name in target.shapes]
        values = [bench.ratio(key, target.rival, target.ours) for key in keys]
        text = f"{target.which}: {target.text}"
        rows.append(_row(text, values, lambda v, t=target: v >= t.at_least, "{:.2f}x"))
    values = [(bench.get(("fwd", name)) or {}).get("tflops") for name in ALL]
    text = f"fwd: at least {FORWARD_TFLOPS:.0f} TFLOP/s"
    rows.append(_row(text, values, lambda v: v >= FORWARD_TFLOPS, "{:.0f}"))
    for which, most in MEMORY.items():
        values = [(bench.get((which, name)) or {}).get("extra_mib") for name in cases.LARGE]
        text = f"{which}: at most {most:.0f} MiB beyond its outputs"
        rows.append(_row(text, values, lambda v, m=most: v <= m, "{:.1f} MiB"))
    return rows


def _cells(item: dict | None) -> list[str]:
    if item is None or "median_us" not in item:
        return [NOT_RUN] * 3
    time = f"{item['median_us'] / 1e3:.2f}"
    return [time, f"{item['tflops']:.0f}", f"{item['extra_mib']:.0f}"]


def _wide_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for case in WIDE:
        item = bench.get(case)
        tree = _cells(bench.get(case, "ours_tree"))[0]
        rows.append([*case, *_cells(item), tree, bits(item), where(item)])
    return rows


def _ratio_rows(bench: Bench) -> list[list[str]]:
    """A rival that has not the pass, or was not asked, has no ratio."""
    rivals = ("liger", "liger_triton", "quack", "cce", "torch")
    return [[*case, *(times(bench.ratio(case, name), "-") for name in rivals)] for case in WIDE]


def _decode_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for case in DECODE:
        item = bench.get(case)
        share = (item or {}).get("of_copy")
        cells = [_cells(item)[0], NOT_RUN if share is None else f"{share:.0%}"]
        cells += [times(bench.ratio(case, rival)) for rival in ("liger", "torch")]
        rows.append([case[1], *cells, bits(item), where(item)])
    return rows


def _passes(records: list[dict]) -> list[str]:
    bench = latest(records, "logp")
    head = ["pass", "shape", "ms", "TFLOP/s", "extra MiB", "`tree` ms", "bits", "ran on"]
    return folded(head, _wide_rows(bench), ("bits", "ran on"))


def _three_products(records: list[dict]) -> list[str]:
    """Both passes where logits are computed once: milliseconds, and quack's time over ours."""
    bench, rows = latest(records, "logp"), []
    for name in ALL:
        case, row = ("both", name), [name]
        for system in ("ours_kept", "ours_fused"):
            row += [_cells(bench.get(case, system))[0], times(bench.ratio(case, "quack", system))]
        rows.append([*row, where(bench.get(case, "ours_kept"))])
    head = ["shape", "kept ms", "quack", "fused ms", "quack", "ran on"]
    return folded(head, rows, ("ran on",))


def _rivals(records: list[dict]) -> list[str]:
    head = ["pass", "shape", "Liger SM90", "Liger Triton", "quack", "CCE", "torch"]
    return table(head, _ratio_rows(latest(records, "logp")))


def _decoding(records: list[dict]) -> list[str]:
    head = ["shape", "ms", "of copy", "Liger SM90", "torch", "bits", "ran on"]
    return folded(head, _decode_rows(latest(records, "logp")), ("bits", "ran on"))


SECTIONS = (
    Section(
        "Passes",
        """
        bf16, cold L2, in turns. Tokens x D x V: 128k 4096 x 4096 x 131072, 152k 8192 x 4096 x
        151936, qwen3-4b 6000 x 2560 x 151936, deepseek-v3 2048 x 7168 x 129280, llama3-1b 16384 x
        2048 x 128256, llama4 3000 x 5120 x 202048. Bits: those of repeats, and of the first tokens
        alone.
        """,
        _passes,
        benched("logp"),
    ),
    Section(
        "Both passes with three products",
        """
        Kept: with a budget of 4 GiB for `logits_memory`. Fused: `linear_policy_loss` with cross
        entropy.
        """,
        _three_products,
        benched("logp"),
    ),
    Section(
        "Rivals",
        "torch: bf16 logits, fp32 softmax.",
        _rivals,
        benched("logp"),
    ),
    Section("Steps of decoding", "", _decoding, benched("logp")),
    section.targets(target_rows, benched("logp")),
    section.profiles("logp"),
)


def plots(records: list[dict], folder: Path) -> list[Path]:
    """None so far."""
    return []
