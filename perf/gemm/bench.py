"""Subject of `python -m perf bench gemm`: verdicts on products, and what a call costs the host."""

from __future__ import annotations

import functools

import torch

from ..core import timing
from ..core.passes import Suite
from ..core.rival import Call, Rival
from . import check, targets
from .cases import Case, Inputs
from .rivals import RIVALS

#: M = K = N of the call whose host time is taken: the kernel is shorter than it.
HOST_SIZE = 256
#: The forward with whose record the host's time is kept.
HOST_LABEL = targets.SWEEP_SHAPE


def host_costs(call: Call, case: Case, device: str) -> dict[str, float]:
    """Host microseconds of one small forward call that records a graph, and in inference mode."""
    small = Case(case.product, case.shape, HOST_SIZE, HOST_SIZE, HOST_SIZE)
    t = small.inputs(0, device)
    run, finish = functools.partial(call, t), torch.cuda.synchronize
    with torch.inference_mode():
        costs = {"inference": timing.host_cost(run, finish=finish)}
    for value in t.values():
        value.requires_grad_()
    return costs | {"grad": timing.host_cost(run, finish=finish)}


def verdict(rival: Rival, call: Call, case: Case, t: Inputs) -> dict:
    """Correctness and bits of one rival; of one forward that is right, its host costs too."""
    outcome = check.check(call, case.product, t, promised=rival.promised)
    body = {"check": outcome.items(), "bitwise": check.bitwise(call, case.product, t)}
    if not outcome.ok:
        return body | {"status": "failed", "why": "the result is wrong"}
    if (case.product, case.label) == ("fwd", HOST_LABEL):
        body["host_us"] = host_costs(call, case, next(iter(t.values())).device.type)
    return body


SUITE = Suite("gemm", "linear", RIVALS, verdict, compares=False, timed_in=torch.inference_mode)
