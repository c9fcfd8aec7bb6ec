"""The Triton attention, as it is launched, compiled for sm_90, gfx942 and gfx950 without a GPU."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import config
from cute_kernels.sparse_attn.api import block_sparse_attention

from ..gemm.triton_harness import TARGETS
from . import cases
from .triton_engines import copy_of, through
from .triton_harness import KERNELS, compiled, complaints

BF16, FP16 = torch.bfloat16, torch.float16
SIZE = 256
DENSE = torch.rand(1, 2, SIZE, SIZE, generator=torch.Generator().manual_seed(1)) < 0.5
MASKS = {
    "none": BlockMask.full(SIZE, SIZE),
    "band": BlockMask.causal(SIZE, SIZE),
    "bits": BlockMask.from_dense(DENSE[:, :1]),
    "bits by head": BlockMask.from_dense(DENSE),
}
#: The sm_90 code that test_triton.py runs is looked at there.
EVERY_COMMIT = (
    ("gfx942", 128, BF16, "bits", 2.0),
    ("gfx950", 64, FP16, "band", 0.0),
    ("gfx942", 256, BF16, "band", 0.0),
    ("gfx950", 192, FP16, "bits by head", 2.0),
)
ALL = tuple(itertools.product(TARGETS, config.HEAD_DIMS, (BF16, FP16), MASKS, (0.0, 2.0)))


def kernels_of(target, dim, dtype, mask, softcap, module=None) -> list:
    """The five kernels of a forward and a backward of two query heads on one KV head."""
    x = cases.inputs(1, 2, 1, SIZE, SIZE, dim, dtype)

    def call():
        out, lse = block_sparse_attention(
            *x.leaves(), MASKS[mask], softcap=softcap, return_lse=True
        )
        torch.autograd.grad((out, lse), x.leaves(), (x.dout, x.dlse))

    inputs = {} if module is None else {"launch": module}
    with through(*inputs.values()):
        return compiled(target, call, **inputs)


@pytest.mark.parametrize(
    ("target", "dim", "dtype", "mask", "softcap"),
    [
        pytest.param(*case, marks=() if case in EVERY_COMMIT else pytest.mark.nightly)
        for case in ALL
    ],
    ids=str,
)
def test_code(target, dim, dtype, mask, softcap):
    """No atomics, no vector spills, shared memory for the smallest GPU, the matrix instruction."""
    kernels = kernels_of(target, dim, dtype, mask, softcap)
    assert [kernel.name for kernel in kernels] == list(KERNELS)
    for kernel in kernels:
        assert complaints(kernel) == [], kernel.name


def test_a_sum_in_memory_is_found(tmp_path):
    """Mutant of the backward: dK is added to memory by atomics."""
    text = "    _put_rows(dk_ptr + place * D, dk * scale, n, stride * D, KV_LEN, D, BLOCK_D)\n"
    atomic = (
        "    ptrs = dk_ptr + (place + n[:, None] * stride) * D + tl.arange(0, BLOCK_D)[None, :]\n"
        "    tl.atomic_add(ptrs, dk.to(dk_ptr.dtype.element_ty), mask=n[:, None] < KV_LEN)\n"
    )
    module = copy_of(tmp_path, (text, atomic))
    out = {
        kernel.name: complaints(kernel)
        for kernel in kernels_of("sm_90", 64, FP16, "none", 0.0, module)
    }
    assert out.pop("dkdv_kernel") == ["atomics"] and not any(out.values())
