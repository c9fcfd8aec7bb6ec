"""Stages of a lent machine that measure attention."""

from __future__ import annotations

from ..core.stage import Place, Stage, gpu_tests, pytest


def stages(place: Place) -> tuple[Stage, ...]:
    """Stages in the order in which they run."""
    bench = ("bench", "attention")
    orders = ("--check-only", "--heads", "16", "--systems", "ours,ours_unordered")
    profile, soak, sanitize = ((verb, "attention") for verb in ("profile", "soak", "sanitize"))
    return (
        Stage("smoke_attention", place.perf(*bench, *orders, file="checks.jsonl"), 150),
        Stage("pytest_attention", pytest(gpu_tests("tests/sparse_attn")), 550),
        Stage("bench_attention", place.perf(*bench, file="bench.jsonl"), 420),
        Stage("profile_attention", place.perf(*profile, file="profile.jsonl"), 300),
        Stage("soak_attention", place.perf(*soak, file="checks.jsonl"), 330),
        Stage("sanitize_attention", place.perf(*sanitize, file="checks.jsonl"), 400),
    )
