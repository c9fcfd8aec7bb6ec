"""What a call costs the host beyond our op in the mode, and that ops in no table cost nothing.

    python -m tests.model.batch_invariant.test_overhead

prints the times.  The function of ours that an override calls is replaced by one that returns at
once: what is timed is the way to it, through torch's dispatcher, the override and its checks.
The test runs at night, as other work on a machine shows in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.model import aten_products, aten_rows
from tests.model.batch_invariant.cases import drawn

CALLS, ROUNDS = 1000, 20
LIMIT_US = 5.0

X, WEIGHT, SCALE = drawn(4, 64), drawn(32, 64, seed=2), drawn(64, seed=3)
WIDE, IDS, RIGHT, BIAS = X.double(), torch.arange(4), WEIGHT.mT, SCALE[:32]
BATCH = X[None]

#: Case -> (torch's function, who calls what is replaced, its name).
CASES: dict[str, tuple[Callable, object, str]] = {
    "linear": (lambda: F.linear(X, WEIGHT), aten_products.api, "linear"),
    "mm": (lambda: torch.mm(X, RIGHT), aten_products.api, "matmul"),
    "addmm": (lambda: torch.addmm(BIAS, X, RIGHT), aten_products.api, "linear"),
    "_softmax": (lambda: torch._softmax(X, -1, False), aten_rows.rowwise, "softmax"),
    "silu": (lambda: F.silu(X), aten_rows.rowwise, "silu"),
    "layer_norm": (lambda: torch.layer_norm(X, (64,), SCALE), aten_rows.norm_api, "layer_norm"),
    "rms_norm": (lambda: torch.rms_norm(X, (64,), SCALE), aten_rows.norm_api, "rms_norm"),
    "sum": (lambda: X.sum(-1), aten_rows, "row_sum"),
    "mean": (lambda: X.mean(-1), aten_rows, "row_sum"),
    "embedding": (lambda: torch.embedding(X, IDS), aten_rows.rowwise, "embedding"),
}
#: Those that stay torch's: (function, what it may cost more).
PASSING: dict[str, tuple[Callable, float]] = {
    "mm of float64": (lambda: torch.mm(WIDE, WIDE.mT), LIMIT_US),
    "cumsum, refused by strict alone": (lambda: X.cumsum(-1), LIMIT_US),
    "add, in no table": (lambda: X + X, 0.2),
}


def microseconds(call: Callable) -> float:
    """A call's: the best round, in processor time of the thread."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        best = min(best, time.thread_time() - start)
    return 1e6 * best / CALLS


def way(name: str) -> float:
    """From torch's function to ours."""
    function, owner, replaced = CASES[name]
    made = X.clone()

    def at_once(*args, **kwargs):
        return made

    with ck.batch_invariant(), mock.patch.object(owner, replaced, at_once):
        return microseconds(function) - microseconds(at_once)


def passing(name: str) -> float:
    """What the mode adds to a call that is torch's."""
    outside = microseconds(PASSING[name][0])
    with ck.batch_invariant():
        return microseconds(PASSING[name][0]) - outside


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(CASES))
def test_the_way_to_our_op(name):
    assert 0 < min(way(name) for _ in range(3)) <= LIMIT_US


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(PASSING))
def test_what_passes(name):
    assert min(passing(name) for _ in range(3)) <= PASSING[name][1]


if __name__ == "__main__":
    for case in CASES:
        print(f"{case:34} {way(case):6.2f} us")
    for case in PASSING:
        print(f"{case:34} {passing(case):6.2f} us more")
