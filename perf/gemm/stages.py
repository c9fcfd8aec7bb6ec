"""Stages of a lent machine that measure products."""

from __future__ import annotations

from ..core.stage import Place, Stage


def stages(place: Place) -> tuple[Stage, ...]:
    """Stages in the order in which they run."""
    check = ("bench", "gemm", "--check-only", "--rivals", "ours,ours_triton,cublas")
    return (
        Stage("correctness", place.perf(*check, file="checks.jsonl"), 150, early=True),
        Stage("tune", place.perf("tune", file="tune.jsonl"), 240),
        Stage("bench", place.perf("bench", "gemm", file="bench.jsonl"), 500),
        Stage("profile", place.perf("profile", "gemm", file="profile.jsonl"), 120),
    )
