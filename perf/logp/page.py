"""Targets and bits of `linear_logp` on the status page: pure functions of the records."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.speed import Speed
from ..core.tables import kept, latest, target_row
from . import cases

TITLE = "`linear_logp`"
BENCHES = ("logp",)
SPEED = (
    Speed("`linear_logp`, both passes", "logp", ("both",), "liger", "Liger"),
    Speed("`linear_logp`, both passes", "logp", ("both",), "quack", "quack, a sum only"),
)
CASES = [(c.product, c.label) for c in cases.cases(list(cases.SHAPES), list(cases.PASSES))]
ALL = tuple(cases.SHAPES)
_STEPS = ("`python -m perf bench logp`", "docs/notes/logp_sm90.md")


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
    """Row of a target that every shape has to reach; all of them must have run."""
    if None in values:
        return target_row(text, None, False, _STEPS)
    measured = ", ".join(form.format(value) for value in values)
    return target_row(text, measured, all(map(is_met, values)), _STEPS)


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
