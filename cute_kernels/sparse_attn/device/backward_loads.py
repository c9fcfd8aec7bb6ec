"""What the loading warp of a backward does: K and V of each ticket, the rows of its visits."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ...compile import fake
from ...dsl import pipeline
from ...schedulers.tiles import ticket_device as tickets
from ..config import BackwardConfig
from . import packed, walk
from .backward_tiles import BLOCK, BackwardTiles
from .chunks import piece_bytes


class Loads:
    """Of one configuration of the kernel."""

    def __init__(self, config: BackwardConfig, tiles: BackwardTiles):
        self.config, self.tiles, self.packed = config, tiles, config.packed
        self.tile_m, size = config.tile_m, tiles.row_bytes
        self.dq_size = config.tile_m * config.head_dim
        self.k_bytes, self.q_bytes = BLOCK * size, config.tile_m * (size + 4)
        self.of_q = self.tile_m, piece_bytes(tiles.dtype, config.head_dim), size
        self.of_k = tiles.of_k

    @cute.jit
    def load(self, loads, shared, rings, barriers, tickets_of, table):
        """Warp 0: K and V of each ticket, then Q, lse2, dO and delta of its visits."""
        (of_q, of_do, (k, v)), (source, lists, sizes) = loads, tickets_of
        lane = cute.arch.lane_idx()
        state = pipeline.producer_state(self.config.stages)
        received = tickets.ticket_state()
        kv_phase = cutlass.Int32(1)
        phases = cute.make_rmem_tensor((1,), cutlass.Int32)
        phases.fill(0)
        total = lists.total()
        ticket = source.receive(received)
        received.advance()
        while ticket < total:
            head, block, begin, end = lists.column(ticket)
            end_tile, _ = lists.ends(sizes, block, self.tile_m)
            place = None
            if cutlass.const_expr(self.packed):
                place = packed.place_of(table, block)
            tail = barriers.tail, phases
            batch, kv_head = head // sizes.kv_heads, head % sizes.kv_heads
            for matrix, buffer, full, empty in (
                (k, shared.sK, barriers.k_full, barriers.k_empty),
                (v, shared.sV, barriers.v_full, barriers.v_empty),
            ):
                cute.arch.mbarrier_wait(empty, kv_phase)
                s, g = self.tiles.boxes(matrix, self.tiles.keys(buffer), kv_head, batch, place)
                if cutlass.const_expr(self.packed):
                    of_tile = (matrix.atom, g[None, block], s[None, 0]), buffer.data_ptr()
                    self.load_keys(of_tile, place[1] - block * BLOCK, full, tail)
                else:
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full, self.k_bytes)
                    cute.copy(matrix.atom, g[None, block], s[None, 0], tma_bar_ptr=full)
            kv_phase = kv_phase ^ 1
            for member in cutlass.range(sizes.group, unroll=1):
                for entry in cutlass.range(begin, end, unroll=1):
                    q_block = lists.entry_at(entry, block) >> 1
                    count, first = walk.visits(end_tile, q_block, self.tile_m)
                    for visit in cutlass.range(count, unroll=1):
                        tile = first + visit
                        row = walk.row_of(sizes, head, member, tile)
                        at = (kv_head * sizes.group + member, batch, tile, row, place, tail)
                        self.load_rows(of_q, rings[0], (shared.sQ, shared.sLse2), at, state)
                        self.load_rows(of_do, rings[1], (shared.sdO, shared.sDelta), at, state)
                        state.advance()
            ticket = source.receive(received)
            received.advance()

    @cute.jit
    def load_rows(self, what, ring, buffers, at, state):
        """One tile of Q or dO, and the fp32 statistic of its rows, into one stage."""
        (matrix, values), (buffer, statistics) = what, buffers
        q_head, batch, tile, row, place, tail = at
        full = ring.producer_get_barrier(state)
        s, g = self.tiles.boxes(matrix, self.tiles.rows(buffer), q_head, batch, place)
        copied = matrix.atom, g[None, tile], s[None, state.index]
        layout = cute.make_layout((self.tile_m, self.config.stages))
        of_rows = values.iterator + row * self.tile_m, statistics.get_tensor(layout)
        if cutlass.const_expr(self.packed):
            inside = place[1] - tile * self.tile_m
            if inside < self.tile_m:
                ring.sync_object_empty.wait(state.index, state.phase)
                packed.expect(tail[0], self.q_bytes)
                self.copy_rows(copied, of_rows, state.index, tail[0])
                memory = buffer.data_ptr() + state.index * self.dq_size
                packed.clean(*tail, memory, self.of_q, inside, full)
            else:
                ring.producer_acquire(state)
                self.copy_rows(copied, of_rows, state.index, full)
        else:
            ring.producer_acquire(state)
            self.copy_rows(copied, of_rows, state.index, full)

    @cute.jit
    def copy_rows(self, copied, of_rows, stage, barrier):
        """A tile, and the statistic of its rows, come through the barrier."""
        atom, g, s = copied
        cute.copy(atom, g, s, tma_bar_ptr=barrier)
        values, statistics = of_rows
        sRows = statistics[None, stage]
        if cute.arch.lane_idx() == 0:
            pointer = values.align(fake.TMA_ALIGN)
            gRows = cute.make_tensor(pointer, cute.make_layout(self.tile_m))
            whole_s, whole_g = cpasync.group_bulk_copy_modes(sRows, gRows)
            copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32)
            cute.copy(copy, whole_g, whole_s, mbar_ptr=barrier)

    @cute.jit
    def load_keys(self, of_tile, inside, full, tail):
        """K or V of a pack, of which so many rows are of its sequence."""
        (atom, g, s), memory = of_tile
        if inside < BLOCK:
            packed.expect(tail[0], self.k_bytes)
            cute.copy(atom, g, s, tma_bar_ptr=tail[0])
            packed.clean(*tail, memory, self.of_k, inside, full)
        else:
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.k_bytes)
            cute.copy(atom, g, s, tma_bar_ptr=full)
