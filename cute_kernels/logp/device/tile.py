"""Tile of logits in registers: its mainloop, and the operations before its sums."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from ...dsl import copy, mma, pipeline, softmax, tma
from ...dsl.mainloop import Mainloop, Operands
from ...schedulers.tiles import leaves
from ..config import LOG2E
from .units import QUAD, ROWS, bits


@dataclass(frozen=True)
class HeadSlice:
    """Part of the vocabulary whose rows this head has, and the cap of the logits.

    start: vocabulary index of the head's first row.
    vocab: size of the vocabulary.
    """

    start: cutlass.Int32
    vocab: cutlass.Int32
    softcap: cutlass.Float32


@dataclass(frozen=True)
class Accumulators:
    """Registers of a tile: one chain's sums, and the tile's; the same tensor but in a tree."""

    chain: cute.Tensor
    total: cute.Tensor


@dataclass(frozen=True)
class Walk:
    """Mainloop over all of D for one tile after the other, in the order ``chain`` or ``tree``."""

    mainloop: Mainloop
    tree: bool

    @cute.jit
    def load(
        self,
        sources: tuple[tma.Source, tma.Source],
        shared: tuple[cute.Tensor, cute.Tensor],
        cluster: cute.Layout,
        rank: cute.Coord,
        ring: PipelineTmaAsync,
        state: PipelineState,
        coord: cute.Coord,
    ) -> PipelineState:
        """Load every K block of tile ``coord`` = (tile of A's rows, of B's); for the producer."""
        k = cute.size(sources[0].tensor, mode=[1])
        if cutlass.const_expr(self.tree):
            for leaf in cutlass.range(leaves.count(k), unroll=1):
                start, size = self.span(leaf, k)
                loads = self.mainloop.loads(sources, *shared, cluster, rank, (0, 0, start))
                blocks = cute.ceil_div(size, self.mainloop.tile[2])
                state = self.mainloop.load(loads, ring, state, *coord, (0, blocks))
        else:
            loads = self.mainloop.loads(sources, *shared, cluster, rank)
            state = self.mainloop.load(loads, ring, state, *coord, (0, loads.blocks))
        return state

    def start(self) -> tuple[PipelineState, PipelineState]:
        """Initial states of a consumer: of its reads, and of its releases."""
        return tuple(pipeline.consumer_state(self.mainloop.stages) for _ in range(2))

    def accumulators(self, operands: Operands) -> Accumulators:
        """Allocate the registers of a tile."""
        acc = self.mainloop.accumulator(operands)
        return Accumulators(acc, self.mainloop.accumulator(operands) if self.tree else acc)

    @cute.jit
    def multiply(
        self,
        operands: Operands,
        accumulators: Accumulators,
        ring: PipelineTmaAsync,
        states: tuple[PipelineState, PipelineState],
        k: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """total[m, n] = Σ_k A[m, k] B[n, k], in the order; for a consumer warpgroup."""
        acc, total = accumulators.chain, accumulators.total
        if cutlass.const_expr(self.tree):
            # The neutral element is -0: +0 would take the sign of a leaf of -0.
            total.fill(-0.0)
            for leaf in cutlass.range(leaves.count(k), unroll=1):
                _, size = self.span(leaf, k)
                states = self.chain(operands, acc, ring, states, size)
                total.store(total.load() + acc.load())
        else:
            states = self.chain(operands, acc, ring, states, k)
        return states

    @cute.jit
    def chain(
        self,
        operands: Operands,
        acc: cute.Tensor,
        ring: PipelineTmaAsync,
        states: tuple[PipelineState, PipelineState],
        size: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """acc = one chain over ``size`` elements of D."""
        tile_k = self.mainloop.tile[2]
        blocks = size // tile_k
        tail_groups = cute.ceil_div(size - blocks * tile_k, mma.K_GROUP)
        acc.fill(0.0)
        return self.mainloop.chain(operands, acc, ring, states, blocks, tail_groups)

    def span(self, leaf: cutlass.Int32, k: cutlass.Int32) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(first k, elements) of a leaf of the tree."""
        return leaf * leaves.length(k), leaves.size(leaf, k, cutlass.min, cutlass.max)


@cute.jit
def keep(
    acc: cute.Tensor,
    mSums: cute.Tensor,
    cLogits: cute.Tensor,
    row0: cutlass.Int32,
    column0: cutlass.Int32,
):
    """Store the accumulator in ``mSums``, where it has these rows and columns: pairs of columns."""
    rPair = cute.make_rmem_tensor(2, cutlass.Float32)
    for half in cutlass.range_constexpr(ROWS):
        row = row0 + cLogits[2 * half][0]
        if row < mSums.shape[0]:
            # Computed by hand: offsets need 64 bits, and a pair of columns has one instruction.
            first = cutlass.Int64(row) * mSums.stride[0] + column0
            for i in cutlass.range_constexpr(cute.size(acc) // 4):
                if column0 + cLogits[4 * i][1] < mSums.shape[1]:
                    rPair[0], rPair[1] = acc[4 * i + 2 * half], acc[4 * i + 2 * half + 1]
                    copy.aligned(mSums, first + cLogits[4 * i][1], 2).store(rPair.load())


@cute.jit
def finish_logits(
    acc: cute.Tensor,
    mBias: cute.Tensor | None,
    cLogits: cute.Tensor,
    column0: cutlass.Int32,
    softcap: cutlass.Float32,
    capped: cutlass.Constexpr[bool],
):
    """acc = softcap tanh((acc + bias) / softcap), or acc + bias, or acc."""
    if cutlass.const_expr(mBias is not None):
        last = mBias.shape[0] - 1
        for four in cutlass.range_constexpr(cute.size(acc) // 4):
            for side in cutlass.range_constexpr(2):
                column = cutlass.min(column0 + cLogits[4 * four + side][1], last)
                bias = mBias[column].to(cutlass.Float32)
                acc[4 * four + side] += bias
                acc[4 * four + side + 2] += bias
    if cutlass.const_expr(capped):
        inner = cutlass.Float32(2.0 * LOG2E) / softcap
        softmax.cap(acc, inner)
        for i in cutlass.range_constexpr(cute.size(acc) // 4):
            for j in cutlass.range_constexpr(4 * i, 4 * i + 4):
                acc[j] = acc[j] * softcap


@cute.jit
def choose(
    acc: cute.Tensor,
    cLogits: cute.Tensor,
    target: cute.Tensor,
    column0: cutlass.Int32,
    chosen: cute.Tensor,
):
    """chosen = bits of the target's logit, on the lane that has it."""
    columns = cute.size(acc) // (2 * ROWS) * 2 * QUAD
    for half in cutlass.range_constexpr(ROWS):
        column = target[half] - column0
        if (column >= 0) & (column < columns):
            for i in cutlass.range_constexpr(cute.size(acc) // 4):
                for side in cutlass.range_constexpr(2):
                    index = 4 * i + 2 * half + side
                    if cLogits[index][1] == column:
                        chosen[half] = bits(acc[index])


@cute.jit
def mask(acc: cute.Tensor, cLogits: cute.Tensor, column0: cutlass.Int32, valid: cutlass.Int32):
    """acc = -inf in columns from ``valid`` on, which are not of the vocabulary."""
    columns = cute.size(acc) // (2 * ROWS) * 2 * QUAD
    if column0 + columns > valid:
        for i in cutlass.range_constexpr(cute.size(acc) // 4):
            for j in cutlass.range_constexpr(4 * i, 4 * i + 4):
                if column0 + cLogits[j][1] >= valid:
                    acc[j] = -cutlass.Float32.inf


@cute.jit
def row_of(mX: cute.Tensor, run: cutlass.Int32, row: cutlass.Int32) -> cute.Tensor:
    """View of the last mode of ``mX`` [runs, rows, any]."""
    # Computed by hand: offsets need 64 bits, as the tensor may have more than 2^31 elements.
    offset = cutlass.Int64(run) * mX.stride[0] + cutlass.Int64(row) * mX.stride[1]
    return cute.make_tensor(mX.iterator + offset, cute.make_layout(mX.shape[2]))
