"""Attention of few queries with long contexts over paged caches for SM90: the second kernel.

    m' = max(m, M)      f = exp2(c (m - m'))      P = exp2(c (t - m'))
    l = l f + Σ P       O = O f + P V

for each block of 128 keys; then O / l.  t and M are those of ``kernel_paged_scores_sm90``.

Layouts      t and M: ``device/long_tiles``; V, O, LSE, lists and sinks as in ``kernel_paged_sm90``.
Order        the bits of ``kernel_paged_sm90``: blocks ascending, each a chain of k16 groups; m, f
             and l of a row's four lanes as there.  A column of O depends on no other, so a CTA has
             ``columns`` of them and P is made in each.
Overlap      four warps make P of four blocks at once: m of a block is the maximum of M until there,
             which needs no score.  Where f of the blocks after the first is exactly 1 in every row,
             rescaling would change no bit: P V of four blocks (two of 64 columns) is then one batch
             of WGMMA.  Which way a batch takes depends on the data; its bits do not.
Masks        in t.  V rows of a visited block that the query does not see are set to zero, and pages
             without keys that it sees are not read.
Tails        tokens of no sequence: O = 0, LSE = -inf.  Rows without keys: O = 0, LSE = -inf or
             the sink.
Roles        warps 0 to 3 multiply (P in registers: rows 0 to 15 are the first warp's, the others
             have zeros); warps 4 to 7 make P; warps 8 to 11 load V (``device/value_loads``).
Limits       SM90a only; bf16 and fp16; Dv in {64, 96, 128, 256}; at most 16 query heads a KV head.
Measured     docs/status.md, docs/notes/attention_sm90.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineState

from ..compile import fake
from ..dsl import copy, mma, pipeline, smem, softmax, tma
from ..dsl.ring import Slots
from ..dsl.smem import CHUNK
from .config import PagedValuesConfig
from .device import long_tiles, paged_fakes, paged_tiles
from .device.forward_tiles import ForwardTiles
from .device.key_buffer import KeyBuffer
from .device.paged_tiles import BLOCK, ROWS, WARP, Batch, Tile
from .device.probability_exchange import (
    BATCH,
    BLOCK_WORDS,
    STAGES,
    ZEROS,
    ProbabilityExchange,
    exponentiate,
)
from .device.value_loads import ValueLoads
from .device.values_state import READERS, Inputs, Results, Rows, Scratch, ValueRing

#: Registers of the warpgroups that multiply, weigh and load, of three times the 168 of the launch.
CONSUMER_REGISTERS, WEIGH_REGISTERS, PRODUCER_REGISTERS = 240, 184, 80
#: First of the warps that make P, and of those that load.
WEIGH_WARP, LOAD_WARP = 4, 8


class PagedValuesSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    results: type[Results] = Results

    def __init__(self, config: PagedValuesConfig):
        assert BLOCK % config.keys_per_load == 0 and config.value_dim % config.columns == 0
        self.config, self.columns = config, config.columns
        self.dtype = fake.DTYPES[config.dtype]
        self.loads = ValueLoads(config, self.dtype)
        # Of ``kernel_paged_sm90``, with fewer columns: its product P V.
        self.tiles = ForwardTiles(self.dtype, self.columns, self.columns, 1, 1, 1, False)
        #: A lane's scores of a block: 8 vectors of a row, and 8 of the row 8 below.
        self.slots = Slots((16,) * 2 * long_tiles.VECTORS)

    def v_layout(self) -> cute.ComposedLayout:
        """Return the layout of the stages of V, four blocks each."""
        blocks = self.config.v_stages * BATCH
        return smem.operand_layout(self.dtype, self.columns, BLOCK, "mn", blocks)

    @cute.jit
    def __call__(
        self,
        mV: cute.Tensor,
        mScores: cute.Tensor,
        mMaxima: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        mTable: cute.Tensor,
        mLengths: cute.Tensor,
        mStarts: cute.Tensor,
        mSinks: cute.Tensor,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        c: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        batch = Batch(mTable, mLengths, mStarts, lo, hi, mV.shape[1])
        self.launch(mV, mScores, mMaxima, Rows(mO, mLse, mSinks), batch, c, stream)

    def launch(
        self,
        mV: cute.Tensor,
        mScores: cute.Tensor,
        mMaxima: cute.Tensor,
        rows: Rows,
        batch: Batch | KeyBuffer,
        c: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel over V [pages, rows, Hkv, Dv]."""
        # [D, rows, H, pages]: keys are the reduction dimension.
        box, columns, v = self.config.keys_per_load, self.columns, None
        if cutlass.const_expr(self.config.by_tma):
            v_layout = smem.operand_layout(self.dtype, columns, box, "mn", 1)
            v = tma.load(tma.view(mV, [3, 1, 2, 0]), v_layout, (columns, box), 1)
        self.storage = self.shared_storage()
        self.kernel(v, mV, mScores, mMaxima, rows, batch, c).launch(
            # Columns first: those of a row are neighbours in memory.
            grid=(self.config.value_dim // columns, mV.shape[2], rows.mO.shape[0]),
            block=(3 * mma.WARPGROUP, 1, 1),
            min_blocks_per_mp=1,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    def shared_storage(self) -> type:
        """Return the struct of a CTA's shared memory."""
        v_size = cute.cosize(self.v_layout())
        slots = STAGES * BATCH
        scores_size = BATCH * self.config.score_stages * self.slots.size
        by_lane = 2 * WARP

        @cute.struct
        class Storage:
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.config.v_stages]
            p_barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            changed: cute.struct.MemRange[cutlass.Int32, slots]
            maximum: cute.struct.MemRange[cutlass.Float32, by_lane]
            factor: cute.struct.MemRange[cutlass.Float32, slots * by_lane]
            sum: cute.struct.MemRange[cutlass.Float32, slots * by_lane]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, v_size], smem.ALIGN]
            sP: cute.struct.Align[
                cute.struct.MemRange[cutlass.Int32, (slots + 1) * BLOCK_WORDS],
                CHUNK,
            ]
            sScores: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, scores_size], CHUNK]

        return Storage

    @cute.kernel
    def kernel(
        self,
        v: tma.Source | None,
        mV: cute.Tensor,
        mScores: cute.Tensor,
        mMaxima: cute.Tensor,
        rows: Rows,
        batch: Batch | KeyBuffer,
        c: cutlass.Float32,
    ):
        mO, mSinks = rows.mO, rows.mSinks
        tidx, _, _ = cute.arch.thread_idx()
        part, head, token = cute.arch.block_idx()
        _, kv_heads, _ = cute.arch.grid_dim()
        group = mO.shape[1] // kv_heads
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.config.by_tma):
            if warp == 0:
                cpasync.prefetch_descriptor(v.atom)
        storage = SmemAllocator().allocate(self.storage)
        v_layout = self.v_layout()
        sV = storage.sV.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        p_barriers, v_barriers = storage.p_barriers.data_ptr(), storage.v_barriers.data_ptr()
        by_lane = cute.make_layout((WARP, 2, STAGES * BATCH))
        handover = ProbabilityExchange(
            *(p_barriers, p_barriers + STAGES, storage.sP.data_ptr()),
            *(storage.factor.get_tensor(by_lane), storage.sum.get_tensor(by_lane)),
            storage.changed.get_tensor(cute.make_layout(STAGES * BATCH)),
            storage.maximum.get_tensor(cute.make_layout((WARP, 2))),
        )
        v_ring = ValueRing(v_barriers, v_barriers + self.config.v_stages)
        if tidx == 0:
            handover.init(STAGES, BATCH, BATCH)
            v_ring.init(self.config.v_stages, self.loads.warps, READERS)
        if warp == 0:
            handover.fill_zeros(cute.arch.lane_idx())
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        results = self.results(mO, rows.mLse, part * self.columns)
        # Each role finds its tile: held through branches, it would take registers.
        if cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) == 0:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            tile = long_tiles.tile_of_token(batch, token, group)
            if tile.rows > 0:
                inputs, pV = Inputs(mSinks, tile, head, c), storage.sV.data_ptr()
                self.multiply(results, inputs, sV, pV, v_ring, handover)
            else:
                self.clear(results, token, head, group, tidx % mma.WARPGROUP)
        elif warp >= LOAD_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp < LOAD_WARP + self.loads.warps:
                tile = long_tiles.tile_of_token(batch, token, group)
                if tile.rows > 0:
                    operands = v_ring, batch, tile, head
                    if cutlass.const_expr(self.config.by_tma):
                        self.loads.by_tma(v, sV, *operands, part)
                    else:
                        pV, column = storage.sV.data_ptr(), part * self.columns
                        self.loads.by_copies(mV, pV, *operands, column, warp - LOAD_WARP)
        else:
            cute.arch.setmaxregister_increase(WEIGH_REGISTERS)
            tile = long_tiles.tile_of_token(batch, token, group)
            if tile.rows > 0:
                unit = cutlass.Int64(token) * kv_heads + head
                scratch, pScores = Scratch(mScores, mMaxima, unit), storage.sScores.data_ptr()
                inputs = Inputs(mSinks, tile, head, c)
                self.weigh(scratch, handover, inputs, pScores, warp - WEIGH_WARP)

    @cute.jit
    def weigh(
        self,
        scratch: Scratch,
        handover: ProbabilityExchange,
        inputs: Inputs,
        pScores: cute.Pointer,
        warp: cutlass.Int32,
    ):
        """Make P of every fourth block; by a warp."""
        tile, c, lane = inputs.tile, inputs.c, cute.arch.lane_idx()
        row, group, stages = lane // 4, tile.group, self.config.score_stages
        row_max, unused, near = (
            cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32) for _ in range(3)
        )
        softmax.start(row_max, unused)
        sinks = inputs.mSinks, tile, inputs.head, row, lane, c
        paged_tiles.start_at_sinks(row_max, unused, *sinks)
        scores = cute.make_rmem_tensor((2, 4 * long_tiles.VECTORS), cutlass.Float32)
        rounded = cute.make_rmem_tensor((4 * long_tiles.VECTORS,), self.dtype)
        # Rows beyond 7, where there are none, stay zeros.
        pairs = cute.make_rmem_tensor((2, 2 * long_tiles.VECTORS), cutlass.Int32)
        pairs.fill(0)
        ring = pScores + warp * stages * self.slots.size
        stage = cutlass.Int32(0)
        for step in cutlass.range_constexpr(stages):
            self.fetch(scratch, tile, tile.first_block + warp + BATCH * step, ring, step, lane)
        self.load_maxima(scratch, tile, tile.first_block + warp, near, lane)
        p_state = pipeline.producer_state(STAGES)
        for first in cutlass.range(tile.first_block, tile.end_block, BATCH, unroll=1):
            block = first + warp
            # m of the block before, and m' = max(m, M); both -inf where nothing is allowed so far.
            before, after = self.maxima(row_max, near, lane)
            self.load_maxima(scratch, tile, block + BATCH, near, lane)
            cute.arch.cp_async_wait_group(stages - 1)
            for half in cutlass.range_constexpr(softmax.ROWS):
                if long_tiles.HALF * half < group:
                    self.read(ring + stage * self.slots.size, scores[half, None], half)
            # The stage is free: each lane has read what it copied.
            self.fetch(scratch, tile, block + BATCH * stages, ring, stage, lane)
            slot = p_state.index * BATCH + warp
            changed = cutlass.Boolean(False)
            row_sum, factor = (
                cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32) for _ in range(2)
            )
            for half in cutlass.range_constexpr(softmax.ROWS):
                if long_tiles.HALF * half < group:
                    base = after[half]
                    base = base if base != -cutlass.Float32.inf else cutlass.Float32(0.0)
                    factor[half] = cute.math.exp2((before[half] - base) * c, fastmath=True)
                    # P = exp2(c (t - m'))
                    row_sum[half] = exponentiate(scores[half, None], -(base * c), c)
                    softmax.round_pairs(scores[half, None], rounded)
                    pairs[half, None].store(cute.recast_tensor(rounded, cutlass.Int32).load())
                    is_row = row + long_tiles.HALF * half < group
                    changed = changed | (is_row & (factor[half] != 1.0))
            any_changed = cute.arch.vote_any_sync(changed)
            handover.await_empty(p_state)
            handover.give(pairs, slot, lane)
            for half in cutlass.range_constexpr(softmax.ROWS):
                if long_tiles.HALF * half < group:
                    handover.sSum[lane, half, slot] = row_sum[half]
                    handover.sFactor[lane, half, slot] = factor[half]
                    if block == tile.end_block - 1:
                        handover.sMax[lane, half] = after[half]
            if lane == 0:
                handover.sChanged[slot] = cutlass.Int32(any_changed)
            handover.publish(p_state)
            p_state.advance()
            stage = stage + 1
            stage = cutlass.Int32(0) if stage == stages else stage
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def fetch(
        self,
        scratch: Scratch,
        tile: Tile,
        block: cutlass.Int32,
        ring: cute.Pointer,
        stage: cutlass.Int32,
        lane: cutlass.Int32,
    ):
        """Copy a lane's scores of a block to a stage of its warp, asynchronously."""
        target, group = ring + stage * self.slots.size, tile.group
        if block < tile.end_block:
            for half in cutlass.range_constexpr(softmax.ROWS):
                # Lanes without a row keep what they have, which nothing reads.
                if lane // 4 + long_tiles.HALF * half < group:
                    for number in cutlass.range_constexpr(long_tiles.VECTORS):
                        gScores = long_tiles.scores_vector(
                            *(scratch.mScores, scratch.unit, block, half, number, lane),
                        )
                        self.slots.fetch(target, half * long_tiles.VECTORS + number, gScores)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def read(self, stage: cute.Pointer, scores: cute.Tensor, half: cutlass.Constexpr):
        """Load a lane's scores of one half of a block: 2 i + side."""
        values = cute.make_rmem_tensor((4,), cutlass.Float32)
        for number in cutlass.range_constexpr(long_tiles.VECTORS):
            self.slots.read(stage, half * long_tiles.VECTORS + number, values)
            for i in cutlass.range_constexpr(4):
                scores[4 * number + i] = values[i]

    @cute.jit
    def load_maxima(
        self,
        scratch: Scratch,
        tile: Tile,
        block: cutlass.Int32,
        near: cute.Tensor,
        lane: cutlass.Int32,
    ):
        """Load M of blocks ``block`` - 3 to ``block``: one in each lane of a row."""
        index, row = block - (BATCH - 1) + lane % 4, lane // 4
        inside = (index >= tile.first_block) & (index < tile.end_block)
        for half in cutlass.range_constexpr(softmax.ROWS):
            near[half] = -cutlass.Float32.inf
            if inside & (row + long_tiles.HALF * half < tile.group):
                coord = scratch.unit, row + long_tiles.HALF * half, index
                near[half] = copy.vector(scratch.mMaxima, coord, 1)[0]

    @cute.jit
    def maxima(self, row_max: cute.Tensor, near: cute.Tensor, lane: cutlass.Int32):
        """Return the maxima before and behind a block, and keep the latter; ``row_max``: 4 ago."""
        before, after = (cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32) for _ in range(2))
        for half in cutlass.range_constexpr(softmax.ROWS):
            earlier = near[half] if lane % 4 < BATCH - 1 else -cutlass.Float32.inf
            earlier = cute.arch.warp_reduction_max(earlier, threads_in_group=softmax.QUAD)
            before[half] = cute.arch.fmax(row_max[half], earlier)
            latest = cute.arch.shuffle_sync(near[half], lane | (BATCH - 1))
            after[half] = cute.arch.fmax(before[half], latest)
            row_max[half] = after[half]
        return before, after

    @cute.jit
    def multiply(
        self,
        results: Results,
        inputs: Inputs,
        sV: cute.Tensor,
        pV: cute.Pointer,
        v_ring: ValueRing,
        handover: ProbabilityExchange,
    ):
        """Consumer warpgroup: the chain over all blocks, and its end."""
        tile, c, group = inputs.tile, inputs.c, inputs.tile.group
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        pv = self.tiles.pv_mma()
        slice_pv = pv.get_slice(0)
        tOrV = pv.make_fragment_B(slice_pv.partition_B(sV))
        tOrP = [
            pv.make_fragment_A(slice_pv.partition_shape_A((ROWS, BLOCK)))
            for _ in range(self.config.merged)
        ]
        tOrO = cute.make_rmem_tensor(
            slice_pv.partition_shape_C((ROWS, self.columns)), cutlass.Float32
        )
        row_sum, row_max, factor = (
            cute.make_rmem_tensor((softmax.ROWS,), cutlass.Float32) for _ in range(3)
        )
        softmax.start(row_max, row_sum)
        sinks = inputs.mSinks, tile, inputs.head, lane // 4, lane, c
        paged_tiles.start_at_sinks(row_max, row_sum, *sinks)
        factor.fill(1.0)
        tOrO.fill(0.0)
        has_rows = warp == 0
        p_state = pipeline.consumer_state(STAGES)
        v_state = pipeline.consumer_state(self.config.v_stages)
        for first in cutlass.range(tile.first_block, tile.end_block, BATCH, unroll=1):
            handover.await_full(p_state)
            v_ring.await_full(v_state)
            slot, stage = p_state.index * BATCH, v_state.index * BATCH
            if self.is_plain(handover, tile, first, slot):
                for start in cutlass.range_constexpr(0, BATCH, self.config.merged):
                    for n in cutlass.range_constexpr(self.config.merged):
                        # P of a block is taken while the block before is multiplied.
                        at = slot + start + n if has_rows else cutlass.Int32(ZEROS)
                        handover.take(tOrP[n], at, lane if has_rows else cutlass.Int32(0))
                        handover.add(row_sum, factor, slot + start + n, group, lane)
                        if cutlass.const_expr(n == 0):
                            # O *= f of the first block; O += P V of all
                            softmax.rescale(tOrO, factor)
                        self.add_values(tOrO, tOrP[n], tOrV, stage + start + n)
                    warpgroup.wait_group(0)
            else:
                blocks = cutlass.min(tile.end_block - first, BATCH)
                for n in cutlass.range(blocks, unroll=1):
                    at = slot + n if has_rows else cutlass.Int32(ZEROS)
                    handover.take(tOrP[0], at, lane if has_rows else cutlass.Int32(0))
                    handover.add(row_sum, factor, slot + n, group, lane)
                    # O *= f; O += P V
                    softmax.rescale(tOrO, factor)
                    key = (first + n) * BLOCK
                    if key < tile.first_key or key + BLOCK > tile.end_key:
                        pBlock = pV + (stage + n) * BLOCK * self.columns
                        keys = tile.first_key - key, tile.end_key - key
                        paged_tiles.clean(pBlock, *keys, tidx, self.dtype, self.columns)
                    self.add_values(tOrO, tOrP[0], tOrV, stage + n)
                    warpgroup.wait_group(0)
            self.give_back(handover, p_state, v_ring, v_state)
            p_state.advance()
            v_state.advance()
        if warp == 0:
            if tile.end_block > tile.first_block:
                for half in cutlass.range_constexpr(softmax.ROWS):
                    if long_tiles.HALF * half < group:
                        row_max[half] = handover.sMax[lane, half]
            # O = acc / l; LSE = ln l + ln 2 c m
            softmax.finish(row_sum)
            rows = tile, inputs.head, group, lane // 4
            results.store(tOrO, row_max, row_sum, *rows, lane, c)

    def give_back(
        self,
        handover: ProbabilityExchange,
        p_state: PipelineState,
        v_ring: ValueRing,
        v_state: PipelineState,
    ):
        """Give the stages of P and V of a batch back."""
        handover.release(p_state)
        v_ring.release(v_state)

    @cute.jit
    def add_values(
        self, tOrO: cute.Tensor, rP: cute.Tensor, tOrV: cute.Tensor, stage: cutlass.Int32
    ):
        """Issue O += P V of one block."""
        mma.extend(self.tiles.pv_mma(), tOrO, rP, tOrV, stage)

    @cute.jit
    def is_plain(
        self, handover: ProbabilityExchange, tile: Tile, first: cutlass.Int32, slot: cutlass.Int32
    ):
        """Return whether a batch is whole, all seen, and rescaled where products begin alone."""
        key = first * BLOCK
        whole = (key >= tile.first_key) & (key + BATCH * BLOCK <= tile.end_key)
        changed = cutlass.Int32(0)
        for block in cutlass.range_constexpr(BATCH):
            if cutlass.const_expr(block % self.config.merged > 0):
                changed = changed | handover.sChanged[slot + block]
        return cute.arch.make_warp_uniform(cutlass.Int32(whole & (changed == 0))) != 0

    @cute.jit
    def clear(
        self,
        results: Results,
        token: cutlass.Int32,
        head: cutlass.Int32,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Write O = 0 and LSE = -inf of a token of no sequence; by the consumer."""
        elements = CHUNK * 8 // self.dtype.width
        zeros = cute.make_rmem_tensor((elements,), self.dtype)
        zeros.fill(0.0)
        parts = self.columns // elements
        for number in cutlass.range(thread, group * parts, mma.WARPGROUP, unroll=1):
            q_head = cutlass.Int64(head) * group + number // parts
            column = results.column + number % parts * elements
            copy.vector(results.mO, (token, q_head, column), elements).store(zeros.load())
            if column == 0:
                coord = results.lse_coord(token, q_head)
                copy.vector(results.mLse, coord, 1)[0] = -cutlass.Float32.inf


def build(config: PagedValuesConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    tokens, heads, pages, rows, kv_heads = (fake.size() for _ in range(5))
    return compile(
        PagedValuesSm90(config),
        fake.activations(config.dtype, pages, rows, kv_heads, config.value_dim),
        *paged_fakes.scratch(),
        paged_fakes.token_rows(config.dtype, tokens, heads, config.value_dim),
        paged_fakes.lse(heads, tokens),
        *paged_fakes.lists(),
        fake.compact(cutlass.Float32, (heads,)),
        cutlass.Int32(0),
        cutlass.Int32(0),
        cutlass.Float32(1.0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
