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


def rows(dtype: torch.dtype) -> None:
    """Softmax, embeddings and sums."""
    x = drawn(3, WIDTH, dtype=dtype)
    launch.softmax(x, dtype)
    launch.log_softmax(x, FP32)
    launch.softmax_backward(x, x, dtype)
    launch.log_softmax_backward(x, x)
    for into in (drawn(5, WIDTH), drawn(5, WIDTH, dtype=dtype)):
        launch.embedding_gradient(x, indices(5, 3), -1, into)
    launch.square_sum(x.view(-1))
    launch.add_sums(torch.rand(5, dtype=torch.float64))
    launch.scale_(x, torch.tensor(0.5))


def activations(dtype: torch.dtype) -> None:
    x = drawn(3, WIDTH, dtype=dtype)
    for kind in config.KINDS:
        launch.activation(x, kind)
        launch.activation_backward(x, x, kind)


def gates(dtype: torch.dtype) -> None:
    x = drawn(3, WIDTH, dtype=dtype)
    for kind in config.GATES:
        for steps in (False, True):
            launch.gated(x, x, kind, steps)
            launch.gated_backward(x, x, x, kind, steps)
        launch.gated_rows(x, kind)


def rotary(dtype: torch.dtype) -> None:
    launch.rotary_table(torch.arange(50), torch.rand(32), 1.5, dtype)
    c = drawn(1, 1, 50, 64).expand(2, 3, 50, 64)
    for back in (True, False):
        launch.rotary(drawn(2, 3, 50, 80, dtype=dtype), c, c, back)
    for tables in {dtype, FP32}:
        pair = (drawn(2, 50, 3, 80, dtype=dtype).transpose(1, 2),) * 2
        cos = drawn(2, 50, 64, dtype=tables)
        for back in (False, True):
            launch.rotary_pair(*pair, cos, cos, 1, dtype, back)


WIDTH = 1500
#: Launches -> the kernels that they are of.
LAUNCHES = {
    rows: {
        "softmax_kernel", "softmax_backward_kernel", "log_softmax_backward_kernel",
        "embedding_gradient_kernel", "lane_sums_kernel", "chain_kernel", "scale_kernel",
    },
    activations: {"activation_kernel", "activation_backward_kernel"},
    gates: {"gated_kernel", "gated_backward_kernel", "gated_rows_kernel"},
    rotary: {"rotary_table_kernel", "rotary_kernel", "rotary_pair_kernel"},
}  # fmt: skip
#: Steps of a kernel's sums of floats: ten halvings of 1,024 lanes.
SUMS = {"softmax_backward_kernel": 10, "lane_sums_kernel": 10, "embedding_gradient_kernel": 0}


def some(count: int):
    """One of each kind of kernel, of so many rows."""
    width = 1504
    x = drawn(count, width)

    def call():
        launch.activation(x, "silu")
        launch.softmax_backward(x, x, FP32)
        launch.embedding_gradient(x, indices(5, count), -1, drawn(5, width))
        q, cos = drawn(2, count, 3, 64).transpose(1, 2), drawn(2, count, 64)
        launch.rotary_pair(q, q, cos, cos, 1, FP32, False)
        launch.square_sum(x.view(-1))
        launch.scale_(x, torch.tensor(0.5))

    return call


@pytest.mark.parametrize(
    ("launches", "target", "dtype"),
    [
        pytest.param(*case, marks=() if case[1:] in EVERY_COMMIT else pytest.mark.nightly)
        for case in itertools.product(LAUNCHES, TARGETS, DTYPES)
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_code(launches, target, dtype):
    """No atomics, no spills, nothing fused, no order of sums that is not written, wide offsets."""
    kernels = RUNNER.compiled(target, lambda: launches(dtype))
    assert {kernel.name for kernel in kernels} == LAUNCHES[launches]
    for kernel in kernels:
        assert complaints(kernel) == [], kernel.name
        steps = len(sizes_of_float_sums(kernel.asm["ttir"]))
        assert steps == SUMS.get(kernel.name, steps)


def test_every_kernel_is_launched():
    assert set().union(*LAUNCHES.values()) == set(RUNNER.written)


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.nightly)])
def test_numbers_of_rows_are_not_compiled_in(target):
    found = []
    for count in (2, 7, 64):
        kernels = RUNNER.compiled(target, some(count))
        found.append(tuple(kernel.hash for kernel in kernels))
    assert len(set(found)) == 1 and len(found[0]) == 7
