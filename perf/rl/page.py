"""Targets and bits of an RL step on the status page: pure functions of the records."""

from __future__ import annotations

from ..core.speed import Speed
from ..core.tables import NOT_RUN, Bench, latest, target_row
from .size import CARD

TITLE = "An RL step with vLLM"
BENCHES = ("rl",)
STEPS = {name: ("step", size.label) for name, size in CARD.items()}
SPEED: tuple[Speed, ...] = ()  # a run of vLLM too, longer than the headline takes
#: Time of our step over that of stock vLLM and a torch trainer.
AT_MOST = 1.05
RIVAL = "native"


def _steps_of(bench: Bench) -> dict[str, dict]:
    """Size -> our step, of those that have a time."""
    items = {name: bench.get(case) for name, case in STEPS.items()}
    return {name: item for name, item in items.items() if "median_us" in (item or {})}


def _counted(bench: Bench) -> tuple[int, int] | None:
    """Log-probs that differ, and all, of our steps; None: no step has a time."""
    items = _steps_of(bench).values()
    return (sum(i["differ"] for i in items), sum(i["tokens"] for i in items)) if items else None


def bits_kept(records: list[dict]) -> list[list[str]]:
    """Whether the engine's log-probs are the trainer's."""
    counted = _counted(latest(records, "rl"))
    return [["bits", NOT_RUN if counted is None else "{} of {} log-probs differ".format(*counted)]]


def target_rows(records: list[dict]) -> list[list[str]]:
    """(target, measured, verdict, next step) of every target."""
    bench, rows = latest(records, "rl"), []
    for name, case in STEPS.items():
        measure = f"`python -m perf bench rl --size {name}`"
        text = f"step, {name}: at most {AT_MOST:.2f}x the time of stock vLLM and a torch trainer"
        ratio = bench.ratio(case, RIVAL) if name in _steps_of(bench) else None
        measured = None if ratio is None else f"{1 / ratio:.2f}x"
        met = ratio is not None and 1 / ratio <= AT_MOST
        rows.append(target_row(text, measured, met, (measure, "shorten its longest part")))
    text, counted = "log-probs of the rollout that are not the trainer's: 0", _counted(bench)
    measured = None if counted is None else "{} of {}".format(*counted)
    steps = ("`python -m perf bench rl`", "compare the contracts")
    return [*rows, target_row(text, measured, counted is not None and not counted[0], steps)]
