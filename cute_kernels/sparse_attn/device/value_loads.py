"""Loads of V of ``kernel_paged_values_sm90``: a CTA's columns of four blocks a stage.

Rows of 128 bytes come by TMA, a box of a page at a time, by one warp.  Shorter ones come by
``cp.async``, 16 bytes a lane, a block by each of four warps: TMA takes a row at a time, however
short it is.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy, pipeline, tma
from ...dsl.smem import CHUNK, chunk, piece_bytes
from ..config import PagedValuesConfig
from . import long_tiles
from .key_buffer import KeyBuffer
from .paged_tiles import BLOCK, WARP, Batch, Tile, load_box
from .probability_exchange import BATCH
from .values_state import ValueRing


@dataclass(frozen=True)
class ValueLoads:
    """Loads of one configuration of the kernel."""

    config: PagedValuesConfig
    dtype: type[cutlass.Numeric]

    @property
    def warps(self) -> int:
        """Warps that load, and that arrive at a full stage."""
        return 1 if self.config.by_tma else BATCH

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a CTA's columns."""
        return self.config.columns * self.dtype.width // 8

    @cute.jit
    def by_tma(
        self,
        v: tma.Source,
        sV: cute.Tensor,
        v_ring: ValueRing,
        batch: Batch | KeyBuffer,
        tile: Tile,
        head: cutlass.Int32,
        part: cutlass.Int32,
    ):
        """Load V of every block, a stage at a time; by a warp."""
        box, columns = self.config.keys_per_load, self.config.columns
        boxes = BLOCK // box
        v_state = pipeline.producer_state(self.config.v_stages)
        # Where the boxes of a stage lie, by lane: asked for a stage ahead.
        places = long_tiles.boxes_of(batch, self.config, tile, tile.first_block)
        for first in cutlass.range(tile.first_block, tile.end_block, BATCH, unroll=1):
            following = long_tiles.boxes_of(batch, self.config, tile, first + BATCH)
            blocks = cutlass.min(tile.end_block - first, BATCH)
            v_ring.await_empty(v_state)
            v_ring.expect(v_state, blocks * BLOCK * self.row_bytes)
            full = v_ring.full + v_state.index
            for block in cutlass.range(blocks, unroll=1):
                for n in cutlass.range_constexpr(boxes):
                    page, row = long_tiles.place(tile, places, block * boxes + n, self.config)
                    stage = v_state.index * BATCH + block
                    sBox = cute.local_tile(sV, (columns, box, 1), (0, n, stage))
                    load_box(v.matrix(head, page), (0, row), (part, None), sBox, full)
            v_state.advance()
            places = following

    @cute.jit
    def by_copies(
        self,
        mV: cute.Tensor,
        pV: cute.Pointer,
        v_ring: ValueRing,
        batch: Batch | KeyBuffer,
        tile: Tile,
        head: cutlass.Int32,
        column: cutlass.Int32,
        warp: cutlass.Int32,
    ):
        """Load V of every fourth block, a stage at a time; by each of four warps.

        A stage is handed over when the copies of ``v_ahead`` - 1 later ones are in flight.
        """
        ahead = self.config.v_ahead
        v_state = pipeline.producer_state(self.config.v_stages)
        full_state = pipeline.producer_state(self.config.v_stages)
        places = long_tiles.boxes_of(batch, self.config, tile, tile.first_block + warp)
        batches = (tile.end_block - tile.first_block + BATCH - 1) // BATCH
        for step in cutlass.range(batches + ahead - 1, unroll=1):
            if step < batches:
                block = tile.first_block + step * BATCH + warp
                following = long_tiles.boxes_of(batch, self.config, tile, block + BATCH)
                v_ring.await_empty(v_state)
                if block < tile.end_block:
                    stage = pV + (v_state.index * BATCH + warp) * BLOCK * self.config.columns
                    self.copy_block(mV, stage, tile, places, head, column)
                v_state.advance()
                places = following
            cute.arch.cp_async_commit_group()
            if step >= ahead - 1:
                cute.arch.cp_async_wait_group(ahead - 1)
                cute.arch.fence_proxy("async.shared", space="cta")
                v_ring.publish(full_state)
                full_state.advance()

    @cute.jit
    def copy_block(
        self,
        mV: cute.Tensor,
        stage: cute.Pointer,
        tile: Tile,
        places: cutlass.Int32,
        head: cutlass.Int32,
        column: cutlass.Int32,
    ):
        """Copy 128 rows of a block to its place in a stage, asynchronously; by a warp."""
        box, lane = self.config.keys_per_load, cute.arch.lane_idx()
        per_row = self.row_bytes // CHUNK
        # At once: rows of one page, as it has 16 at least.
        rows, elements = WARP // per_row, CHUNK * 8 // self.dtype.width
        piece = piece_bytes(self.dtype, self.config.columns)
        for first in cutlass.range_constexpr(0, BLOCK, rows):
            page, of_box = long_tiles.place(tile, places, first // box, self.config)
            row, number = lane // per_row, lane % per_row
            of_page = long_tiles.row_of(tile, of_box + first % box + row, mV.shape[1])
            coord = page, of_page, head, column + number * elements
            gV = copy.vector(mV, coord, elements)
            sV = chunk(stage, BLOCK, piece, first + row, number)
            # Neighbours' columns are in the same 128 bytes: who asks first brings them to L2.
            cute.arch.inline_ptx(
                f"cp.async.cg.shared.global.L2::128B [{{$r0}}], [{{$r1}}], {CHUNK};",
                read_only_args=[sV.iterator.toint(), gV.iterator.toint()],
            )
