"""D[e, m, n] = round(acc0[e, m, n] + Σ_t A[t, m] B[t, n]), t over the rows of expert e, on SM90.

Layouts      A [T, M] and B [T, N] row-major (16-byte strides); D [E, M, N], rows of whole 16 bytes;
             offsets int32 [E + 1], clamped to [0, T] and to ascend.
Order        ``chain``, by the mainloop of gemm's kernel: one fp32 accumulator per output, tokens
             ascending from the first row of the expert in whole groups of 16, one rounding.  So
             dW[e] has the bytes of ``ck.linear``'s dW of those rows alone.
             ``accumulate``: acc0 is read from D (fp32), which is then overwritten; the part of an
             expert without rows is written as it was.
Token tail   the last group of 16 may hold rows of the next expert: consumers overwrite them with
             zeros in shared memory, in A and in B, as TMA fills zeros behind the last row of all.
             Groups wholly beyond the expert are skipped.
M, N tails   TMA clips the store, expert by expert, as they are a dimension of their own.
Work         persistent: cluster c computes units c, c + clusters, ...; a unit is a column of
             tiles of one expert, one for each CTA of the cluster, which load a part of the tile of
             B each and multicast it.
Roles        warpgroup 0: one warp loads; warpgroups 1, 2: 64 rows of the tile each.
Limits       SM90a only; bf16 and fp16; T, M, N < 2^31.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.pipeline import PipelineState

from ..compile import fake
from ..dsl import epilogue, mma, tma
from ..dsl.product import CONSUMERS, Arguments, Consumer, Cta, Frame, Tile, Tiles
from ..schedulers.tiles.raster import tile_at
from .config import GroupedDwConfig
from .device.experts import rows_of

#: Named barrier of both consumers; those before it are the CTA's and the epilogue's.
BARRIER = epilogue.BARRIER + CONSUMERS


@dataclass(frozen=True)
class DwArguments(Arguments):
    """D [E, M, N] and offsets [E + 1]."""

    mD: cute.Tensor
    mOffsets: cute.Tensor


@dataclass(frozen=True)
class DwTile(Tile):
    """Tile (m, n) of one expert, whose rows are row0 to row0 + rows."""

    expert: cutlass.Int32
    row0: cutlass.Int32
    rows: cutlass.Int32


@dataclass(frozen=True)
class DwTiles(Tiles):
    """Units of all experts, which ascend, whatever their loads are: columns of tiles."""

    mD: cute.Tensor
    mOffsets: cute.Tensor
    tokens: cutlass.Int32
    config: GroupedDwConfig

    def has(self, index: cutlass.Int32, walk: None) -> cutlass.Boolean:
        """Whether there is a unit ``index``."""
        rows, columns = self.units_of_expert()
        return index < self.mD.shape[0] * rows * columns

    @cute.jit
    def at(self, index: cutlass.Int32, walk: None, rank: cute.Coord) -> DwTile:
        """Tile of CTA ``rank`` of the cluster."""
        rows, columns = self.units_of_expert()
        expert = index // (rows * columns)
        local = index % (rows * columns)
        m, n = tile_at(local, rows, columns, self.config.raster_group, cutlass.min)
        row0, rows_of_expert = rows_of(expert, self.mOffsets, self.tokens)
        return DwTile(m * self.config.cluster_m + rank[0], n, expert, row0, rows_of_expert)

    def units_of_expert(self) -> tuple[cutlass.Int32, cutlass.Int32]:
        """Number of units of an expert along M and along N."""
        high = self.config.tile_m * self.config.cluster_m
        rows, columns = self.mD.shape[1], self.mD.shape[2]
        return cute.ceil_div(rows, high), cute.ceil_div(columns, self.config.tile_n)


class GroupedDwSm90(Frame):
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: GroupedDwConfig):
        self.config = config
        dtype, tile = fake.DTYPES[config.dtype], (config.tile_m, config.tile_n, config.tile_k)
        d_dtype = cutlass.Float32 if config.accumulate else dtype
        super().__init__(dtype, d_dtype, ("mn", "mn"), tile, (config.cluster_m, 1))

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        mOffsets: cute.Tensor,
        clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        # A and B as [M, T] and [N, T]; D as [M, N, E].
        mA, mB, mD_tma = tma.view(mA, [1, 0]), tma.view(mB, [1, 0]), tma.view(mD, [1, 2, 0])
        self.launch(mA, mB, mD_tma, DwArguments(mD, mOffsets), clusters, stream)

    def tiles(self, cta: Cta, args: DwArguments) -> DwTiles:
        """Tiles of all experts."""
        return DwTiles(args.mD, args.mOffsets, self.problem_shape(cta)[2], self.config)

    @cute.jit
    def load(
        self,
        cta: Cta,
        a: tma.Source,
        b: tma.Source,
        state: PipelineState,
        tile: DwTile,
        args: DwArguments,
    ) -> PipelineState:
        """Producer warp: load the blocks of tokens of A and B of one unit, ascending."""
        return self.load_range(cta, a, b, state, tile, tile.row0, tile.rows)

    @cute.jit
    def mainloop(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        tile: DwTile,
        args: DwArguments,
    ) -> tuple[PipelineState, PipelineState]:
        """tCrC = acc0 + Σ_t A[t, m] B[t, n] of one unit."""
        if cutlass.const_expr(self.config.accumulate):
            row0 = tile.m * self.tile_m + consumer.index * 64
            column0 = tile.n * self.tile_n
            self.start_from(consumer, args.mD, row0, column0, (tile.expert,))
        else:
            consumer.tCrC.fill(0.0)
        blocks = tile.rows // self.tile_k
        states = self.product.chain(
            consumer.operands,
            consumer.tCrC,
            consumer.cta.ab_pipeline,
            states,
            blocks,
            cutlass.Int32(0),
        )
        tail = tile.rows - blocks * self.tile_k
        if tail > 0:
            states = self.add_tail(consumer, states, tail)
        return states

    @cute.jit
    def epilogue(
        self, consumer: Consumer, buffer: cutlass.Int32, tile: DwTile, args: DwArguments
    ) -> cutlass.Int32:
        """D[e] = round(tCrC) of one unit."""
        return self.store(consumer, tma.sliced(consumer.d, tile.expert), tile, buffer)

    @cute.jit
    def add_tail(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        tail: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """tCrC += Σ A B over the last ``tail`` tokens, less than a block, of one more stage."""
        read, release = states
        cta, ring = consumer.cta, consumer.cta.ab_pipeline
        groups = cute.ceil_div(tail, mma.K_GROUP)
        ring.consumer_wait(read)
        self.clear(cta.sA, read.index, tail, groups)
        self.clear(cta.sB, read.index, tail, groups)
        # WGMMA reads through another proxy what threads of both consumers wrote.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=CONSUMERS * mma.WARPGROUP)
        operands = consumer.operands
        tiled, tCrA, tCrB = operands.tiled, operands.tCrA, operands.tCrB
        mma.add_groups(tiled, consumer.tCrC, tCrA, tCrB, read.index, groups)
        cute.nvgpu.warpgroup.wait_group(0)
        ring.consumer_release(release)
        read.advance()
        release.advance()
        return read, release

    @cute.jit
    def clear(
        self,
        sX: cute.Tensor,
        stage: cutlass.Int32,
        tail: cutlass.Int32,
        groups: cutlass.Int32,
    ):
        """Zeros in the tokens of the last group that are not the expert's, by both consumers."""
        tidx, _, _ = cute.arch.thread_idx()
        rows = cute.size(sX, mode=[0])
        for token in cutlass.range(tail, groups * mma.K_GROUP, unroll=1):
            for row in cutlass.range(
                tidx - mma.WARPGROUP, rows, CONSUMERS * mma.WARPGROUP, unroll=1
            ):
                sX[row, token, stage] = self.dtype(0.0)


def build(config: GroupedDwConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    t, m, n = fake.size(), fake.size(), fake.size()
    # [E, M, N] with contiguous rows, the other strides multiples of 16 bytes.
    element = fake.DTYPES["fp32" if config.accumulate else config.dtype]
    step = fake.TMA_ALIGN * 8 // element.width
    outer, lead = (cute.sym_int64(divisibility=step) for _ in range(2))
    align = {"assumed_align": fake.TMA_ALIGN}
    return compile(
        GroupedDwSm90(config),
        fake.matrix(config.dtype, t, m, "k"),
        fake.matrix(config.dtype, t, n, "k"),
        fake.make_fake_tensor(element, (fake.size(), m, n), (outer, lead, 1), **align),
        fake.compact(cutlass.Int32, (fake.size(),)),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
