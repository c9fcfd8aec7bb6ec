"""The Triton norm, as it is launched, compiled for NVIDIA and AMD without a GPU."""

from __future__ import annotations

import itertools
import re

import pytest

pytest.importorskip("triton")

from cute_kernels.norm.triton import launch
from tests import triton_inspect as inspect
from tests import triton_runner
from tests.triton_runner import NARROW, TARGETS, sizes_of_float_sums

from . import cases
from .cases import BF16, FP16, FP32, RMS, Case, Rule
from .triton_checks import LAYERS
from .triton_engine import RUNNER

pytestmark = pytest.mark.simulates("norm.triton")

#: Bytes a thread on the stack that a kernel may have: what Triton 3.7.1 leaves of layer norms of
#: 8192 fp32 on sm_90 is 24, of 65 fp16 on sm_80 16.
STACK = 24
#: Rows of one warp, of many, of as many lanes as there are, of blocks; ragged ones.
WIDTHS = (65, 128, 4096, 8192, 16384, 40000)
#: Every value of each field: target, width, dtype, weight's dtype, kind.
EVERY_COMMIT = (
    ("sm_80", 8192, BF16, BF16, "rms"),
    ("sm_90", 4096, BF16, FP32, "layer"),
    ("sm_90", 40000, FP16, FP16, "layer"),
    ("gfx942", 128, FP32, FP32, "layer"),
    ("gfx950", 65, BF16, BF16, "rms"),
)
ALL = [
    (target, width, *dtypes, kind)
    for target, width, dtypes, kind in itertools.product(
        TARGETS, WIDTHS, [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)], ("rms", "layer")
    )
]
FUSED = {"forward_kernel", "backward_kernel", "add_parts_kernel"}
APART = {"forward_kernel", "dx_kernel", "parts_kernel", "add_parts_kernel"}


def complaints(kernel) -> list[str]:
    return triton_runner.complaints(kernel, STACK, NARROW)


def everything(module, case: Case, m: int | None = None):
    """Launches what answers a case, with everything that it can be given."""
    inputs = cases.inputs_of(case._replace(m=m or case.m))

    def call():
        out = module.forward(inputs.x, inputs.residual, inputs.scale, case.rule)
        stats = (out.mean, out.rstd)
        _, parts = module.backward(inputs.upstream, out.h, stats, inputs.scale, case.rule, True)
        module.add_parts([parts.weight], [None], [inputs.scale.weight])

    return call


def of(width, dtype=BF16, weight=BF16, kind="layer") -> Case:
    rule = LAYERS if kind == "layer" else Rule(RMS, 1e-6, 1.0)
    return Case(2, width, rule, dtype, weight, bias=kind == "layer", residual=True)


@pytest.mark.parametrize(
    ("target", "width", "dtype", "weight", "kind"),
    [
        pytest.param(*case, marks=() if case in EVERY_COMMIT else pytest.mark.nightly)
        for case in ALL
    ],
    ids=str,
)
def test_everything(target, width, dtype, weight, kind):
    """No atomics, no spills, nothing fused, no order of sums that is not written, wide offsets."""
    kernels = RUNNER.compiled(target, everything(launch, of(width, dtype, weight, kind)))
    names = {kernel.name for kernel in kernels}
    assert names == (FUSED if width <= launch.TRITON.backward_whole else APART)
    assert names <= set(RUNNER.written)
    for kernel in kernels:
        assert complaints(kernel) == [], kernel.name
    # Lanes of a row are a tree: log2 of them.
    sums = max(len(sizes_of_float_sums(kernel.asm["ttir"])) for kernel in kernels)
    assert sums >= launch.backward_lanes(width).bit_length() - 1


@pytest.mark.parametrize(
    ("target", "width"), [("sm_90", 1024), pytest.param("gfx942", 40000, marks=pytest.mark.nightly)]
)
def test_rows_are_not_compiled_in(target, width):
    """Of one alignment: other numbers of rows launch the same code."""
    hashes = [
        tuple(kernel.hash for kernel in RUNNER.compiled(target, everything(launch, of(width), m)))
        for m in (2, 16, 1040, 3001)[: 4 if width < 2000 else 3]
    ]
    assert len(set(hashes)) == 1


def test_aligned_rows_are_loaded_16_bytes_at_a_time():
    """Rows of 8 k elements too, which Triton itself would take for ragged ones."""
    for kernel in RUNNER.compiled("sm_90", everything(launch, of(2888))):
        if kernel.name in ("forward_kernel", "backward_kernel"):
            code = inspect.text(kernel)
            assert re.search(r"ld\.global\S*\.v4\.b32", code), kernel.name
            assert re.search(r"st\.global\S*\.v4\.b32", code), kernel.name


PAIRS = "of_products = tl.div_rn(pairs(g * x_hat, ROWS, BLOCK), size)"
MUTANTS = {
    "a sum of a whole tile": (PAIRS, "of_products = tl.div_rn(tl.sum(g * x_hat, axis=1), size)",
        "a sum in the order of the compiler"),
    "fused": ("\"enable_fp_fusion\": TRITON.fp_fusion", "\"enable_fp_fusion\": True",
        "sums that the compiler may fuse"),
    "atomic": ("tl.store(out_ptr + c, total.to(out_ptr.dtype.element_ty), mask=c < D)",
        "tl.atomic_add(out_ptr + c, total.to(out_ptr.dtype.element_ty), mask=c < D)", "atomics"),
    "approximate division": (PAIRS, "of_products = pairs(g * x_hat, ROWS, BLOCK) / size",
        "division or root that is not IEEE's"),
    "approximate root": ("tl.sqrt_rn(", "tl.sqrt(", "division or root that is not IEEE's"),
    "reciprocal root": ("tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, size) + eps))",
        "tl.rsqrt(tl.div_rn(squares, size) + eps)", "division or root that is not IEEE's"),
    "narrow offsets": ("ptrs = ptr + rows[:, None] * D + c",
        "ptrs = ptr + (rows[:, None] * D + c).to(tl.int32)", "offsets of 32 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_found(name):
    old, new, complaint = MUTANTS[name]
    mutant = RUNNER.mutant((old, new))
    kernels = RUNNER.compiled("sm_90", everything(mutant, of(96, FP32, FP32)), mutant)
    assert any(complaint in complaints(kernel) for kernel in kernels)
