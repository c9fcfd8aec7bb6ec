"""Scores of few queries with long contexts over paged caches for SM90: the first of two kernels.

    S = Q Kᵀ      t = S, or tanh(S scale / softcap); -inf where masked      M = max t of a block

``kernel_paged_values_sm90`` makes O of them.  A score depends on no other block, so all SMs share
the blocks of a sequence here, where a chain would keep one busy.

Layouts      Q, K, the lists and a page as in ``kernel_paged_sm90``.  t fp32 [T Hkv, blocks,
             1024 halves] and M fp32 [T Hkv, group, blocks]: see ``device/long_tiles``.
Order        the bits of ``kernel_paged_sm90``: one fp32 accumulator a score, D ascending in k16
             groups of the same instruction; maxima are exact in any order.
Tiles        64 rows, of which a query has ``group`` <= 16: query heads of a KV head.
Work         (sequence, query, KV head, block of 128 keys), in this order, cut into equal shares,
             one for each CTA; a share begins in any block of any unit.  The host reads no length.
Masks        by selection.  Pages without keys that a sequence's queries see are not read.
Roles        warp 0 loads K, box by box of a page, into a ring; warpgroup 1 multiplies, and its
             first warp, which has the rows, stores.
Limits       SM90a only; bf16 and fp16; D in {64, 96, 128, 192, 256}; at most 16 query heads a KV
             head.
Measured     docs/status.md, docs/notes/attention_sm90.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineTmaAsync

from ..compile import fake
from ..dsl import copy, mma, pipeline, smem, softmax, tma
from .config import VALUE_DIMS, PagedScoresConfig
from .device import long_tiles, paged_fakes, paged_tiles
from .device.forward_tiles import ForwardTiles
from .device.key_buffer import KeyBuffer
from .device.long_tiles import Cursor
from .device.paged_tiles import BLOCK, ROWS, Batch, Tile

#: Blocks whose boxes one lookup of a warp finds: 32 boxes, of 16 keys at least.
AHEAD = 4


@dataclass(frozen=True)
class Scratch:
    """Results: t and M (``device/long_tiles``)."""

    mScores: cute.Tensor
    mMaxima: cute.Tensor


class PagedScoresSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: PagedScoresConfig):
        assert BLOCK % config.keys_per_load == 0
        self.config, self.head_dim = config, config.head_dim
        self.dtype = fake.DTYPES[config.dtype]
        self.boxes = BLOCK // config.keys_per_load
        dims = self.head_dim, VALUE_DIMS[self.head_dim]
        # Of ``kernel_paged_sm90``: its product Q Kᵀ.
        self.tiles = ForwardTiles(self.dtype, *dims, 1, config.k_stages, 1, False)

    def layouts(self) -> tuple[cute.ComposedLayout, ...]:
        """Return the layouts of Q, and of the stages of K."""
        return (
            smem.operand_layout(self.dtype, ROWS, self.head_dim, "k", 1),
            smem.operand_layout(self.dtype, BLOCK, self.head_dim, "k", self.config.k_stages),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mScores: cute.Tensor,
        mMaxima: cute.Tensor,
        mTable: cute.Tensor,
        mLengths: cute.Tensor,
        mStarts: cute.Tensor,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        inner: cutlass.Float32,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        batch = Batch(mTable, mLengths, mStarts, lo, hi, mK.shape[1])
        self.launch(mQ, mK, Scratch(mScores, mMaxima), batch, inner, ctas, stream)

    def launch(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        scratch: Scratch,
        batch: Batch | KeyBuffer,
        inner: cutlass.Float32,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel over K [pages, rows, Hkv, D]."""
        # [rows, D, H, pages]
        box = self.config.keys_per_load
        k_layout = smem.operand_layout(self.dtype, box, self.head_dim, "k", 1)
        k = tma.load(tma.view(mK, [1, 3, 2, 0]), k_layout, (box, self.head_dim), 1)
        self.storage = self.shared_storage()
        self.kernel(k, mQ, scratch, batch, mK.shape[2], inner).launch(
            grid=(ctas, 1, 1),
            block=(2 * mma.WARPGROUP, 1, 1),
            min_blocks_per_mp=self.config.ctas_per_sm,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    def shared_storage(self) -> type:
        """Return the struct of a CTA's shared memory."""
        sizes = [cute.cosize(layout) for layout in self.layouts()]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.config.k_stages]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[0]], smem.ALIGN]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[1]], smem.ALIGN]

        return Storage

    @cute.kernel
    def kernel(
        self,
        k: tma.Source,
        mQ: cute.Tensor,
        scratch: Scratch,
        batch: Batch | KeyBuffer,
        kv_heads: cutlass.Int32,
        inner: cutlass.Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            cpasync.prefetch_descriptor(k.atom)
        storage = SmemAllocator().allocate(self.storage)
        sQ, sK = (
            memory.get_tensor(layout.outer, swizzle=layout.inner)
            for memory, layout in zip((storage.sQ, storage.sK), self.layouts(), strict=True)
        )
        k_ring = self.make_ring(storage.barriers.data_ptr())
        cursor = long_tiles.cursor_of(batch, kv_heads, cta, ctas)
        if cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) == 0:
            if warp == 0:
                self.load(k, sK, k_ring, batch, cursor, kv_heads, mQ.shape[1] // kv_heads)
        else:
            pQ = storage.sQ.data_ptr()
            self.multiply(mQ, scratch, sQ, sK, pQ, k_ring, batch, cursor, kv_heads, inner)

    def make_ring(self, barriers: cute.Pointer) -> PipelineTmaAsync:
        """Make the ring of K, and publish its barriers to the CTA."""
        size = BLOCK * self.head_dim * self.dtype.width // 8
        alone = cute.make_layout((1, 1, 1))
        k_ring = pipeline.tma_ring(barriers, self.config.k_stages, size, 4, alone)
        pipeline.announce_barriers((1, 1))
        pipeline.await_barriers((1, 1))
        return k_ring

    @cute.jit
    def load(
        self,
        k: tma.Source,
        sK: cute.Tensor,
        k_ring: PipelineTmaAsync,
        batch: Batch | KeyBuffer,
        cursor: Cursor,
        kv_heads: cutlass.Int32,
        group: cutlass.Int32,
    ):
        """Load K of every block of a CTA; by a warp."""
        k_state = pipeline.producer_state(self.config.k_stages)
        while cursor.remaining > 0:
            segment = long_tiles.segment_of(batch, kv_heads, cursor)
            if segment.count > 0:
                tile = long_tiles.tile_of(batch, cursor.sequence, segment.query, group)
                end = segment.block + segment.count
                # Where the boxes of a few blocks lie, by lane: asked for so many ahead.
                boxes = long_tiles.boxes_of(batch, self.config, tile, segment.block)
                for first in cutlass.range(segment.block, end, AHEAD, unroll=1):
                    following = long_tiles.boxes_of(batch, self.config, tile, first + AHEAD)
                    for block in cutlass.range(cutlass.min(end - first, AHEAD), unroll=1):
                        k_ring.producer_acquire(k_state)
                        full = k_ring.producer_get_barrier(k_state)
                        # All of them first: each is a shuffle.
                        places = [
                            long_tiles.place(tile, boxes, block * self.boxes + n, self.config)
                            for n in range(self.boxes)
                        ]
                        for n, (page, row) in enumerate(places):
                            shape = self.config.keys_per_load, self.head_dim, 1
                            sBox = cute.local_tile(sK, shape, (n, 0, k_state.index))
                            matrix = k.matrix(segment.head, page)
                            paged_tiles.load_box(matrix, (row, 0), (None, 0), sBox, full)
                        k_state.advance()
                    boxes = following
            cursor = long_tiles.next_of(cursor, segment)

    @cute.jit
    def multiply(
        self,
        mQ: cute.Tensor,
        scratch: Scratch,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        pQ: cute.Pointer,
        k_ring: PipelineTmaAsync,
        batch: Batch | KeyBuffer,
        cursor: Cursor,
        kv_heads: cutlass.Int32,
        inner: cutlass.Float32,
    ):
        """Consumer warpgroup: the scores of every block of a CTA."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % mma.WARPGROUP
        warp = cute.arch.make_warp_uniform(lane // 32)
        group = mQ.shape[1] // kv_heads
        qk = self.tiles.qk_mma()
        slice_qk = qk.get_slice(0)
        tSrQ = qk.make_fragment_A(slice_qk.partition_A(sQ))
        tSrK = qk.make_fragment_B(slice_qk.partition_B(sK))
        shape = slice_qk.partition_shape_C((ROWS, BLOCK))
        tSrS = cute.make_rmem_tensor(shape, cutlass.Float32)
        k_state = pipeline.consumer_state(self.config.k_stages)
        while cursor.remaining > 0:
            segment = long_tiles.segment_of(batch, kv_heads, cursor)
            if segment.count > 0:
                tile = long_tiles.tile_of(batch, cursor.sequence, segment.query, group)
                # Products of the unit before have ended in every warp.
                paged_tiles.await_consumer()
                paged_tiles.load_q(mQ, pQ, tile, segment.head, lane, self.head_dim)
                unit = cutlass.Int64(tile.token) * kv_heads + segment.head
                end = segment.block + segment.count
                for block in cutlass.range(segment.block, end, unroll=1):
                    # S = Q Kᵀ
                    k_ring.consumer_wait(k_state)
                    mma.start(qk, tSrS, tSrQ, tSrK, 0, k_state.index)
                    warpgroup.wait_group(0)
                    k_ring.consumer_release(k_state)
                    k_state.advance()
                    if warp == 0:
                        self.keep(scratch, tSrS, tile, unit, block, lane, inner)
            cursor = long_tiles.next_of(cursor, segment)

    @cute.jit
    def keep(
        self,
        scratch: Scratch,
        tSrS: cute.Tensor,
        tile: Tile,
        unit: cutlass.Int64,
        block: cutlass.Int32,
        lane: cutlass.Int32,
        inner: cutlass.Float32,
    ):
        """Cap and mask the scores of a block, and store them with their maxima; by a warp."""
        # t = S or tanh(S scale / softcap), -inf where masked
        if cutlass.const_expr(self.config.softcap):
            softmax.cap(tSrS, inner)
        row, key = lane // 4, block * BLOCK
        bounds = paged_tiles.bounds_of(tile, row)
        paged_tiles.mask_scores(tSrS, bounds, key, lane)
        group = tile.group
        values = cute.make_rmem_tensor((long_tiles.VECTOR,), cutlass.Float32)
        for half in cutlass.range_constexpr(softmax.ROWS):
            top = softmax.block_max(tSrS, half)
            if row + 8 * half < group:
                for number in cutlass.range_constexpr(long_tiles.VECTORS):
                    for i in cutlass.range_constexpr(long_tiles.VECTOR):
                        values[i] = tSrS[4 * (2 * number + i // 2) + 2 * half + i % 2]
                    gScores = long_tiles.scores_vector(
                        scratch.mScores, unit, block, half, number, lane
                    )
                    gScores.store(values.load())
                if lane % 4 == 0:
                    copy.vector(scratch.mMaxima, (unit, row + 8 * half, block), 1)[0] = top


def build(config: PagedScoresConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    tokens, heads, pages, rows, kv_heads = (fake.size() for _ in range(5))
    return compile(
        PagedScoresSm90(config),
        paged_fakes.token_rows(config.dtype, tokens, heads, config.head_dim),
        fake.activations(config.dtype, pages, rows, kv_heads, config.head_dim),
        *paged_fakes.scratch(),
        *paged_fakes.lists(),
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Float32(0.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
