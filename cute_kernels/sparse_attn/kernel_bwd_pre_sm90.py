"""Backward preprocessing: delta[q] = Σ_d dO[q, d] O[q, d] - dlse[q]; lse2 = lse log2 e; zeros.

Layouts      O, dO [B, Sq, Hq, Dv] with contiguous rows; lse, dlse fp32 [B, Hq, Sq]; dlse, the
             gradient of lse, may be None.
             delta, lse2 fp32 [B, Hq, Mt * tile_m]: rows beyond Sq get delta 0 and lse2 +inf, so
             that P = exp2(s - lse2) is 0 there.  A row whose lse is -inf (no key) gets +inf too.
             A row of O that is zeros has delta -dlse, whatever NaN and Inf are in dO.
             Both in the order of ``statistics_place``.
             Of a varlen batch O, dO, lse and dlse lie as ``device/varlen`` says, Mt counts the
             rows there.
             semaphore int32 [B, Hq, Mt] (or [B, Hq, Mt, turns]), counter int32 [1], and with
             ``zeros`` dq fp32 [B, Hq, Mt, tile_m * D]: zeros; of a varlen batch, dq of tiles
             without a row is not written.
Order        T threads a row, the largest power of two that divides Dv / 8: 8, 4, 16, 32 for Dv =
             64, 96, 128, 256.  Thread t has 8 columns from 8 (t + T i) on, for i = 0, 1, ..: one
             fp32 chain over its products, ascending; then a butterfly over the T threads, nearest
             first; dlse last.  It depends on Dv alone.
Roles        one CTA per (tile of tile_m query rows, head, batch).
Limits       SM90a; bf16 and fp16; Dv a multiple of 8 up to 256.
Measured     on an H200: docs/status.md, docs/notes/attention_sm90.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.runtime import make_fake_tensor

from ..compile import fake
from ..dsl import copy, reduce
from .config import VALUE_DIMS, PreConfig
from .device import tile_scheduler, varlen
from .device.backward_tiles import statistics_place
from .device.block_union import BLOCK

THREADS = 128
#: Elements that a thread loads at once: 16 bytes.
VECTOR = 8
#: Two elements of 16 bits without their signs.
MAGNITUDES = 0x7FFF7FFF


@dataclass(frozen=True)
class Tensors:
    """Inputs and outputs; mTable: of a varlen batch, or None."""

    mO: cute.Tensor
    mdO: cute.Tensor
    mLse: cute.Tensor
    mdLse: cute.Tensor | None
    mLse2: cute.Tensor
    mDelta: cute.Tensor
    mdQ: cute.Tensor
    mSemaphore: cute.Tensor
    mCounter: cute.Tensor
    mTable: cute.Tensor | None


@dataclass(frozen=True)
class Coord:
    """Position of a thread: batch, head, tile of rows, thread in the CTA."""

    batch: cutlass.Int32
    head: cutlass.Int32
    tile: cutlass.Int32
    thread: cutlass.Int32


class BackwardPreSm90:
    """One dtype, head dimension and tile height; ``__call__`` is what is compiled."""

    def __init__(self, config: PreConfig):
        value_dim, tile_m = VALUE_DIMS[config.head_dim], config.tile_m
        vectors = value_dim // VECTOR
        self.threads_per_row = vectors & -vectors
        assert value_dim % VECTOR == 0 and self.threads_per_row <= 32
        assert tile_m % (THREADS // self.threads_per_row) == 0 and tile_m <= THREADS
        self.packed, self.turns = config.packed, config.turns
        self.zeros, self.pdl = config.zeros, config.pdl
        self.dtype, self.head_dim, self.tile_m = fake.DTYPES[config.dtype], config.head_dim, tile_m
        self.value_dim = value_dim

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLse: cute.Tensor,
        mdLse: cute.Tensor | None,
        mLse2: cute.Tensor,
        mDelta: cute.Tensor,
        mdQ: cute.Tensor,
        mSemaphore: cute.Tensor,
        mCounter: cute.Tensor,
        mTable: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        batches, heads, tiles = mSemaphore.shape[:3]
        rows = mO, mdO, mLse, mdLse, mLse2, mDelta
        self.kernel(Tensors(*rows, mdQ, mSemaphore, mCounter, mTable)).launch(
            grid=tile_scheduler.row_grid(batches, heads, tiles),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tensors: Tensors):
        mSemaphore, mCounter, mTable = tensors.mSemaphore, tensors.mCounter, tensors.mTable
        mLse2, mDelta = tensors.mLse2, tensors.mDelta
        tidx, _, _ = cute.arch.thread_idx()
        tile, head, batch = tile_scheduler.row_coord(mSemaphore.shape[1], mSemaphore.shape[2])
        if cutlass.const_expr(self.pdl):
            # The next kernel may be scheduled when all CTAs of this one have begun.
            cute.arch.griddepcontrol_launch_dependents()
        if tidx == 0:
            if cutlass.const_expr(self.turns == 1):
                mSemaphore[batch, head, tile] = cutlass.Int32(0)
            else:
                for turn in cutlass.range_constexpr(self.turns):
                    mSemaphore[batch, head, tile, turn] = cutlass.Int32(0)
            if tile + head + batch == 0:
                mCounter[0] = cutlass.Int32(0)
        coord = Coord(batch, head, tile, tidx)
        if cutlass.const_expr(self.packed):
            rows = varlen.row_range(mTable, tile * self.tile_m // BLOCK)
            if tile * self.tile_m < rows.end:
                if cutlass.const_expr(self.zeros):
                    self.zero(tensors.mdQ, coord)
                self.statistics(tensors, coord, rows)
            elif tidx < self.tile_m:
                # Sums over all rows (``sinks_gradient``) read these.
                mDelta[batch, head, tile * self.tile_m + tidx] = cutlass.Float32(0.0)
                mLse2[batch, head, tile * self.tile_m + tidx] = cutlass.Float32(math.inf)
        else:
            if cutlass.const_expr(self.zeros):
                self.zero(tensors.mdQ, coord)
            self.statistics(tensors, coord, varlen.RowRange(0, tensors.mO.shape[1]))

    @cute.jit
    def statistics(self, tensors: Tensors, coord: Coord, rows: varlen.RowRange):
        """Compute delta and lse2 of a tile's rows."""
        batch, head, tile, tidx = coord.batch, coord.head, coord.tile, coord.thread
        threads_per_row = self.threads_per_row
        rows_at_once, columns = THREADS // threads_per_row, threads_per_row * VECTOR
        column = (tidx % threads_per_row) * VECTOR
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=VECTOR * self.dtype.width
        )
        rO = cute.make_rmem_tensor(VECTOR, self.dtype)
        rdO = cute.make_rmem_tensor(VECTOR, self.dtype)
        rPairs = cute.recast_tensor(rO, cutlass.Int32)
        for step in cutlass.range_constexpr(self.tile_m // rows_at_once):
            row = tile * self.tile_m + step * rows_at_once + tidx // threads_per_row
            inside = row < rows.end
            read = row - rows.shift if inside else cutlass.Int32(0)
            # delta = Σ dO O - dlse; rows by hand, as those of a varlen batch are shifted
            total, magnitudes = cutlass.Float32(0.0), cutlass.Int32(0)
            for part in cutlass.range_constexpr(self.value_dim // columns):
                source = (batch, read, head, column + part * columns)
                cute.copy(atom, copy.vector(tensors.mO, source, VECTOR), rO)
                cute.copy(atom, copy.vector(tensors.mdO, source, VECTOR), rdO)
                total = reduce.add_products(total, rdO, rO)
                for pair in cutlass.range_constexpr(VECTOR // 2):
                    magnitudes |= rPairs[pair] & MAGNITUDES
            total = reduce.over_threads(total, threads_per_row)
            for bit in cutlass.range_constexpr(int(math.log2(threads_per_row))):
                magnitudes |= cute.arch.shuffle_sync_bfly(magnitudes, offset=1 << bit)
            if column == 0:
                # A row without keys, where dO may hold anything: 0 NaN = NaN.
                if magnitudes == 0 and total != total:
                    total = cutlass.Float32(0.0)
                if cutlass.const_expr(tensors.mdLse is not None):
                    total -= tensors.mdLse[batch, head, read]
                # lse2 = lse log2 e
                lse = tensors.mLse[batch, head, read]
                infinite = cutlass.Float32(math.inf)
                known = inside and lse != -infinite
                index = statistics_place(row)
                tensors.mDelta[batch, head, index] = total if known else cutlass.Float32(0.0)
                tensors.mLse2[batch, head, index] = lse * math.log2(math.e) if known else infinite

    @cute.jit
    def zero(self, mdQ: cute.Tensor, coord: Coord):
        """Zero this tile of the dQ accumulator, 16 bytes a thread at a time."""
        zeros = cute.make_rmem_tensor(4, cutlass.Float32)
        zeros.fill(0.0)
        gdQ = cute.zipped_divide(mdQ[coord.batch, coord.head, coord.tile, None], (4,))
        for step in cutlass.range(self.tile_m * self.head_dim // (4 * THREADS), unroll=8):
            cute.autovec_copy(zeros, gdQ[None, step * THREADS + coord.thread])


def build(config: PreConfig, compile: Callable = cute.compile):
    """Compile one variant against fake tensors; no GPU needed."""
    batch, q_len, heads, padded, tiles = (fake.size() for _ in range(5))
    rows = (batch, heads, padded)
    operand = config.dtype, batch, q_len, heads, VALUE_DIMS[config.head_dim]
    turns = (config.turns,) if config.turns > 1 else ()
    return compile(
        BackwardPreSm90(config),
        fake.activations(*operand),
        fake.activations(*operand),
        tight(cutlass.Float32, (batch, heads, q_len)),
        tight(cutlass.Float32, (batch, heads, q_len)) if config.dlse else None,
        tight(cutlass.Float32, rows),
        tight(cutlass.Float32, rows),
        tight(cutlass.Float32, (batch, heads, tiles, config.tile_m * config.head_dim)),
        tight(cutlass.Int32, (batch, heads, tiles, *turns)),
        tight(cutlass.Int32, (1,)),
        varlen.fake_table() if config.packed else None,
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )


def tight(element: type[cutlass.Numeric], shape: tuple[cute.IntTuple, ...]):
    """Return a fake tensor of the workspace: contiguous rows, of 16 bytes where it is a tile."""
    vector = isinstance(shape[-1], int) and shape[-1] % 4 == 0
    strides = tuple(cute.sym_int64(divisibility=4 if vector else 1) for _ in shape[:-1])
    return make_fake_tensor(element, shape, (*strides, 1), assumed_align=16 if vector else 4)
