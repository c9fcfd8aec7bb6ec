"""What a call costs the host: beyond our op in the mode, and nothing out of it.

    python -m tests.model.batch_invariant.test_overhead

prints the times.  The test runs at night, as other work on a machine shows in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.torch_ops import MODE_KEYS
from tests.model.batch_invariant.cases import drawn

CALLS, ROUNDS = 100, 40
LIMIT_US = 5.0

X, WEIGHT = drawn(4, 64), drawn(32, 64, seed=2)
WIDE, SCALE = X.double(), drawn(64, seed=3)
EPS = torch.finfo(X.dtype).eps

#: Case -> (torch's function, what stands in for it).
CASES: dict[str, tuple[Callable, Callable]] = {
    "linear": (lambda: F.linear(X, WEIGHT), lambda: ck.linear(X, WEIGHT)),
    "mm": (lambda: torch.mm(X, WEIGHT.mT), lambda: ck.matmul(X, WEIGHT.mT)),
    "softmax": (lambda: torch._softmax(X, -1, False), lambda: ck.softmax(X)),
    "silu": (lambda: F.silu(X), lambda: ck.silu(X)),
    "rms_norm": (lambda: F.rms_norm(X, (64,), SCALE), lambda: ck.rms_norm(X, SCALE, EPS)),
    "sum": (lambda: X.sum(-1), lambda: torch.ops.cute_kernels.row_sum(X, 1.0, X.dtype)),
    "float64, which passes": (lambda: torch.mm(WIDE, WIDE.mT), lambda: torch.mm(WIDE, WIDE.mT)),
    "add, in no table": (lambda: X + X, lambda: X + X),
}


def seconds(call: Callable) -> float:
    """Of the thread's own processor time."""
    start = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - start) / CALLS


def difference(name: str) -> float:
    """Microseconds that a call in the mode takes more than ours out of it: the best of rounds."""
    torchs, ours = CASES[name]
    inside, outside = [], []
    with ck.batch_invariant():
        for _ in range(ROUNDS):
            inside.append(seconds(torchs))
            with torch._C._ExcludeDispatchKeyGuard(MODE_KEYS):
                outside.append(seconds(ours))
    return 1e6 * (min(inside) - min(outside))


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(CASES))
def test_a_call_costs_little_more_than_ours(name):
    limit = 0.5 if name.startswith("add") else LIMIT_US
    assert min(difference(name) for _ in range(5)) <= limit


if __name__ == "__main__":
    for case in CASES:
        print(f"{case:24} {difference(case):6.2f} us")
