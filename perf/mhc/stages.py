"""What a lent machine is asked about hyper-connections."""

from __future__ import annotations

from ..core.stage import Place, Stage


def stages(place: Place) -> tuple[Stage, ...]:
    """In the order in which they run."""
    return (Stage("bench_mhc", place.perf("bench", "mhc", file="mhc.jsonl"), 600),)
