"""Producer warp of a backward: it loads K and V of each ticket, and the rows of its visits."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from ...compile import fake
from ...dsl import pipeline, tma
from ..config import BackwardConfig
from . import varlen, walk
from .backward_state import Cta, Rings, SharedStorage
from .backward_tiles import BackwardTiles


@dataclass(frozen=True)
class RowOperand:
    """Q with lse2, or dO with delta.

    pTile: first element of the stages sTile; shape: of a stage.
    """

    source: tma.Source
    mStat: cute.Tensor
    sTile: cute.Tensor
    pTile: cute.Pointer
    sStat: cute.Tensor
    shape: varlen.TileShape


@dataclass(frozen=True)
class KeyOperand:
    """K or V: its TMA source, its buffer sTile from pTile on, its mbarriers."""

    source: tma.Source
    sTile: cute.Tensor
    pTile: cute.Pointer
    shape: varlen.TileShape
    full: cute.Pointer
    empty: cute.Pointer


@dataclass(frozen=True)
class TileCoord:
    """Position of a tile of rows or of keys.

    tile: its number in its head; rows: of its block, in a varlen batch; tail: its tail barrier.
    """

    head: cutlass.Int32
    batch: cutlass.Int32
    tile: cutlass.Int32
    rows: varlen.RowRange | None
    tail: varlen.TailBarrier


class Loads:
    """Producer of one configuration of the kernel."""

    def __init__(self, config: BackwardConfig, tiles: BackwardTiles):
        self.config, self.tiles, self.packed = config, tiles, config.packed
        self.tile_m, self.keys, self.parts = config.tile_m, config.keys, config.parts

    def rings(self, shared: SharedStorage, readers: int) -> Rings:
        """Make the rings; readers: warps."""
        alone = cute.make_layout((1, 1, 1))
        q = self.config.stages, bytes_of(self.tiles.q_shape, 4)
        do = self.config.do_stages, bytes_of(self.tiles.do_shape, 4)
        return Rings(
            pipeline.tma_ring(shared.q_ring.data_ptr(), *q, readers, alone),
            pipeline.tma_ring(shared.do_ring.data_ptr(), *do, readers, alone),
        )

    @cute.jit
    def load(self, cta: Cta):
        """Load K and V of each ticket, and Q, lse2, dO and delta of its visits; by warp 0."""
        tiles, shared, barriers, rings = self.tiles, cta.shared, cta.barriers, cta.rings
        sources, work, sizes = cta.sources, cta.work, cta.work.sizes
        sLse2, sDelta = (
            b.get_tensor(cute.make_layout((self.tile_m, n)))
            for b, n in ((shared.sLse2, self.config.stages), (shared.sDelta, self.config.do_stages))
        )
        pQ, pdO, pK, pV = (b.data_ptr() for b in (shared.sQ, shared.sdO, shared.sK, shared.sV))
        sQ, sdO, sK, sV = (
            *(tiles.q(shared.sQ), tiles.do(shared.sdO)),
            *(tiles.k(shared.sK), tiles.v(shared.sV)),
        )
        q = RowOperand(sources.q, cta.tensors.mLse2, sQ, pQ, sLse2, tiles.q_shape)
        do = RowOperand(sources.do, cta.tensors.mDelta, sdO, pdO, sDelta, tiles.do_shape)
        k = KeyOperand(sources.k, sK, pK, tiles.k_shape, barriers.k_full, barriers.k_empty)
        v = KeyOperand(sources.v, sV, pV, tiles.v_shape, barriers.v_full, barriers.v_empty)
        # Rings of as many stages advance together.
        two_states = self.config.stages != self.config.do_stages
        phase = cute.make_rmem_tensor((1,), cutlass.Int32)
        phase.fill(0)
        tail = varlen.TailBarrier(barriers.tail, phase)

        @cute.jit
        def load_column(
            column: walk.Column,
            kv_phase: cutlass.Int32,
            do_state: PipelineState,
            state: PipelineState,
        ):
            (end_tile, _), rows = work.ends(column), None
            if cutlass.const_expr(self.packed):
                rows = varlen.row_range(cta.tensors.mTable, column.block)
            batch, kv_head = column.head // sizes.kv_heads, column.head % sizes.kv_heads
            # K and V wait for the end of the ticket before; rows find stages free before that.
            key_tile = column.block * self.parts + column.part
            keys = TileCoord(kv_head, batch, key_tile, rows, tail)
            if cutlass.const_expr(not self.config.rows_first):
                self.load_kv(k, v, keys, kv_phase)

            @cute.jit
            def load_visit(
                visit: walk.Visit,
                wants_keys: cutlass.Boolean,
                do_state: PipelineState,
                state: PipelineState,
            ):
                row = walk.row_of(sizes, column.head, visit)
                q_head = kv_head * sizes.group + visit.member
                at = TileCoord(q_head, batch, visit.tile, rows, tail)
                self.load_rows(q, rings.q, at, row, state)
                if cutlass.const_expr(two_states):
                    self.load_rows(do, rings.do, at, row, do_state)
                    do_state.advance()
                else:
                    self.load_rows(do, rings.do, at, row, state)
                state.advance()
                if cutlass.const_expr(self.config.rows_first):
                    if wants_keys:
                        self.load_kv(k, v, keys, kv_phase)
                        wants_keys = cutlass.Boolean(False)
                return wants_keys, do_state, state

            first = cutlass.Boolean(self.config.rows_first), do_state, state
            wants_keys, do_state, state = walk.for_each_visit(
                work, column, end_tile, load_visit, first
            )
            if cutlass.const_expr(self.config.rows_first):
                if wants_keys:
                    pass_kv(k, v, kv_phase)
            return kv_phase ^ 1, do_state, state

        states = (pipeline.producer_state(n) for n in (self.config.do_stages, self.config.stages))
        walk.for_each_ticket(work, load_column, (cutlass.Int32(1), *states))

    @cute.jit
    def load_rows(
        self,
        operand: RowOperand,
        ring: PipelineTmaAsync,
        coord: TileCoord,
        row: cutlass.Int64,
        state: PipelineState,
    ):
        """Load a tile of Q or dO, and the fp32 statistic of its rows, into one stage.

        row: the tile's number in the launch (``walk.row_of``).
        """
        full = ring.producer_get_barrier(state)
        source, shape = operand.source, operand.shape
        tXsX, tXgX = self.tiles.boxes(source, operand.sTile, coord.head, coord.batch, coord.rows)
        gTile, sTile = tXgX[None, coord.tile], tXsX[None, state.index]
        # The statistic of these rows: a bulk copy of contiguous fp32, so a pointer is enough.
        pStat, sStat, stage = operand.mStat.iterator + row * self.tile_m, operand.sStat, state.index
        if cutlass.const_expr(self.packed):
            inside = coord.rows.end - coord.tile * self.tile_m
            if inside < self.tile_m:
                barrier = coord.tail.barrier
                ring.sync_object_empty.wait(state.index, state.phase)
                varlen.expect(barrier, bytes_of(shape, 4))
                self.copy_rows(source.atom, gTile, sTile, pStat, sStat, stage, barrier)
                tile = operand.pTile + state.index * (shape.bytes * 8 // self.tiles.dtype.width)
                varlen.clean(coord.tail, tile, shape, inside, full)
            else:
                ring.producer_acquire(state)
                self.copy_rows(source.atom, gTile, sTile, pStat, sStat, stage, full)
        else:
            ring.producer_acquire(state)
            self.copy_rows(source.atom, gTile, sTile, pStat, sStat, stage, full)

    @cute.jit
    def copy_rows(
        self,
        atom: cute.CopyAtom,
        gTile: cute.Tensor,
        sTile: cute.Tensor,
        pStat: cute.Pointer,
        sStat: cute.Tensor,
        stage: cutlass.Int32,
        barrier: cute.Pointer,
    ):
        """Copy a tile, and the statistic of its rows, through the barrier."""
        cute.copy(atom, gTile, sTile, tma_bar_ptr=barrier)
        sRows = sStat[None, stage]
        if cute.arch.lane_idx() == 0:
            gStat = cute.make_tensor(pStat.align(fake.TMA_ALIGN), cute.make_layout(self.tile_m))
            tSsS, tSgS = cpasync.group_bulk_copy_modes(sRows, gStat)
            copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32)
            cute.copy(copy, tSgS, tSsS, mbar_ptr=barrier)

    @cute.jit
    def load_kv(self, k: KeyOperand, v: KeyOperand, coord: TileCoord, phase: cutlass.Int32):
        """Load a ticket's tiles of K and V."""
        self.load_keys(k, coord, phase)
        self.load_keys(v, coord, phase)

    @cute.jit
    def load_keys(self, operand: KeyOperand, coord: TileCoord, phase: cutlass.Int32):
        """Load a ticket's tile of K or V."""
        source, shape, full = operand.source, operand.shape, operand.full
        cute.arch.mbarrier_wait(operand.empty, phase)
        tXsX, tXgX = self.tiles.boxes(source, operand.sTile, coord.head, coord.batch, coord.rows)
        if cutlass.const_expr(self.packed):
            inside = coord.rows.end - coord.tile * self.keys
            if inside < self.keys:
                barrier = coord.tail.barrier
                varlen.expect(barrier, shape.bytes)
                gTile = tXgX[None, coord.tile]
                cute.copy(source.atom, gTile, tXsX[None, 0], tma_bar_ptr=barrier)
                varlen.clean(coord.tail, operand.pTile, shape, inside, full)
            else:
                copy_keys(source.atom, tXgX, coord.tile, tXsX, full, shape.bytes)
        else:
            copy_keys(source.atom, tXgX, coord.tile, tXsX, full, shape.bytes)


@cute.jit
def pass_kv(k: KeyOperand, v: KeyOperand, phase: cutlass.Int32):
    """Pass the buffers of K and V to the readers of a ticket without visits: they read neither."""
    for operand in (k, v):
        cute.arch.mbarrier_wait(operand.empty, phase)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(operand.full)


@cute.jit
def copy_keys(
    atom: cute.CopyAtom,
    tXgX: cute.Tensor,
    tile: cutlass.Int32,
    tXsX: cute.Tensor,
    full: cute.Pointer,
    size: cutlass.Constexpr,
):
    """Copy a tile that lies in one sequence into a buffer that is free; by a warp."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    cute.copy(atom, tXgX[None, tile], tXsX[None, 0], tma_bar_ptr=full)


def bytes_of(shape: varlen.TileShape, extra: int) -> int:
    """Return the bytes of a tile, with ``extra`` bytes for each row."""
    return shape.bytes + shape.rows * extra
