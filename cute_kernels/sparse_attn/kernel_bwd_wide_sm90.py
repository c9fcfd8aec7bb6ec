"""Attention backward for heads wider than 128 on SM90: dK, dV and the fp32 dQ in one pass.

Formulas, layouts, masks, varlen batches and schedules are those of ``kernel_bwd_sm90``.  dK and
dV of 128 keys would not fit into registers there, so:

Tickets      a ticket of the schedule is two here, one for each half of its 128 keys, the lower
             first: number 2 t + part.  Their ranks follow each other: 2 rank + part.
Order        dK, dV: as there.  dQ: each visit's product is a chain over 64 keys.
Roles        warpgroup 0: as there.  Warpgroup 1 makes S, P and dV, warpgroup 2 dP, dS and dK; each
             makes its half of dQ.  Through shared memory warpgroup 2 gets P in fp32, warpgroup 1
             dS rounded.
Turns        D = 192: of a tile of dQ, whose visits two threads add alternately.  D = 256, where a
             buffer of a whole tile does not fit: of each half of its columns, by a thread each,
             semaphores [B, Hq, Mt, 2]; warpgroup 2 has the buffer first, then warpgroup 1.
Buffers      dK and dV are stored through those of K and V.
Limits       SM90a only; bf16 and fp16; D = 192 with Dv = 128, and D = Dv = 256; the rest as there.
Measured     docs/status.md, docs/notes/attention_sm90.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineState

from ..dsl import mma, pipeline, softmax, turnstile
from . import kernel_bwd_sm90
from .config import BackwardConfig
from .device import slope, varlen, walk
from .device.backward_state import Cta, SharedStorage, Staging
from .device.key_mask import ScoreCoord
from .kernel_bwd_sm90 import CONSUMER_WARPS, BackwardSm90

WARPGROUP = mma.WARPGROUP
KEYS = 64
#: Halves of a ticket of the schedule, and of a tile of dQ.
HALVES = 2
#: Named barriers of both warpgroups: P is written, dS is written, K is multiplied; and their own.
P_BARRIER, DS_BARRIER, K_BARRIER, OWN_BARRIER = 1, 2, 3, 4
OF_DV, OF_DK = 0, 1


class BackwardWideSm90(BackwardSm90):
    """One configuration of the kernel."""

    def __init__(self, config: BackwardConfig):
        self.set_up(config)
        assert config.head_dim in (192, 256) and (config.keys, config.tile_m) == (KEYS, KEYS)
        assert config.ds_stages == 1, (
            "dS is multiplied by both before P of the next visit is written"
        )
        self.adders = HALVES
        self.half_size = self.dq_size // HALVES
        self.by_halves = config.turns == HALVES
        self.dq_writers = CONSUMER_WARPS // HALVES if self.by_halves else CONSUMER_WARPS
        self.value_dim = self.tiles.value_dim

    def dq_capacity(self) -> int:
        """Return the fp32 values of the buffer of dQ."""
        return self.half_size if self.by_halves else self.dq_size

    def allocate_p(self, allocator: SmemAllocator) -> cute.Tensor:
        """Allocate P in fp32: (4 values, thread, group of 4), as the accumulator has them."""
        layout = cute.make_layout((4, WARPGROUP, KEYS * KEYS // (4 * WARPGROUP)))
        return allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)

    @cute.jit
    def add_dq(self, cta: Cta, number: cutlass.Int32):
        """Add every second tile of dQ, or its half of each, in its turn; by one thread of two.

        The buffer is free as soon as it is read; the turn is over when all has landed.
        """
        barriers, work, tensors = cta.barriers, cta.work, cta.tensors
        sdQ, size = cta.shared.sdQ.data_ptr(), self.dq_capacity()
        half, freed = cutlass.Int32(0), barriers.dq_empty
        if cutlass.const_expr(self.by_halves):
            # The other warpgroup writes the buffer next.
            half, freed = number, barriers.dq_empty + 1 - number

        @cute.jit
        def add_column(column: walk.Column, phase: cutlass.Int32, adder: cutlass.Int32):
            @cute.jit
            def add_visit(
                visit: walk.Visit,
                waits: cutlass.Boolean,
                phase: cutlass.Int32,
                adder: cutlass.Int32,
            ):
                mine = adder == number
                last = (visit.index == column.end - 1) & (visit.member == work.sizes.group - 1)
                if cutlass.const_expr(self.by_halves):
                    mine, last = cutlass.Boolean(True), last & (visit.number == visit.count - 1)
                if mine:
                    row = walk.row_of(work.sizes, column.head, visit)
                    semaphores, turns = tensors.mSemaphore.iterator, self.config.turns
                    if cutlass.const_expr(self.config.ordered):
                        turnstile.wait_turn(semaphores + row * turns + half, visit.rank)
                    if last:
                        cute.arch.mbarrier_arrive(barriers.last_turns)
                        waits = cutlass.Boolean(False)
                    cute.arch.mbarrier_wait(barriers.dq_full + number, phase)
                    phase = phase ^ 1
                    # A bulk add takes a pointer: half a tile of dQ is contiguous.
                    target = tensors.mdQ.iterator + row * self.dq_size + half * self.half_size
                    turnstile.add(target, sdQ, size * 4)
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.mbarrier_arrive(freed)
                    if cutlass.const_expr(self.config.ordered):
                        turnstile.finish_turn(semaphores + (row * turns + half))
                    else:
                        turnstile.land()
                return waits, phase, adder ^ 1

            end_tile, _ = work.ends(column)
            base = work.lists.rank_base(column.block)
            first = cutlass.Boolean(True), phase, adder
            waits, phase, adder = walk.for_each_visit(
                work, column, end_tile, add_visit, first, base, ranked=True
            )
            if waits:
                cute.arch.mbarrier_arrive(barriers.last_turns)
            return phase, adder

        # The phase of what this thread adds; the thread whose visit it is, where they alternate.
        first = cutlass.Int32(0), cutlass.Int32(0)
        walk.for_each_ticket(work, add_column, first, alone=True)

    @cute.jit
    def multiply(self, cta: Cta, consumer: cutlass.Int32):
        """Consumer warpgroup: dV with S and P, or dK with dP and dS; each its half of dQ."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % WARPGROUP
        if cutlass.const_expr(consumer == OF_DV):
            self.make_dv(cta, lane)
        else:
            self.make_dk(cta, lane)

    @cute.jit
    def make_dv(self, cta: Cta, lane: cutlass.Int32):
        """Warpgroup 1: S and P of each visit, dV += round(P)ᵀ dO, and the first columns of dQ."""
        config, tiles, shared, sP = self.config, self.tiles, cta.shared, cta.sP
        rings, barriers, scalars, work = cta.rings, cta.barriers, cta.scalars, cta.work
        score, sum_v = tiles.score_mma(), tiles.kv_mma(self.value_dim)
        tSrK, tSrQ = mma.operands(score, 0, tiles.k(shared.sK), tiles.q(shared.sQ))
        slice_v = sum_v.get_slice(0)
        tVrO = sum_v.make_fragment_B(slice_v.partition_B(tiles.do(shared.sdO, "mn")))
        rS, rP, tVrP = self.scores(score, slice_v)
        rdV = self.accumulator(slice_v, self.value_dim)
        sum_q, tQrS, tQrK, rdQ = self.dq_product(shared, OF_DV)

        @cute.jit
        def multiply_column(
            column: walk.Column,
            bit: cutlass.Int32,
            kv_phase: cutlass.Int32,
            state: PipelineState,
            do_state: PipelineState,
        ):
            key = softmax.first_row(column.part * KEYS, lane)
            end_tile, kv_len = work.ends(column)
            rdV.fill(0.0)
            cute.arch.mbarrier_wait(barriers.k_full, kv_phase)

            @cute.jit
            def multiply_visit(
                visit: walk.Visit,
                bit: cutlass.Int32,
                state: PipelineState,
                do_state: PipelineState,
            ):
                # S = Q Kᵀ, with the keys as rows
                rings.q.consumer_wait(state)
                mma.start(score, rS, tSrK, tSrQ, 0, state.index)
                place = config.stages, state.index, lane
                lse2 = tiles.statistics(shared.sLse2, *place, fetched=True)
                warpgroup.wait_group(0)
                rings.q.consumer_release(state)
                # P = exp2(S scale log2 e - lse2)
                slope.scaled_exponents(rS, lse2, scalars, config.softcap)
                coord = ScoreCoord.of(visit, column, self.tile_m, key, lane)
                self.mask(rS, cta, kv_len, coord)
                rS.store(cute.math.exp2(rS.load(), fastmath=True))
                # The other warpgroup has read P of the visit before: its dS has come.
                cute.autovec_copy(by_fours(rS), sP[None, lane, None])
                arrive(P_BARRIER)
                rP.store(rS.load().to(self.dtype))
                # dV += Pᵀ dO, and after it dQ = dS K
                rings.do.consumer_wait(do_state)
                mma.extend(sum_v, rdV, tVrP, tVrO, do_state.index)
                meet(DS_BARRIER)
                mma.start(sum_q, rdQ, tQrS, tQrK, 0, 0)
                warpgroup.wait_group(1)
                rings.do.consumer_release(do_state)
                warpgroup.wait_group(0)
                self.give_dq(cta, rdQ, OF_DV, lane, bit)
                bit = bit ^ 1
                state.advance()
                do_state.advance()
                return bit, state, do_state

            first = bit, state, do_state
            bit, state, do_state = walk.for_each_visit(
                work, column, end_tile, multiply_visit, first, ahead=True
            )
            arrive(K_BARRIER)
            # V is multiplied: dS of the last visit has come.
            cute.arch.mbarrier_wait(barriers.v_full, kv_phase)
            self.store_sum(cta, rdV, OF_DV, lane, column)
            if lane == 0:
                cute.arch.mbarrier_arrive(barriers.v_empty)
            return bit, kv_phase ^ 1, state, do_state

        # The number, modulo 2, of the visit whose dQ comes next; the phase of K and V.
        first = cutlass.Int32(0), cutlass.Int32(0)
        walk.for_each_ticket(work, multiply_column, (*first, *self.states()))

    @cute.jit
    def make_dk(self, cta: Cta, lane: cutlass.Int32):
        """Warpgroup 2: dP and dS of each visit, dK += round(dS)ᵀ Q, and the last columns of dQ."""
        config, tiles, shared, sP = self.config, self.tiles, cta.shared, cta.sP
        rings, barriers, scalars, work = cta.rings, cta.barriers, cta.scalars, cta.work
        score, sum_k = tiles.score_mma(), tiles.kv_mma(self.head_dim)
        tPrV, tPrO = mma.operands(score, 0, tiles.v(shared.sV), tiles.do(shared.sdO))
        sum_q, tQrS, tQrK, rdQ = self.dq_product(shared, OF_DK)
        slice_k = sum_k.get_slice(0)
        tKrQ = sum_k.make_fragment_B(slice_k.partition_B(tiles.q(shared.sQ, "mn")))
        rdP, rdS, tKrS = self.scores(score, slice_k)
        rP = cute.make_rmem_tensor(rdP.shape, cutlass.Float32)
        rdK = self.accumulator(slice_k, self.head_dim)

        @cute.jit
        def multiply_column(
            column: walk.Column,
            kv_phase: cutlass.Int32,
            bit: cutlass.Int32,
            state: PipelineState,
            do_state: PipelineState,
        ):
            end_tile, _ = work.ends(column)
            rdK.fill(0.0)
            cute.arch.mbarrier_wait(barriers.k_full, kv_phase)
            cute.arch.mbarrier_wait(barriers.v_full, kv_phase)

            @cute.jit
            def multiply_visit(
                visit: walk.Visit,
                bit: cutlass.Int32,
                state: PipelineState,
                do_state: PipelineState,
            ):
                # dP = dO Vᵀ, with the keys as rows
                rings.do.consumer_wait(do_state)
                mma.start(score, rdP, tPrV, tPrO, 0, do_state.index)
                place = config.do_stages, do_state.index, lane
                delta = tiles.statistics(shared.sDelta, *place, fetched=True)
                warpgroup.wait_group(0)
                rings.do.consumer_release(do_state)
                # dS = P (dP - delta)
                rings.q.consumer_wait(state)
                meet(P_BARRIER)
                cute.autovec_copy(sP[None, lane, None], by_fours(rP))
                lse2 = None
                if cutlass.const_expr(config.softcap):
                    lse2 = tiles.statistics(shared.sLse2, config.stages, state.index, lane)
                slope.score_slopes(rdP, rP, delta, lse2, scalars, config.softcap)
                rdS.store(rdP.load().to(self.dtype))
                self.keep_ds(rdS, shared, 0, lane, 0)
                cute.arch.fence_proxy("async.shared", space="cta")
                self.meet_own(OF_DK)
                arrive(DS_BARRIER)
                # dQ = dS K, and while it is written dK += dSᵀ Q
                mma.start(sum_q, rdQ, tQrS, tQrK, 0, 0)
                mma.extend(sum_k, rdK, tKrS, tKrQ, state.index)
                warpgroup.wait_group(1)
                self.give_dq(cta, rdQ, OF_DK, lane, bit)
                bit = bit ^ 1
                warpgroup.wait_group(0)
                rings.q.consumer_release(state)
                state.advance()
                do_state.advance()
                return bit, state, do_state

            first = bit, state, do_state
            bit, state, do_state = walk.for_each_visit(
                work, column, end_tile, multiply_visit, first
            )
            rdK.store(rdK.load() * scalars.scale)
            meet(K_BARRIER)
            self.store_sum(cta, rdK, OF_DK, lane, column)
            if lane == 0:
                cute.arch.mbarrier_arrive(barriers.k_empty)
            return kv_phase ^ 1, bit, state, do_state

        first = cutlass.Int32(0), cutlass.Int32(0)
        walk.for_each_ticket(work, multiply_column, (*first, *self.states()))

    def scores(self, score: cute.TiledMma, slice_of_sum: cute.TiledMma):
        """Return an accumulator of scores, its rounded copy, and that copy as register operand."""
        shape = score.get_slice(0).partition_shape_C((KEYS, self.tile_m))
        values = cute.make_rmem_tensor(shape, cutlass.Float32)
        rounded = cute.make_rmem_tensor(shape, self.dtype)
        layout = cute.make_layout(slice_of_sum.partition_shape_A((KEYS, self.tile_m)))
        return values, rounded, cute.make_tensor(rounded.iterator, layout)

    def accumulator(self, slice_of_sum: cute.TiledMma, columns: int) -> cute.Tensor:
        """Return an accumulator of dK or dV."""
        shape = slice_of_sum.partition_shape_C((KEYS, columns))
        return cute.make_rmem_tensor(shape, cutlass.Float32)

    def dq_product(self, shared: SharedStorage, consumer: int):
        """Return the product dS K of a warpgroup's columns of dQ, its operands, its result."""
        product, first = self.tiles.dq_mma(), consumer * WARPGROUP
        ds, dims = self.tiles.ds(shared.sdS, "mn"), self.tiles.k(shared.sK, "mn")
        shape = product.get_slice(first).partition_shape_C((self.tile_m, self.head_dim))
        result = cute.make_rmem_tensor(shape, cutlass.Float32)
        return product, *mma.operands(product, first, ds, dims), result

    def states(self) -> tuple[PipelineState, PipelineState]:
        """Return the first positions of a consumer in the rings of Q and of dO."""
        stages = self.config.stages, self.config.do_stages
        return tuple(pipeline.consumer_state(n) for n in stages)

    @cute.jit
    def give_dq(
        self,
        cta: Cta,
        rdQ: cute.Tensor,
        consumer: cutlass.Constexpr,
        lane: cutlass.Int32,
        bit: cutlass.Int32,
    ):
        """Write a warpgroup's half of a dQ tile, in the order of ``dq_layout``, for the adder.

        bit: the number of the visit, modulo 2.
        """
        barriers, memory, adder = cta.barriers, cta.shared.sdQ.data_ptr(), consumer
        if cutlass.const_expr(self.by_halves):
            # Warpgroup 2 is the first to write the buffer that both share.
            phase = bit ^ 1 if consumer == OF_DK else bit
            cute.arch.mbarrier_wait(barriers.dq_empty + consumer, phase)
        else:
            memory, adder = memory + consumer * self.half_size, bit
            cute.arch.mbarrier_wait(barriers.dq_empty, bit ^ 1)
        # By hand: ``dq_layout`` is by thread, no coordinates of dQ are needed.
        layout = cute.make_layout((4, WARPGROUP, cute.size(rdQ) // 4))
        cute.autovec_copy(by_fours(rdQ), cute.make_tensor(memory, layout)[None, lane, None])
        self.hand_over(barriers, lane, adder)

    @cute.jit
    def store_sum(
        self,
        cta: Cta,
        acc: cute.Tensor,
        consumer: cutlass.Constexpr,
        lane: cutlass.Int32,
        column: walk.Column,
    ):
        """Store dK or dV of 64 keys, rounded once, through the buffer of K or V."""
        tiles, sources, tensors, part = self.tiles, cta.sources, cta.tensors, column.part
        if cutlass.const_expr(consumer == OF_DK):
            buffer, sX, shape = cta.shared.sK, tiles.k(cta.shared.sK), tiles.k_shape
            out = Staging(sources.dk, sX, buffer.data_ptr(), tensors.mdK)
        else:
            buffer, sX, shape = cta.shared.sV, tiles.v(cta.shared.sV), tiles.v_shape
            out = Staging(sources.dv, sX, buffer.data_ptr(), tensors.mdV)
        self.keep_sum(acc, sX, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet_own(consumer)
        sizes, tile = cta.work.sizes, column.block * HALVES + part
        batch, kv_head = column.head // sizes.kv_heads, column.head % sizes.kv_heads
        if cutlass.const_expr(self.packed):
            rows = varlen.row_range(tensors.mTable, column.block)
            inside = rows.end - tile * KEYS
            if inside < KEYS:
                start = varlen.RowCoord(batch, tile * KEYS - rows.shift, kv_head)
                end = cutlass.max(inside, cutlass.Int32(0))
                varlen.store_rows(out.pTile, shape, out.mX, start, end, lane, WARPGROUP)
                self.meet_own(consumer)
            elif lane == 0:
                self.copy_out((out,), kv_head, batch, tile, rows)
        else:
            if lane == 0:
                self.copy_out((out,), kv_head, batch, tile, None)

    def meet_own(self, consumer: int):
        """Synchronise a warpgroup's threads."""
        barrier_id = OWN_BARRIER + consumer
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=WARPGROUP)


def by_fours(values: cute.Tensor) -> cute.Tensor:
    """Return a thread's values as a tensor [4, n]."""
    return cute.make_tensor(values.iterator, cute.make_layout((4, cute.size(values) // 4)))


def arrive(barrier: int):
    """Signal the other warpgroup, without waiting."""
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP)


def meet(barrier: int):
    """Wait until the other warpgroup has signalled."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP)


def build(config: BackwardConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; no GPU needed."""
    return kernel_bwd_sm90.build(config, compile, BackwardWideSm90)
