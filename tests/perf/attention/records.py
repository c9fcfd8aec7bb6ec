"""Records of attention, as the tests of its pages make them."""

from __future__ import annotations

from perf.attention import targets
from perf.attention.cases import Case
from perf.core import record

FIRST = targets.cases(quick=True)[0]


def bench(size=FIRST, which: str = "bwd", system: str = "ours", us: float = 1000.0, **more) -> dict:
    """A record; `rivals` are their times."""
    rivals = more.pop("rivals", {})
    item = Case(*size).items(which) | {"system": system, "kind": "bench", "kernel": "attention"}
    item |= {"schema": record.SCHEMA, "status": "ok", "commit": "0123456789abcdef", "dirty": False}
    item |= {"date": "2026-11-21T10:00:00+00:00", "gpu": "NVIDIA H200", "tflops": 612.0}
    item |= {"median_us": us, "p10_us": us - 1, "p90_us": us + 1, "bitwise": {"repeat": True}}
    return item | {"ratio": {name: other / us for name, other in rivals.items()}} | more


def every(ratio: float, rival: str = "ours_unordered", system: str = "ours", **more) -> list[dict]:
    """All cases of the suite, and the held-out ones, at `ratio` of a rival's time."""
    out = []
    for size in (*targets.cases(), *targets.HELD_OUT):
        out.append(bench(size, system=system, rivals={rival: 1000.0 / ratio}, **more))
    return out
