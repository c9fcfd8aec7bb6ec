"""Runs probes by name and turns what they yield into records."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from ..core import record, watch
from . import exp2, instruction, model, promotion, smoke, width, zeros
from .questions import QUESTIONS

PROBES = {
    "smoke": smoke.run,
    "width": width.run,
    "zeros": zeros.run,
    "model": model.run,
    "promotion": promotion.run,
    "instruction": instruction.run,
    "exp2": exp2.run,
}
GOLDEN = record.ROOT / "tests" / "golden"
_NUMBERS = {question.probe: question.number for question in QUESTIONS}


def compile_here(chain, *, with_c: bool = False):
    """`wgmma_kernel.build` for this machine's card, once for each chain."""
    from . import wgmma_kernel

    return wgmma_kernel.build(chain, with_c=with_c)


def run(
    names: list[str],
    *,
    output: Path | None,
    golden: Path = GOLDEN,
    commit: str | None = None,
) -> Iterator[dict]:
    """Runs probes on the card; yields each record as it is written.

    A probe that raises has a last record with case "answer" and verdict "failed", and the next
    probe runs.
    """
    common = record.environment(commit) | {"kind": "probe"}
    build = functools.cache(compile_here)
    for name in names:
        probe = PROBES[name]
        if name == "model":
            path = golden / "wgmma_sm90.npz"
            probe = functools.partial(probe, golden_path=path, about=common)
        for body in guarded(probe, build):
            full_record = common | {"probe": name, "question": _NUMBERS.get(name)} | body
            if output is not None:
                record.append(output, full_record)
            yield full_record


def guarded(probe, build) -> Iterator[dict]:
    """A probe's bodies; an exception becomes its answer."""
    try:
        yield from probe(build)
    except Exception as error:
        yield {"case": "answer", "verdict": "failed", "why": watch.words(error)}


def line(body: dict) -> str:
    """One line for the terminal."""
    text = f"{body['probe']:<10} {body['case']:<60}"
    if "differ" in body:
        text += f" {body['differ']} of {body['outputs']} differ: {body['verdict']}"
    elif "cost" in body:
        text += f" {body['median_us']:9.1f} us {body['tflops']:6.1f} TFLOP/s {body['cost']:+.1%}"
    else:
        text += " " + ", ".join(f"{k} {body[k]}" for k in ("ok", "verdict", "why") if k in body)
    if body["case"] == "answer" and "costs" in body:
        text += "; " + ", ".join(f"leaf {p}: {cost:+.1%}" for p, cost in body["costs"].items())
    return text
