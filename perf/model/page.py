"""The part of a whole model on the status page: a pure function of the records."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..core.counts import timed
from ..core.tables import NOT_RUN, Bench, bits, folded, kept, latest, table, times, where
from . import host, shapes
from .llama import SYSTEMS, Size

KERNELS = ()
STEPS = [(part, f"{b}x{n}") for part, sizes in shapes.TIMED.items() for b, n in sizes]
#: What has a verdict on bits: the audit, and graphs against one pass.
PROMISES = [("audit", shapes.AUDIT), *(case for case in STEPS if case[0] == "replaying")]
COUNTS = (timed("steps of a whole model timed", "model", set(STEPS)),)
_MEASURE = "`python -m perf bench model`"
_STEP = "time the parts of a call on that host: the node, the look for a known call, the launch"


def bench_of(records: list[dict]) -> Bench:
    """The latest of the model at its usual size."""
    return latest([r for r in records if r.get("model") == Size().label], "model")


class Target(NamedTuple):
    """A training step of ours over one of torch's, in time."""

    system: str
    rival: str
    at_most: float

    @property
    def text(self) -> str:
        return (
            f"training 4x2048: {self.system} at most {self.at_most:.2f}x the time of {self.rival}"
        )


TARGETS = (Target("ours", "torch", 1.02), Target("ours_compiled", "torch_compiled", 1.05))
#: Product -> microseconds of the host at most.
HOST_TARGETS = {"host linear": 12.0, "host linear, grad": 22.0, "host attention": 35.0}


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Of the patched model: the audit, and each decoding step of a CUDA graph."""
    return [["[bits of a whole model](#a-whole-model)", kept(bench_of(records), PROMISES)]]


def _target_rows(bench: Bench) -> list[list[str]]:
    rows = []
    for target in TARGETS:
        rival = bench.ratio(("training", "4x2048"), target.rival, target.system)
        if rival is None:
            rows.append([target.text, NOT_RUN, NOT_RUN, _MEASURE])
            continue
        ok = 1 / rival <= target.at_most
        measured = f"{1 / rival:.2f}x"
        rows.append([target.text, measured, *(("held", "none") if ok else ("missed", _MEASURE))])
    for product, most in HOST_TARGETS.items():
        text = f"{product}: at most {most:.0f} us"
        own, rival = (bench.get((product, host.SHAPE), name) for name in ("ours", "torch"))
        if own is None or rival is None:
            rows.append([text, NOT_RUN, NOT_RUN, _MEASURE])
            continue
        ok = own["host_us"] <= most
        measured = f"{own['host_us']:.1f} us; torch {rival['host_us']:.1f} us"
        rows.append([text, measured, "held" if ok else "missed", "none" if ok else _STEP])
    return rows


def target_verdicts(records: list[dict]) -> tuple[str, list[str]]:
    """Of each target."""
    rows = _target_rows(bench_of(records))
    return "[targets of a whole model](#a-whole-model)", [row[2] for row in rows]


def _audits(records: list[dict]) -> list[str]:
    """A line for each size of the model, the usual one first."""
    sizes = {r["model"] for r in records if r.get("kernel") == "model" and "model" in r}
    lines = []
    for size in sorted(sizes | {Size().label}, key=lambda size: size != Size().label):
        bench = latest([r for r in records if r.get("model") == size], "model")
        own = bench.get(("audit", shapes.AUDIT))
        if own is None and size != Size().label:
            continue
        head = f"Audit of {size}, patched and as it is"
        if own is None:
            lines += [f"{head}: {NOT_RUN}.", ""]
            continue
        said = [f"{name}: {own[name]['differing']} rows differ" for name in ("ours", "torch")]
        lines += [f"{head} ({where(own)}): {'; '.join(said)}.", ""]
    return lines


def _rows(bench: Bench) -> list[list[str]]:
    rows = []
    for case in STEPS:
        for system in SYSTEMS:
            own = bench.get(case, system)
            if own is None or "median_us" not in own:
                continue
            found = (bench.ratio(case, rival, system) for rival in SYSTEMS[:2])
            ratios = ", ".join(times(ratio, "-") for ratio in found)
            kept_bits = bits(own) if "bitwise" in own else "-"
            shown = [" ".join(case), system, f"{own['median_us'] / 1000:.2f}"]
            rows.append([*shown, ratios, kept_bits, where(own)])
    return rows


def images(records: list[dict]) -> list[str]:
    """None so far."""
    return []


def render(records: list[dict]) -> list[str]:
    """The lines of a whole model."""
    bench = bench_of(records)
    head = ["step, batch x tokens", "system", "ms", ", ".join(SYSTEMS[:2]), "bits", "ran on"]
    rows = _rows(bench)
    return [
        "## A whole model",
        "",
        "A Llama of hidden 2048, 16 layers, 32 and 8 heads, random bf16 weights, by `ck.patch` and",
        "as it is, either compiled or not.  Training: forward and backward.  Generating: one token",
        "more in a dynamic cache, awaited, so with the host's part; replaying: the same in a CUDA",
        "graph on a static one.  Ratios: torch's time over that system's.  Bits: the graph's",
        "logits are those of one pass.",
        "",
        *_audits(records),
        *(folded(head, rows, ("ran on",)) if rows else [f"Steps: {NOT_RUN}."]),
        "",
        *table(["target", "measured", "verdict", "next step"], _target_rows(bench)),
    ]


def plots(records: list[dict], folder: Path) -> list[Path]:
    """None so far."""
    return []
