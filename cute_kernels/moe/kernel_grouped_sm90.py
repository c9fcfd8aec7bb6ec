"""D[t, n] = round(Σ_k A[t, k] B[n, k, e] + bias[e, n]), e the expert of row t, on SM90.

Layouts      A [T, K] row-major; B [N, K, E], each expert row- or column-major (16-byte strides);
             D [T, N] row-major, rows of whole 16 bytes; offsets int32 [E + 1]: expert e has the
             rows offsets[e] to offsets[e + 1], clamped to [0, T] and to ascend.
Order        ``chain``, by the mainloop of gemm's kernel: one fp32 accumulator per output, K
             ascending in whole groups of 16, bias added in fp32, one rounding.  So a row has the
             bytes of ``ck.linear`` with its expert's weight.
Work         persistent: cluster c computes units c, c + clusters, ...; a unit is a row of tiles of
             one expert, one for each CTA of the cluster, which load a part of the tile of A each
             and multicast it.  Each role walks the offsets as its units ascend: no schedule in
             memory, no host.
K tail       TMA fills zeros inside the last group of 16, of B expert by expert, as they are a
             dimension of their own; groups wholly beyond K are skipped.
M tail       a tile may load rows of the next expert, which no output reads.  A warpgroup whose 64
             rows are all its expert's stores them by TMA at the expert's first row; else each
             thread stores its pairs of values that lie inside.
N tail       TMA clips the store, threads skip pairs beyond N; loads beyond N give zeros, and a
             tile wholly beyond N loads the last one.
Roles        warpgroup 0: one warp loads; warpgroups 1, 2: 64 rows of the tile each.
Limits       SM90a only; bf16 and fp16; T, N, K < 2^31.
Measured     docs/status/moe.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineTmaAsync

from ..compile import fake
from ..dsl import copy, mma, pipeline, tma
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
from .config import GroupedConfig
from .device import operands
from .device.experts import rows_of


@dataclass(frozen=True)
class Unit:
    """A row of tiles of one expert, one for each CTA of a cluster.

    expert: its index; E when there is no unit any more.  row0, rows: the first row of the expert,
    and how many it has.  end: units of all experts up to it.
    """

    expert: cutlass.Int32
    row0: cutlass.Int32
    rows: cutlass.Int32
    end: cutlass.Int32


class GroupedSm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: GroupedConfig):
        self.config = config
        self.dtype = self.d_dtype = fake.DTYPES[config.dtype]
        tile = config.tile_m, config.tile_n, config.tile_k
        cluster = 1, config.cluster_n
        self.frame = Frame(self.dtype, self.d_dtype, ("k", config.b_major), tile, cluster)
        self.mainloop, self.epilogue = self.frame.mainloop, self.frame.epilogue

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        mOffsets: cute.Tensor,
        mBias: cute.Tensor | None,
        clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        a, b = self.mainloop.sources(mA, mB)
        d = self.epilogue.target(mD)
        self.storage = self.frame.storage()
        self.kernel(a, b, d, mD, mOffsets, mBias, None).launch(
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
        mBias: cute.Tensor | None,
        length: cutlass.Int32 | None,
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

        warpgroup = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load((a, b), smem_tiles, cluster, ring, rank, mD, mOffsets, length)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            extent = cute.size(a.tensor, mode=[1]), length
            self.multiply(smem_tiles, d, mD, mOffsets, mBias, ring, rank, extent)

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
        length: cutlass.Int32 | None,
    ):
        """Producer warp: load the K blocks of A and B of each unit, ascending."""
        a, b = sources
        blocks = cute.ceil_div(cute.size(a.tensor, mode=[1]), self.config.tile_k)
        experts = mOffsets.shape[0] - 1
        state = pipeline.producer_state(self.mainloop.stages)
        index, step = persistent.first_and_step()
        unit = self.unit_at(index, self.first_unit(mD, mOffsets), mD, mOffsets)
        while unit.expert < experts:
            m, n = self.tile_of(index, unit, mD, rank)
            # B of one expert, and A from its first row on.
            b_expert = tma.Source(b.atom, b.tensor[None, None, unit.expert])
            origin = (unit.row0, 0, 0)
            loads = self.mainloop.loads(
                (a, b_expert), smem_tiles.sA, smem_tiles.sB, cluster, rank, origin
            )
            # A tile wholly outside loads the last one: zeros that TMA fills in cost more than data.
            n = cutlass.min(n, loads.b.tiles - 1)
            state = self.mainloop.load(loads, ring, state, m, n, (0, blocks))
            index += step
            unit = self.unit_at(index, unit, mD, mOffsets)
        # A CTA must not exit while others of its cluster may still arrive on its barriers.
        ring.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        smem_tiles: SharedTiles,
        d: tma.Source,
        mD: cute.Tensor,
        mOffsets: cute.Tensor,
        mBias: cute.Tensor | None,
        ring: PipelineTmaAsync,
        rank: cute.Coord,
        extent: tuple[cutlass.Int32, cutlass.Int32 | None],
    ):
        """Consumer warpgroup: compute and store 64 rows of each unit; extent: (K, length)."""
        k, _ = extent
        _, tile_n, tile_k = self.mainloop.tile
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP

        # The slice of one warpgroup gives the coordinates of this thread's values.
        thr_mma = self.mainloop.tiled_mma(1).get_slice(lane)
        operands = self.mainloop.operands(smem_tiles.sA, smem_tiles.sB, consumer)
        acc = self.mainloop.accumulator(operands)

        blocks = k // tile_k
        tail_groups = cute.ceil_div(k - blocks * tile_k, mma.K_GROUP)
        states = tuple(pipeline.consumer_state(self.mainloop.stages) for _ in range(2))
        buffer = cutlass.Int32(0)
        experts = mOffsets.shape[0] - 1
        index, step = persistent.first_and_step()
        unit = self.unit_at(index, self.first_unit(mD, mOffsets), mD, mOffsets)
        while unit.expert < experts:
            m, n = self.tile_of(index, unit, mD, rank)
            # acc = Σ_k A[t, k] B[n, k, e]
            acc.fill(0.0)
            states = self.mainloop.chain(operands, acc, ring, states, blocks, tail_groups)
            # D = round(acc + bias)
            if cutlass.const_expr(mBias is not None):
                self.add_bias(acc, mBias, unit.expert, n * tile_n, thr_mma)
            buffer = self.store_unit(acc, (d, mD), smem_tiles, unit, (m, n), thr_mma, buffer)
            index += step
            unit = self.unit_at(index, unit, mD, mOffsets)
        self.epilogue.finish(lane)

    @cute.jit
    def store_unit(
        self,
        acc: cute.Tensor,
        target: tuple[tma.Source, cute.Tensor],
        smem_tiles: SharedTiles,
        unit: Unit,
        tile: cute.Coord,
        thr_mma: cute.ThrMma,
        buffer: cutlass.Int32,
    ) -> cutlass.Int32:
        """D[t, n] = round(acc) for the rows of this warpgroup that its expert has.

        target: D for TMA, and D, [T, N].  tile: of the unit.  buffer: as in `Epilogue.store`.
        """
        d, mD = target
        m, n = tile
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP
        row = m * self.config.tile_m + consumer * 64
        if row + 64 <= unit.rows:
            gD = cute.domain_offset((unit.row0, 0), d.tensor)
            coord = (m * CONSUMERS + consumer, n)
            buffer = self.epilogue.store(
                acc, tma.Source(d.atom, gD), smem_tiles.sD, consumer, lane, coord, buffer
            )
        else:
            self.store_tail(acc, mD, unit, (row, n * self.config.tile_n), thr_mma)
        return buffer

    @cute.jit
    def store_tail(
        self,
        acc: cute.Tensor,
        mD: cute.Tensor,
        unit: Unit,
        origin: cute.Coord,
        thr_mma: cute.ThrMma,
    ):
        """D[t, n] = round(acc) for rows of the expert alone; ``origin``: of these 64 rows."""
        row0, column0 = origin
        tCcD = thr_mma.partition_C(cute.make_identity_tensor((64, self.config.tile_n)))
        rPair = cute.make_rmem_tensor(cute.make_layout(2), self.d_dtype)
        # Values 4 i + {0, 1} and 4 i + {2, 3} of a thread are two rows of the same two columns.
        for four in cutlass.range_constexpr(cute.size(acc) // 4):
            for side in cutlass.range_constexpr(2):
                first = 4 * four + 2 * side
                row, column = row0 + tCcD[first][0], column0 + tCcD[first][1]
                rPair[0] = acc[first].to(self.d_dtype)
                rPair[1] = acc[first + 1].to(self.d_dtype)
                if row < unit.rows:
                    # A pair that begins inside ends inside its row of whole 16 bytes.
                    if column < mD.shape[1]:
                        copy.vector(mD, (unit.row0 + row, column), 2).store(rPair.load())

    @cute.jit
    def add_bias(
        self,
        acc: cute.Tensor,
        mBias: cute.Tensor,
        expert: cutlass.Int32,
        column0: cutlass.Int32,
        thr_mma: cute.ThrMma,
    ):
        """acc[m, n] += bias[e, n], in fp32; no store takes columns outside."""
        tCcD = thr_mma.partition_C(cute.make_identity_tensor((64, self.config.tile_n)))
        last = mBias.shape[1] - 1
        # Values 4 i + {0, 1} and 4 i + {2, 3} of a thread are two rows of the same two columns.
        for four in cutlass.range_constexpr(cute.size(acc) // 4):
            for side in cutlass.range_constexpr(2):
                column = cutlass.min(column0 + tCcD[4 * four + side][1], last)
                bias = mBias[expert, column].to(cutlass.Float32)
                acc[4 * four + side] += bias
                acc[4 * four + side + 2] += bias

    # ---- units -----------------------------------------------------------------------------------

    @cute.jit
    def first_unit(self, mD: cute.Tensor, mOffsets: cute.Tensor) -> Unit:
        """Unit to begin a walk with: of expert 0."""
        row0, rows = rows_of(cutlass.Int32(0), mOffsets, mD.shape[0])
        return Unit(cutlass.Int32(0), row0, rows, self.units_of(rows, mD))

    @cute.jit
    def unit_at(
        self, index: cutlass.Int32, unit: Unit, mD: cute.Tensor, mOffsets: cute.Tensor
    ) -> Unit:
        """Unit ``index``, from a unit that is not after it."""
        experts = mOffsets.shape[0] - 1
        expert, row0, rows, end = unit.expert, unit.row0, unit.rows, unit.end
        walking = index >= end
        while walking:
            expert += 1
            row0, rows = rows_of(cutlass.min(expert, experts - 1), mOffsets, mD.shape[0])
            end += self.units_of(rows, mD)
            walking = (expert < experts) & (index >= end)
        return Unit(expert, row0, rows, end)

    def units_of(self, rows: cutlass.Int32, mD: cute.Tensor) -> cutlass.Int32:
        """Number of units of an expert with so many rows."""
        return cute.ceil_div(rows, self.config.tile_m) * self.columns_of(mD)

    def columns_of(self, mD: cute.Tensor) -> cutlass.Int32:
        """Number of units side by side."""
        return cute.ceil_div(mD.shape[1], self.config.tile_n * self.config.cluster_n)

    @cute.jit
    def tile_of(
        self, index: cutlass.Int32, unit: Unit, mD: cute.Tensor, rank: cute.Coord
    ) -> tuple[cutlass.Int32, cutlass.Int32]:
        """Tile (m, n) within its expert that CTA ``rank`` of the cluster computes of a unit."""
        rows = cute.ceil_div(unit.rows, self.config.tile_m)
        local = index - (unit.end - self.units_of(unit.rows, mD))
        group = self.config.raster_group
        m, n = tile_at(local, rows, self.columns_of(mD), group, cutlass.min)
        return m, n * self.config.cluster_n + rank[1]


def build(config: GroupedConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    arguments = operands.fakes(config.dtype, config.b_major, config.bias)
    return compile(GroupedSm90(config), *arguments, fake.stream(), options=fake.SM90_OPTIONS)
