"""Stages of a lent machine that measure hyper-connections."""

from __future__ import annotations

from ..core.stage import Place, Stage


def stages(place: Place) -> tuple[Stage, ...]:
    """Stages in the order in which they run."""
    return (Stage("bench_mhc", place.perf("bench", "mhc", file="mhc.jsonl"), 600),)
