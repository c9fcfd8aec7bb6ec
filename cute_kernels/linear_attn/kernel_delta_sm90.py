"""The gated delta rule on SM90, chunk after chunk: o, u and the states of a sequence and v head.

    r = β (v - 2^G S^ᵀ k)    u = A r    o = scale 2^G S^ᵀ q + P u
    S' = 2^G_C S + Σ_j k_j (2^(G_C - G_j) u_j)ᵀ

A, P and G of each chunk are made before, by triton/kernel_delta.py, whose order this is.

Layouts      q, k [N, H, K], v, o, u [N, HV, V], A, P [N, HV, 64] bf16, last stride 1, others whole
             16 bytes; G fp32, β bf16 or fp32 [N, HV]; states [slots, HV, K, V] bf16, the state
             before a chunk; initial and final [S, HV, K, V] fp32; offsets int32 [S + 1], of rows.
Order        as written there: products are WGMMA over ascending k16 steps (``device/chain``).
Tails        rows of a chunk behind its sequence are zeros in r, u and the update; k's are cleared
             in shared memory, as 0 times NaN is NaN.  Rows of o and u, and slots, that belong to no
             chunk are zeros.
Roles        warpgroup 0 has the state; 1 makes o of S^ and u in shared memory, and stores; a warp
             of 2 loads.
Limits       SM90a only; bf16; K of 64 or 128, V a multiple of 64.
Measured     docs/notes/linear_attention.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy, mma, tma, turnstile
from .device.chain import (
    BARRIER,
    COLUMNS,
    WARPS,
    Chain,
    Gates,
    Operand,
    Place,
    Result,
    RowGates,
    Shared,
)
from .device.fakes import states, strided
from .device.walks import ROWS, DeltaConfig

#: Registers of a thread of each warpgroup, of the 3 times 168 of the launch.
REGISTERS = 240, 200, 64
#: Tiles that are handed over: S^ and u.
HANDED_OVER = 2
STATE, ROWS_OF_U = range(HANDED_OVER)


@dataclass(frozen=True)
class Tensors:
    """Tensors in global memory that are not read or written by TMA alone."""

    mDecay: cute.Tensor
    mBeta: cute.Tensor
    mO: cute.Tensor
    mU: cute.Tensor
    mStates: cute.Tensor
    mInitial: cute.Tensor | None
    mFinal: cute.Tensor | None
    mOffsets: cute.Tensor


@dataclass(frozen=True)
class Sources:
    """Operands of a chunk, and its results, as TMA addresses them."""

    q: tma.Source
    k: tma.Source
    v: tma.Source
    a: tma.Source
    p: tma.Source
    o: tma.Source
    u: tma.Source
    s: tma.Source


@dataclass(frozen=True)
class Scalars:
    """scale; lag of the last state; slots of a sequence of a batch, 0 of a pack."""

    scale: cutlass.Float32
    lag: cutlass.Int32
    slots: cutlass.Int32


@dataclass(frozen=True)
class Handover:
    """Barriers of the tiles that warpgroup 0 writes and warpgroup 1 reads: full, and empty."""

    barriers: cute.Pointer

    @cute.jit
    def init(self):
        """Initialise them, before the CTA's barrier."""
        tidx, _, _ = cute.arch.thread_idx()
        if tidx == 0:
            for i in cutlass.range_constexpr(2 * HANDED_OVER):
                cute.arch.mbarrier_init(self.barriers + i, WARPS)

    def await_full(self, which: int, n: cutlass.Int32):
        """Wait for the tile of chunk ``n``."""
        cute.arch.mbarrier_wait(self.barriers + which, n % 2)

    def await_empty(self, which: int, n: cutlass.Int32):
        """Wait until the tile of the chunk before is read."""
        cute.arch.mbarrier_wait(self.barriers + (HANDED_OVER + which), (n + 1) % 2)

    @cute.jit
    def publish(self, which: cutlass.Constexpr[int], lane: cutlass.Int32):
        """Hand a tile over that all threads wrote."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane % 32 == 0:
            cute.arch.mbarrier_arrive(self.barriers + which)

    @cute.jit
    def release(self, which: cutlass.Constexpr[int], lane: cutlass.Int32):
        """Give a tile back, whose readers are done."""
        cute.arch.sync_warp()
        if lane % 32 == 0:
            cute.arch.mbarrier_arrive(self.barriers + (HANDED_OVER + which))


class DeltaSm90(Chain):
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    readers = 2

    def layouts(self) -> dict[str, cute.ComposedLayout]:
        return {
            "sQ": self.of_keys(),
            "sK": self.of_keys(),
            "sKt": self.of_keys_transposed(),
            "sV": self.of_columns(self.stages),
            "sA": self.square("k"),
            "sP": self.square("k"),
            "sO": self.of_columns(1),
            "sU": self.of_columns(1),
            "sS": self.of_columns(1, self.keys),
        }

    def renamed(self) -> dict[str, str]:
        return {"sKt": "sK"}

    def more_fields(self) -> dict[str, cute.struct.MemRange]:
        return {"handover": cute.struct.MemRange[cutlass.Int64, 2 * HANDED_OVER]}

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mA: cute.Tensor,
        mP: cute.Tensor,
        mDecay: cute.Tensor,
        mBeta: cute.Tensor,
        mO: cute.Tensor,
        mU: cute.Tensor,
        mStates: cute.Tensor,
        mInitial: cute.Tensor | None,
        mFinal: cute.Tensor | None,
        mOffsets: cute.Tensor,
        scale: cutlass.Float32,
        lag: cutlass.Int32,
        slots: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        q, k = (self.load_keys(m) for m in (mQ, mK))
        a, p = (self.load_square(m) for m in (mA, mP))
        v = self.load_columns(mV)
        o, u = (self.store_columns(m) for m in (mO, mU))
        sources = Sources(q, k, v, a, p, o, u, self.store_states(mStates))
        tensors = Tensors(mDecay, mBeta, mO, mU, mStates, mInitial, mFinal, mOffsets)
        self.kernel(sources, tensors, Scalars(scale, lag, slots)).launch(
            grid=(mOffsets.shape[0] - 1, mV.shape[1], mV.shape[2] // COLUMNS),
            block=(3 * mma.WARPGROUP, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sources: Sources, tensors: Tensors, scalars: Scalars):
        role = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.storage())
        handover = Handover(storage.handover.data_ptr())
        handover.init()
        shared = self.make_shared(storage)
        place = self.place(tensors.mOffsets, scalars.slots)
        if role < WARPS:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self.walk(tensors, scalars, shared, handover, place)
        elif role < 2 * WARPS:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.put_out(sources, tensors, shared, handover, place)
            if scalars.slots == 0:
                self.clear_behind(tensors, place)
        else:
            cute.arch.setmaxregister_decrease(REGISTERS[2])
            if role == 2 * WARPS:
                self.produce(sources, tensors, scalars, shared, place)

    @cute.jit
    def produce(
        self, sources: Sources, tensors: Tensors, scalars: Scalars, shared: Shared, place: Place
    ):
        """Load each chunk, and what follows from its gates; by a warp."""
        of_v, tiles = place.head, shared.tiles
        of_k = of_v // (tensors.mDecay.shape[1] // sources.k.tensor.shape[2])
        operands = (
            Operand(sources.q, tiles["sQ"], of_k, False),
            Operand(sources.k, tiles["sK"], of_k, False),
            Operand(sources.v, tiles["sV"], of_v, True),
            Operand(sources.a, tiles["sA"], of_v, False),
            Operand(sources.p, tiles["sP"], of_v, False),
        )
        gates = Gates(tensors.mDecay, tensors.mBeta, scalars.scale)
        self.produce_chunks(operands, gates, shared, place)

    def of_gates(self, row: RowGates) -> tuple[cutlass.Float32, ...]:
        """-2^G, β, 2^(G_C - G), scale 2^G, 2^G_C."""
        return -row.grown, row.beta, row.to_end, row.grown * row.scale, row.whole

    @cute.jit
    def walk(
        self,
        tensors: Tensors,
        scalars: Scalars,
        shared: Shared,
        handover: Handover,
        place: Place,
    ):
        """Go through the chunks with the state; by warpgroup 0."""
        lane, _, _ = cute.arch.thread_idx()
        tiles, acc = shared.tiles, self.accumulators(lane)
        tRrK, tUrA = (self.fragment_b(acc.by_keys, tiles[name]) for name in ("sK", "sA"))
        tSrK = self.fragment_b(acc.update, tiles["sKt"])
        tRrR = cute.make_rmem_tensor(acc.rows, cutlass.Float32)
        tSrS, tSrD = (cute.make_rmem_tensor(acc.state, cutlass.Float32) for _ in range(2))
        rS = self.fragment_a(acc.by_keys, self.keys)
        rR, rW = (self.fragment_a(acc.by_keys, ROWS) for _ in range(2))
        behind = place.end
        if scalars.lag >= 0:
            kept = cutlass.max(place.end - place.first - scalars.lag, 0)
            behind = place.first + kept // ROWS * ROWS

        tSrS.fill(0.0)
        if cutlass.const_expr(tensors.mInitial is not None):
            self.load_state(tensors.mInitial, tSrS, acc, place)
        if cutlass.const_expr(tensors.mFinal is not None):
            if behind == place.first:
                self.save_state(tensors.mFinal, tSrS, acc, place)

        for n in cutlass.range(place.chunks, unroll=1):
            stage, phase = n % self.stages, n // self.stages % 2
            start = place.first + n * ROWS
            count = place.end - start
            sGates = shared.sGates[None, None, stage]
            self.round(tSrS, rS)
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            if count < ROWS:
                self.clear_rows((tiles["sK"],), stage, count, lane)
            # S^ᵀ k; S^ is handed over meanwhile
            self.multiply(acc.by_keys, tRrR, rS, tRrK, stage, True)
            handover.await_empty(STATE, n)
            self.keep(cute.make_tensor(rS.iterator, acc.state), tiles["sS"], acc.update, lane)
            handover.publish(STATE, lane)
            rV = self.values(tiles["sV"], stage, acc, lane)
            grown, beta = (self.numbers(sGates, which, lane) for which in (0, 1))
            warpgroup.wait_group(0)
            # r = β (v - 2^G S^ᵀ k)
            for i in cutlass.range_constexpr(cute.size(tRrR)):
                value = rV[i].to(cutlass.Float32)
                value = cute.math.fma(self.of_row(grown, i), tRrR[i], value)
                tRrR[i] = self.of_row(beta, i) * value
            if count < ROWS:
                self.clear_values(tRrR, count, acc)
            self.round(tRrR, rR)
            # u = A r
            self.multiply(acc.by_keys, tRrR, rR, tUrA, stage, True)
            weight = self.numbers(sGates, 2, lane)
            warpgroup.wait_group(0)
            if count < ROWS:
                self.clear_values(tRrR, count, acc)
            turnstile.add_zero(tRrR)
            self.round(tRrR, rR)
            self.weigh(tRrR, weight, count, acc, rW)
            # Σ_j k_j (2^(G_C - G_j) u_j)ᵀ; u is handed over meanwhile
            self.multiply(acc.update, tSrD, rW, tSrK, stage, True)
            handover.await_empty(ROWS_OF_U, n)
            self.keep(cute.make_tensor(rR.iterator, acc.rows), tiles["sU"], acc.by_keys, lane)
            handover.publish(ROWS_OF_U, lane)
            whole = sGates[0, 4]
            warpgroup.wait_group(0)
            self.release(shared, stage, lane)
            for i in cutlass.range_constexpr(cute.size(tSrS)):
                tSrS[i] = cute.math.fma(whole, tSrS[i], tSrD[i])
            if cutlass.const_expr(tensors.mFinal is not None):
                if cutlass.min(start + ROWS, place.end) == behind:
                    self.save_state(tensors.mFinal, tSrS, acc, place)

    @cute.jit
    def put_out(
        self, sources: Sources, tensors: Tensors, shared: Shared, handover: Handover, place: Place
    ):
        """Make o of each chunk, and store o, u and S^; by warpgroup 1."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx - mma.WARPGROUP
        leads = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == WARPS
        tiles, acc = shared.tiles, self.accumulators(lane)
        product = mma.tiled_mma(self.dtype, "mn", "k", 1, ROWS)
        tOrS, tOrQ = mma.operands(product, lane, tiles["sS"], tiles["sQ"])
        tOrU, tOrP = mma.operands(product, lane, tiles["sU"], tiles["sP"])
        tOrO = cute.make_rmem_tensor(acc.rows, cutlass.Float32)
        for n in cutlass.range(place.chunks, unroll=1):
            stage, phase = n % self.stages, n // self.stages % 2
            start = place.first + n * ROWS
            count = place.end - start
            sGates = shared.sGates[None, None, stage]
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            handover.await_full(STATE, n)
            # S^ᵀ q
            mma.start(product, tOrO, tOrS, tOrQ, 0, stage)
            if leads:
                self.store_state(sources.s, tiles["sS"], place.slot + n, place)
            weight = self.numbers(sGates, 3, lane)
            warpgroup.wait_group(0)
            if leads:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            handover.release(STATE, lane)
            for i in cutlass.range_constexpr(cute.size(tOrO)):
                tOrO[i] = tOrO[i] * self.of_row(weight, i)
            # o = scale 2^G S^ᵀ q + P u
            handover.await_full(ROWS_OF_U, n)
            product.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.fence()
            for group in cutlass.range_constexpr(cute.size(tOrU, mode=[2])):
                tCrA, tCrB = tOrU[None, None, group, 0], tOrP[None, None, group, stage]
                cute.gemm(product, tOrO, tCrA, tCrB, tOrO)
            warpgroup.commit_group()
            of_u = Result(sources.u, tiles["sU"], tensors.mU)
            self.store_rows(of_u, start, count, place, lane)
            warpgroup.wait_group(0)
            self.release(shared, stage, lane)
            turnstile.add_zero(tOrO)
            rO = cute.make_rmem_tensor(acc.rows, self.dtype)
            self.round(tOrO, rO)
            # Of u, and of o of the chunk before.
            self.await_tiles(BARRIER + 1, lane)
            handover.release(ROWS_OF_U, lane)
            self.keep(rO, tiles["sO"], acc.by_keys, lane)
            self.publish_tiles(BARRIER + 1)
            of_o = Result(sources.o, tiles["sO"], tensors.mO)
            self.store_rows(of_o, start, count, place, lane)
        if leads:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def clear_behind(self, tensors: Tensors, place: Place):
        """Write zeros to the slots before the next sequence's, and behind a pack."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx - mma.WARPGROUP
        first_slot = place.first // ROWS + place.sequence
        is_last = place.sequence + 2 == tensors.mOffsets.shape[0]
        until = place.end // ROWS + place.sequence + 1
        if is_last:
            until = tensors.mStates.shape[0]
        zeros = cute.make_rmem_tensor((4,), cutlass.Int32)
        zeros.fill(0)
        piece = lane % 8
        for slot in cutlass.range(first_slot + place.chunks, until, unroll=1):
            for i in cutlass.range(self.keys // 16, unroll=1):
                coord = (slot, place.head, i * 16 + lane // 8, place.column + 8 * piece)
                to = copy.vector(tensors.mStates, coord, 8)
                cute.recast_tensor(to, cutlass.Int32).store(zeros.load())
        if is_last:
            for row in cutlass.range(place.end + lane // 8, tensors.mO.shape[0], 16, unroll=1):
                for target in (tensors.mO, tensors.mU):
                    self.store_piece(target, row, place, piece, zeros)


def build(config: DeltaConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    rows, heads, v_heads, values = fake.size(), fake.size(), fake.size(), fake.size(COLUMNS)
    slots, sequences = fake.size(), fake.size()
    of_v, state = (rows, v_heads, values), (sequences, v_heads, config.keys, values)
    return compile(
        DeltaSm90(config),
        *(strided("bf16", (rows, heads, config.keys)) for _ in "qk"),
        strided("bf16", of_v),
        *(strided("bf16", (rows, v_heads, ROWS)) for _ in "ap"),
        fake.rows("fp32", rows, v_heads),
        fake.rows(config.beta, rows, v_heads),
        *(strided("bf16", of_v) for _ in "ou"),
        strided("bf16", (slots, v_heads, config.keys, values)),
        *states(state, config.initial, config.final),
        fake.compact(cutlass.Int32, (fake.size(),)),
        cutlass.Float32(1.0),
        cutlass.Int32(0),
        cutlass.Int32(0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
