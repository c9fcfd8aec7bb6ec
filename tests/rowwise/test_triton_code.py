"""The Triton rowwise, as it is launched, compiled for NVIDIA and AMD without a GPU."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.rowwise import config
from cute_kernels.rowwise.triton import launch

from ..triton_runner import TARGETS, complaints, sizes_of_float_sums
from .cases import BF16, DTYPES, FP32, drawn, indices
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("rowwise.triton")

#: Every target, and both dtypes with kernels of their own; the others by night.
EVERY_COMMIT = (("sm_90", BF16), ("gfx950", FP32))


def everything(module, dtype: torch.dtype, rows: int = 3, width: int = 1500):
    """Launches every kernel, each function of elements among them."""
    x, c = drawn(rows, width, dtype=dtype), drawn(1, 1, 50, 64).expand(2, 3, 50, 64)

    def call():
        for kind in config.KINDS:
            module.activation(x, kind)
            module.activation_backward(x, x, kind)
        for kind in config.GATES:
            for steps in (False, True):
                module.gated(x, x, kind, steps)
                module.gated_backward(x, x, x, kind, steps)
            module.gated_rows(x, kind)
        module.softmax(x, dtype)
        module.log_softmax(x, FP32)
        module.softmax_backward(x, x, dtype)
        module.log_softmax_backward(x, x)
        module.rotary_table(torch.arange(50), torch.rand(32), 1.5, dtype)
        for back in (True, False):
            module.rotary(drawn(2, 3, 50, 80, dtype=dtype), c, c, back)
        for tables in {dtype, FP32}:
            pair = (drawn(2, 50, 3, 80, dtype=dtype).transpose(1, 2),) * 2
            cos = drawn(2, 50, 64, dtype=tables)
            for back in (False, True):
                module.rotary_pair(*pair, cos, cos, 1, dtype, back)
        for into in (drawn(5, width), drawn(5, width, dtype=dtype)):
            module.embedding_gradient(x, indices(5, rows), -1, into)
        module.square_sum(x.view(-1))
        module.add_sums(torch.rand(5, dtype=torch.float64))
        module.scale_(x, torch.tensor(0.5))

    return call


def some(module, rows: int = 3, width: int = 1500):
    """One of each kind of kernel."""
    x = drawn(rows, width)

    def call():
        module.activation(x, "silu")
        module.softmax_backward(x, x, FP32)
        module.embedding_gradient(x, indices(5, rows), -1, drawn(5, width))
        q, cos = drawn(2, rows, 3, 64).transpose(1, 2), drawn(2, rows, 64)
        module.rotary_pair(q, q, cos, cos, 1, FP32, False)
        module.square_sum(x.view(-1))
        module.scale_(x, torch.tensor(0.5))

    return call


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        pytest.param(*case, marks=() if case in EVERY_COMMIT else pytest.mark.nightly)
        for case in itertools.product(TARGETS, DTYPES)
    ],
    ids=str,
)
def test_everything(target, dtype):
    """No atomics, no spills, nothing fused, no order of sums that is not written, wide offsets."""
    kernels = RUNNER.compiled(target, everything(launch, dtype))
    assert {kernel.name for kernel in kernels} == set(RUNNER.written)
    for kernel in kernels:
        assert complaints(kernel) == [], kernel.name
    sums = {kernel.name: sizes_of_float_sums(kernel.asm["ttir"]) for kernel in kernels}
    # Ten halvings of 1,024 lanes.
    assert len(sums["softmax_backward_kernel"]) == len(sums["lane_sums_kernel"]) == 10
    assert sums["embedding_gradient_kernel"] == []


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.nightly)])
def test_numbers_of_rows_are_not_compiled_in(target):
    found = []
    for rows in (2, 7, 64):
        kernels = RUNNER.compiled(target, some(launch, rows, 1504))
        found.append(tuple(kernel.hash for kernel in kernels))
    assert len(set(found)) == 1 and len(found[0]) == 7
