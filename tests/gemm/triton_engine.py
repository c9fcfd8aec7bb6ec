"""The Triton gemm through its public launcher, and operands that lie far apart."""

from __future__ import annotations

import torch

from cute_kernels.gemm.triton import launch

from . import triton_cases as cases
from .triton_tree_cases import MANY, Tree

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def engine(monkeypatch, module=launch):
    """gemm(a, b, bias=None, accumulator=None, programs=132) through the public launcher."""

    def gemm(a, b, bias=None, accumulator=None, programs=132):
        monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", str(programs))
        return module.gemm(a, b, bias, accumulator)

    return gemm


def far_offsets(gemm, column_sum, folder) -> None:
    a, b, _, start = cases.problem(3, 3, 20, BF16, "accumulate", seed=81)
    near, added = gemm(a, b), gemm(a, b, None, start.clone())
    far_a, far_b, far_start = (_far(t, folder / str(i)) for i, t in enumerate((a, b, start)))
    assert cases.differing(gemm(far_a, far_b), near) == 0
    gemm(far_a, far_b, None, far_start)
    assert cases.differing(far_start, added) == 0
    assert cases.differing(column_sum(far_a), column_sum(a)) == 0


def _far(t: torch.Tensor, file) -> torch.Tensor:
    """The values of a 2-D tensor with a row stride of 2³⁰, in a sparse file."""
    stride = 2**30
    size = stride * (t.shape[0] - 1) + t.shape[1]
    storage = torch.from_file(str(file), shared=True, size=size, dtype=t.dtype)
    return storage.as_strided(t.shape, (stride, 1)).copy_(t)


def tree_engine(monkeypatch, module=launch) -> Tree:
    """The order ``tree`` through the public launcher."""

    def gemm(a, b, bias=None):
        monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", "132")
        return module.gemm(a, b, bias, None, "tree")

    def skinny(x, w, bias=None, deterministic=True, programs=MANY):
        # A unit is meant to hold two programs of such a launch.
        monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", str(-(-programs // 2)))
        return module.skinny(x, w, bias, deterministic)

    def leaf_sums(a, b, length):
        monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", "132")
        return module.leaf_sums(a, b, length)

    return Tree(gemm, skinny, leaf_sums)
