"""Stages of a lent machine that measure log-probabilities."""

from __future__ import annotations

from ..core.stage import Place, Stage


def stages(place: Place) -> tuple[Stage, ...]:
    """Stages in the order in which they run."""
    return (Stage("bench_logp", place.perf("bench", "logp", file="logp.jsonl"), 500),)
