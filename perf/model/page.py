"""Targets and bits of a whole model on the status page: pure functions of the records."""

from __future__ import annotations

from typing import NamedTuple

from ..core.speed import Speed
from ..core.tables import Bench, kept, latest, target_row
from . import host, shapes
from .llama import Size

TITLE = "A whole model"
BENCHES = ("model",)
SPEED = (Speed("a Llama's training step", "model", ("training",), "torch", "torch"),)
STEPS = [(part, f"{b}x{n}") for part, sizes in shapes.TIMED.items() for b, n in sizes]
#: What has a verdict on bits: the audit, and graphs against one pass.
PROMISES = [("audit", shapes.AUDIT), *(case for case in STEPS if case[0] == "replaying")]
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
        measured = None if rival is None else f"{1 / rival:.2f}x"
        met = rival is not None and 1 / rival <= target.at_most
        rows.append(target_row(target.text, measured, met, (_MEASURE, _MEASURE)))
    for product, most in HOST_TARGETS.items():
        ours, rival = (bench.get((product, host.SHAPE), name) for name in ("ours", "torch"))
        text, steps = f"{product}: at most {most:.0f} us", (_MEASURE, _STEP)
        if ours is None or rival is None:
            rows.append(target_row(text, None, False, steps))
            continue
        measured = f"{ours['host_us']:.1f} us; torch {rival['host_us']:.1f} us"
        rows.append(target_row(text, measured, ours["host_us"] <= most, steps))
    return rows
