"""The Triton gemm, as it is launched, compiled for sm_90, gfx942 and gfx950 without a GPU."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.gemm.triton import launch

from . import triton_cases as cases
from .triton_harness import TARGETS, compiled
from .triton_inspect import common_complaints, complaints, matrix_instructions

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
EPILOGUES = ("plain", "bias", "accumulate")
MAJORS = tuple(itertools.product(("k", "mn"), repeat=2))

#: Every value of each field, and the products that training runs: forward (k, k), dx (k, mn), dW
#: (mn, mn) with and without main_grad.  Each for one target, each target in turn.
EVERY_COMMIT = (
    (BF16, ("k", "k"), "bias"),
    (BF16, ("k", "mn"), "plain"),
    (BF16, ("mn", "mn"), "accumulate"),
    (FP16, ("mn", "mn"), "plain"),
    (FP16, ("mn", "k"), "accumulate"),
    (FP32, ("k", "k"), "bias"),
    (FP32, ("mn", "mn"), "accumulate"),
)
ALL = tuple(itertools.product((BF16, FP16, FP32), MAJORS, EPILOGUES))


def variants():
    for (index, target), case in itertools.product(enumerate(TARGETS), ALL):
        dtype, majors, epilogue = case
        often = case in EVERY_COMMIT[index :: len(TARGETS)]
        marks = () if often else pytest.mark.nightly
        name = f"{target}-{NAMES[dtype]}-{'_'.join(majors)}-{epilogue}"
        yield pytest.param(target, dtype, majors, epilogue, marks=marks, id=name)


def gemm_kernel(target, dtype, majors, epilogue, size=(256, 384, 128)):
    a, b, bias, start = cases.problem(*size, dtype, epilogue)
    a, b = cases.laid_out(a, majors[0]), cases.laid_out(b, majors[1])
    (kernel,) = compiled(launch, target, lambda: launch._launch(a, b, bias, start, 132))
    return kernel


@pytest.mark.parametrize(("target", "dtype", "majors", "epilogue"), list(variants()))
def test_gemm(target, dtype, majors, epilogue):
    kernel = gemm_kernel(target, dtype, majors, epilogue)
    assert complaints(kernel, dtype, epilogue) == []


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("target", TARGETS)
def test_column_sum(target, dtype):
    rows = cases.random(64, 128, dtype=dtype, seed=1)
    (kernel,) = compiled(launch, target, lambda: launch._launch_column_sum(rows))
    assert common_complaints(kernel) == []
    assert not matrix_instructions(kernel)


@pytest.mark.parametrize("epilogue", ["plain", "accumulate"])
@pytest.mark.parametrize("target", TARGETS)
def test_alignment_changes_loads_only(target, epilogue):
    """Sizes and strides that allow no vector load compile to the same matrix instruction.

    Such a kernel keeps an address per element and may spill some: slower, the same bits.
    """
    aligned = gemm_kernel(target, BF16, ("k", "mn"), epilogue)
    ragged = gemm_kernel(target, BF16, ("k", "mn"), epilogue, size=(255, 383, 127))
    assert aligned.hash != ragged.hash
    assert set(matrix_instructions(aligned)) == set(matrix_instructions(ragged))
    assert set(complaints(ragged, BF16, epilogue)) <= {"spills"}
