"""The part of a whole model on the status page: a pure function of the records."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..core.counts import timed
from ..core.models import model
from ..core.speed import Speed
from ..core.tables import NOT_RUN, Bench, bits, by_card, folded, kept, latest, table, times, where
from . import host, shapes
from .llama import SYSTEMS, Size

KERNELS = ()
SPEED = (Speed("a Llama's training step", "model", ("training",), "torch", "torch"),)
STEPS = [(part, f"{b}x{n}") for part, sizes in shapes.TIMED.items() for b, n in sizes]
#: What has a verdict on bits: the audit, and graphs against one pass.
PROMISES = [("audit", shapes.AUDIT), *(case for case in STEPS if case[0] == "replaying")]
COUNTS = (timed("steps of a whole model timed", "model", set(STEPS)),)
_MEASURE = "`python -m perf bench model`"
_STEP = "time the parts of a call on that host: the node, the look for a known call, the launch"


def cards_of(records: list[dict]) -> dict[str, Bench]:
    """The latest of the model at its usual size on each GPU model."""
    return by_card([r for r in records if r.get("model") == Size().label], "model")


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


def _target_rows(cards: dict[str, Bench]) -> list[list[str]]:
    """Target, GPU model, measured, verdict, next step; of each target on each card."""
    if not cards:
        texts = [target.text for target in TARGETS] + [_host_text(name) for name in HOST_TARGETS]
        return [[text, NOT_RUN, NOT_RUN, NOT_RUN, _MEASURE] for text in texts]
    rows = []
    for target in TARGETS:
        for card, bench in cards.items():
            rival = bench.ratio(("training", "4x2048"), target.rival, target.system)
            if rival is None:
                rows.append([target.text, card, NOT_RUN, NOT_RUN, _MEASURE])
                continue
            verdict = ("held", "none") if 1 / rival <= target.at_most else ("missed", _MEASURE)
            rows.append([target.text, card, f"{1 / rival:.2f}x", *verdict])
    for product, most in HOST_TARGETS.items():
        for card, bench in cards.items():
            own, rival = (bench.get((product, host.SHAPE), name) for name in ("ours", "torch"))
            if own is None or rival is None:
                rows.append([_host_text(product), card, NOT_RUN, NOT_RUN, _MEASURE])
                continue
            verdict = ("held", "none") if own["host_us"] <= most else ("missed", _STEP)
            measured = f"{own['host_us']:.1f} us; torch {rival['host_us']:.1f} us"
            rows.append([_host_text(product), card, measured, *verdict])
    return rows


def _host_text(product: str) -> str:
    return f"{product}: at most {HOST_TARGETS[product]:.0f} us"


def _host_rows(bench: Bench) -> list[list[str]]:
    """Microseconds of the host for a call of ours, of its launch alone, and of torch's."""
    products = sorted({key[1] for key in bench.records if key[1].startswith("host ")})
    rows = []
    for product in products:
        case = (product, host.SHAPE)
        found = [bench.get(case, name) for name in ("ours", "ours, launch", "torch")]
        shown = ["-" if one is None else f"{one['host_us']:.1f}" for one in found]
        ours, _, torch = found
        share = "-" if None in (ours, torch) else times(torch["host_us"] / ours["host_us"])
        rows.append([product.removeprefix("host "), *shown, share, where(ours)])
    return rows


def target_verdicts(records: list[dict]) -> tuple[str, list[str]]:
    """Of each target."""
    rows = _target_rows(cards_of(records))
    return "[targets of a whole model](#targets-of-a-whole-model)", [row[3] for row in rows]


def _audits(records: list[dict]) -> list[str]:
    """A line for each size of the model, the usual one first, and each GPU model."""
    own = [r for r in records if r.get("kernel") == "model" and r.get("product") == "audit"]
    usual = Size().label
    found = {(r["model"] != usual, r["model"], model(r["gpu"])) for r in own}
    lines = [] if any(not other for other, *_ in found) else _audit(usual, None)
    for _, size, card in sorted(found):
        chosen = [r for r in own if r["model"] == size and model(r["gpu"]) == card]
        lines += _audit(size, latest(chosen, "model").get(("audit", shapes.AUDIT)))
    return lines


def _audit(size: str, own: dict | None) -> list[str]:
    head = f"Audit of {size}, patched and as it is"
    if own is None:
        return [f"{head}: {NOT_RUN}.", ""]
    said = [f"{name}: {own[name]['differing']} rows differ" for name in ("ours", "torch")]
    return [f"{head} ({where(own)}): {'; '.join(said)}.", ""]


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
    cards = cards_of(records)
    head = ["step, batch x tokens", "system", "ms", ", ".join(SYSTEMS[:2]), "bits", "ran on"]
    steps = [rows for bench in cards.values() if (rows := _rows(bench))]
    call = ["call", "ours, us", "its launch, us", "torch, us", "torch over ours", "ran on"]
    calls = [rows for bench in cards.values() if (rows := _host_rows(bench))]
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
        *(line for rows in steps for line in (*folded(head, rows, ("ran on",)), "")),
        *([] if steps else [f"Steps: {NOT_RUN}.", ""]),
        "### What a call costs the host",
        "",
        f"Microseconds of one call at {host.TOKENS} tokens and {host.HIDDEN} columns, the least of",
        "many turns, ours and torch's in one process; grad: with the node of the graph.  Hosts",
        "differ: compare within a table.",
        "",
        *(line for rows in calls for line in (*folded(call, rows, ("ran on",)), "")),
        *([] if calls else [f"Calls: {NOT_RUN}.", ""]),
        "### Targets of a whole model",
        "",
        *table(["target", "on", "measured", "verdict", "next step"], _target_rows(cards)),
    ]


def plots(records: list[dict], folder: Path) -> list[Path]:
    """None so far."""
    return []
