"""What a call costs the host beyond our op in the mode, and that ops in no table cost nothing.

The function of ours that an override calls is replaced by one that returns at once: what is
measured is the way to it, through torch's dispatcher, the override and its checks.  Lines of Python
are counted, which no other work on a machine changes; 5 us are about 40 of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.model.batch_invariant.ops import products, rows
from tests.model.batch_invariant.cases import drawn
from tests.steps import lines

PACKAGE = str(Path(ck.__file__).parent)

LIMIT_LINES = 40

X, WEIGHT, SCALE = drawn(4, 64), drawn(32, 64, seed=2), drawn(64, seed=3)
WIDE, IDS, RIGHT, BIAS = X.double(), torch.arange(4), WEIGHT.mT, SCALE[:32]
BATCH = X[None]

#: Case -> (torch's function, who calls what is replaced, its name).
CASES: dict[str, tuple[Callable, object, str]] = {
    "linear": (lambda: F.linear(X, WEIGHT), products.api, "linear"),
    "mm": (lambda: torch.mm(X, RIGHT), products.api, "matmul"),
    "addmm": (lambda: torch.addmm(BIAS, X, RIGHT), products.api, "linear"),
    "_softmax": (lambda: torch._softmax(X, -1, False), rows.rowwise, "softmax"),
    "silu": (lambda: F.silu(X), rows.rowwise, "silu"),
    "layer_norm": (lambda: torch.layer_norm(X, (64,), SCALE), rows.norm_api, "layer_norm"),
    "rms_norm": (lambda: torch.rms_norm(X, (64,), SCALE), rows.norm_api, "rms_norm"),
    "sum": (lambda: X.sum(-1), rows, "row_sum"),
    "mean": (lambda: X.mean(-1), rows, "row_sum"),
    "embedding": (lambda: torch.embedding(X, IDS), rows.rowwise, "embedding"),
}
#: Those that stay torch's: (function, the lines that it may run).
PASSING: dict[str, tuple[Callable, int]] = {
    "mm of float64": (lambda: torch.mm(WIDE, WIDE.mT), LIMIT_LINES),
    # Lines of the kernel that refuses, once a strict mode was on in this process.
    "cumsum, refused by strict alone": (lambda: X.cumsum(-1), 4),
    "add, in no table": (lambda: X + X, 0),
}


@contextlib.contextmanager
def at_once(name: str):
    """Our op of a case returns at once."""
    _, owner, replaced = CASES[name]
    result, calls = X.clone(), []

    def ours(*args, **kwargs):
        calls.append(name)
        return result

    with ck.batch_invariant(), mock.patch.object(owner, replaced, ours):
        yield
    assert calls, "the case never came to our op"


@pytest.mark.parametrize("name", list(CASES))
def test_the_way_to_our_op(name):
    with at_once(name):
        CASES[name][0]()  # what the first call imports and caches
        assert 0 < lines(CASES[name][0], PACKAGE) <= LIMIT_LINES


@pytest.mark.parametrize("name", list(PASSING))
def test_what_passes(name):
    function, most = PASSING[name]
    with ck.batch_invariant():
        function()
        assert lines(function, PACKAGE) <= most
