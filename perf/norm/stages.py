"""Stages of a lent machine that measure norms."""

from __future__ import annotations

from ..core.stage import Place, Stage


def stages(place: Place) -> tuple[Stage, ...]:
    """Stages in the order in which they run."""
    return (Stage("bench_norm", place.perf("bench", "norm", file="norm.jsonl"), 300),)
