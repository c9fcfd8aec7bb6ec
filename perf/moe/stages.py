"""Stages of a lent machine that measure mixtures of experts."""

from __future__ import annotations

from ..core.stage import Place, Stage


def stages(place: Place) -> tuple[Stage, ...]:
    """Stages in the order in which they run."""
    return (
        Stage("bench_moe", place.perf("bench", "moe", file="moe.jsonl"), 520),
        Stage("bench_qwen3", place.perf("bench", "qwen3-moe", file="moe.jsonl"), 300),
    )
