"""The Triton gemm in Triton's interpreter: masks, pointers and order of blocks, in numpy.

Collected by test_triton_interpreter.py only, in a process that has TRITON_INTERPRET=1 before triton
is imported.  The interpreter multiplies the bit patterns of bf16 and truncates when it stores bf16,
so the launcher is told to multiply in fp32 and to round outside the kernel.
"""

from __future__ import annotations

import os

import pytest
import torch

import cute_kernels.gemm.triton as package
from cute_kernels.gemm.triton import launch

from ..triton_copies import copy_of
from ..triton_in_numpy import same_on_every_machine  # noqa: F401
from . import triton_cases as cases

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])


def engine(module):
    def gemm(a, b, bias=None, accumulator=None, programs=132):
        return module._launch(a, b, bias, accumulator, programs, interpret=True)

    return gemm


@DTYPES
@pytest.mark.parametrize("epilogue", ["plain", "bias", "accumulate"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (127, 129, 65), (130, 7, 200), (128, 128, 64)])
def test_accuracy(dtype, epilogue, shape):
    cases.accuracy(engine(launch), *shape, dtype, epilogue)


@DTYPES
@pytest.mark.parametrize(
    "check",
    [cases.order_of_blocks, cases.rows_alone, cases.pieces, cases.programs, cases.neighbours],
    ids=lambda check: check.__name__,
)
def test_invariance(check, dtype):
    check(engine(launch), dtype)


@DTYPES
def test_layouts(dtype):
    pairs = tuple((a, b) for a in cases.LAYOUTS for b in cases.LAYOUTS)
    cases.layouts(engine(launch), dtype, pairs)


@DTYPES
def test_column_sum(dtype):
    cases.column_sums(lambda rows: launch._launch_column_sum(rows, interpret=True), dtype)


MUTANTS = {
    "wide_dot_in_the_accumulate_path": (
        "plan.accumulate_k if accumulate else plan.block_k",
        "plan.block_k",
        cases.pieces,
    ),
    "block_k_by_m": (
        "dot_options(plan, accumulate, interpret)",
        "dot_options(plan, accumulate or m < 32, interpret)",
        cases.rows_alone,
    ),
    "k_descending": (
        "for step in tl.range(0, steps):",
        "for step in tl.range(steps - 1, -1, -1):",
        cases.order_of_blocks,
    ),
    "k_tail_multiplied": (
        "a = tl.load(a_ptrs + step * a_step, mask=in_m & in_k[None, :], other=0.0)",
        "a = tl.load(a_ptrs + step * a_step, mask=in_m) * in_k[None, :]",
        cases.neighbours,
    ),
    "stride_of_the_grid_fixed": ("tiles_n, tl.num_programs(0)):", "tiles_n, 132):", cases.programs),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(tmp_path, name):
    old, new, check = MUTANTS[name]
    mutant = copy_of(package, tmp_path, (old, new))
    with pytest.raises(AssertionError):
        check(engine(mutant), BF16)
