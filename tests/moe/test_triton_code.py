"""The Triton kernels of moe, as they are launched, compiled for NVIDIA and AMD without a GPU."""

from __future__ import annotations

import functools
import re

import pytest

pytest.importorskip("triton")

import torch
import triton

from cute_kernels.moe.triton import launch, routing

from ..triton_inspect import common_complaints, text, tree_complaints
from ..triton_inspect import complaints as product_complaints
from ..triton_runner import complaints
from . import cases
from .triton_engine import PRODUCTS, ROUTES

pytestmark = pytest.mark.simulates("moe.triton")

BF16, FP32 = cases.BF16, cases.FP32
#: Each target and each dtype at every commit.
EVERY_COMMIT = {("sm_90", BF16), ("gfx950", FP32)}
PARAMETERS = [
    pytest.param(
        target, dtype, marks=() if (target, dtype) in EVERY_COMMIT else pytest.mark.nightly
    )
    for target in ("sm_90", "gfx942", "gfx950")
    for dtype in (BF16, cases.FP16, FP32)
]


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return cases.drawn(*shape, seed=1, dtype=dtype)


@pytest.mark.parametrize(("target", "dtype"), PARAMETERS)
def test_products(target, dtype):
    """The matrix instruction is gemm's; no atomics, no spills."""
    x, weight = drawn(512, 128, dtype=dtype), drawn(4, 256, 128, dtype=dtype)
    dy, bias = drawn(512, 256, dtype=dtype), drawn(4, 256, dtype=dtype)
    offsets = cases.offsets_of([128] * 4)
    calls = {
        "bias": lambda: launch.grouped_gemm(x, weight, offsets, bias),
        "plain": lambda: launch.grouped_gemm(dy, weight.mT, offsets, None),
        "dw": lambda: launch.grouped_dw(dy, x, offsets, None),
        "accumulate": lambda: launch.grouped_dw(dy, x, offsets, torch.zeros(4, 256, 128)),
    }
    for epilogue, call in calls.items():
        (kernel,) = PRODUCTS.compiled(target, call)
        assert product_complaints(kernel, dtype, epilogue) == [], epilogue
    (kernel,) = PRODUCTS.compiled(target, lambda: launch.grouped_column_sum(dy, offsets))
    assert common_complaints(kernel) == []


@pytest.mark.parametrize(("target", "dtype"), PARAMETERS)
def test_tree(target, dtype):
    """The matrix instruction is that of gemm's leaves, the weight first; no atomics, no spills."""
    x, weight = drawn(512, 128, dtype=dtype), drawn(4, 256, 128, dtype=dtype)
    bias, offsets = drawn(4, 256, dtype=dtype), cases.offsets_of([128] * 4)
    dy = drawn(512, 256, dtype=dtype)
    calls = {
        "tree": lambda: launch.grouped_tree(x, weight, offsets, bias),
        "dx": lambda: launch.grouped_tree(dy, weight.mT, offsets, None),
        "leaves": lambda: launch.grouped_leaf_sums(x, weight, offsets, 16),
    }
    for stage, call in calls.items():
        (kernel,) = PRODUCTS.compiled(target, call)
        # Loads of offsets are of 32 bits; those of rows are not (test_narrow_offsets_are_killed).
        tolerated = {"offsets of 32 bits"}
        if target != "sm_90" and re.search(r"\.vgpr_spill_count:\s*0\b", text(kernel)):
            tolerated.add("spills")  # scalar registers in lanes of vector ones: no memory access
        assert set(tree_complaints(kernel, dtype, stage)) <= tolerated, stage


def every_routing_kernel(dtype: torch.dtype, width: int = 1500) -> None:
    scores, bias = drawn(6, 64, dtype=FP32), drawn(64, dtype=dtype)
    indices = torch.randint(0, 64, (6, 8), generator=cases.generator(1), dtype=torch.int32)
    rows, weights = drawn(48, width, dtype=dtype), drawn(6, 8, dtype=FP32)
    routing.select(scores, bias, 8, 8, 4)
    routing.select(scores, None, 8, 1, 1)
    for normalize in (True, False):
        routing.weights(scores, indices, normalize, 2.5)
        routing.weights_backward(weights, scores, indices, normalize, 2.5)
        routing.slot_weights(scores, indices, normalize, dtype)
    # Blocks that count and place; then one that does both.
    routing.sort(torch.zeros(1100, 1, dtype=torch.int32), 64)
    offsets, order, positions = routing.sort(indices, 64)
    routing.gather(rows[:6], offsets, order, positions)
    routing.combine(rows, weights, offsets, positions)
    routing.combine_backward(rows[:6], rows, weights, offsets, order, positions)


@pytest.mark.parametrize(("target", "dtype"), PARAMETERS)
def test_routing(target, dtype):
    """Nothing fused, exact division, wide offsets, no float sum in the compiler's order."""
    kernels = ROUTES.compiled(target, lambda: every_routing_kernel(dtype))
    assert {kernel.name for kernel in kernels} == set(ROUTES.written)
    assert {kernel.name: complaints(kernel) for kernel in kernels} == {
        name: [] for name in ROUTES.written
    }


def test_rows_move_by_16_bytes():
    """Where D is a multiple of 16 no load or store of a row has fewer bytes."""
    call = functools.partial(every_routing_kernel, BF16, 1504)
    moves = {
        kernel.name: re.findall(r"(?:ld|st)\.global\.\S+", kernel.asm["ptx"])
        for kernel in ROUTES.compiled("sm_90", call)
        if kernel.name.startswith(("gather", "combine"))
    }
    assert len(moves) == 3
    for name, widths in moves.items():
        assert {"ld.global.v4.b32", "st.global.v4.b32"} <= set(widths), name
        # Weights and positions are of 4 bytes, rows of 2.
        assert not [width for width in widths if width.endswith(("16", "8"))], name


@pytest.mark.parametrize(
    "experts", [128, *(pytest.param(e, marks=pytest.mark.nightly) for e in (1, 256, 1024))]
)
def test_sorts_of_many_experts(experts):
    def call():
        for slots in (8, 40_000):
            routing.sort(torch.zeros(slots, 1, dtype=torch.int32), experts)

    kernels = ROUTES.compiled("sm_90", call)
    assert [kernel.name for kernel in kernels] == ["place_kernel", "count_kernel", "place_kernel"]
    # Triton 3.6 keeps 72 bytes of the first on the stack, where one program has all slots.
    stacks = (72 if triton.__version__.startswith("3.6.") else 0, 0, 0)
    found = [complaints(*pair) for pair in zip(kernels, stacks, strict=True)]
    assert found == [[], [], []]


def test_every_kernel_is_here():
    assert set(PRODUCTS.written) | set(ROUTES.written) == {
        name
        for module in (launch.kernels, routing.kernels)
        for name in vars(module)
        if name.endswith("_kernel")
    }
