"""Whole runs of the attention bench on the CPU, as its tests ask for them."""

from __future__ import annotations

from perf.attention import bench
from tests.perf.core.clocks import HostClock

CEILINGS = {"mm_tflops": 800.0, "copy_gbs": 4300.0}


def options(names, **more) -> bench.Options:
    """A run of these rivals on this CPU."""
    host = {"device": "cpu", "l2_bytes": 1, "finish": lambda: None, "clock": HostClock()}
    return bench.Options(list(names), **{"rounds": 3, "ceilings": CEILINGS} | host | more)


def run(todo, run_options, path=None) -> tuple[list[dict], list[str]]:
    """The records of a run, and its lines."""
    out = list(bench.measure(todo, run_options, output=path, commit="abc"))
    return [x for x in out if isinstance(x, dict)], [x for x in out if isinstance(x, str)]
