"""How much work a call is, and what a record says of the time that it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .timing import Timing, quantile


@dataclass(frozen=True)
class Work:
    """Operations of one call, and its least traffic in bytes."""

    flops: int
    bytes: int

    def floor_us(self, ceilings: dict[str, float]) -> float:
        """No version runs much faster on the card whose ceilings these are."""
        compute = self.flops / ceilings["mm_tflops"] / 1e6
        return max(compute, self.bytes / ceilings["copy_gbs"] / 1e3)


def ratios(medians: dict[str, float], name: str) -> dict[str, float]:
    """Another rival's time over this one's: above 1 this one is faster."""
    return {other: t / medians[name] for other, t in medians.items() if other != name}


def spreads(samples: Mapping[str, Sequence[float]]) -> dict[str, dict]:
    """Fields of every system's samples (microseconds) that a record has, by system."""
    medians = {name: quantile(times, 0.5) for name, times in samples.items()}
    return {
        name: {
            "median_us": medians[name],
            "p10_us": quantile(times, 0.1),
            "p90_us": quantile(times, 0.9),
            "samples": len(times),
            "ratio": ratios(medians, name),
        }
        for name, times in samples.items()
    }


def measured(taken: Timing, work: Work, ceilings: dict[str, float] | None) -> dict:
    """The fields of a record; without ceilings it has no floor."""
    body = {
        "median_us": taken.median,
        "p10_us": taken.p10,
        "p90_us": taken.p90,
        "samples": len(taken.samples),
        "backlog": taken.backlog,
        "tflops": work.flops / taken.median / 1e6,
    }
    if ceilings is None:
        return body
    floor = work.floor_us(ceilings)
    floors = {"floor_us": floor, "floor_fraction": floor / taken.median}
    return body | floors | {"ceilings": ceilings}
