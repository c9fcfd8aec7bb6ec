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
Measured     docs/status/moe.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from ..compile import fake
from ..dsl import copy, epilogue, mma, pipeline, tma
from ..dsl.mainloop import Operands
from ..dsl.product import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    THREADS,
    Frame,
    SharedTiles,
)
from ..schedulers.tiles import persistent_device as persistent
from ..schedulers.tiles.raster import tile_at
from .config import GroupedDwConfig
from .device.experts import rows_of

#: Named barrier of both consumers; those before it are the CTA's and the epilogue's.
BARRIER = epilogue.BARRIER + CONSUMERS


@dataclass(frozen=True)
class Unit:
    """Tile (m, n) of one expert, whose rows are row0 to row0 + rows, for one CTA of a cluster."""

    expert: cutlass.Int32
    row0: cutlass.Int32
    rows: cutlass.Int32
    m: cutlass.Int32
    n: cutlass.Int32


class GroupedDwSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: GroupedDwConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.d_dtype = cutlass.Float32 if config.accumulate else self.dtype
        tile = config.tile_m, config.tile_n, config.tile_k
        cluster = config.cluster_m, 1
        self.frame = Frame(self.dtype, self.d_dtype, ("mn", "mn"), tile, cluster)
        self.mainloop, self.epilogue = self.frame.mainloop, self.frame.epilogue

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
        a, b = self.mainloop.sources(tma.view(mA, [1, 0]), tma.view(mB, [1, 0]))
        d = self.epilogue.target(tma.view(mD, [1, 2, 0]))
        self.storage = self.frame.storage()
        self.kernel(a, b, d, mD, mOffsets).launch(
            grid=(*self.frame.cluster, clusters),
            block=(THREADS, 1, 1),
            cluster=(*self.frame.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        a: tma.Source,
        b: tma.Source,
        d: tma.Source,
        mD: cute.Tensor,
        mOffsets: cute.Tensor,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.frame.prefetch(a, b, d)
        storage = SmemAllocator().allocate(self.storage)
        smem_tiles = self.frame.tiles(storage)
        cluster = cute.make_layout((*self.frame.cluster, 1))
        ring = self.frame.make_ring(storage, cluster)
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank = cluster.get_flat_coord(cta)
        pipeline.await_barriers(self.frame.cluster)
        tokens = cute.size(a.tensor, mode=[1])
        warpgroup = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load((a, b), smem_tiles, cluster, ring, rank, mD, mOffsets)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.multiply(smem_tiles, d, mD, mOffsets, ring, rank, tokens)

    @cute.jit
    def load(
        self,
        sources: tuple[tma.Source, tma.Source],
        smem_tiles: SharedTiles,
        cluster: cute.Layout,
        ring: PipelineTmaAsync,
        rank: cute.Coord,
        mD: cute.Tensor,
        mOffsets: cute.Tensor,
    ):
        """Producer warp: load the blocks of tokens of A and B of each unit, ascending."""
        tokens = cute.size(sources[0].tensor, mode=[1])
        state = pipeline.producer_state(self.mainloop.stages)
        index, step = persistent.first_and_step()
        units = self.units(mD)
        while index < units:
            unit = self.unit_at(index, rank, mD, mOffsets, tokens)
            origin = (0, 0, unit.row0)
            sA, sB = smem_tiles.sA, smem_tiles.sB
            loads = self.mainloop.loads(sources, sA, sB, cluster, rank, origin)
            blocks = cute.ceil_div(unit.rows, self.config.tile_k)
            # A tile wholly outside loads the last one: zeros that TMA fills in cost more than data.
            m = cutlass.min(unit.m, loads.a.tiles - 1)
            state = self.mainloop.load(loads, ring, state, m, unit.n, (0, blocks))
            index += step
        # A CTA must not exit while others of its cluster may still arrive on its barriers.
        ring.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        smem_tiles: SharedTiles,
        d: tma.Source,
        mD: cute.Tensor,
        mOffsets: cute.Tensor,
        ring: PipelineTmaAsync,
        rank: cute.Coord,
        tokens: cutlass.Int32,
    ):
        """Consumer warpgroup: compute and store 64 rows of each unit."""
        tile_m, tile_n, tile_k = self.mainloop.tile
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP

        # The slice of one warpgroup gives the coordinates of this thread's values.
        thr_mma = self.mainloop.tiled_mma(1).get_slice(lane)
        operands = self.mainloop.operands(smem_tiles.sA, smem_tiles.sB, consumer)
        acc = self.mainloop.accumulator(operands)

        states = tuple(pipeline.consumer_state(self.mainloop.stages) for _ in range(2))
        buffer = cutlass.Int32(0)
        index, step = persistent.first_and_step()
        units = self.units(mD)
        while index < units:
            unit = self.unit_at(index, rank, mD, mOffsets, tokens)
            # acc = acc0 + Σ_t A[t, m] B[t, n]
            if cutlass.const_expr(self.config.accumulate):
                self.start_from(acc, mD, unit, consumer, thr_mma)
            else:
                acc.fill(0.0)
            blocks = unit.rows // tile_k
            states = self.mainloop.chain(operands, acc, ring, states, blocks, cutlass.Int32(0))
            tail = unit.rows - blocks * tile_k
            if tail > 0:
                states = self.add_tail(operands, acc, smem_tiles, ring, states, tail)
            # D[e] = round(acc)
            target = tma.Source(d.atom, d.tensor[None, None, unit.expert])
            coord = (unit.m * CONSUMERS + consumer, unit.n)
            buffer = self.epilogue.store(acc, target, smem_tiles.sD, consumer, lane, coord, buffer)
            index += step
        self.epilogue.finish(lane)

    @cute.jit
    def add_tail(
        self,
        operands: Operands,
        acc: cute.Tensor,
        smem_tiles: SharedTiles,
        ring: PipelineTmaAsync,
        states: tuple[PipelineState, PipelineState],
        tail: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """acc += Σ A B over the last ``tail`` tokens, less than a block, of one more stage."""
        read, release = states
        groups = cute.ceil_div(tail, mma.K_GROUP)
        ring.consumer_wait(read)
        self.clear(smem_tiles.sA, read.index, tail, groups)
        self.clear(smem_tiles.sB, read.index, tail, groups)
        # WGMMA reads through another proxy what threads of both consumers wrote.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=CONSUMERS * mma.WARPGROUP)
        tiled, tCrA, tCrB = operands.tiled, operands.tCrA, operands.tCrB
        mma.add_groups(tiled, acc, tCrA, tCrB, read.index, groups)
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

    @cute.jit
    def start_from(
        self,
        acc: cute.Tensor,
        mD: cute.Tensor,
        unit: Unit,
        consumer: cutlass.Int32,
        thr_mma: cute.ThrMma,
    ):
        """acc[m, n] = D[e, m, n]; elements outside read its last row or column pair instead."""
        row0 = unit.m * self.config.tile_m + consumer * 64
        column0 = unit.n * self.config.tile_n
        rows, columns = mD.shape[1], mD.shape[2]
        last_pair = (columns - 1) // 2 * 2
        tCcD = thr_mma.partition_C(cute.make_identity_tensor((64, self.config.tile_n)))
        for four in cutlass.range_constexpr(cute.size(acc) // 4):
            for side in cutlass.range_constexpr(2):
                first = 4 * four + 2 * side
                coord = tCcD[first]
                row = cutlass.min(row0 + coord[0], rows - 1)
                column = cutlass.min(column0 + coord[1], last_pair)
                # Rows are 16-byte aligned and the column is even: one 8-byte load.
                values = copy.vector(mD, (unit.expert, row, column), 2).load()
                acc[first] = values[0]
                acc[first + 1] = values[1]

    # ---- units -----------------------------------------------------------------------------------

    def tiles(self, mD: cute.Tensor) -> tuple[cutlass.Int32, cutlass.Int32]:
        """Number of units of an expert along M and along N."""
        tile_m, tile_n, _ = self.mainloop.tile
        high = tile_m * self.config.cluster_m
        return cute.ceil_div(mD.shape[1], high), cute.ceil_div(mD.shape[2], tile_n)

    def units(self, mD: cute.Tensor) -> cutlass.Int32:
        """Number of units of all experts."""
        rows, columns = self.tiles(mD)
        return mD.shape[0] * rows * columns

    @cute.jit
    def unit_at(
        self,
        index: cutlass.Int32,
        rank: cute.Coord,
        mD: cute.Tensor,
        mOffsets: cute.Tensor,
        tokens: cutlass.Int32,
    ) -> Unit:
        """Tile of CTA ``rank`` of unit ``index``: experts ascend, whatever their loads are."""
        rows, columns = self.tiles(mD)
        expert = index // (rows * columns)
        local = index % (rows * columns)
        m, n = tile_at(local, rows, columns, self.config.raster_group, cutlass.min)
        row0, rows_of_expert = rows_of(expert, mOffsets, tokens)
        return Unit(expert, row0, rows_of_expert, m * self.config.cluster_m + rank[0], n)


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
