"""Typed bundles of ``kernel_paged_values_sm90``: operands, a unit, scratch, results, rings."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.pipeline import PipelineState

from ...dsl import copy, softmax
from .paged_tiles import Tile, token_of

#: Warps that read a stage of V.
READERS = 4


@dataclass(frozen=True)
class Inputs:
    """A unit: its rows and keys, its KV head, and what scales its scores; sinks [Hq]."""

    mSinks: cute.Tensor
    tile: Tile
    head: cutlass.Int32
    c: cutlass.Float32


@dataclass(frozen=True)
class Rows:
    """What query rows have in memory: O and LSE, and their heads' sinks [Hq]."""

    mO: cute.Tensor
    mLse: cute.Tensor
    mSinks: cute.Tensor


@dataclass(frozen=True)
class Scratch:
    """Scores and maxima of all units (``long_tiles``), and the unit."""

    mScores: cute.Tensor
    mMaxima: cute.Tensor
    unit: cutlass.Int64


@dataclass(frozen=True)
class Results:
    """O [T, Hq, Dv], LSE [Hq, T], and the first column of O that a CTA has."""

    mO: cute.Tensor
    mLse: cute.Tensor
    column: cutlass.Int32 | int

    @cute.jit
    def store(
        self,
        tOrO: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        tile: Tile,
        head: cutlass.Int32,
        rows: cutlass.Int32,
        row: cutlass.Int32,
        lane: cutlass.Int32,
        c: cutlass.Float32,
    ):
        """Store O = acc / l of a CTA's columns, and LSE if it has the first; of ``rows`` rows.

        row: a thread's first row, the second is 8 below.
        """
        pair = cute.make_rmem_tensor((2,), self.mO.element_type)
        for half in cutlass.range_constexpr(softmax.ROWS):
            softmax.normalise(tOrO, row_sum, half)
            if row + 8 * half < rows:
                token, q_head = token_of(tile, row + 8 * half, head)
                for i in cutlass.range_constexpr(cute.size(tOrO) // 4):
                    for side in cutlass.range_constexpr(2):
                        pair[side] = tOrO[4 * i + 2 * half + side].to(self.mO.element_type)
                    column = self.column + 8 * i + 2 * (lane % 4)
                    copy.vector(self.mO, (token, q_head, column), 2).store(pair.load())
                lse = softmax.log_sum(row_max[half], row_sum[half], c)
                if lane % 4 == 0 and self.column == 0:
                    copy.vector(self.mLse, self.lse_coord(token, q_head), 1)[0] = lse

    def lse_coord(self, token: cutlass.Int64, q_head: cutlass.Int64):
        """Return the coordinates of a row in LSE."""
        return q_head, token


@dataclass(frozen=True)
class BufferResults(Results):
    """Those of one query a sequence: LSE [T, Hq]."""

    def lse_coord(self, token: cutlass.Int64, q_head: cutlass.Int64):
        """Return the coordinates of a row in LSE."""
        return token, q_head


@dataclass(frozen=True)
class Handover:
    """mbarriers of the stages of a ring: ``full`` when one has landed, ``empty`` when read."""

    full: cute.Pointer
    empty: cute.Pointer

    def init(self, stages: int, writers: int, readers: int):
        """Initialise the mbarriers, each of so many warps; by one thread, before the barrier."""
        for stage in range(stages):
            cute.arch.mbarrier_init(self.full + stage, writers)
            cute.arch.mbarrier_init(self.empty + stage, readers)

    def await_empty(self, state: PipelineState):
        """Wait until a stage is free."""
        cute.arch.mbarrier_wait(self.empty + state.index, state.phase)

    @cute.jit
    def publish(self, state: PipelineState):
        """Hand a warp's part of a stage over; after each lane's fence, if one is needed."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.full + state.index)

    def await_full(self, state: PipelineState):
        """Wait until a stage has landed."""
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)

    @cute.jit
    def release(self, state: PipelineState):
        """Give a stage back; by a warp of the consumer."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.empty + state.index)


@dataclass(frozen=True)
class ValueRing(Handover):
    """Ring of V."""

    @cute.jit
    def expect(self, state: PipelineState, size: cutlass.Int32):
        """Announce ``size`` bytes of a stage, which TMA will load; by a warp."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + state.index, size)
        cute.arch.sync_warp()
