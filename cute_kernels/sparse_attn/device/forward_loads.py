"""Producer warp of a forward: for each tile it loads Q, then K and V of every listed block.

It runs ahead of its readers by as many blocks as the rings hold, into the next tile too.  What a
tile's consumers have to know is published with its Q (``TileInfo``).  After V of a tile's last
block the producer leaves stages of V to the consumers, through which O is stored.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from ...dsl import pipeline, tma
from ..masks import SPANS
from . import block_union, mask, tile_scheduler, varlen
from .block_union import BLOCK
from .forward_state import Buffers, Rings, Scalars, Sizes, Sources, Tensors
from .forward_tiles import ForwardTiles


@dataclass(frozen=True)
class KvOperand:
    """One head's K or V to load: its TMA source, its stages, its ring."""

    source: tma.Source
    sKV: cute.Tensor
    ring: PipelineTmaAsync
    is_v: bool


@dataclass(frozen=True)
class KeyOffset:
    """Where keys lie in the buffer.

    column: column of key 0; table: a varlen batch's, or None; tail: its tail barrier; pV: start of
    the stages of V.
    """

    column: cutlass.Int32
    table: cute.Tensor | None
    tail: varlen.TailBarrier
    pV: cute.Pointer


class Loads:
    """Producer of one configuration of the kernel.

    max_skipped_steps: of ``block_union.step``.
    """

    def __init__(self, tiles: ForwardTiles, form: str, max_skipped_steps: int | None):
        self.tiles, self.packed, self.form = tiles, tiles.packed, form
        # Whether key 0 may be any column of K and V.
        self.moved = form == SPANS
        self.max_skipped_steps = max_skipped_steps

    @cute.jit
    def load(
        self,
        sources: Sources,
        tensors: Tensors,
        scalars: Scalars,
        buffers: Buffers,
        rings: Rings,
        sizes: Sizes,
    ):
        """Load every tile of this CTA; by a warp."""
        parts, skipped = self.tiles.parts, self.max_skipped_steps
        steps, tile_info, table = buffers.steps, buffers.tile_info, tensors.mTable
        q_state = pipeline.producer_state(1)
        state_k, state_v = (pipeline.producer_state(self.tiles.stages) for _ in range(2))
        phase = cute.make_rmem_tensor((1,), cutlass.Int32)
        phase.fill(0)
        tail = varlen.TailBarrier(buffers.tail, phase)
        index, _, _ = cute.arch.block_idx()
        while index < sizes.tiles:
            rows, heads = self.tiles.rows, sizes.heads
            tile, head, batch = tile_scheduler.tile_coord(index, sizes.q_len, rows, heads)
            of_tile = self.form, self.tiles.consumers, tile, head, batch
            column, lists = mask.lists_of(tensors, scalars, *of_tile)
            count = lists[0].count + lists[-1].count
            kv_head = tile_scheduler.kv_head_of(head, heads, sizes.kv_heads)
            k = KvOperand(sources.k.matrix(kv_head, batch), buffers.sK, rings.k, False)
            v = KvOperand(sources.v.matrix(kv_head, batch), buffers.sV, rings.v, True)
            offset = KeyOffset(column, table, tail, buffers.pV)

            rings.q.sync_object_empty.wait(q_state.index, q_state.phase)
            tile_info.publish(tile, head, batch, count, self.code(state_k, state_v))
            rings.q.producer_acquire(q_state)
            q, full = sources.q.matrix(head, batch), rings.q.producer_get_barrier(q_state)
            self.load_q(q, buffers.sQ, full, tile, table)
            q_state.advance()

            cursor = block_union.cursor(lists)
            code = self.code(state_k, state_v)
            first_steps = steps[None, None, self.tiles.stages]
            block = block_union.step(lists, cursor, first_steps, skipped, code)
            before = cutlass.Int32(block_union.END)
            # K runs one block ahead of V, as its readers do.  In parts, V of a block leaves its
            # stages before K of the next one does, and comes first.
            while block < block_union.END:
                if cutlass.const_expr(parts > 1):
                    if before < block_union.END:
                        for part in cutlass.range_constexpr(parts):
                            self.load_part(v, state_v, before, part, offset)
                            state_v.advance()
                rings.k.sync_object_empty.wait(state_k.index, state_k.phase)
                code = self.code(advanced(state_k, parts), advanced(state_v, parts))
                stage_steps = steps[None, None, state_k.index]
                following = block_union.step(lists, cursor, stage_steps, skipped, code)
                for part in cutlass.range_constexpr(parts):
                    self.load_part(k, state_k, block, part, offset)
                    state_k.advance()
                if cutlass.const_expr(parts == 1):
                    if before < block_union.END:
                        self.load_part(v, state_v, before, 0, offset)
                        state_v.advance()
                before, block = block, following
            if before < block_union.END:
                for part in cutlass.range_constexpr(parts):
                    self.load_part(v, state_v, before, part, offset)
                    state_v.advance()
            # Not earlier: a CTA that has taken a tile keeps it from CTAs that are idle.
            index = tile_scheduler.next_tile(tensors.mCounter, sizes.tiles)
            for _ in cutlass.range_constexpr(self.tiles.o_stages):
                if cutlass.const_expr(parts == 1):
                    # The rings of K and V advance together.
                    leave(rings.k, state_k)
                    state_k.advance()
                leave(rings.v, state_v)
                state_v.advance()
        rings.q.sync_object_empty.wait(q_state.index, q_state.phase)
        tile_info.publish_end()
        leave(rings.q, q_state)

    def make_rings(self, barriers: cute.Pointer) -> Rings:
        """Make the rings of Q, K and V, and publish their barriers to the CTA."""
        alone = cute.make_layout((1, 1, 1))
        rings, index, readers = [], 0, 4 * self.tiles.consumers
        counts = 1, self.tiles.stages, self.tiles.stages
        for stages, size in zip(counts, self.tiles.stage_bytes, strict=True):
            ring = pipeline.tma_ring(barriers + index, stages, size, readers, alone)
            rings.append(ring)
            index += 2 * stages
        pipeline.announce_barriers((1, 1))
        pipeline.await_barriers((1, 1))
        return Rings(*rings)

    def code(self, state_k: PipelineState, state_v: PipelineState):
        """Return the code of a step's ring position; of parts, each in its own stage, both phases.

        A reader's phase is the other one.
        """
        if self.tiles.parts == 1:
            return block_union.ring_code(state_k.index, state_k.phase ^ 1)
        return block_union.ring_code(state_v.phase ^ 1, state_k.phase ^ 1)

    @cute.jit
    def load_q(
        self,
        q: tma.Source,
        sQ: cute.Tensor,
        full: cute.Pointer,
        tile: cutlass.Int32,
        table: cute.Tensor | None,
    ):
        """Load a tile of Q."""
        if cutlass.const_expr(self.packed):
            for n in cutlass.range_constexpr(self.tiles.rows // self.tiles.box_rows):
                row = tile * self.tiles.rows + n * self.tiles.box_rows
                shift = varlen.row_range(table, row // BLOCK).shift
                tQsQ, tQgQ = self.tiles.box(q, sQ, row - shift, n)
                cute.copy(q.atom, tQgQ, tQsQ, tma_bar_ptr=full)
        else:
            gQ = cute.local_tile(q.tensor, (self.tiles.rows, self.tiles.head_dim), (None, 0))
            tQsQ, tQgQ = tma.partition(q.atom, 0, cute.make_layout(1), sQ, gQ)
            cute.copy(q.atom, tQgQ[None, tile], tQsQ[None, 0], tma_bar_ptr=full)

    @cute.jit
    def load_part(
        self,
        operand: KvOperand,
        state: PipelineState,
        block: cutlass.Int32,
        part: cutlass.Constexpr,
        offset: KeyOffset,
    ):
        """Load a part of a block of K, or of V, into the ring's next free stage."""
        source, ring, column = operand.source, operand.ring, offset.column
        # A box of K is a block of keys, one of V a part of them.
        box, (keys, columns) = block, self.tiles.v_box
        if cutlass.const_expr(operand.is_v):
            box = block * self.tiles.parts + part
        end = block * BLOCK + BLOCK
        if cutlass.const_expr(self.packed):
            rows = varlen.row_range(offset.table, block)
            end = rows.end
            column = -rows.shift
        tKsK, tKgK = self.boxes(operand, column, part)
        if cutlass.const_expr(self.packed and operand.is_v):
            inside = end - box * keys
            if inside < keys:
                barrier = offset.tail.barrier
                ring.sync_object_empty.wait(state.index, state.phase)
                varlen.expect(barrier, self.tiles.stage_bytes[2])
                cute.copy(
                    source.atom, tKgK[None, box], tKsK[None, state.index], tma_bar_ptr=barrier
                )
                stage = offset.pV + state.index * keys * columns
                full = ring.producer_get_barrier(state)
                varlen.clean(offset.tail, stage, self.tiles.v_shape, inside, full)
            else:
                load_whole(source.atom, tKgK, box, tKsK, ring, state)
        else:
            load_whole(source.atom, tKgK, box, tKsK, ring, state)

    def boxes(self, operand: KvOperand, column: cutlass.Int32, part: int):
        """Return (shared, global) boxes of K, of some columns, or of V; key 0 is in ``column``."""
        tensor, shape, boxes = operand.source.tensor, self.tiles.k_box, (None, part)
        moved = (column, 0)
        if operand.is_v:  # [D, keys]
            shape, boxes, moved = self.tiles.v_box[::-1], (0, None), moved[::-1]
        if self.moved or self.packed:
            tensor = cute.domain_offset(moved, tensor)
        gKV = cute.local_tile(tensor, shape, boxes)
        return tma.partition(operand.source.atom, 0, cute.make_layout(1), operand.sKV, gKV)


def load_whole(
    atom: cute.CopyAtom,
    tKgK: cute.Tensor,
    box: cutlass.Int32,
    tKsK: cute.Tensor,
    ring: PipelineTmaAsync,
    state: PipelineState,
):
    """Load a box that lies in one sequence into the ring's next free stage; by a warp."""
    ring.producer_acquire(state)
    full = ring.producer_get_barrier(state)
    cute.copy(atom, tKgK[None, box], tKsK[None, state.index], tma_bar_ptr=full)


def advanced(state: PipelineState, parts: int) -> PipelineState:
    """Return the ring position ``parts`` stages on."""
    following = state.clone()
    for _ in range(parts):
        following.advance()
    return following


@cute.jit
def leave(ring: PipelineTmaAsync, state: PipelineState):
    """Leave the ring's next free stage to its readers as it is; by a warp."""
    ring.sync_object_empty.wait(state.index, state.phase)
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ring.producer_get_barrier(state))
