"""Attention forward over paged caches for SM90: one CTA walks all keys of up to 64 query rows.

    S = Q Kᵀ      t = S, c = scale log2 e      P = exp2(c (t - max t))      O = Σ P V / Σ P

With a softcap t = tanh(S scale / softcap), c = softcap log2 e.

Layouts      Q [T, Hq, D]; O likewise with Dv columns; LSE fp32 [Hq, T], natural log.  K and V
             [pages, rows, Hkv, D or Dv]; last dimension contiguous, other strides multiples of
             16 bytes.  Key j of sequence n is row j mod rows of page mTable[n, j / rows]; its
             queries are tokens mStarts[n] to mStarts[n + 1], the last of its mLengths[n] keys.
Order        that of ``kernel_fwd_sm90``, and its bits: one chain over blocks of 128 keys at
             absolute positions, ascending.
Tiles        64 rows: the query heads of a KV head of consecutive tokens of a sequence, token by
             token (packed GQA).  ``device/paged_tiles`` says which a CTA has: no prefix sum is
             taken, and no length is read by the host.
Masks        by selection.  V rows of a visited block that no row of the tile may see are set to
             zero, and pages without such keys are not read: what they hold reaches nothing.
Tails        tokens of no sequence: O = 0, LSE = -inf.  Rows without keys: O = 0, LSE = -inf or
             the sink.
Roles        warp 0 loads K and V, box by box of a page, into rings; warpgroup 1 multiplies.  Two
             CTAs an SM up to D = 128, so that one loads while the other multiplies.
Limits       SM90a only; bf16 and fp16; D = Dv in {64, 96, 128, 256}, and D = 192 with Dv = 128;
             lengths below 2^30.
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
from ..dsl import mma, pipeline, smem, softmax, tma
from .config import VALUE_DIMS, PagedConfig
from .device import paged_fakes, paged_tiles
from .device.forward_tiles import ForwardTiles
from .device.paged_tiles import BLOCK, ROWS, Batch, Tile
from .device.values_state import Results, Rows

#: Registers of each role, of twice the 128 of the launch, where two CTAs share an SM.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 216


@dataclass(frozen=True)
class Buffers:
    """Shared memory of a CTA, and the rings of K and V; pQ, pV: first elements of Q and of V."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    pQ: cute.Pointer
    pV: cute.Pointer
    k_ring: PipelineTmaAsync
    v_ring: PipelineTmaAsync


class PagedSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: PagedConfig):
        assert BLOCK % config.keys_per_load == 0
        self.config = config
        self.head_dim, self.value_dim = config.head_dim, VALUE_DIMS[config.head_dim]
        self.dtype = fake.DTYPES[config.dtype]
        self.boxes = BLOCK // config.keys_per_load
        # Of the dense forward, for one consumer: its products are those here.
        dims = self.head_dim, self.value_dim
        self.tiles = ForwardTiles(self.dtype, *dims, 1, config.k_stages, 1, False)

    def layouts(self) -> tuple[cute.ComposedLayout, ...]:
        """Return the layouts of Q, and of the stages of K and V."""
        return (
            smem.operand_layout(self.dtype, ROWS, self.head_dim, "k", 1),
            smem.operand_layout(self.dtype, BLOCK, self.head_dim, "k", self.config.k_stages),
            smem.operand_layout(self.dtype, self.value_dim, BLOCK, "mn", self.config.v_stages),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        mTable: cute.Tensor,
        mLengths: cute.Tensor,
        mStarts: cute.Tensor,
        mSinks: cute.Tensor,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
        tiles: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        # [rows, D, H, pages], and [D, rows, H, pages] for V: its keys are the reduction dimension.
        box = self.config.keys_per_load
        k_layout = smem.operand_layout(self.dtype, box, self.head_dim, "k", 1)
        v_layout = smem.operand_layout(self.dtype, self.value_dim, box, "mn", 1)
        k = tma.load(tma.view(mK, [1, 3, 2, 0]), k_layout, (box, self.head_dim), 1)
        v = tma.load(tma.view(mV, [3, 1, 2, 0]), v_layout, (self.value_dim, box), 1)
        self.storage = self.shared_storage()
        batch = Batch(mTable, mLengths, mStarts, lo, hi, mK.shape[1])
        self.kernel(k, v, mQ, Rows(mO, mLse, mSinks), batch, c, inner).launch(
            # Heads first: those of a token are neighbours in a page.
            grid=paged_tiles.grid(mK.shape[2], tiles),
            block=(2 * mma.WARPGROUP, 1, 1),
            min_blocks_per_mp=self.config.ctas_per_sm,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    def shared_storage(self) -> type:
        """Return the struct of a CTA's shared memory."""
        sizes = [cute.cosize(layout) for layout in self.layouts()]
        stages = 2 * (self.config.k_stages + self.config.v_stages)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, stages]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[0]], smem.ALIGN]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[1]], smem.ALIGN]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[2]], smem.ALIGN]

        return Storage

    @cute.kernel
    def kernel(
        self,
        k: tma.Source,
        v: tma.Source,
        mQ: cute.Tensor,
        rows: Rows,
        batch: Batch,
        c: cutlass.Float32,
        inner: cutlass.Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        head, index = paged_tiles.coord()
        kv_heads, _, _ = cute.arch.grid_dim()
        tokens, group = mQ.shape[0], mQ.shape[1] // kv_heads
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for source in (k, v):
                cpasync.prefetch_descriptor(source.atom)
        storage = SmemAllocator().allocate(self.storage)
        sQ, sK, sV = (
            memory.get_tensor(layout.outer, swizzle=layout.inner)
            for memory, layout in zip(
                (storage.sQ, storage.sK, storage.sV), self.layouts(), strict=True
            )
        )
        pQ, pV = storage.sQ.data_ptr(), storage.sV.data_ptr()
        buffers = Buffers(sQ, sK, sV, pQ, pV, *self.make_rings(storage.barriers.data_ptr()))
        is_shared = self.config.ctas_per_sm == 2
        if cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) == 0:
            if cutlass.const_expr(is_shared):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                tile = paged_tiles.tile_of(batch, index, tokens, group)
                if tile.rows > 0:
                    self.load(k, v, buffers, batch, tile, head)
        else:
            if cutlass.const_expr(is_shared):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            tile = paged_tiles.tile_of(batch, index, tokens, group)
            paged_tiles.clear(batch, rows.mO, rows.mLse, index, head, group, tidx % mma.WARPGROUP)
            if tile.rows > 0:
                self.multiply(mQ, rows, buffers, tile, head, c, inner)

    def make_rings(self, barriers: cute.Pointer) -> tuple[PipelineTmaAsync, PipelineTmaAsync]:
        """Make the rings of K and V, and publish their barriers to the CTA."""
        alone = cute.make_layout((1, 1, 1))
        stages, item = (self.config.k_stages, self.config.v_stages), self.dtype.width // 8
        sizes = BLOCK * self.head_dim * item, BLOCK * self.value_dim * item
        k_ring = pipeline.tma_ring(barriers, stages[0], sizes[0], 4, alone)
        v_ring = pipeline.tma_ring(barriers + 2 * stages[0], stages[1], sizes[1], 4, alone)
        pipeline.announce_barriers((1, 1))
        pipeline.await_barriers((1, 1))
        return k_ring, v_ring

    @cute.jit
    def load(
        self,
        k: tma.Source,
        v: tma.Source,
        buffers: Buffers,
        batch: Batch,
        tile: Tile,
        head: cutlass.Int32,
    ):
        """Load K and V of every block of a tile, K one block ahead; by a warp."""
        sK, sV, k_ring, v_ring = buffers.sK, buffers.sV, buffers.k_ring, buffers.v_ring
        k_state = pipeline.producer_state(self.config.k_stages)
        v_state = pipeline.producer_state(self.config.v_stages)
        pages = paged_tiles.pages_of(batch, self.config, tile, tile.first_block)
        for block in cutlass.range(tile.first_block, tile.end_block, unroll=1):
            k_ring.producer_acquire(k_state)
            full = k_ring.producer_get_barrier(k_state)
            for n in cutlass.range_constexpr(self.boxes):
                page, row = paged_tiles.place(pages, n, self.config)
                shape = self.config.keys_per_load, self.head_dim, 1
                sBox = cute.local_tile(sK, shape, (n, 0, k_state.index))
                paged_tiles.load_box(k.matrix(head, page), (row, 0), (None, 0), sBox, full)
            k_state.advance()
            v_ring.producer_acquire(v_state)
            full = v_ring.producer_get_barrier(v_state)
            for n in cutlass.range_constexpr(self.boxes):
                page, row = paged_tiles.place(pages, n, self.config)
                shape = self.value_dim, self.config.keys_per_load, 1
                sBox = cute.local_tile(sV, shape, (0, n, v_state.index))
                paged_tiles.load_box(v.matrix(head, page), (0, row), (0, None), sBox, full)
            v_state.advance()
            pages = paged_tiles.pages_of(batch, self.config, tile, block + 1)

    @cute.jit
    def multiply(
        self,
        mQ: cute.Tensor,
        rows: Rows,
        buffers: Buffers,
        tile: Tile,
        head: cutlass.Int32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
    ):
        """Consumer warpgroup: the chain over all blocks, and its end."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % mma.WARPGROUP
        k_ring, v_ring, pV = buffers.k_ring, buffers.v_ring, buffers.pV
        paged_tiles.load_q(mQ, buffers.pQ, tile, head, lane, self.head_dim)
        qk, pv = self.tiles.qk_mma(), self.tiles.pv_mma()
        slice_qk, slice_pv = qk.get_slice(0), pv.get_slice(0)
        tSrQ = qk.make_fragment_A(slice_qk.partition_A(buffers.sQ))
        tSrK = qk.make_fragment_B(slice_qk.partition_B(buffers.sK))
        tOrV = pv.make_fragment_B(slice_pv.partition_B(buffers.sV))
        tOrP = pv.make_fragment_A(slice_pv.partition_shape_A((ROWS, BLOCK)))
        scores_shape = slice_qk.partition_shape_C((ROWS, BLOCK))
        tSrS = cute.make_rmem_tensor(scores_shape, cutlass.Float32)
        tOrO = cute.make_rmem_tensor(
            slice_pv.partition_shape_C((ROWS, self.value_dim)), cutlass.Float32
        )
        row_sum, row_max, factor, shift = (
            cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32) for _ in range(4)
        )
        # This thread's first row (``softmax``); the second is 8 below.
        row = lane // 32 * 16 + lane % 32 // 4
        bounds = paged_tiles.bounds_of(tile, row)
        softmax.start(row_max, row_sum)
        paged_tiles.start_at_sinks(row_max, row_sum, rows.mSinks, tile, head, row, lane, c)
        tOrO.fill(0.0)
        k_state = pipeline.consumer_state(self.config.k_stages)
        v_state = pipeline.consumer_state(self.config.v_stages)
        for block in cutlass.range(tile.first_block, tile.end_block, unroll=1):
            # S = Q Kᵀ
            k_ring.consumer_wait(k_state)
            mma.start(qk, tSrS, tSrQ, tSrK, 0, k_state.index)
            warpgroup.wait_group(0)
            k_ring.consumer_release(k_state)
            k_state.advance()
            # t = S or tanh(S scale / softcap), -inf where masked; m' = max(m, max t)
            if cutlass.const_expr(self.config.softcap):
                softmax.cap(tSrS, inner)
            key = block * BLOCK
            paged_tiles.mask_scores(tSrS, bounds, key, lane)
            softmax.raise_max(tSrS, row_max, factor, shift, c)
            # P = exp2(c (t - m')); l = l factor + Σ P; O *= factor
            softmax.exponentiate(tSrS, row_sum, factor, shift, c)
            softmax.rescale(tOrO, factor)
            softmax.round_pairs(tSrS, cute.make_tensor(tOrP.iterator, tSrS.layout))
            # O += P V
            v_ring.consumer_wait(v_state)
            if key < tile.first_key or key + BLOCK > tile.end_key:
                stage = pV + v_state.index * BLOCK * self.value_dim
                keys = tile.first_key - key, tile.end_key - key
                paged_tiles.clean(stage, *keys, lane, self.dtype, self.value_dim)
            mma.extend(pv, tOrO, tOrP, tOrV, v_state.index)
            warpgroup.wait_group(0)
            v_ring.consumer_release(v_state)
            v_state.advance()
        # O = acc / l; LSE = ln l + ln 2 c m
        softmax.finish(row_sum)
        results = Results(rows.mO, rows.mLse, 0)
        results.store(tOrO, row_max, row_sum, tile, head, tile.rows, row, lane, c)


def build(config: PagedConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    tokens, heads, pages, rows, kv_heads = (fake.size() for _ in range(5))
    width, value_dim = config.head_dim, VALUE_DIMS[config.head_dim]

    return compile(
        PagedSm90(config),
        paged_fakes.token_rows(config.dtype, tokens, heads, width),
        fake.activations(config.dtype, pages, rows, kv_heads, width),
        fake.activations(config.dtype, pages, rows, kv_heads, value_dim),
        paged_fakes.token_rows(config.dtype, tokens, heads, value_dim),
        paged_fakes.lse(heads, tokens),
        *paged_fakes.lists(),
        fake.compact(cutlass.Float32, (heads,)),
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Float32(1.0),
        cutlass.Float32(0.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
