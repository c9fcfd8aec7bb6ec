"""Properties of the Triton order ``tree``, stated once for the simulator and the interpreter.

Each check takes a `Tree` and raises AssertionError.  Bytes are compared wherever bits are promised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_kernels.schedulers.tiles import leaves
from tests.oracles import gemm as reference

from .triton_cases import _fma_chain, differing, laid_out, problem, random

BIASES = (None, "n", "rows", "spread")
#: Programs of a launch: leaves of a few tiles each to its own, some to one, all to one.
MANY, FEW, ONE = 132, 7, 1


class Tree(NamedTuple):
    """The three entries: ``gemm(a, b, bias)`` in the order tree, ``skinny(x, w, bias=None,
    deterministic=True, programs=MANY)`` and ``leaf_sums(a, b, length)``."""

    gemm: Callable[..., torch.Tensor]
    skinny: Callable[..., torch.Tensor]
    leaf_sums: Callable[..., torch.Tensor]


def operands(m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple:
    """a, b, where the first product, 2²⁴ times larger than others, is cancelled in the middle of K.

    So the first leaves are rounded coarsely and the last ones finely; backwards it is the reverse.
    Cancelled at the end, every leaf would be rounded alike, in any order.
    """
    a, b, _, _ = problem(m, n, k, dtype, "plain", seed=seed, cancel=False)
    if k >= 32:  # within one group of 16 the reference's float64 would round
        a, b = a / 16, b / 16
        a[:, 0] *= 2**12
        b[:, 0] *= 2**12
        a[:, k // 2], b[:, k // 2] = -a[:, 0], b[:, 0]
    return a, b


def bias_of(kind: str | None, m: int, n: int, dtype: torch.dtype) -> torch.Tensor | None:
    """[M, N], as the op hands it on: one row for all, a row each, or with NaN in between."""
    if kind is None:
        return None
    if kind == "n":
        return random(n, dtype=dtype, seed=7).expand(m, n)
    bias = random(m, n, dtype=dtype, seed=8)
    if kind == "rows":
        return bias
    return torch.stack((bias, torch.full_like(bias, torch.nan)), 2)[:, :, 0]


def leaf_chains(a: torch.Tensor, b: torch.Tensor, length: int | None = None) -> torch.Tensor:
    """[leaves, M, N]: groups of 16 in one rounding; of fp32, one fma at a time."""
    chain = _fma_chain if a.dtype == torch.float32 else reference.chain
    length = length or leaves.length(a.shape[1])
    parts = zip(a.split(length, 1), b.split(length, 1), strict=True)
    return torch.stack([chain(x, y, None, None) for x, y in parts])


def added(sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The leaves in ascending order, the bias, one rounding."""
    total = sums[0]
    for leaf in sums[1:]:
        total = total + leaf
    return (total if bias is None else total + bias.float()).to(dtype)


def want(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The documented bytes: `reference.tree` rounded, or in fp32 the same of chains of fma."""
    if a.dtype == torch.float32:
        return added(leaf_chains(a, b), bias, a.dtype)
    return reference.tree(a, b, bias).to(a.dtype)


def tree_bits(tree: Tree, m: int, n: int, k: int, dtype: torch.dtype, kind: str | None) -> None:
    """Every way to the order tree has the bytes of the documented one."""
    a, b = operands(m, n, k, dtype)
    bias = bias_of(kind, m, n, dtype)
    right = want(a, b, bias)
    if kind in (None, "n"):
        of_n = None if bias is None else bias[0]
        assert differing(tree.gemm(a, b, of_n), right) == 0, "gemm"
    for programs in (MANY, FEW, ONE):
        assert differing(tree.skinny(a, b, bias, True, programs), right) == 0, programs
    assert differing(tree.leaf_sums(a, b, leaves.length(k)), leaf_chains(a, b)) == 0, "leaf_sums"


def order_of_leaves(tree: Tree, dtype: torch.dtype) -> None:
    """One product that is not zero per block of a leaf, so the sum over a block is exact in any
    order: the bits are those of the ascending chain of blocks, and of leaves."""
    m, n, k = 20, 17, 1030
    generator = torch.Generator().manual_seed(5)
    a, b = operands(m, n, k, dtype, seed=11)
    is_summed = torch.zeros(k, dtype=torch.bool)
    for start in range(0, k, leaves.length(k)):
        for first in range(start, min(start + leaves.length(k), k), 64):
            end = min(first + 64, start + leaves.length(k), k)
            drawn = int(torch.randint(first, end, (1,), generator=generator))
            large = [index for index in (0, k // 2) if first <= index < end]
            is_summed[large[0] if large else drawn] = True
    a = torch.where(is_summed, a, torch.zeros((), dtype=dtype))
    right = reference.tree(a, b).to(dtype)
    assert differing(tree.gemm(a, b, None), right) == 0, "gemm"
    for programs in (MANY, ONE):
        assert differing(tree.skinny(a, b, None, True, programs), right) == 0, programs


def rows_alone(tree: Tree, dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    """A row has the same bits in any number of rows, moved, and beside those of gemm."""
    n, k = 70, 520
    a, b = operands(150, n, k, dtype, seed=21)
    bias = bias_of("rows", 150, n, dtype)
    shared = bias[:1].expand(150, n)
    whole = tree.skinny(a[:128], b, bias[:128])
    assert differing(tree.gemm(a, b, shared[0])[:128], tree.skinny(a[:128], b, shared[:128])) == 0
    for count in counts:
        for first in {0, 128 - count}:
            rows = slice(first, first + count)
            assert differing(tree.skinny(a[rows], b, bias[rows]), whole[rows]) == 0, (count, first)


def layouts(tree: Tree, dtype: torch.dtype, pairs: tuple[tuple[str, str], ...]) -> None:
    """Strides and alignment, of operands and of the bias, do not change a byte."""
    m, n, k = 24, 32, 288
    a, b = operands(m, n, k, dtype, seed=51)
    bias = bias_of("rows", m, n, dtype)
    split, shared = tree.skinny(a, b, bias), tree.gemm(a, b, bias[0])
    for a_layout, b_layout in pairs:
        x, y, z = laid_out(a, a_layout), laid_out(b, b_layout), laid_out(bias, a_layout)
        assert differing(tree.skinny(x, y, z), split) == 0, (a_layout, b_layout)
        assert differing(tree.gemm(x, y, bias[0]), shared) == 0, (a_layout, b_layout)
    spread = torch.stack((bias, torch.full_like(bias, torch.nan)), 2)[:, :, 0]
    assert differing(tree.skinny(a, b, spread), split) == 0
    row = a[3:4].expand(m, k)
    assert differing(tree.skinny(row, b, bias), tree.skinny(row.contiguous(), b, bias)) == 0


def neighbours(tree: Tree, dtype: torch.dtype) -> None:
    """NaN and Inf stay in their own row and column; what is around the operands is not read."""
    m, n, k = 33, 21, 285
    a, b = operands(m, n, k, dtype, seed=61)
    clean = tree.skinny(a, b)
    around = laid_out(a, "padded"), laid_out(b, "padded")
    assert differing(tree.skinny(*around), clean) == 0
    assert differing(tree.gemm(*around, None), clean) == 0
    a, b = a.clone(), b.clone()
    a[5, 3], a[30, 284], b[7, 50] = torch.nan, torch.inf, -torch.inf
    dirty = tree.skinny(a, b)
    unchanged = torch.ones(m, n, dtype=torch.bool)
    unchanged[[5, 30]], unchanged[:, 7] = False, False
    assert differing(dirty[unchanged], clean[unchanged]) == 0
    assert bool(dirty[5].isnan().all()) and not bool(dirty[30].isfinite().any())


def slices(tree: Tree, dtype: torch.dtype) -> None:
    """Leaves of a slice of K are those of the whole, in 2, 4 and 8 slices and for more rows."""
    n, k = 21, 1030
    a, b = operands(140, n, k, dtype, seed=91)
    length = leaves.length(k)
    few, whole = tree.leaf_sums(a[:5], b, length), tree.leaf_sums(a, b, length)
    assert differing(whole[:, :5], few) == 0
    assert differing(added(whole, None, dtype), tree.gemm(a, b, None)) == 0
    for ranks in (2, 4, 8):
        step = -(-leaves.count(k) // ranks) * length
        parts = [
            tree.leaf_sums(x, y, length)
            for x, y in zip(a[:5].split(step, 1), b.split(step, 1), strict=True)
        ]
        assert differing(torch.cat(parts), few) == 0, ranks


def signs(tree: Tree) -> None:
    """Leaves that underflow to -0 add up to -0, in every way; a leaf of products of -0 is +0."""
    m, n, k = 5, 21, 1024  # leaves of two whole blocks: no zeros are filled in
    a = torch.full((m, k), 2.0**-90, dtype=torch.bfloat16)
    a *= 1 + torch.arange(k).remainder(7).bfloat16() / 8
    b = -a[:1].expand(n, k).clone()
    minus_zero = torch.full((m, n), -0.0, dtype=torch.bfloat16)
    assert differing(reference.tree(a, b).bfloat16(), minus_zero) == 0
    assert differing(tree.gemm(a, b, None), minus_zero) == 0, "gemm"
    for programs in (MANY, ONE):
        for deterministic in (True, False):
            y = tree.skinny(a, b, None, deterministic, programs)
            assert differing(y, minus_zero) == 0, (programs, deterministic)
    assert bool(tree.leaf_sums(a, b, 128).signbit().all())
    zeros = torch.full_like(a, -0.0)
    assert differing(tree.skinny(zeros, -b), torch.zeros_like(minus_zero)) == 0


def fast(tree: Tree, dtype: torch.dtype) -> None:
    """Where every sum is exact the unordered bytes are those of the tree; else they are near."""
    m, n, k = 33, 70, 520
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-3, 4, (m, k), generator=generator).to(dtype)
    b = torch.randint(-2, 4, (n, k), generator=generator).to(dtype)
    for kind in BIASES:
        bias = bias_of(kind, m, n, dtype)
        right = (a.double() @ b.double().mT).float()
        right = (right if bias is None else right + bias.float()).to(dtype)
        assert differing(tree.skinny(a, b, bias, False), right) == 0, kind
    a, b, _, _ = problem(m, n, k, dtype, "plain", cancel=False)
    exact = reference.gemm(a, b)
    bound = 4 * reference.error_bound(a, b) + exact.abs() * 2.0**-8
    assert ((tree.skinny(a, b, None, False).double() - exact).abs() <= bound).all()
    # One program has nothing to add out of order.
    assert differing(tree.skinny(a, b, None, False, ONE), tree.skinny(a, b, None, True, ONE)) == 0
