"""Stages of a lent machine that measure a whole model."""

from __future__ import annotations

from ..core.stage import Place, Stage


def stages(place: Place) -> tuple[Stage, ...]:
    """Stages in the order in which they run."""
    return (Stage("bench_model", place.perf("bench", "model", file="model.jsonl"), 400),)
