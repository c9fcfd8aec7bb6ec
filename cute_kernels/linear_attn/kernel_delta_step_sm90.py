"""Decoding for the gated delta rule on SM90: o of the new rows of a sequence and v head.

The order is that of triton/kernel_delta.py; triton/kernel_delta_step.py says what a step makes and
what the rings and counters hold.  A step that makes whole chunks closes them: S' is the next state.

Layouts      q, k [N, H, K], v [N, HV, V] bf16, last stride 1, others whole 16 bytes; g fp32, β bf16
             or fp32 [N, HV]; o [N, HV, V]; state and scratch [slots, HV, K, V] fp32; rings [slots R
             + 1, H, ..]; counters, offsets and slots int64.  R is a multiple of 64.
Work         a CTA has a sequence and a v head, a warp 32 columns of V.  Products are transposed,
             columns of V being an instruction's rows: S^, r and u come from memory as operand A, 4
             columns a lane, and what a product makes is the next one's operand A.  Warps share k, q
             and what follows from them: L, T, A and P of a block of 16 rows.
Order        ``mma.sync.m16n8k16`` over ascending k16 steps: the bits of WGMMA (docs/numerics.md).
             Steps of blocks that are not there would add zeros, and are left out.
Memory       ``rounded`` [slots, HV, K V] has S^ in the order in which lanes read it, if the slot's
             ``rounded_at`` is the grid + 1; else a step makes it from the state.  Lanes read only
             rows of r, u and S that they wrote themselves, or that lay there before.  S' of a chunk
             that may be dropped again lies in ``scratch``.
Limits       SM90a only; bf16; K and V of 64 or 128.
Measured     docs/notes/linear_attention.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy, turnstile
from .device.fakes import strided
from .device.step import (
    BLOCKS,
    LANE_COLUMNS,
    LOG2E,
    PLACE,
    RESIDENT_WARPS,
    STEP_ROWS,
    UNROLL,
    WARP_COLUMNS,
    Counters,
    Lane,
    Operands,
    Record,
    Scalars,
    Shared,
    State,
    Step,
    StepParts,
    add,
)
from .device.walks import BLOCK, ROWS, DeltaStepConfig


class DeltaStepSm90(StepParts):
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mOut: cute.Tensor,
        mState: cute.Tensor,
        mRounded: cute.Tensor,
        mScratch: cute.Tensor,
        mScratchRounded: cute.Tensor,
        mKRing: cute.Tensor,
        mVRing: cute.Tensor,
        mGRing: cute.Tensor,
        mBetaRing: cute.Tensor,
        mRRing: cute.Tensor,
        mURing: cute.Tensor,
        mARing: cute.Tensor,
        mOffsets: cute.Tensor,
        mSlots: cute.Tensor,
        mGrid: cute.Tensor,
        mLength: cute.Tensor,
        mMade: cute.Tensor,
        mRoundedAt: cute.Tensor,
        scale: cutlass.Float32,
        sequences: cutlass.Int32,
        length: cutlass.Int32,
        by_slot: cutlass.Int32,
        drafts: cutlass.Int32,
        ring: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        operands = Operands(mQ, mK, mV, mG, mBeta, mOut)
        rings = mKRing, mVRing, mGRing, mBetaRing, mRRing, mURing, mARing
        record = Record(mState, mRounded, mScratch, mScratchRounded, *rings)
        counters = Counters(mOffsets, mSlots, mGrid, mLength, mMade, mRoundedAt)
        scalars = Scalars(scale, length, by_slot, drafts, ring)
        self.kernel(operands, record, counters, scalars).launch(
            grid=(sequences, mV.shape[1], 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=RESIDENT_WARPS // self.warps,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    # ---- the kernel ------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, operands: Operands, record: Record, counters: Counters, scalars: Scalars):
        sequence, _, _ = cute.arch.block_idx()
        shared = self.make_shared(SmemAllocator().allocate(self.storage()))
        op = warp.MmaF16BF16Op(self.dtype, cutlass.Float32, (16, 8, 16))
        product = cute.make_tiled_mma(op, (1, 1, 1), permutation_mnk=(16, 16, 16))
        work = operands, record, scalars, shared, product
        self.find_place(operands, counters, scalars, shared)
        cute.arch.sync_threads()
        total = shared.sPlace[PLACE.index("total")]
        step = self.step(*work, cutlass.Int32(0))
        state = self.state(record.mState, record.mRounded, step.slot, step)
        if shared.sPlace[PLACE.index("rounded")] == 0:
            self.round_state(step, state)
        exact, rounded = state.exact, state.rounded
        for start in cutlass.range(0, total, ROWS, unroll=1):
            step = self.step(*work, start)
            begin = cutlass.max(step.made, 0) // BLOCK
            end = cutlass.min((step.total + BLOCK - 1) // BLOCK, BLOCKS)
            self.fetch_chunk(step, begin)
            for b in cutlass.range(begin, end, unroll=1):
                self.block(self.step(*work, start), rounded, b)
            if start + ROWS <= total:
                step = self.step(*work, start)
                following = self.state(record.mState, record.mRounded, step.slot, step)
                if start + ROWS > shared.sPlace[PLACE.index("whole")]:
                    following = self.state(record.mScratch, record.mScratchRounded, sequence, step)
                self.close(step, exact, following)
                exact, rounded = following.exact, following.rounded
            cute.arch.sync_threads()

    @cute.jit
    def find_place(self, operands: Operands, counters: Counters, scalars: Scalars, shared: Shared):
        """Write the numbers of `PLACE`; by the first thread."""
        tidx, _, _ = cute.arch.thread_idx()
        sequence, _, _ = cute.arch.block_idx()
        if tidx == 0:
            first = cutlass.Int64(sequence) * scalars.length
            count = cutlass.Int64(scalars.length)
            if scalars.length == 0:
                first = counters.mOffsets[sequence]
                count = counters.mOffsets[sequence + 1] - first
            slot = cutlass.Int64(sequence)
            if scalars.by_slot != 0:
                slot = counters.mSlots[sequence]
            grid = counters.mGrid[slot]
            opened = counters.mLength[slot] - grid
            made = cutlass.min(cutlass.max(counters.mMade[slot] - grid, 0), opened)
            total = opened + count
            whole = cutlass.max(total - scalars.drafts, 0) // ROWS * ROWS
            rounded = counters.mRoundedAt[slot] - grid == 1
            turn = grid % scalars.ring
            numbers = slot, first, opened, total, made, whole, turn, rounded, 0
            for i in cutlass.range_constexpr(len(PLACE)):
                shared.sPlace[i] = cutlass.Int32(numbers[i])

    def step(
        self,
        operands: Operands,
        record: Record,
        scalars: Scalars,
        shared: Shared,
        product: cute.TiledMma,
        start: cutlass.Int32,
    ) -> Step:
        """The step in the chunk that begins ``start`` rows behind the grid.

        Numbers are loaded again in each turn of a loop, so that the compiler cannot compute all
        addresses before it, which would take more registers than there are; hence a zero, too.
        """
        place = {name: shared.sPlace[i] for i, name in enumerate(PLACE)}
        tidx, _, _ = cute.arch.thread_idx()
        _, head, _ = cute.arch.block_idx()
        tidx += place["zero"]
        index, warp_index = tidx % 32, cute.arch.make_warp_uniform(tidx // 32)
        column = WARP_COLUMNS * warp_index + LANE_COLUMNS * (index // 4)
        v_heads, k_heads = operands.mV.shape[1], operands.mK.shape[1]
        group = v_heads // k_heads
        row = cutlass.Int64(place["slot"]) * scalars.ring + (place["turn"] + start) % scalars.ring
        return Step(
            operands,
            record,
            scalars,
            shared,
            product,
            Lane(index // 4, 2 * (index % 4), column, warp_index, index),
            head,
            head // group,
            group,
            place["slot"],
            place["first"],
            place["opened"] - start,
            place["total"] - start,
            place["made"] - start,
            row * v_heads + head,
            row * k_heads + head // group,
        )

    # ---- loads of a chunk ------------------------------------------------------------------------

    @cute.jit
    def fetch_chunk(self, step: Step, begin: cutlass.Int32):
        """Load the rows of k, and those of A before block ``begin``; find G and β of the chunk."""
        shared = step.shared
        for j, c in self.vectors(step, ROWS, self.keys):
            old = self.ring_keys(step, j, 8 * c).iterator.toint()
            new = self.new_row(step.operands.mK, step, j, step.k_head, 8 * c, 8).iterator.toint()
            source = old if j < step.opened else new
            self.fetch(source, self.vector_of(shared.sK, j, c), j < step.total)
        for j, c in self.vectors(step, ROWS, ROWS):
            if j < begin * BLOCK:
                source = self.ring(step.record.mA, step, j, 8 * c, 8).iterator.toint()
                self.fetch(source, self.vector_of(shared.sA, j, c), True)
        if step.lane.warp == 0:
            self.gates(step)

    @cute.jit
    def gates(self, step: Step):
        """Write G and β of a chunk's rows to shared memory, and keep new g and β; by a warp.

        A lane has two rows.  G is the tree of sums of neighbours: at each level a row in the right
        half of its node adds the sum of the left one.
        """
        operands = step.operands
        steps = [cutlass.Float32(0.0), cutlass.Float32(0.0)]
        for half in cutlass.range_constexpr(2):
            i = 2 * step.lane.index + half
            g, beta = cutlass.Float32(0.0), cutlass.Float32(0.0)
            if i < step.total:
                ring_g = self.ring(step.record.mG, step, i, 0, 1)
                ring_beta = self.ring(step.record.mBeta, step, i, 0, 1)
                if i < step.opened:
                    g, beta = ring_g[0], ring_beta[0]
                else:
                    row = step.first + (i - step.opened)
                    g = copy.vector(operands.mG, (row, step.head), 1)[0]
                    new_beta = copy.vector(operands.mBeta, (row, step.head), 1)[0]
                    beta = new_beta.to(cutlass.Float32)
                    ring_g[0], ring_beta[0] = g, beta
            steps[half] = g * cutlass.Float32(LOG2E)
            step.shared.sBeta[i] = beta
        left, right = steps[0], add(steps[0], steps[1])
        for level in cutlass.range_constexpr(5):
            sibling = ((step.lane.index >> level) << level) - 1
            before = cute.arch.shuffle_sync(right, cutlass.max(sibling, 0))
            if step.lane.index & (1 << level):
                left = before + left
                right = before + right
        step.shared.sDecay[2 * step.lane.index] = left
        step.shared.sDecay[2 * step.lane.index + 1] = right

    # ---- a block of 16 rows ----------------------------------------------------------------------

    @cute.jit
    def block(self, step: Step, rounded: cutlass.Int64, b: cutlass.Int32):
        """Make r, u, A and o of block ``b`` of a chunk."""
        shared, first = step.shared, b * BLOCK + step.lane.pair
        self.fetch_queries(step, b)
        self.fetch_rounded(step, rounded)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        accR, accO = (self.accumulator(step, WARP_COLUMNS, BLOCK) for _ in range(2))
        for s in cutlass.range(self.keys // BLOCK, unroll=UNROLL):
            rS = self.rounded_state(step, s)
            self.multiply(step, accR, rS, self.load(step, "B", self.square(shared.sK, b, s)))
            self.multiply(step, accO, rS, self.load(step, "B", self.square(shared.sQ, 0, s)))
        self.scores(step, b)
        cute.arch.sync_threads()

        rV = [self.values_of(step, first + i) for i in STEP_ROWS]
        rR = [self.rows_before(step.record.mR, step, s, b) for s in range(BLOCKS - 1)]
        rU = [self.rows_before(step.record.mU, step, s, b) for s in range(BLOCKS - 1)]

        if step.lane.warp == self.warps - 1:
            self.inverse(step)
        # r = β (v - 2^G S^ᵀ k), and the first term of o
        for j in cutlass.range_constexpr(len(STEP_ROWS)):
            i = first + STEP_ROWS[j]
            there = i < step.total
            grown = cute.math.exp2(shared.sDecay[i], fastmath=True)
            beta, weight = shared.sBeta[i], grown * step.scalars.scale
            for c in cutlass.range_constexpr(LANE_COLUMNS):
                e = self.elements(j)[c]
                value = cute.math.fma(-grown, accR[e], rV[j][c].to(cutlass.Float32))
                value = beta * value
                accR[e] = value if there else cutlass.Float32(0.0)
                accO[e] = accO[e] * weight
        ownR = self.as_operand(step, accR)
        self.keep(step.record.mR, ownR, step, b)
        cute.arch.sync_threads()

        self.rows_of_inverse(step, b)
        cute.arch.sync_threads()

        # u = A r
        rT = self.load(step, "B", shared.sT)
        accU = self.accumulator(step, WARP_COLUMNS, BLOCK)
        for s in cutlass.range_constexpr(BLOCKS - 1):
            if s < b:
                rA = self.load(step, "B", self.square(shared.sA, b, s))
                self.multiply(step, accU, rR[s], rA)
        self.multiply(step, accU, ownR, rT)
        turnstile.add_zero(accU)
        ownU = self.as_operand(step, accU)
        self.keep(step.record.mU, ownU, step, b)
        # o = scale 2^G S^ᵀ q + P u
        for s in cutlass.range_constexpr(BLOCKS - 1):
            if s < b:
                rP = self.load(step, "B", self.square(shared.sP, 0, s))
                self.multiply(step, accO, rU[s], rP)
        self.multiply(step, accO, ownU, self.load(step, "B", self.square(shared.sP, 0, b)))
        turnstile.add_zero(accO)
        self.put_out(step, self.as_operand(step, accO), b)
        cute.arch.sync_threads()

    @cute.jit
    def fetch_queries(self, step: Step, b: cutlass.Int32):
        """Load the block's new rows of q; zeros for others."""
        for n, c in self.vectors(step, BLOCK, self.keys):
            i = b * BLOCK + n
            there = (i >= step.opened) & (i < step.total)
            q = self.new_row(step.operands.mQ, step, i, step.k_head, 8 * c, 8)
            self.fetch(q.iterator.toint(), self.vector_of(step.shared.sQ, n, c), there)

    @cute.jit
    def values_of(self, step: Step, i: cutlass.Int32) -> cute.Tensor:
        """A lane's columns of v of row i, or of the last row; keep those of a new one."""
        column = step.lane.column
        i = cutlass.min(i, step.total - 1)
        row = self.ring_columns(step.record.mV, step, i)
        new = self.new_row(step.operands.mV, step, i, step.head, column, LANE_COLUMNS)
        address = new.iterator.toint()
        if i < step.opened:
            address = row.iterator.toint()
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=8)
        rV = cute.make_rmem_tensor(cute.make_layout(LANE_COLUMNS), self.dtype)
        rV.store(cute.make_tensor(pointer, rV.layout).load())
        if i >= step.opened:
            row.store(rV.load())
        return rV

    @cute.jit
    def scores(self, step: Step, b: cutlass.Int32):
        """Write L and P of the block's rows, against a warp's blocks of rows up to it."""
        shared = step.shared
        for part in cutlass.range_constexpr(BLOCKS // self.warps):
            other = step.lane.warp + part * self.warps
            if other <= b:
                accK, accQ = (self.accumulator(step, BLOCK, BLOCK) for _ in range(2))
                for s in cutlass.range(self.keys // BLOCK, unroll=UNROLL):
                    rK = self.load(step, "B", self.square(shared.sK, other, s))
                    self.multiply(
                        step, accK, self.load(step, "A", self.square(shared.sK, b, s)), rK
                    )
                    self.multiply(
                        step, accQ, self.load(step, "A", self.square(shared.sQ, 0, s)), rK
                    )
                for e in cutlass.range_constexpr(8):
                    n = step.lane.row + 8 * (e // 2 % 2)
                    column = 8 * (e // 4) + step.lane.pair + e % 2
                    i, j = b * BLOCK + n, other * BLOCK + column
                    weight = cute.math.exp2(shared.sDecay[i] - shared.sDecay[j], fastmath=True)
                    lower = (shared.sBeta[i] * accK[e]) * weight
                    score = accQ[e] * (weight * step.scalars.scale)
                    if other == b:
                        lower = lower if n > column else cutlass.Float32(0.0)
                        score = score if n >= column else cutlass.Float32(0.0)
                        shared.sDiagonal[column, n] = lower
                    shared.sL[n, j] = lower.to(self.dtype)
                    shared.sP[n, j] = score.to(self.dtype)

    @cute.jit
    def inverse(self, step: Step):
        """Write T = (I + L)⁻¹ of the block's rows, rounded; by a warp, a lane having a column.

        Row i is e_i - Σ_m L_im T_m, m ascending: row m is taken from all rows below it at once.
        """
        shared, j = step.shared, step.lane.index % BLOCK
        rT = cute.make_rmem_tensor(cute.make_layout(BLOCK), cutlass.Float32)
        for i in cutlass.range_constexpr(BLOCK):
            rT[i] = cutlass.Float32(1.0) if j == i else cutlass.Float32(0.0)
        for m in cutlass.range_constexpr(BLOCK - 1):
            for i in cutlass.range_constexpr(m + 1, BLOCK):
                rT[i] = cute.math.fma(-shared.sDiagonal[m, i], rT[m], rT[i])
        if step.lane.index < BLOCK:
            for i in cutlass.range_constexpr(BLOCK):
                shared.sT[i, j] = rT[i].to(self.dtype)

    @cute.jit
    def rows_of_inverse(self, step: Step, b: cutlass.Int32):
        """Write the block's rows of A = T (I - L A), a warp's blocks of columns."""
        shared = step.shared
        for part in cutlass.range_constexpr(BLOCKS // self.warps):
            other = step.lane.warp + part * self.warps
            acc = self.accumulator(step, BLOCK, BLOCK)
            for s in cutlass.range_constexpr(BLOCKS - 1):
                if (s < b) & (s >= other):
                    rA = self.load(step, "A", self.square(shared.sAt, other, s), transposed=True)
                    rL = self.load(step, "B", self.square(shared.sL, 0, s))
                    self.multiply(step, acc, rA, rL)
            for e in cutlass.range_constexpr(8):
                j = step.lane.row + 8 * (e // 2 % 2)
                i = 8 * (e // 4) + step.lane.pair + e % 2
                one = (other == b) & (i == j)
                unit = cutlass.Float32(1.0) if one else cutlass.Float32(0.0)
                acc[e] = unit - acc[e]
            rest = self.as_operand(step, acc)
            acc.fill(0.0)
            self.multiply(step, acc, rest, self.load(step, "B", shared.sT))
            for e in cutlass.range_constexpr(8):
                j = other * BLOCK + step.lane.row + 8 * (e // 2 % 2)
                i = b * BLOCK + 8 * (e // 4) + step.lane.pair + e % 2
                shared.sA[i, j] = acc[e].to(self.dtype)

    @cute.jit
    def put_out(self, step: Step, rO: cute.Tensor, b: cutlass.Int32):
        """Store o of the new rows; keep their rows of A and, by its first v head, of k."""
        shared = step.shared
        for j in cutlass.range_constexpr(len(STEP_ROWS)):
            i = b * BLOCK + step.lane.pair + STEP_ROWS[j]
            if (i >= step.opened) & (i < step.total):
                mOut, column = step.operands.mOut, step.lane.column
                out = self.new_row(mOut, step, i, step.head, column, LANE_COLUMNS)
                out.store(self.columns_of(rO, j).load())
        for n, c in self.vectors(step, BLOCK, ROWS):
            i = b * BLOCK + n
            if (i >= step.made) & (i < step.total):
                source = self.vector_of(shared.sA, i, c)
                self.put(source, self.ring(step.record.mA, step, i, 8 * c, 8))
        if step.head == step.k_head * step.group:
            for n, c in self.vectors(step, BLOCK, self.keys):
                i = b * BLOCK + n
                if (i >= step.opened) & (i < step.total):
                    source = self.vector_of(shared.sK, i, c)
                    self.put(source, self.ring_keys(step, i, 8 * c))

    # ---- the end of a chunk ----------------------------------------------------------------------

    @cute.jit
    def close(self, step: Step, exact: cutlass.Int64, following: State):
        """S' = 2^G_C S + Σ_j k_j (2^(G_C - G_j) u_j)ᵀ of a whole chunk, u = A r before rounding."""
        cute.arch.cp_async_commit_group()  # of a chunk without new rows
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        shared, whole = step.shared, step.shared.sDecay[ROWS - 1]
        all_blocks = cutlass.Int32(BLOCKS)
        rR = [self.rows_before(step.record.mR, step, s, all_blocks) for s in range(BLOCKS)]
        rU = [self.fragment_a(step, WARP_COLUMNS, BLOCK) for _ in range(BLOCKS)]
        for b in cutlass.range_constexpr(BLOCKS):
            acc = self.accumulator(step, WARP_COLUMNS, BLOCK)
            for s in cutlass.range_constexpr(b + 1):
                self.multiply(step, acc, rR[s], self.load(step, "B", self.square(shared.sA, b, s)))
            turnstile.add_zero(acc)
            for j in cutlass.range_constexpr(len(STEP_ROWS)):
                i = b * BLOCK + step.lane.pair + STEP_ROWS[j]
                weight = cute.math.exp2(whole - shared.sDecay[i], fastmath=True)
                for e in self.elements(j):
                    acc[e] = acc[e] * weight
            rU[b].store(self.as_operand(step, acc).load())
        grown = cute.math.exp2(whole, fastmath=True)
        for part in cutlass.range(self.keys // BLOCK, unroll=1):
            acc = self.accumulator(step, WARP_COLUMNS, BLOCK)
            for s in cutlass.range_constexpr(BLOCKS):
                tile = self.square(shared.sKt, part, s)
                self.multiply(step, acc, rU[s], self.load(step, "B", tile, transposed=True))
            for j in cutlass.range_constexpr(len(STEP_ROWS)):
                row = BLOCK * part + STEP_ROWS[j]
                old = self.state_row(exact, row).load()
                new = cute.make_rmem_tensor(cute.make_layout(LANE_COLUMNS), cutlass.Float32)
                for c in cutlass.range_constexpr(LANE_COLUMNS):
                    e = self.elements(j)[c]
                    new[c] = cute.math.fma(grown, old[c], acc[e])
                    acc[e] = new[c]
                self.state_row(following.exact, row).store(new.load())
            self.keep_rounded(self.as_operand(step, acc), following.rounded, part)


def build(config: DeltaStepConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    rows, heads, v_heads, slots, ring = (fake.size() for _ in range(5))
    sequences, scratch = fake.size(), fake.size()
    of_state = v_heads, config.keys, config.values
    k_ring, v_ring, a_ring = (
        strided("bf16", (ring, count, size))
        for count, size in ((heads, config.keys), (v_heads, config.values), (v_heads, ROWS))
    )
    gates = fake.rows("fp32", ring, v_heads)
    counters = [fake.compact(cutlass.Int64, (slots,), 8) for _ in range(4)]
    return compile(
        DeltaStepSm90(config),
        *(strided("bf16", (rows, heads, config.keys)) for _ in "qk"),
        strided("bf16", (rows, v_heads, config.values)),
        fake.rows("fp32", rows, v_heads),
        fake.rows(config.beta, rows, v_heads),
        strided("bf16", (rows, v_heads, config.values)),
        strided("fp32", (slots, *of_state)),
        strided("bf16", (slots, v_heads, config.keys * config.values)),
        strided("fp32", (scratch, *of_state)),
        strided("bf16", (scratch, v_heads, config.keys * config.values)),
        k_ring,
        v_ring,
        gates,
        gates,
        v_ring,
        v_ring,
        a_ring,
        fake.compact(cutlass.Int64, (fake.size(),), 8),
        fake.compact(cutlass.Int64, (sequences,), 8),
        *counters,
        cutlass.Float32(1.0),
        *(cutlass.Int32(0) for _ in range(5)),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
