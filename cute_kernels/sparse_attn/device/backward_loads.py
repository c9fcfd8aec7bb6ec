"""What the loading warp of a backward does: K and V of each ticket, the rows of its visits."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ...compile import fake
from ...dsl import pipeline
from ...schedulers.tiles import ticket_device as tickets
from ..config import BackwardConfig
from . import packed, walk
from .backward_tiles import BackwardTiles


class Loads:
    """Of one configuration of the kernel."""

    def __init__(self, config: BackwardConfig, tiles: BackwardTiles):
        self.config, self.tiles, self.packed = config, tiles, config.packed
        self.tile_m, self.keys, self.parts = config.tile_m, config.keys, config.parts

    def rings(self, shared, readers: int):
        """The rings of Q with lse2, and of dO with delta; readers: warps."""
        alone = cute.make_layout((1, 1, 1))
        q = self.config.stages, bytes_of(self.tiles.of_q, 4)
        do = self.config.do_stages, bytes_of(self.tiles.of_do, 4)
        return (
            pipeline.tma_ring(shared.q_ring.data_ptr(), *q, readers, alone),
            pipeline.tma_ring(shared.do_ring.data_ptr(), *do, readers, alone),
        )

    @cute.jit
    def load(self, loads, shared, rings, barriers, tickets_of, table):
        """Warp 0: K and V of each ticket, then Q, lse2, dO and delta of its visits."""
        (of_q, of_do, (k, v)), (source, lists, sizes) = loads, tickets_of
        tiles = self.tiles
        memory = (b.data_ptr() for b in (shared.sQ, shared.sdO, shared.sK, shared.sV))
        of_lse2, of_delta = (
            b.get_tensor(cute.make_layout((self.tile_m, n)))
            for b, n in ((shared.sLse2, self.config.stages), (shared.sDelta, self.config.do_stages))
        )
        of_q = *of_q, tiles.q(shared.sQ), next(memory), of_lse2, tiles.of_q
        of_do = *of_do, tiles.do(shared.sdO), next(memory), of_delta, tiles.of_do
        of_k = k, tiles.k(shared.sK), next(memory), tiles.of_k, barriers.k_full, barriers.k_empty
        of_v = v, tiles.v(shared.sV), next(memory), tiles.of_v, barriers.v_full, barriers.v_empty
        # Rings of as many stages go round together.
        apart = self.config.stages != self.config.do_stages
        state = pipeline.producer_state(self.config.stages)
        do_state = pipeline.producer_state(self.config.do_stages)
        received = tickets.ticket_state()
        kv_phase = cutlass.Int32(1)
        phases = cute.make_rmem_tensor((1,), cutlass.Int32)
        phases.fill(0)
        total = lists.total() * self.parts
        ticket = source.receive(received)
        received.advance()
        while ticket < total:
            head, block, begin, end = lists.column(ticket // self.parts)
            end_tile, _ = lists.ends(sizes, block, self.tile_m)
            place = None
            if cutlass.const_expr(self.packed):
                place = packed.place_of(table, block)
            tail = barriers.tail, phases
            batch, kv_head = head // sizes.kv_heads, head % sizes.kv_heads
            tile = block * self.parts + ticket % self.parts
            for of_keys in (of_k, of_v):
                self.load_keys(of_keys, (kv_head, batch, tile, place, tail), kv_phase)
            kv_phase = kv_phase ^ 1
            for member in cutlass.range(sizes.group, unroll=1):
                for entry in cutlass.range(begin, end, unroll=1):
                    q_block = lists.entry_at(entry, block) >> 1
                    count, first = walk.visits(end_tile, q_block, self.tile_m)
                    for visit in cutlass.range(count, unroll=1):
                        tile = first + visit
                        row = walk.row_of(sizes, head, member, tile)
                        at = (kv_head * sizes.group + member, batch, tile, row, place, tail)
                        self.load_rows(of_q, rings[0], at, state)
                        if cutlass.const_expr(apart):
                            self.load_rows(of_do, rings[1], at, do_state)
                            do_state.advance()
                        else:
                            self.load_rows(of_do, rings[1], at, state)
                        state.advance()
            ticket = source.receive(received)
            received.advance()

    @cute.jit
    def load_rows(self, what, ring, at, state):
        """One tile of Q or dO, and the fp32 statistic of its rows, into one stage."""
        matrix, values, view, memory, statistics, sizes = what
        q_head, batch, tile, row, place, tail = at
        full = ring.producer_get_barrier(state)
        s, g = self.tiles.boxes(matrix, view, q_head, batch, place)
        copied = matrix.atom, g[None, tile], s[None, state.index]
        of_rows = values.iterator + row * self.tile_m, statistics
        if cutlass.const_expr(self.packed):
            inside = place[1] - tile * self.tile_m
            if inside < self.tile_m:
                ring.sync_object_empty.wait(state.index, state.phase)
                packed.expect(tail[0], bytes_of(sizes, 4))
                self.copy_rows(copied, of_rows, state.index, tail[0])
                stage = memory + state.index * (bytes_of(sizes) * 8 // self.tiles.dtype.width)
                packed.clean(*tail, stage, sizes, inside, full)
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
    def load_keys(self, what, at, phase):
        """A ticket's tile of K or V."""
        matrix, view, memory, sizes, full, empty = what
        kv_head, batch, tile, place, tail = at
        size = bytes_of(sizes)
        cute.arch.mbarrier_wait(empty, phase)
        s, g = self.tiles.boxes(matrix, view, kv_head, batch, place)
        if cutlass.const_expr(self.packed):
            inside = place[1] - tile * self.keys
            if inside < self.keys:
                packed.expect(tail[0], size)
                cute.copy(matrix.atom, g[None, tile], s[None, 0], tma_bar_ptr=tail[0])
                packed.clean(*tail, memory, sizes, inside, full)
            else:
                copy_keys(matrix.atom, g, tile, s, full, size)
        else:
            copy_keys(matrix.atom, g, tile, s, full, size)


@cute.jit
def copy_keys(atom, g, tile, s, full, size: cutlass.Constexpr):
    """By a warp: a tile, all of it one sequence's, into a buffer that is free."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    cute.copy(atom, g[None, tile], s[None, 0], tma_bar_ptr=full)


def bytes_of(sizes: tuple[int, int, int], beside: int = 0) -> int:
    """Of a tile as ``packed`` has it, with so many bytes beside each row."""
    rows, _, row_bytes = sizes
    return rows * (row_bytes + beside)
