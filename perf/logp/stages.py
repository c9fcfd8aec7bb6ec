"""What a lent machine is asked about log-probabilities."""

from __future__ import annotations

from ..core.stage import Place, Stage


def stages(place: Place) -> tuple[Stage, ...]:
    """In the order in which they run."""
    return (Stage("bench_logp", place.perf("bench", "logp", file="logp.jsonl"), 500),)
