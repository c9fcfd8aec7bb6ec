"""What a lent machine is asked about norms."""

from __future__ import annotations

from ..core.stage import Place, Stage


def stages(place: Place) -> tuple[Stage, ...]:
    """In the order in which they run."""
    return (Stage("bench_norm", place.perf("bench", "norm", file="norm.jsonl"), 300),)
