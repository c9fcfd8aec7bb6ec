"""Sums over chunks of tokens, added to gradient accumulators, on SM90.

    weights   into_phi[j, k] += dpsi[j, k] w[k];  into_weight[k] += Σ_j dpsi[j, k] phi[j, k]
    vectors   into[l] += Σ of the partial sums of a chunk

Layout       dpsi fp32 [T, N, K]; phi, into_phi [N, K]; w, into_weight [K]; parts fp32 [P, L], a
             chunk being ``group`` neighbours.
Order        chunks ascending, j ascending, one fma each; the parts of a chunk ascending, from zero.
Work         a thread for (j, k); for k of a norm_weight, and for parts, a warp for a chunk.
Measured     docs/status.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import copy
from .config import SumConfig

WARP, WARPS, AHEAD = 32, 8, 8


class MhcSumsSm90:
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: SumConfig):
        self.config = config
        self.threads = WARP * WARPS

    @cute.jit
    def __call__(
        self,
        mParts: cute.Tensor,
        mInto: cute.Tensor,
        mPhi: cute.Tensor | None,
        mWeight: cute.Tensor | None,
        mIntoWeight: cute.Tensor | None,
        group: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        if cutlass.const_expr(self.config.weights):
            size, rows = mParts.shape[2], mParts.shape[1]
            if cutlass.const_expr(self.config.norm):
                rows = rows + WARPS
            self.of_weights(mParts, mInto, mPhi, mWeight, mIntoWeight).launch(
                grid=(cute.ceil_div(size, self.threads), rows, 1),
                block=(self.threads, 1, 1),
                min_blocks_per_mp=1,
                stream=stream,
            )
        else:
            self.of_vectors(mParts, mInto, group).launch(
                grid=(cute.ceil_div(mInto.shape[0], WARP), 1, 1),
                block=(self.threads, 1, 1),
                min_blocks_per_mp=1,
                stream=stream,
            )

    @cute.kernel
    def of_weights(
        self,
        mParts: cute.Tensor,
        mInto: cute.Tensor,
        mPhi: cute.Tensor | None,
        mWeight: cute.Tensor | None,
        mIntoWeight: cute.Tensor | None,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, row, _ = cute.arch.block_idx()
        chunks, columns, size = mParts.shape
        k = block * self.threads + tidx
        # Computed by hand: 64-bit offsets, with one address for all chunks.
        step = cutlass.Int64(columns) * size
        if cutlass.const_expr(self.config.norm):
            if row >= columns:
                first = block * self.threads + (row - columns) * WARP
                self.norm_weight(mParts, mPhi, mIntoWeight, first, step)
        if row < columns:
            if k < size:
                # into_phi[j, k] += dpsi[j, k] w[k]
                offset = cutlass.Int64(row) * size + k
                total = copy.aligned(mInto, offset, 1)[0]
                weight = cutlass.Float32(1.0)
                if cutlass.const_expr(self.config.norm):
                    weight = mWeight[k]
                for s in cutlass.range(chunks, unroll=AHEAD):
                    d_psi = copy.aligned(mParts, offset + s * step, 1)[0]
                    total = cute.math.fma(d_psi, weight, total)
                copy.aligned(mInto, offset, 1)[0] = total

    @cute.jit
    def norm_weight(
        self,
        mParts: cute.Tensor,
        mPhi: cute.Tensor,
        mIntoWeight: cute.Tensor,
        first: cutlass.Int32,
        step: cutlass.Int64,
    ):
        """into_weight[k] += Σ_j dpsi[j, k] phi[j, k], chunk by chunk, of 32 k from ``first`` on."""
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = tidx // WARP, tidx % WARP
        chunks, columns, size = mParts.shape
        k = first + lane
        # A lane beyond the last element reads that one; its sum is not stored.
        source = cutlass.min(k, size - 1)
        sSums = self.shared_sums()
        total = mIntoWeight[source]
        for begin in cutlass.range(0, chunks, WARPS, unroll=1):
            # The sum of one chunk by each warp; then into_weight += the chunks, ascending.
            s = cutlass.min(begin + warp, chunks - 1)
            chunk_sum = cutlass.Float32(0.0)
            for j in cutlass.range(columns, unroll=AHEAD):
                offset = cutlass.Int64(j) * size + source
                d_psi = copy.aligned(mParts, offset + s * step, 1)[0]
                chunk_sum = cute.math.fma(d_psi, copy.aligned(mPhi, offset, 1)[0], chunk_sum)
            sSums[warp, lane] = chunk_sum
            cute.arch.sync_threads()
            for w in cutlass.range(cutlass.min(WARPS, chunks - begin), unroll=1):
                total = total + sSums[w, lane]
            cute.arch.sync_threads()
        if (warp == 0) & (k < size):
            mIntoWeight[k] = total

    def shared_sums(self) -> cute.Tensor:
        """Allocate shared memory for a sum of each thread: [warp, lane]."""
        layout = cute.make_ordered_layout((WARPS, WARP), order=(1, 0))
        return SmemAllocator().allocate_tensor(cutlass.Float32, layout, byte_alignment=16)

    @cute.kernel
    def of_vectors(self, mParts: cute.Tensor, mInto: cute.Tensor, group: cutlass.Int32):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = tidx // WARP, tidx % WARP
        parts, size = mParts.shape
        column = block * WARP + lane
        # A lane beyond the last column reads that column; its sum is not stored.
        source = cutlass.min(column, size - 1)
        sSums = self.shared_sums()
        total = mInto[source]
        chunks = (parts + group - 1) // group
        for first in cutlass.range(0, chunks, WARPS, unroll=1):
            # The sum of one chunk by each warp; then into += the chunks, ascending.
            chunk_sum = cutlass.Float32(0.0)
            begin = cutlass.Int64(first + warp) * group
            count = cutlass.min(parts - begin, cutlass.Int64(group)).to(cutlass.Int32)
            for part in cutlass.range(count, unroll=AHEAD):
                part_value = copy.aligned(mParts, (begin + part) * size + source, 1)[0]
                chunk_sum = chunk_sum + part_value
            sSums[warp, lane] = chunk_sum
            cute.arch.sync_threads()
            for w in cutlass.range(cutlass.min(WARPS, chunks - first), unroll=1):
                total = total + sSums[w, lane]
            cute.arch.sync_threads()
        if (warp == 0) & (column < size):
            mInto[column] = total


def build(config: SumConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    chunks, n, k = (fake.size() for _ in range(3))
    parts, into = fake.compact(cutlass.Float32, (chunks, k), 4), fake.vector("fp32", k)
    others = (None, None, None)
    if config.weights:
        parts = fake.compact(cutlass.Float32, (chunks, n, k), 4)
        into = fake.compact(cutlass.Float32, (n, k), 4)
    if config.norm:
        others = (into, fake.vector("fp32", k), fake.vector("fp32", k))
    return compile(
        MhcSumsSm90(config),
        parts,
        into,
        *others,
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
