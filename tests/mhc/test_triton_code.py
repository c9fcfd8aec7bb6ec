"""The Triton mhc, as it is launched, compiled for NVIDIA and AMD without a GPU."""

from __future__ import annotations

import itertools
import re

import pytest

pytest.importorskip("triton")

from cute_kernels.mhc.tensors import Sinkhorn
from cute_kernels.mhc.triton import launch
from tests import triton_inspect as inspect
from tests.triton_runner import NARROW, TARGETS, sizes_of_float_sums

from . import launcher_cases as cases
from .launcher_cases import BF16, FP32, NAMES, Shape
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("mhc.triton")

PRODUCTS = ("project_kernel", "project_backward_kernel")
#: Bytes a thread on the stack that the projection's backward may have where x is fp32: what Triton
#: 3.7.1 leaves on sm_80 for four streams of the layout "nc" whose channels are no multiple of 16.
FP32_BACKWARD_STACK = 208
#: Every value of each field but one target: target, n, layout, dtype, channels.
EVERY_COMMIT = (("sm_90", 2, "nc", BF16, 512), ("gfx950", 4, "cn", FP32, 513))
LAYOUTS = ("cn", "nc")
ALL = tuple(itertools.product(TARGETS, (4, 2), LAYOUTS, NAMES, (512, 513)))


def complaints(kernel) -> list[str]:
    """Complaints about the code of a kernel; empty if there are none."""
    hip = kernel.metadata.target.backend == "hip"
    on_fma_units = kernel.name in PRODUCTS and not hip
    stack = inspect.FP32_STACK if on_fma_units else 0
    if kernel.name == "project_backward_kernel" and kernel.src.signature["x_ptr"] == "*fp32":
        stack = FP32_BACKWARD_STACK
    out = inspect.code_complaints(kernel, stack, NARROW)
    if on_fma_units and "fma.rn.f32" not in inspect.text(kernel):
        out.append("no fma")
    matrix = {"v_mfma_f32_16x16x4_f32"} if hip and kernel.name in PRODUCTS else set()
    if set(inspect.matrix_instructions(kernel)) != matrix:
        out.append("matrix instruction")
    return out


def everything(module, shape: Shape):
    """Launches every kernel, with everything that it can be given."""
    form = Sinkhorn(20, "epsilon" if shape.dtype == BF16 else "log", 1e-6)
    return lambda: cases.results(module, cases.given(shape), form)


@pytest.mark.parametrize(
    ("target", "n", "layout", "dtype", "c"),
    [
        pytest.param(*case, marks=() if case in EVERY_COMMIT else pytest.mark.nightly)
        for case in ALL
    ],
    ids=str,
)
def test_everything(target, n, layout, dtype, c):
    """No atomics, no spills, nothing fused, no order of sums that is not written, wide offsets."""
    kernels = RUNNER.compiled(target, everything(launch, Shape(64, c, n, layout, dtype)))
    assert {kernel.name for kernel in kernels} == set(RUNNER.written)
    for kernel in kernels:
        assert complaints(kernel) == [], kernel.name
    sums = [len(sizes_of_float_sums(kernel.asm["ttir"])) for kernel in kernels]
    # Lanes of a reduction are a tree: log2 of the block, and of the tokens for dbias.
    assert max(sums) >= 6


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.nightly)])
def test_sizes_are_not_compiled_in(target):
    """Of one alignment: other numbers of tokens launch the same code."""
    kernels = []
    for m in (2, 16, 1040, 3001):
        shape = Shape(m, 1024, 2, "nc", BF16)
        kernels.append([k.hash for k in RUNNER.compiled(target, everything(launch, shape))])
    assert len({tuple(hashes) for hashes in kernels}) == 1


@pytest.mark.parametrize(
    ("n", "layout"), [(2, "cn"), *(pytest.param(4, x, marks=pytest.mark.nightly) for x in LAYOUTS)]
)
@pytest.mark.parametrize("target", ["gfx942", pytest.param("gfx950", marks=pytest.mark.nightly)])
def test_alignment_shows_in_no_product(target, n, layout):
    """A product takes its elements in one order, whatever is known of the addresses."""
    out = []
    for c in (512, 513):
        g = cases.given(Shape(64, c, n, layout, BF16))

        def products(g=g):
            launch.project(g.x, g.mapping, g.streams)
            of = (g.x, g.h, g.ms, g.mapping, g.streams, cases.Upstream(), (True, True))
            launch.project_backward(*of)

        products = [kernel.asm["ttgir"] for kernel in RUNNER.compiled(target, products)]
        out.append([set(re.findall(r"amd_mfma<.*?>|kWidth = \d+", text)) for text in products])
    assert out[0] == out[1] and all(len(one) > 1 for one in out[0])
