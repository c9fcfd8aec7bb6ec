"""The CPU backend: the BLAS's sgemm inside blocks of one fixed shape, in one fixed order.

Forward and dx: rows are cut into blocks of 64, the last one padded with zero rows, and columns into
blocks of 256, so every product has the shape [64, K] x [K, 256] whatever M and N are.  K is padded
to a multiple of 16.  Four blocks of rows, and all blocks of columns, are multiplied at once where
this machine's BLAS is shown to give them the bits of single ones.

The order ``tree`` multiplies leaf by leaf, each a product of its own shape, and adds ascending.
Leaves that are not added, of a slice of K, are the same products.

dW into main_grad: tokens are consumed 16 at a time, in order, each group added to the accumulator
in memory, so any cut at multiples of 16 leaves the same fp32 state.

A BLAS promises nothing about row positions inside a block.  The first product of each (N, K,
threads) therefore proves it on this machine: 64 equal rows must give 64 equal results, or the call
fails.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from ..cpu.ieee import ieee, mm
from ..errors import BackendUnavailable
from ..runtime.operands import flat_rows
from ..schedulers.tiles import leaves
from .config import CPU, K_GROUP, ORDER

_ALIGN_BYTES = 64


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    order: str = ORDER,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [..., K] · b [N, K]ᵀ (+ bias [N]), or accumulator [M, N] fp32 += the same, in place.

    ``order``: of ``ORDERS``; an accumulator is a chain's.  ``out``: where the product goes, or
    None: into a new tensor.
    """
    with ieee() as team:
        if accumulator is not None:
            return _accumulate(a, b, accumulator)
        y = _blocked(flat_rows(a, "gemm"), b, bias, order, team, out)
        return y if a.dim() == 2 else y.view(*a.shape[:-1], b.shape[0])


def skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool
) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ (+ bias [M, N]) in the order ``tree``: here the only one."""
    with ieee() as team:
        return _blocked(x, weight, bias, "tree", team)


def leaf_sums(a: torch.Tensor, b: torch.Tensor, length: int) -> torch.Tensor:
    """The chains over leaves of ``length`` of a [M, K] · b [N, K]ᵀ: fp32 [leaves, M, N].

    They are for tensor-parallel ranks, which have some of the columns of other products, at other
    positions: that positions do not show is proved here.
    """
    spans = _spans(a.shape[1], length)
    out = torch.empty(len(spans), a.shape[0], b.shape[0], dtype=torch.float32, device="cpu")
    with ieee() as team:
        for span, leaf in zip(spans, out, strict=True):
            _prove_column_position(_padded(span.stop - span.start), team)
            _fill(leaf, a, [_k_slice(b, span, team)], None, team)
    return out


def column_sum(rows: torch.Tensor) -> torch.Tensor:
    """Σ over rows of [M, N], in fp32: blocks of 64 rows ascending, each added half onto half.

    Not by torch's ``sum``, whose order follows the layout, and for the last columns their number:
    a tensor-parallel rank has fewer of them.
    """
    with ieee():
        total = _zeros(rows.shape[1])
        sums = _zeros(CPU.sum_rows, rows.shape[1])
        for block in rows.split(CPU.sum_rows):
            sums[: len(block)] = block
            sums[len(block) :] = 0
            half = CPU.sum_rows
            while half > 1:
                half //= 2
                sums[:half] += sums[half : 2 * half]
            total += sums[0]
        return total.to(rows.dtype)


def _blocked(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    order: str,
    team: tuple[int, int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[0]
    spans = _spans(k, leaves.length(k) if order == "tree" else k)
    out = torch.empty(m, n, dtype=a.dtype, device="cpu") if out is None else out
    if bias is not None:
        bias = bias.to(torch.float32).expand(m, n)
    _fill(out, a, [_k_slice(b, span, team) for span in spans], bias, team)
    return out


def _fill(out, a, k_slices: list[_KSlice], bias, team: tuple[int, int]) -> None:
    """out [M, N] = the products of the slices of K, added ascending, + bias [M, N]."""
    m = out.shape[0]
    sizes = {k_slice.size for k_slice in k_slices}
    # One packing of the weight for more rows: four blocks at a time, while their bits are the same.
    wide_rows = m // CPU.wide * CPU.wide
    if wide_rows and not all(_wide_is_same(*size, team) for size in sizes):
        wide_rows = 0
    for start, stop, size in ((0, wide_rows, CPU.wide), (wide_rows, m, CPU.rows)):
        if start < stop:
            _blocks(a, k_slices, bias, out, range(start, stop, size), size)


class _KSlice(NamedTuple):
    """Columns ``span`` of a weight, as the BLAS takes them: products of ``size`` (N, K)."""

    span: slice
    weight: torch.Tensor
    size: tuple[int, int]


def _spans(k: int, length: int) -> list[slice]:
    """K cut at every multiple of ``length``."""
    return [slice(first, min(first + length, k)) for first in range(0, k, length)]


def _k_slice(b: torch.Tensor, span: slice, team: tuple[int, int]) -> _KSlice:
    k_pad, n_pad = _padded(span.stop - span.start), _padded(b.shape[0], CPU.columns)
    together = n_pad == CPU.columns or _columns_are_same(n_pad, k_pad, team)
    size = (n_pad if together else CPU.columns, k_pad)
    _prove_row_position(*size, team)
    return _KSlice(span, _canonical(b[:, span], n_pad, k_pad), size)


def _multiply(block: torch.Tensor, k_slice: _KSlice, out: torch.Tensor) -> None:
    """out = block · k_slice.weightᵀ, by products of the size of the slice."""
    width = k_slice.size[0]
    if width == len(k_slice.weight):
        mm(block, k_slice.weight.mT, out)
        return
    for first in range(0, len(k_slice.weight), width):
        columns = slice(first, first + width)
        out[:, columns] = mm(block, k_slice.weight[columns].mT)


def _blocks(a, k_slices: list[_KSlice], bias, out, starts: range, size: int) -> None:
    """out[first : first + size] for each start, by products of one shape for each slice of K."""
    m, n = out.shape
    blocks = [_zeros(size, k_slice.weight.shape[1]) for k_slice in k_slices]
    sums = torch.empty(size, k_slices[0].weight.shape[0], dtype=torch.float32, device="cpu")
    total = torch.empty_like(sums) if len(k_slices) > 1 else sums
    for first in starts:
        rows = min(size, m - first)
        for i, (k_slice, block) in enumerate(zip(k_slices, blocks, strict=True)):
            block[:rows, : k_slice.span.stop - k_slice.span.start] = a[
                first : first + rows, k_slice.span
            ]
            block[rows:] = 0
            _multiply(block, k_slice, sums if i else total)
            if i:
                total += sums
        y = total[:rows, :n]
        out[first : first + rows] = y if bias is None else y + bias[first : first + rows]


def _accumulate(a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor) -> torch.Tensor:
    """accumulator [M, N] += Σ_g a_g b_gᵀ over groups g of 16 columns, ascending."""
    (m, k), n = a.shape, b.shape[0]
    total = (
        accumulator
        if _dense(accumulator)
        else accumulator.clone(memory_format=torch.contiguous_format)
    )
    a_group, b_group = _zeros(K_GROUP, _padded(m)), _zeros(K_GROUP, n)
    for first in range(0, k, K_GROUP):
        size = min(K_GROUP, k - first)
        a_group[:size, :m] = a[:, first : first + size].mT
        b_group[:size] = b[:, first : first + size].mT
        a_group[size:] = 0
        b_group[size:] = 0
        mm(a_group[:, :m].mT, b_group, total, add=True)
    if total is not accumulator:
        accumulator.copy_(total)
    return accumulator


def _padded(size: int, to: int = CPU.pad) -> int:
    return -(-size // to) * to


def _dense(t: torch.Tensor) -> bool:
    return t.is_contiguous() and t.data_ptr() % _ALIGN_BYTES == 0


def _canonical(b: torch.Tensor, n_pad: int, k_pad: int) -> torch.Tensor:
    """b as an aligned, contiguous, zero-padded fp32 [N, K]: one layout, one set of bits."""
    if b.dtype == torch.float32 and tuple(b.shape) == (n_pad, k_pad) and _dense(b):
        return b
    weight = _zeros(n_pad, k_pad)
    weight[: b.shape[0], : b.shape[1]] = b
    return weight


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _drawn(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random [rows, K] and [N, K], the same in every process."""
    # By NumPy: torch refuses to draw while a backward is batched (is_grads_batched).
    generator = np.random.default_rng(n * 1_000_003 + k)
    return tuple(
        torch.from_numpy(generator.standard_normal((size, k), np.float32)) for size in (rows, n)
    )


@functools.cache
def _wide_is_same(n: int, k: int, team: tuple[int, int]) -> bool:
    """Whether a product of ``wide`` random rows has the bytes of its blocks of ``rows``, here."""
    a, weight = _drawn(CPU.wide, n, k)
    product = mm(a, weight.mT).view(torch.int32)
    blocks = [mm(block, weight.mT).view(torch.int32) for block in a.split(CPU.rows)]
    return bool((product == torch.cat(blocks)).all())


@functools.cache
def _columns_are_same(n: int, k: int, team: tuple[int, int]) -> bool:
    """Whether a product of n random columns has the bytes of its blocks of ``columns``, here."""
    a, weight = _drawn(CPU.rows, n, k)
    product = mm(a, weight.mT).view(torch.int32)
    blocks = [mm(a, block.mT).view(torch.int32) for block in weight.split(CPU.columns)]
    return bool((product == torch.cat(blocks, 1)).all())


@functools.cache
def _prove_column_position(k: int, team: tuple[int, int]) -> None:
    """Equal weight rows in, equal columns out, byte for byte; BackendUnavailable otherwise."""
    a, row = _drawn(CPU.rows, 1, k)
    out = mm(a, row.expand(CPU.columns, k).contiguous().mT).view(torch.int32)
    if bool((out != out[:, :1]).any()):
        raise BackendUnavailable(
            f"gemm: backend cpu cannot keep tp_invariant here: this machine's BLAS gives equal "
            f"columns different bits by position at K={k}, {team[1]} threads"
        )


@functools.cache
def _prove_row_position(n: int, k: int, team: tuple[int, int]) -> None:
    """64 equal rows in, 64 equal rows out, byte for byte; BackendUnavailable otherwise."""
    row, weight = _drawn(1, n, k)
    out = mm(row.expand(CPU.rows, k).contiguous(), weight.mT).view(torch.int32)
    if bool((out != out[0]).any()):
        raise BackendUnavailable(
            f"gemm: backend cpu cannot keep batch_invariant here: this machine's BLAS gives equal "
            f"rows different bits by position at N={n}, K={k}, {team[1]} threads"
        )
