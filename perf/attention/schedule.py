"""The schedule that a backward ran by: its name and hash, its predicted time, what its lists cost.

The prediction is the simulator's for the schedule that ran; the lists' cost is the time to build
the order's tensors on the device, against one backward: of a schedule seen for the first time, and
of one whose tensors were made before; and the host's part of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from cute_kernels.schedulers import Schedule, simulate
from cute_kernels.sparse_attn import checks, config, lowering, masks

from ..core.timing import quantile
from .cases import Problem

_BUILDS = 9


def facts(problem: Problem, medians: dict[str, float], finish: Callable[[], None]) -> dict:
    """The record fields of our ordered backward, timed as `medians` (microseconds) say."""
    case = problem.case
    lowered = lowering.lower(problem.mask)
    count = config.schedule_heads(problem.mask.shape[1], case.batch, case.heads, case.kv_heads)
    group = case.batch * case.heads // count
    admitted = lowering.admitted(lowered, checks.AUTO, count, case.dim, group)
    machine = config.MACHINES[case.dim]
    simulated = simulate(admitted, machine, group=group)
    # A copy has kept nothing yet.
    host_us, order_us = _built(lowered, [replace(admitted) for _ in range(_BUILDS)], finish)
    _, again_us = _built(lowered, [admitted] * _BUILDS, finish)
    body = {
        "schedule": {
            "name": admitted.name,
            "hash": admitted.hash,
            "heads": admitted.heads,
            "heads_in_flight": admitted.heads_in_flight,
            "group": group,
        },
        "predicted": {
            "machine": machine,
            "makespan_us": simulated.makespan_ns / 1e3,
            "unordered_us": simulated.unordered_ns / 1e3,
            "ratio": simulated.ratio,
            "stall_share": simulated.stall_share,
        },
        "order_us": order_us,
        "order_host_us": host_us,
        "order_again_us": again_us,
        "order_share": order_us / medians["ours"],
        "ordered_us": medians["ours"],
    }
    unordered = medians.get("ours_unordered")
    return body | ({"unordered_us": unordered} if unordered else {})


def _built(
    lowered: masks.LoweredMask, schedules: list[Schedule], finish: Callable
) -> tuple[float, float]:
    """Median microseconds of `order_of` over the schedules: of the host, and until it is done.

    The host goes on to the backward's launch when `order_of` returns.
    """
    times = []
    for schedule in schedules:
        finish()
        start = time.perf_counter()
        masks.order_of(lowered, schedule)
        returned = time.perf_counter()
        finish()
        times.append([(each - start) * 1e6 for each in (returned, time.perf_counter())])
    host_us, done_us = (quantile(column, 0.5) for column in zip(*times, strict=True))
    return host_us, done_us
