"""Stages of a lent machine that measure an RL step."""

from __future__ import annotations

from ..core.stage import Place, Stage


def stages(place: Place) -> tuple[Stage, ...]:
    """Stages in the order in which they run."""
    return (Stage("bench_rl", place.perf("bench", "rl", file="rl.jsonl"), 560),)
