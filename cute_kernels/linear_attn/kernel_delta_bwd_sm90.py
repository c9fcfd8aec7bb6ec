"""Gradients of the gated delta rule's states on SM90, the last chunk of a sequence first.

    dU = dU₀ + 2^(G_C - G) dS'ᵀ k    dR = Aᵀ dU    Z = β 2^G dR
    dS = 2^G_C dS' + Σ_i q_i (scale 2^G_i dO_i)ᵀ - Σ_i k_i Z_iᵀ

dU₀ = Pᵀ dO is made before, by triton/kernel_delta_backward.py, whose order this is.

Layouts      as in kernel_delta_sm90; d_out, dU₀, dR as v; the gradient of the state behind a chunk
             [slots, HV, K, V] bf16 at the chunk's slot; of final and initial [S, HV, K, V] fp32.
Order        as written there: products are WGMMA over ascending k16 steps (``device/chain``).
Tails        rows of a chunk behind its sequence are zeros in dU, Z and dO; those of q, k and A are
             cleared in shared memory, as 0 times NaN is NaN.  Rows of dR and slots that belong to
             no chunk are not written: nothing reads them.
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
from ..dsl import tma
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


@dataclass(frozen=True)
class Tensors:
    """Tensors in global memory that are not read or written by TMA alone."""

    mDecay: cute.Tensor
    mBeta: cute.Tensor
    mDr: cute.Tensor
    mDfinal: cute.Tensor | None
    mDinitial: cute.Tensor | None
    mOffsets: cute.Tensor


@dataclass(frozen=True)
class Sources:
    """Operands of a chunk, and its results, as TMA addresses them."""

    q: tma.Source
    k: tma.Source
    d_out: tma.Source
    du: tma.Source
    a: tma.Source
    dr: tma.Source
    ds: tma.Source


class DeltaGradientSm90(Chain):
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def layouts(self) -> dict[str, cute.ComposedLayout]:
        return {
            "sQ": self.of_keys(),
            "sQt": self.of_keys_transposed(),
            "sK": self.of_keys(),
            "sKt": self.of_keys_transposed(),
            "sDo": self.of_columns(self.stages),
            "sDu": self.of_columns(self.stages),
            "sA": self.square("k"),
            "sAt": self.square("mn"),
            "sDr": self.of_columns(1),
            "sDs": self.of_columns(1, self.keys),
        }

    def renamed(self) -> dict[str, str]:
        return {"sQt": "sQ", "sKt": "sK", "sAt": "sA"}

    @cute.jit
    def __call__(
        self,
        mDout: cute.Tensor,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mDu: cute.Tensor,
        mA: cute.Tensor,
        mDecay: cute.Tensor,
        mBeta: cute.Tensor,
        mDr: cute.Tensor,
        mDstates: cute.Tensor,
        mDfinal: cute.Tensor | None,
        mDinitial: cute.Tensor | None,
        mOffsets: cute.Tensor,
        scale: cutlass.Float32,
        slots: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        q, k = (self.load_keys(m) for m in (mQ, mK))
        d_out, du = (self.load_columns(m) for m in (mDout, mDu))
        results = self.store_columns(mDr), self.store_states(mDstates)
        sources = Sources(q, k, d_out, du, self.load_square(mA), *results)
        tensors = Tensors(mDecay, mBeta, mDr, mDfinal, mDinitial, mOffsets)
        self.kernel(sources, tensors, scale, slots).launch(
            grid=(mOffsets.shape[0] - 1, mDout.shape[1], mDout.shape[2] // COLUMNS),
            block=(32 * (WARPS + 1), 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, sources: Sources, tensors: Tensors, scale: cutlass.Float32, slots: cutlass.Int32
    ):
        role = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.make_shared(SmemAllocator().allocate(self.storage()))
        place = self.place(tensors.mOffsets, slots)
        if role == WARPS:
            self.produce(sources, tensors, scale, shared, place)
        else:
            self.compute(sources, tensors, shared, place)

    @cute.jit
    def produce(
        self,
        sources: Sources,
        tensors: Tensors,
        scale: cutlass.Float32,
        shared: Shared,
        place: Place,
    ):
        """Load each chunk, and what follows from its gates; by a warp."""
        of_v, tiles = place.head, shared.tiles
        of_k = of_v // (tensors.mDecay.shape[1] // sources.k.tensor.shape[2])
        operands = (
            Operand(sources.q, tiles["sQ"], of_k, False),
            Operand(sources.k, tiles["sK"], of_k, False),
            Operand(sources.d_out, tiles["sDo"], of_v, True),
            Operand(sources.du, tiles["sDu"], of_v, True),
            Operand(sources.a, tiles["sA"], of_v, False),
        )
        self.produce_chunks(operands, Gates(tensors.mDecay, tensors.mBeta, scale), shared, place)

    def chunk(self, n: cutlass.Int32, place: Place) -> cutlass.Int32:
        return place.chunks - 1 - n

    def of_gates(self, row: RowGates) -> tuple[cutlass.Float32, ...]:
        """2^(G_C - G), -β 2^G, scale 2^G, 2^G_C."""
        return row.to_end, -(row.beta * row.grown), row.grown * row.scale, row.whole

    @cute.jit
    def compute(self, sources: Sources, tensors: Tensors, shared: Shared, place: Place):
        """Go through the chunks; by a warpgroup."""
        lane, _, _ = cute.arch.thread_idx()
        tiles, acc = shared.tiles, self.accumulators(lane)
        tUrK = self.fragment_b(acc.by_keys, tiles["sK"])
        tRrA = self.fragment_b(acc.by_rows, tiles["sAt"])
        tSrQ, tSrK = (self.fragment_b(acc.update, tiles[name]) for name in ("sQt", "sKt"))
        tRrR = cute.make_rmem_tensor(acc.rows, cutlass.Float32)
        tSrS, tSrD = (cute.make_rmem_tensor(acc.state, cutlass.Float32) for _ in range(2))
        rS = self.fragment_a(acc.by_keys, self.keys)
        rO, rU = (self.fragment_a(acc.by_keys, ROWS) for _ in range(2))
        tSrS.fill(0.0)
        if cutlass.const_expr(tensors.mDfinal is not None):
            self.load_state(tensors.mDfinal, tSrS, acc, place)

        for n in cutlass.range(place.chunks, unroll=1):
            stage, phase = n % self.stages, n // self.stages % 2
            chunk = self.chunk(n, place)
            start = place.first + chunk * ROWS
            count = place.end - start
            sGates = shared.sGates[None, None, stage]
            self.round(tSrS, rS)
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            if count < ROWS:
                self.clear_rows((tiles["sQ"], tiles["sK"], tiles["sA"]), stage, count, lane)
            # dS'ᵀ k
            self.multiply(acc.by_keys, tRrR, rS, tUrK, stage, True)
            # Σ_i q_i (scale 2^G_i dO_i)ᵀ, behind it
            values = self.values(tiles["sDo"], stage, acc, lane)
            self.weigh(values, self.numbers(sGates, 2, lane), count, acc, rO)
            self.multiply(acc.update, tSrD, rO, tSrQ, stage, True)
            self.await_tiles(BARRIER, lane)
            self.keep(cute.make_tensor(rS.iterator, acc.state), tiles["sDs"], acc.update, lane)
            self.publish_tiles(BARRIER)
            if lane < 32:
                self.store_state(sources.ds, tiles["sDs"], place.slot + chunk, place)
            weight = self.numbers(sGates, 0, lane)
            warpgroup.wait_group(1)
            local = self.values(tiles["sDu"], stage, acc, lane)
            # dU = dU₀ + 2^(G_C - G) dS'ᵀ k
            for i in cutlass.range_constexpr(cute.size(tRrR)):
                value = local[i].to(cutlass.Float32)
                tRrR[i] = cute.math.fma(self.of_row(weight, i), tRrR[i], value)
            if count < ROWS:
                self.clear_values(tRrR, count, acc)
            self.round(tRrR, rU)
            # dR = Aᵀ dU
            self.multiply(acc.by_rows, tRrR, rU, tRrA, stage, True)
            weight = self.numbers(sGates, 1, lane)
            warpgroup.wait_group(0)
            rR = cute.make_rmem_tensor(acc.rows, self.dtype)
            self.round(tRrR, rR)
            # dS = 2^G_C dS' + Σ_i q_i (..)ᵀ - Σ_i k_i Z_iᵀ
            self.weigh(rR, weight, count, acc, rU)
            self.multiply(acc.update, tSrD, rU, tSrK, stage, False)
            self.keep(rR, tiles["sDr"], acc.by_keys, lane)
            self.publish_tiles(BARRIER)
            of_dr = Result(sources.dr, tiles["sDr"], tensors.mDr)
            self.store_rows(of_dr, start, count, place, lane)
            whole = sGates[0, 3]
            warpgroup.wait_group(0)
            self.release(shared, stage, lane)
            for i in cutlass.range_constexpr(cute.size(tSrS)):
                tSrS[i] = cute.math.fma(whole, tSrS[i], tSrD[i])
        if lane < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(tensors.mDinitial is not None):
            self.save_state(tensors.mDinitial, tSrS, acc, place)


def build(config: DeltaConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    rows, heads, v_heads, values = fake.size(), fake.size(), fake.size(), fake.size(COLUMNS)
    slots, sequences = fake.size(), fake.size()
    of_v, state = (rows, v_heads, values), (sequences, v_heads, config.keys, values)
    return compile(
        DeltaGradientSm90(config),
        strided("bf16", of_v),
        *(strided("bf16", (rows, heads, config.keys)) for _ in "qk"),
        strided("bf16", of_v),
        strided("bf16", (rows, v_heads, ROWS)),
        fake.rows("fp32", rows, v_heads),
        fake.rows(config.beta, rows, v_heads),
        strided("bf16", of_v),
        strided("bf16", (slots, v_heads, config.keys, values)),
        *states(state, config.final, config.initial),
        fake.compact(cutlass.Int32, (fake.size(),)),
        cutlass.Float32(1.0),
        cutlass.Int32(0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
