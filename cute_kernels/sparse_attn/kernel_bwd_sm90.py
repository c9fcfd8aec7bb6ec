"""Attention backward for SM90: dK, dV and the fp32 dQ in one pass, in the order of a schedule.

For each ticket (KV head, block of 128 keys) and each tile of query rows on its list:

    S = Q Kᵀ      P = exp2(S c - lse2), c = scale log2 e, 0 where masked      dP = dO Vᵀ
    dS = P (dP - delta)     dV += round(P)ᵀ dO     dK += round(dS)ᵀ Q     dQ += round(dS) K

With a softcap, P = exp2(t c - lse2) with t = tanh(S scale / softcap) and c = softcap log2 e, and dS
has the factor 1 - t².

Layouts      Q, dO [B, Sq, Hq, D]; K, V, dK, dV [B, Sk, Hkv, D]; last dimension contiguous, other
             strides multiples of 16 bytes.  lse2, delta fp32 [B, Hq, Mt, tile_m] and dq fp32
             [B, Hq, Mt, tile_m * D] as the kernel before this one leaves them; a tile of dq as in
             ``dq_layout``.
Order        dK, dV: one fp32 accumulator per element over the group's query heads ascending; in a
             head over the list's entries in visiting order; in an entry its rows ascending in k16
             groups; dK times ``scale``; one rounding.  dQ: each visit's product is a chain over 128
             keys from zero, ascending in k16 groups; products are added to 0 by rank (``ordered``).
             With ``first_stores`` that of rank 0 plus 0 is stored, and tiles that no visit has are
             not written.
Turns        dsl/turnstile.py, one semaphore per tile of rows.  Only tiles that begin inside Sq are
             visited, awaited and released.
Tickets      from an atomic counter; the next one when the turn of every dQ tile of this one has
             come.  What a CTA still has to do then waits for nobody, so that no ticket is held by
             one that waits for another.
Tails        keys beyond Sk are masked in the last block, and stored outputs clipped by TMA; query
             rows beyond Sq have lse2 = +inf, so P = 0.
Varlen       (``packed``) sequences are read and written in place, as ``device/varlen`` says; lse2,
             delta, dq and semaphores by rows as counted there.  Visits and ranks follow from a
             ticket.
Roles        warpgroup 0: warp 0 loads, one thread each of warps 1 and 2 adds the dQ tiles of one
             buffer, one thread of warp 3 takes tickets; warpgroups 1 and 2: 64 keys of the block
             each, and half of every dQ tile.
Limits       SM90a only; bf16 and fp16; D 64, 96 and 128; lengths below 2^30; the query heads of
             a group share their lists.
Measured     on an H200: docs/status.md, docs/notes/attention_sm90.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineState

from ..compile import fake
from ..dsl import mma, pipeline, softmax, tma, turnstile
from ..schedulers.tiles import ticket_device
from .config import VALUE_DIMS, BackwardConfig
from .device import key_mask, slope, varlen, walk
from .device.backward_loads import Loads
from .device.backward_state import (
    Barriers,
    Cta,
    Scalars,
    SharedStorage,
    Sources,
    Staging,
    Tensors,
)
from .device.backward_tiles import WARPGROUPS as CONSUMERS
from .device.backward_tiles import BackwardTiles, dq_layout
from .device.block_union import BLOCK
from .device.key_mask import ScoreCoord
from .masks import FORMS

CONSUMER_THREADS = CONSUMERS * mma.WARPGROUP
CONSUMER_WARPS = CONSUMER_THREADS // 32
THREADS = CONSUMER_THREADS + mma.WARPGROUP
#: The warp that takes tickets; those between it and the first add dQ.
LAST_PRODUCER = mma.WARPGROUP // 32 - 1
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240
#: Named barrier 0 is the CTA's; the consumers meet at 1.
CONSUMER_BARRIER = 1


class BackwardSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: BackwardConfig):
        assert config.head_dim in (64, 96, 128) and config.keys == BLOCK
        assert config.tile_m in (64, BLOCK), "a dQ tile is whole products of both warpgroups"
        assert BLOCK // config.tile_m <= config.dq_stages, "a buffer for each tile of an entry"
        assert not (config.dp_first and config.tile_m > 64), "ptxas would serialise the products"
        self.set_up(config)

    def set_up(self, config: BackwardConfig):
        """Set the constants that all kernels of this family have."""
        assert config.form in FORMS
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.tile_m, self.head_dim = config.tile_m, config.head_dim
        self.tiles = BackwardTiles.of(config, self.dtype)
        self.loads = Loads(config, self.tiles)
        self.packed, self.dq_size = config.packed, self.tiles.dq_size
        # Single mbarriers.
        self.singles = 5 + config.packed
        # Threads that add dQ, pairs of mbarriers of what they add, and warps that write one.
        self.adders, self.dq_writers = config.dq_stages, CONSUMER_WARPS
        # Whether each consumer has code of its own, in which its operands' addresses are constants.
        # In code that both share, ptxas computes them in every thread at D = 128.
        self.specialised = config.head_dim >= 128
        self.parts = config.parts

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLse2: cute.Tensor,
        mDelta: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mSemaphore: cute.Tensor,
        mCounter: cute.Tensor,
        mTicket: cute.Tensor,
        mEntry: cute.Tensor | None,
        mRank: cute.Tensor | None,
        mTile: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mTable: cute.Tensor | None,
        scale: cutlass.Float32,
        c: cutlass.Float32,
        inner: cutlass.Float32,
        lo: cutlass.Int32,
        hi: cutlass.Int32,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        tiles, width, value_dim = self.tiles, self.head_dim, self.tiles.value_dim
        q = tma.load(by_rows(mQ), tiles.q_layout(), (self.tile_m, width), 1)
        do = tma.load(by_rows(mdO), tiles.do_layout(), (self.tile_m, value_dim), 1)
        k = tma.load(by_rows(mK), tiles.k_layout(), (tiles.keys, width), 1)
        v = tma.load(by_rows(mV), tiles.v_layout(), (tiles.keys, value_dim), 1)
        dk = tma.store(by_rows(mdK), tiles.k_layout(), (tiles.keys, width))
        dv = tma.store(by_rows(mdV), tiles.v_layout(), (tiles.keys, value_dim))
        self.storage = tiles.storage(self.dq_capacity(), 2 * self.adders, self.singles)
        lists = walk.Lists(mTicket, mEntry, mRank)
        if cutlass.const_expr(self.packed):
            lists = walk.VarlenLists(mTicket, mTable, lo, hi)
        group = mQ.shape[2] // mK.shape[2]
        sizes = walk.Sizes(mK.shape[1], mK.shape[2], group, mSemaphore.shape[2])
        out = (mTable, mdK, mdV) if self.packed else (None, None, None)
        rows = mLse2, mDelta, mdQ, mSemaphore, mCounter
        tensors = Tensors(*rows, lists, sizes, mTile, mWords, *out)
        scalars = Scalars(scale, c, inner, lo, hi)
        self.kernel(Sources(q, do, k, v, dk, dv), tensors, scalars).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(1, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=self.config.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sources: Sources, tensors: Tensors, scalars: Scalars):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.config.pdl):
            # The kernel that rounds dQ may be scheduled now; it waits for the end of this one.
            cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            for name in ("q", "do", "k", "v", "dk", "dv"):
                cpasync.prefetch_descriptor(getattr(sources, name).atom)
        allocator = SmemAllocator()
        shared = allocator.allocate(self.storage)
        sP = self.allocate_p(allocator)
        rings = self.loads.rings(shared, CONSUMER_WARPS)
        dq = shared.dq.data_ptr()
        singles = [shared.singles.data_ptr() + i for i in range(self.singles)]
        first, tail = singles[:5], singles[5:]
        barriers = Barriers(*first, dq, dq + self.adders, *tail)
        full = shared.tickets.data_ptr()
        receivers = 1 + self.adders + CONSUMER_WARPS
        tickets = ticket_device.TicketRing(
            shared.slots.data_ptr(), full, full + ticket_device.STAGES, 1, receivers
        )
        if tidx == 0:
            tickets.init()
            self.init(barriers)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.config.pdl):
            # The kernel before may still run: all of global memory is used after this only.
            cute.arch.griddepcontrol_wait()

        work = walk.Work(tickets, tensors.lists, tensors.sizes, self.tile_m, self.parts)
        cta = Cta(sources, tensors, scalars, shared, sP, rings, barriers, work)
        if warp < mma.WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.loads.load(cta)
            elif cute.arch.lane_idx() == 0:
                if warp <= self.adders:
                    self.add_dq(cta, warp - 1)
                if warp == LAST_PRODUCER:
                    counter, done = tensors.mCounter.iterator, barriers.last_turns
                    tickets.dispatch_one_by_one(counter, work.total(), done)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if cutlass.const_expr(self.specialised):
                for consumer in cutlass.range_constexpr(CONSUMERS):
                    if warp // (mma.WARPGROUP // 32) == consumer + 1:
                        self.multiply(cta, consumer)
            else:
                consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
                self.multiply(cta, consumer)

    def dq_capacity(self) -> int:
        """Return the fp32 values of the buffers of dQ."""
        return self.config.dq_stages * self.dq_size

    def allocate_p(self, allocator: SmemAllocator) -> cute.Tensor | None:
        """No P buffer: the consumers exchange dS alone."""
        return None

    @cute.jit
    def add_dq(self, cta: Cta, buffer: cutlass.Int32):
        """Add each dQ tile that comes through a buffer, in the tile's turn; by one thread.

        A thread for each buffer, as a turn takes as long as a visit: waiting for it, landing, and
        handing on are three trips to L2.
        """
        config, barriers, work = self.config, cta.barriers, cta.work
        mdQ, mSemaphore = cta.tensors.mdQ, cta.tensors.mSemaphore
        sdQ = cta.shared.sdQ.data_ptr() + buffer * self.dq_size

        @cute.jit
        def add_column(column: walk.Column, state: PipelineState):
            @cute.jit
            def add_visit(visit: walk.Visit, waits: cutlass.Boolean, state: PipelineState):
                if state.index == buffer:
                    row = walk.row_of(work.sizes, column.head, visit)
                    # A bulk add takes a pointer: a tile of dQ is contiguous.
                    target = mdQ.iterator + row * self.dq_size
                    if cutlass.const_expr(config.ordered):
                        # The turn is awaited while the tile is still computed.
                        turnstile.wait_turn(mSemaphore.iterator + row, visit.rank)
                    # The last entry has no second tile for this buffer.
                    if (visit.index == column.end - 1) & (visit.member == work.sizes.group - 1):
                        cute.arch.mbarrier_arrive(barriers.last_turns)
                        waits = cutlass.Boolean(False)
                    cute.arch.mbarrier_wait(barriers.dq_full + buffer, state.phase)
                    first_stores = config.first_stores
                    turnstile.add_or_store(target, sdQ, self.dq_size * 4, visit.rank, first_stores)
                    if cutlass.const_expr(config.ordered):
                        turnstile.finish_turn(mSemaphore.iterator + row)
                    else:
                        turnstile.land()
                    cute.arch.mbarrier_arrive(barriers.dq_empty + buffer)
                state.advance()
                return waits, state

            end_tile, _ = work.ends(column)
            base = work.lists.rank_base(column.block)
            first = cutlass.Boolean(True), state
            waits, state = walk.for_each_visit(
                work, column, end_tile, add_visit, first, base, ranked=True
            )
            if waits:
                cute.arch.mbarrier_arrive(barriers.last_turns)
            return (state,)

        state = pipeline.consumer_state(config.dq_stages)
        walk.for_each_ticket(work, add_column, (state,), alone=True)

    @cute.jit
    def multiply(self, cta: Cta, consumer: cutlass.Int32):
        """Consumer warpgroup: dK and dV of its 64 keys, and its half of every dQ tile."""
        config, tiles, shared, work = self.config, self.tiles, cta.shared, cta.work
        barriers, scalars = cta.barriers, cta.scalars
        lane = cute.arch.thread_idx()[0] % mma.WARPGROUP
        first = consumer * mma.WARPGROUP
        # This thread's first key in the block; its second is 8 on.
        key = softmax.first_row(consumer * 64, lane)
        score, sum_kv, sum_q = tiles.score_mma(), tiles.kv_mma(self.head_dim), tiles.dq_mma()
        operands = tiles.operands(shared, first, score, sum_kv, sum_q)
        tSrK, tSrQ, tPrV, tPrO, tQrS, tQrK, tKrQ, tVrO = operands
        rS, rdP, rP, rdS, tVrP, tKrS, rdK, rdV, rdQ = tiles.accumulators(
            first, score, sum_kv, sum_q
        )

        @cute.jit
        def multiply_column(
            column: walk.Column,
            kv_phase: cutlass.Int32,
            done: PipelineState,
            state: PipelineState,
            dq_state: PipelineState,
            ds_state: PipelineState,
        ):
            # What a branch calls a method of must be a local of its function.
            rings = cta.rings
            end_tile, kv_len = work.ends(column)
            base = work.lists.rank_base(column.block) if config.first_stores else None
            rdK.fill(0.0)
            rdV.fill(0.0)
            cute.arch.mbarrier_wait(barriers.k_full, kv_phase)

            @cute.jit
            def multiply_visit(
                visit: walk.Visit,
                written: cutlass.Int32,
                done: PipelineState,
                state: PipelineState,
                dq_state: PipelineState,
                ds_state: PipelineState,
            ):
                rings = cta.rings
                # S = Q Kᵀ and dP = dO Vᵀ, with the keys as rows.  The last visit's dK is still in
                # flight: S follows it without a gap.
                rings.q.consumer_wait(state)
                mma.start(score, rS, tSrK, tSrQ, 0, state.index)
                if cutlass.const_expr(config.dp_first):
                    if written < 0:
                        cute.arch.mbarrier_wait(barriers.v_full, kv_phase)
                    rings.do.consumer_wait(state)
                    mma.start(score, rdP, tPrV, tPrO, 0, state.index)
                    warpgroup.wait_group(2)
                else:
                    warpgroup.wait_group(1)
                if written >= 0:
                    rings.q.consumer_release(done)
                    done.advance()
                    self.hand_over(barriers, lane, written)
                elif cutlass.const_expr(not config.dp_first):
                    cute.arch.mbarrier_wait(barriers.v_full, kv_phase)
                # Shared memory answers late while WGMMA reads it: lse2 and delta are asked for
                # before the products that they meet, if registers allow.
                place, fetched = (config.stages, state.index, lane), not config.softcap
                lse2 = tiles.statistics(shared.sLse2, *place, fetched)
                if cutlass.const_expr(not config.dp_first):
                    rings.do.consumer_wait(state)
                    mma.start(score, rdP, tPrV, tPrO, 0, state.index)
                warpgroup.wait_group(1)
                # P = exp2(S scale log2 e - lse2)
                slope.scaled_exponents(rS, lse2, scalars, config.softcap)
                coord = ScoreCoord.of(visit, column, self.tile_m, key, lane)
                self.mask(rS, cta, kv_len, coord)
                slope.round_weights(rS, rP)
                delta = tiles.statistics(shared.sDelta, *place, self.tile_m == 64)
                warpgroup.wait_group(0)
                # dS = P (dP - delta).  Only then dV += Pᵀ dO: with P, dP and the operands of a
                # product in flight alive at once, ptxas finds too few registers and awaits every
                # WGMMA by itself.
                slope.score_slopes(rdP, rS, delta, lse2, scalars, config.softcap)
                rdS.store(rdP.load().to(self.dtype))
                self.keep_ds(rdS, shared, consumer, lane, ds_state.index)
                mma.extend(sum_kv, rdV, tVrP, tVrO, state.index)
                # dQ = dS K, of all 128 keys
                cute.arch.fence_proxy("async.shared", space="cta")
                self.sync()
                mma.start(sum_q, rdQ, tQrS, tQrK, ds_state.index, 0)
                mma.extend(sum_kv, rdK, tKrS, tKrQ, state.index)
                warpgroup.wait_group(1)
                rings.do.consumer_release(state)
                if cutlass.const_expr(config.first_stores):
                    if work.lists.is_first(visit.window, visit.index, column.begin, base):
                        turnstile.add_zero(rdQ)
                self.keep_dq(cta, rdQ, consumer, lane, dq_state)
                written = dq_state.index
                state.advance()
                dq_state.advance()
                ds_state.advance()
                return written, done, state, dq_state, ds_state

            # The buffer of dQ that is written and not yet handed over, or -1.
            first_visit = cutlass.Int32(-1), done, state, dq_state, ds_state
            written, done, state, dq_state, ds_state = walk.for_each_visit(
                work, column, end_tile, multiply_visit, first_visit, ahead=True
            )
            warpgroup.wait_group(0)
            if written >= 0:
                rings.q.consumer_release(done)
                done.advance()
                self.hand_over(barriers, lane, written)
            else:
                cute.arch.mbarrier_wait(barriers.v_full, kv_phase)
            rdK.store(rdK.load() * scalars.scale)
            self.store(cta, rdK, rdV, consumer, lane, column)
            return kv_phase ^ 1, done, state, dq_state, ds_state

        # Q and dO are loaded visit by visit: one state for both rings; Q is released a visit later.
        state, done = (pipeline.consumer_state(config.stages) for _ in range(2))
        dq_state, ds_state = map(pipeline.producer_state, (config.dq_stages, config.ds_stages))
        states = cutlass.Int32(0), done, state, dq_state, ds_state
        walk.for_each_ticket(work, multiply_column, states)

    def mask(self, rS: cute.Tensor, cta: Cta, kv_len: cutlass.Int32, coord: ScoreCoord):
        """Set scores to -inf where a key is not allowed."""
        form = self.config.form
        key_mask.keep(rS, form, self.tile_m, cta.tensors, cta.scalars, kv_len, coord)

    @cute.jit
    def keep_ds(
        self,
        rdS: cute.Tensor,
        shared: SharedStorage,
        consumer: cutlass.Int32,
        lane: cutlass.Int32,
        stage: cutlass.Int32,
    ):
        """Write dS of this warpgroup's 64 keys to shared memory.

        The other warpgroup has multiplied what lay there: with two stages since the last barrier.
        """
        tiled = cute.make_tiled_copy_C(self.tiles.store_atom(), self.tiles.score_mma(1))
        copy, ds = tiled.get_slice(lane), self.tiles.ds(shared.sdS, "k")
        sdS = cute.local_tile(ds, (64, self.tile_m, 1), (consumer, 0, stage))
        cute.copy(copy, copy.retile(rdS), copy.partition_D(sdS)[None, None, None, 0])

    @cute.jit
    def keep_dq(
        self,
        cta: Cta,
        rdQ: cute.Tensor,
        consumer: cutlass.Int32,
        lane: cutlass.Int32,
        state: PipelineState,
    ):
        """Write this thread's dQ to a free buffer, 16 bytes at a time, neighbours adjacent."""
        cute.arch.mbarrier_wait(cta.barriers.dq_empty + state.index, state.phase)
        # By hand: ``dq_layout`` is by thread, no coordinates of dQ are needed.
        fours = cute.size(rdQ) // 4
        pointer = cta.shared.sdQ.data_ptr() + state.index * self.dq_size
        sdQ = cute.make_tensor(pointer, dq_layout(fours))[None, lane, None, consumer]
        cute.autovec_copy(cute.make_tensor(rdQ.iterator, cute.make_layout((4, fours))), sdQ)

    @cute.jit
    def hand_over(self, barriers: Barriers, lane: cutlass.Int32, buffer: cutlass.Int32):
        """Tell that a warp's share of a dQ buffer is written.

        Called with the next products in flight: the fence waits until the stores are done.
        """
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane % 32 == 0:
            cute.arch.mbarrier_arrive(barriers.dq_full + buffer)

    @cute.jit
    def store(
        self,
        cta: Cta,
        rdK: cute.Tensor,
        rdV: cute.Tensor,
        consumer: cutlass.Int32,
        lane: cutlass.Int32,
        column: walk.Column,
    ):
        """Store dK and dV, rounded once, through the buffers of dS and V; frees K, then V.

        dS is written again in visits, and those wait for the next V, which comes after the store.
        """
        self.sync()  # both warpgroups have multiplied what lies there
        thread, tiles, shared = consumer * mma.WARPGROUP + lane, self.tiles, cta.shared
        if thread == 0:
            cute.arch.mbarrier_arrive(cta.barriers.k_empty)
        sdK, sdV, shape = tiles.k(shared.sdS), tiles.v(shared.sV), tiles.k_shape
        for acc, buffer in zip((rdK, rdV), (sdK, sdV), strict=True):
            tile = cute.local_tile(buffer, (64, self.head_dim, 1), (consumer, 0, 0))
            self.keep_sum(acc, tile, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()
        sources, tensors = cta.sources, cta.tensors
        staged = (
            Staging(sources.dk, sdK, shared.sdS.data_ptr(), tensors.mdK),
            Staging(sources.dv, sdV, shared.sV.data_ptr(), tensors.mdV),
        )
        sizes, block = cta.work.sizes, column.block
        batch, kv_head = column.head // sizes.kv_heads, column.head % sizes.kv_heads
        if cutlass.const_expr(self.packed):
            rows = varlen.row_range(tensors.mTable, block)
            inside = rows.end - block * BLOCK
            start = varlen.RowCoord(batch, block * BLOCK - rows.shift, kv_head)
            if inside < BLOCK:
                of_thread = thread, CONSUMER_THREADS
                for out in staged:
                    varlen.store_rows(out.pTile, shape, out.mX, start, inside, *of_thread)
                self.sync()
            elif thread == 0:
                self.copy_out(staged, kv_head, batch, block, rows)
        else:
            if thread == 0:
                self.copy_out(staged, kv_head, batch, block, None)
        if thread == 0:
            cute.arch.mbarrier_arrive(cta.barriers.v_empty)

    def keep_sum(self, acc: cute.Tensor, sX: cute.Tensor, lane: cutlass.Int32):
        """Write dK or dV of a warpgroup's 64 keys, rounded once, to its staging buffer."""
        product = self.tiles.kv_mma(cute.size(sX, mode=[1]), 1)
        copy = cute.make_tiled_copy_C(self.tiles.store_atom(), product).get_slice(lane)
        rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
        rounded.store(acc.load().to(self.dtype))
        cute.copy(copy, copy.retile(rounded), copy.partition_D(sX)[None, None, None, 0])

    def copy_out(
        self,
        staged: tuple[Staging, ...],
        kv_head: cutlass.Int32,
        batch: cutlass.Int32,
        tile: cutlass.Int32,
        rows: varlen.RowRange | None,
    ):
        """Store tiles of dK or dV through TMA; by one thread."""
        for out in staged:
            tXsX, tXgX = self.tiles.boxes(out.matrix, out.sTile, kv_head, batch, rows)
            cute.copy(out.matrix.atom, tXsX[None, 0], tXgX[None, tile])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def init(self, barriers: Barriers):
        """Initialise the mbarriers; by one thread, before the CTA's barrier."""
        for one in (barriers.k_full, barriers.k_empty, barriers.v_full, barriers.v_empty):
            cute.arch.mbarrier_init(one, 1)
        if self.packed:
            cute.arch.mbarrier_init(barriers.tail, 1)
        cute.arch.mbarrier_init(barriers.last_turns, self.adders)
        for buffer in range(self.adders):
            cute.arch.mbarrier_init(barriers.dq_full + buffer, self.dq_writers)
            cute.arch.mbarrier_init(barriers.dq_empty + buffer, 1)
        cute.arch.mbarrier_init_fence()

    def sync(self):
        """Synchronise the consumers' 256 threads."""
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=CONSUMER_THREADS)


def by_rows(tensor: cute.Tensor) -> cute.Tensor:
    """Return the view [S, D, H, B] of a tensor [B, S, H, D]."""
    return tma.view(tensor, [1, 3, 2, 0])


def build(
    config: BackwardConfig,
    compile: Callable = cute.compile,
    kernel: type[BackwardSm90] = BackwardSm90,
):
    """Compile one configuration against fake tensors; no GPU needed."""
    batch, q_len, kv_len, heads, kv_heads, tiles = (fake.size() for _ in range(6))
    width, value_dim, rows = config.head_dim, VALUE_DIMS[config.head_dim], config.tile_m

    def operands():
        """Yield fakes of K and V, or of their gradients."""
        for columns in (width, value_dim):
            yield fake.activations(config.dtype, batch, kv_len, kv_heads, columns)

    fp32, ints = cutlass.Float32, cutlass.Int32
    return compile(
        kernel(config),
        fake.activations(config.dtype, batch, q_len, heads, width),
        *operands(),
        fake.activations(config.dtype, batch, q_len, heads, value_dim),
        fake.compact(fp32, (batch, heads, tiles, rows), fake.TMA_ALIGN),
        fake.compact(fp32, (batch, heads, tiles, rows), fake.TMA_ALIGN),
        fake.compact(fp32, (batch, heads, tiles, rows * width), fake.TMA_ALIGN),
        *operands(),
        fake.compact(ints, (batch, heads, tiles, *([config.turns] * (config.turns > 1)))),
        fake.compact(ints, (1,)),
        fake.compact(ints, (fake.size(), walk.FIELDS), fake.TMA_ALIGN),
        *((None,) * 4 if config.packed else walk.fake_lists(config.form)),
        varlen.fake_table() if config.packed else None,
        *(fp32(1.0), fp32(1.0), fp32(0.0), ints(0), ints(0), ints(1)),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
