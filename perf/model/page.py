"""The status page of a whole model: a pure function of the records."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..core import section
from ..core.counts import timed
from ..core.section import Section, benched
from ..core.speed import Speed
from ..core.tables import MET, MISSED, NOT_RUN, Bench, bits, folded, kept, latest, times, where
from . import host, shapes
from .llama import SYSTEMS, Size

TITLE = "A whole model"
KERNELS = ()
SPEED = (Speed("a Llama's training step", "model", ("training",), "torch", "torch"),)
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
    """Bits of the patched model: the audit, and each decoding step of a CUDA graph."""
    return [["bits", kept(bench_of(records), PROMISES)]]


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target."""
    bench, rows = bench_of(records), []
    for target in TARGETS:
        rival = bench.ratio(("training", "4x2048"), target.rival, target.system)
        if rival is None:
            rows.append([target.text, NOT_RUN, NOT_RUN, _MEASURE])
            continue
        verdict = (MET, "none") if 1 / rival <= target.at_most else (MISSED, _MEASURE)
        rows.append([target.text, f"{1 / rival:.2f}x", *verdict])
    for product, most in HOST_TARGETS.items():
        ours, rival = (bench.get((product, host.SHAPE), name) for name in ("ours", "torch"))
        if ours is None or rival is None:
            rows.append([_host_text(product), NOT_RUN, NOT_RUN, _MEASURE])
            continue
        verdict = (MET, "none") if ours["host_us"] <= most else (MISSED, _STEP)
        measured = f"{ours['host_us']:.1f} us; torch {rival['host_us']:.1f} us"
        rows.append([_host_text(product), measured, *verdict])
    return rows


def _host_text(product: str) -> str:
    return f"{product}: at most {HOST_TARGETS[product]:.0f} us"


def _host_rows(bench: Bench) -> list[list[str]]:
    """Microseconds of the host for a call of ours, of its launch alone, and of torch's."""
    products = sorted({key[1] for key in bench.records if key[1].startswith("host ")})
    rows = []
    for product in products:
        case = (product, host.SHAPE)
        items = [bench.get(case, name) for name in ("ours", "ours, launch", "torch")]
        cells = ["-" if item is None else f"{item['host_us']:.1f}" for item in items]
        ours, _, torch = items
        share = "-" if None in (ours, torch) else times(torch["host_us"] / ours["host_us"])
        rows.append([product.removeprefix("host "), *cells, share, where(ours)])
    return rows


def _audits(records: list[dict]) -> list[str]:
    """A line for each size of the model, the usual one first."""
    audits = [r for r in records if _is_audit(r)]
    usual = Size().label
    sizes = sorted({usual, *(r["model"] for r in audits)}, key=lambda size: (size != usual, size))
    lines = []
    for size in sizes:
        bench = latest([r for r in audits if r["model"] == size], "model")
        lines += _audit(size, bench.get(("audit", shapes.AUDIT)))
    return lines[:-1]


def _is_audit(item: dict) -> bool:
    return (item["kind"], item.get("kernel"), item.get("product")) == ("bench", "model", "audit")


def _audit(size: str, audit: dict | None) -> list[str]:
    head = f"Audit of {size}, patched and as it is"
    if audit is None:
        return [f"{head}: {NOT_RUN}.", ""]
    counts = [f"{name}: {audit[name]['differing']} rows differ" for name in ("ours", "torch")]
    return [f"{head} ({where(audit)}): {'; '.join(counts)}.", ""]


def _rows(bench: Bench) -> list[list[str]]:
    rows = []
    for case in STEPS:
        for system in SYSTEMS:
            item = bench.get(case, system)
            if item is None or "median_us" not in item:
                continue
            rival_ratios = (bench.ratio(case, rival, system) for rival in SYSTEMS[:2])
            ratios = ", ".join(times(ratio, "-") for ratio in rival_ratios)
            kept_bits = bits(item) if "bitwise" in item else "-"
            head = [" ".join(case), system, f"{item['median_us'] / 1000:.2f}"]
            rows.append([*head, ratios, kept_bits, where(item)])
    return rows


def _steps(records: list[dict]) -> list[str]:
    head = ["step, batch x tokens", "system", "ms", ", ".join(SYSTEMS[:2]), "bits", "ran on"]
    rows = _rows(bench_of(records))
    return folded(head, rows, ("ran on",)) if rows else [f"Steps: {NOT_RUN}."]


def _calls(records: list[dict]) -> list[str]:
    head = ["call", "ours, us", "its launch, us", "torch, us", "torch over ours", "ran on"]
    rows = _host_rows(bench_of(records))
    return folded(head, rows, ("ran on",)) if rows else [f"Calls: {NOT_RUN}."]


def _is_step(item: dict) -> bool:
    return benched("model")(item) and "median_us" in item


def _is_call(item: dict) -> bool:
    return benched("model")(item) and "host_us" in item


SECTIONS = (
    Section(
        "Audit",
        """
        A Llama of hidden 2048, 16 layers, 32 and 8 heads, random bf16 weights, by `ck.patch` and
        as it is: rows of one pass that differ from those of another batch.
        """,
        _audits,
        _is_audit,
    ),
    Section(
        "Steps",
        """
        The same Llama, either compiled or not. Training: forward and backward. Generating: one
        token more in a dynamic cache, awaited, so with the host's part; replaying: the same in a
        CUDA graph on a static one. Ratios: torch's time over that system's. Bits: the graph's
        logits are those of one pass.
        """,
        _steps,
        _is_step,
    ),
    Section(
        "What a call costs the host",
        f"""
        Microseconds of one call at {host.TOKENS} tokens and {host.HIDDEN} columns, the least of
        many turns, ours and torch's in one process; grad: with the node of the graph. Hosts
        differ: compare within a table.
        """,
        _calls,
        _is_call,
    ),
    section.targets(target_rows, benched("model")),
)


def plots(records: list[dict], folder: Path) -> list[Path]:
    """None so far."""
    return []
