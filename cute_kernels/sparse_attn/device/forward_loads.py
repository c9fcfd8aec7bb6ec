"""What the loading warp of a forward does: for each tile Q, then K and V of every listed block.

It runs ahead of its readers by as many blocks as the rings hold, into the next tile too.  What a
tile's consumers have to know comes with its Q (``Told``).  Behind V of a tile's last block it
leaves them stages of V, through which O goes out.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import pipeline, tma
from ..masks import SPANS
from . import merge, packed, place
from .forward_tiles import BLOCK, ForwardTiles


@dataclass(frozen=True)
class Told:
    """What comes with Q, int32 [5]: the tile, or -1 behind the last one; its head, its batch; how
    many blocks its lists have; the place in the rings of its first step (``merge.place_code``)."""

    memory: cute.Tensor

    @cute.jit
    def tell(self, numbers: tuple):
        """By a warp."""
        if cute.arch.lane_idx() == 0:
            for n in cutlass.range_constexpr(len(numbers)):
                self.memory[n] = numbers[n]
        cute.arch.sync_warp()

    def __getitem__(self, n: int):
        return cute.arch.make_warp_uniform(self.memory[n])

    def more(self):
        """Whether there is a tile."""
        return self[0] >= 0

    def place(self):
        """(tile, head, batch)."""
        return self[0], self[1], self[2]

    def count(self):
        """How many blocks the tile's lists have."""
        return self[3]

    def first(self):
        """The place of the first step, or of what comes instead."""
        return self[4]


class Loads:
    """Of one configuration of the kernel; ``spans``: whether key 0 is anywhere in K and V.

    patience: of ``merge.step``.
    """

    def __init__(self, tiles: ForwardTiles, form: str, patience: int | None):
        self.tiles, self.packed, self.spans = tiles, tiles.packed, form == SPANS
        self.patience = patience

    @cute.jit
    def load(self, sources, shared, rings, lists_of, sizes, counter):
        """By a warp.  sizes: (tiles in all, Sq, query heads, KV heads)."""
        (q, k, v), (q_ring, k_ring, v_ring) = sources, rings
        (sQ, sK, sV), words, told, tail, table = shared
        total, q_len, heads, kv_heads = sizes
        parts, patience = self.tiles.parts, self.patience
        q_state = pipeline.producer_state(1)
        state_k, state_v = (pipeline.producer_state(self.tiles.stages) for _ in range(2))
        phases = cute.make_rmem_tensor((1,), cutlass.Int32)
        phases.fill(0)
        index, _, _ = cute.arch.block_idx()
        while index < total:
            tile, head, batch = place.tile_of(index, q_len, heads, self.tiles.rows)
            column, lists = lists_of(tile, head, batch)
            count = lists[0][0] + lists[-1][0]
            kv_head = place.kv_head_of(head, heads, kv_heads)
            of_k = matrix_of(k, kv_head, batch), sK, k_ring, False
            of_v = matrix_of(v, kv_head, batch), sV, v_ring, True
            where = column, table, tail, phases

            q_ring.sync_object_empty.wait(q_state.index, q_state.phase)
            told.tell((tile, head, batch, count, self.code(state_k, state_v)))
            q_ring.producer_acquire(q_state)
            of_q, barrier = matrix_of(q, head, batch), q_ring.producer_get_barrier(q_state)
            self.load_q(of_q, sQ, barrier, tile, table)
            q_state.advance()

            at = merge.cursor(lists)
            code = self.code(state_k, state_v)
            block = merge.step(lists, at, words[None, None, self.tiles.stages], patience, code)
            before = cutlass.Int32(merge.END)
            # K runs one block ahead of V, as its readers do.  In parts, V of a block leaves its
            # stages before K of the next one does, and comes first.
            while block < merge.END:
                if cutlass.const_expr(parts > 1):
                    if before < merge.END:
                        for part in cutlass.range_constexpr(parts):
                            self.load_part(of_v, state_v, before, part, where)
                            state_v.advance()
                k_ring.sync_object_empty.wait(state_k.index, state_k.phase)
                code = self.code(behind(state_k, parts), behind(state_v, parts))
                step = merge.step(lists, at, words[None, None, state_k.index], patience, code)
                for part in cutlass.range_constexpr(parts):
                    self.load_part(of_k, state_k, block, part, where)
                    state_k.advance()
                if cutlass.const_expr(parts == 1):
                    if before < merge.END:
                        self.load_part(of_v, state_v, before, 0, where)
                        state_v.advance()
                before, block = block, step
            if before < merge.END:
                for part in cutlass.range_constexpr(parts):
                    self.load_part(of_v, state_v, before, part, where)
                    state_v.advance()
            # Not before: who has taken a tile keeps it from those who have nothing left to do.
            index = place.take(counter, total)
            for _ in cutlass.range_constexpr(self.tiles.o_stages):
                if cutlass.const_expr(parts == 1):
                    # The rings of K and V go round together.
                    leave(k_ring, state_k)
                    state_k.advance()
                leave(v_ring, state_v)
                state_v.advance()
        q_ring.sync_object_empty.wait(q_state.index, q_state.phase)
        told.tell((cutlass.Int32(-1),))
        leave(q_ring, q_state)

    def code(self, state_k, state_v):
        """The code of a step's place; of parts, each of which has its own stage, of both phases.

        A reader's phase is the other one.
        """
        if self.tiles.parts == 1:
            return merge.place_code(state_k.index, state_k.phase ^ 1)
        return merge.place_code(state_v.phase ^ 1, state_k.phase ^ 1)

    @cute.jit
    def load_q(self, q, sQ, full, tile, table):
        """A tile of Q."""
        if cutlass.const_expr(self.packed):
            for n in cutlass.range_constexpr(self.tiles.rows // self.tiles.box_rows):
                row = tile * self.tiles.rows + n * self.tiles.box_rows
                shift, _ = packed.place_of(table, row // BLOCK)
                s, g = self.tiles.box(q, sQ, row - shift, n)
                cute.copy(q.atom, g, s, tma_bar_ptr=full)
        else:
            gQ = cute.local_tile(q.tensor, (self.tiles.rows, self.tiles.head_dim), (None, 0))
            tQsQ, tQgQ = tma.partition(q.atom, 0, cute.make_layout(1), sQ, gQ)
            cute.copy(q.atom, tQgQ[None, tile], tQsQ[None, 0], tma_bar_ptr=full)

    @cute.jit
    def load_part(self, what, state, block, part: cutlass.Constexpr, where):
        """A part of a block of K, or of V, into the ring's next free stage."""
        (source, buffer, ring, values), (column, table, tail, phases) = what, where
        # A box of K is a block of keys, one of V a part of them.
        at, (keys, columns) = block, self.tiles.v_box
        if cutlass.const_expr(values):
            at = block * self.tiles.parts + part
        end = block * BLOCK + BLOCK
        if cutlass.const_expr(self.packed):
            shift, end = packed.place_of(table, block)
            column = -shift
        s, g = self.boxes(source, buffer, column, part, values)
        if cutlass.const_expr(self.packed and values):
            inside = end - at * keys
            if inside < keys:
                barrier, memory = tail
                ring.sync_object_empty.wait(state.index, state.phase)
                packed.expect(barrier, self.tiles.stage_bytes[2])
                cute.copy(source.atom, g[None, at], s[None, state.index], tma_bar_ptr=barrier)
                memory += state.index * keys * columns
                full = ring.producer_get_barrier(state)
                packed.clean(barrier, phases, memory, self.tiles.of_v, inside, full)
            else:
                load_whole(source.atom, g, at, s, ring, state)
        else:
            load_whole(source.atom, g, at, s, ring, state)

    def boxes(self, source, buffer, column, part: int, values: bool):
        """(shared, global) views of K, of some columns, or of V; key 0 is in ``column``."""
        tensor, shape, boxes = source.tensor, self.tiles.k_box, (None, part)
        moved = (column, 0)
        if values:  # [D, keys]
            shape, boxes, moved = self.tiles.v_box[::-1], (0, None), moved[::-1]
        if self.spans or self.packed:
            tensor = cute.domain_offset(moved, tensor)
        tiles = cute.local_tile(tensor, shape, boxes)
        return tma.partition(source.atom, 0, cute.make_layout(1), buffer, tiles)


def load_whole(atom, g, at, s, ring, state):
    """By a warp: the box ``at``, all of it one sequence's, into the ring's next free stage."""
    ring.producer_acquire(state)
    full = ring.producer_get_barrier(state)
    cute.copy(atom, g[None, at], s[None, state.index], tma_bar_ptr=full)


def behind(state, parts: int):
    """The place so many parts on."""
    place = state.clone()
    for _ in range(parts):
        place.advance()
    return place


@cute.jit
def leave(ring, state):
    """By a warp: the ring's next free stage to its readers, as it is."""
    ring.sync_object_empty.wait(state.index, state.phase)
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ring.producer_get_barrier(state))


def matrix_of(source, head, batch):
    """One head's matrix of a source [rows, columns, heads, batches]."""
    return tma.Source(source.atom, source.tensor[None, None, head, batch])
