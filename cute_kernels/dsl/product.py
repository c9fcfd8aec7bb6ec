"""Frame of a persistent product kernel on SM90: D = f(A Bᵀ), tile by tile, by TMA and WGMMA.

A kernel derives from `Frame` and gives three methods; the rest is here:

    tiles      which tiles there are, and which one a cluster takes next
    mainloop   tCrC = Σ_k A[m, k] B[n, k] of 64 rows of a tile; here: from zero, in its order
    epilogue   D of 64 rows of a tile, from tCrC; here: D = round(tCrC)

Order        ``chain``: one fp32 accumulator, K ascending in whole groups of 16.  ``tree``: K is cut
             into leaves; a leaf is a chain from zero; leaves are added in fp32, ascending.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond K are skipped.
M, N tails   loads beyond M or N give zeros, in no stored output; TMA clips the store.
Roles        warpgroup 0 loads, by one warp; warpgroups 1 and 2 multiply 64 rows of a tile each, and
             have their own epilogue, whose stores overlap the loads of the next tile.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from ..schedulers.tiles import leaves
from ..schedulers.tiles.raster import tile_at
from . import copy, epilogue, mma, pipeline, smem, tma
from .mainloop import Mainloop, Operands

CONSUMERS = 2
THREADS = (1 + CONSUMERS) * mma.WARPGROUP
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
#: The 232448 bytes of shared memory that a CTA may have, less 2 KiB for barriers and alignment.
SHARED_BYTES = 230400


class Arguments:
    """What a kernel has besides A, B and D for TMA: a frozen dataclass of tensors and scalars."""


class Registers:
    """What a consumer keeps besides its accumulators: a frozen dataclass of register tensors."""


class Shared:
    """Shared memory of a kernel besides its tiles: a frozen dataclass of tensors and pointers."""


class Walk:
    """What a role carries from one tile to the next: a frozen dataclass of integers."""


@dataclass(frozen=True)
class Tile:
    """Tile (m, n) of D."""

    m: cutlass.Int32
    n: cutlass.Int32


@dataclass(frozen=True)
class GridTile(Tile):
    """Tile (m, n) of D, whose first element is D[row, column]."""

    row: cutlass.Int32
    column: cutlass.Int32


class Tiles:
    """Tiles of a launch, as `Frame` walks them: a frozen dataclass with ``has`` and ``at``.

    has(index, walk): whether there is a tile ``index`` of a cluster.
    at(index, walk, rank): tile of CTA ``rank`` of the cluster.
    """

    def start(self) -> Walk | None:
        """Walk to begin with; None where a tile follows from its index alone."""

    def seek(self, index: cutlass.Int32, walk: Walk | None) -> Walk | None:
        """Walk at tile ``index`` of a cluster, from one at a lower index."""


@dataclass(frozen=True)
class GridTiles(Tiles):
    """Tiles of one matrix D: cluster c takes tiles c, c + clusters, c + 2 clusters, ...

    No tile waits for another, so any grid size, dispatch order or occupancy gives the same bits.

    counts: clusters of tiles along M and N.  group: rows of clusters in a raster group.
    """

    counts: cute.Shape
    tile: tuple[int, int]
    group: int
    cluster: tuple[int, int]

    def has(self, index: cutlass.Int32, walk: None) -> cutlass.Boolean:
        """Whether there is a tile ``index``."""
        return index < self.counts[0] * self.counts[1]

    def at(self, index: cutlass.Int32, walk: None, rank: cute.Coord) -> GridTile:
        """Tile of CTA ``rank`` of the cluster."""
        m, n = tile_at(index, self.counts[0], self.counts[1], self.group, cutlass.min)
        m, n = m * self.cluster[0] + rank[0], n * self.cluster[1] + rank[1]
        return GridTile(m, n, m * self.tile[0], n * self.tile[1])


@dataclass(frozen=True)
class Cta:
    """A CTA: its operands, its shared memory, its ring and its place in the cluster.

    a, b: sources of A and B.  sA, sB: staged tiles, [rows, k, stage].  sD: staging buffers of D, or
    None.  shared: those of `Frame.prepare`.
    """

    a: tma.Source
    b: tma.Source
    sA: cute.Tensor
    sB: cute.Tensor
    sD: cute.Tensor | None
    ab_pipeline: PipelineTmaAsync
    cluster: cute.Layout
    rank: cute.Coord
    shared: Shared | None


@dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup and its registers.

    index: of the warpgroup.  lane: of the thread in it.
    tCrC: product of 64 rows of a tile.  tCrLeaf: chain that is being added; tCrC itself but in a
    tree.  registers: those of `Frame.registers`.
    counts: of `Frame.count_blocks`; tCcC: of `Frame.coordinates`; None where they are not held.
    """

    cta: Cta
    index: cutlass.Int32
    lane: cutlass.Int32
    d: tma.Source | None
    operands: Operands
    tCrC: cute.Tensor
    tCrLeaf: cute.Tensor
    thr_mma: cute.ThrMma
    counts: tuple[cutlass.Int32, cutlass.Int32] | None
    tCcC: cute.Tensor | None
    registers: Registers | None


class Frame:
    """Base of product kernels: shared memory, ring, roles, and the walk over tiles.

    Args:
        dtype: element type of A and B.
        d_dtype: element type of D; None: the kernel stores no D by TMA.
        majors: contiguous dimension of A and of B, ``"k"`` or ``"mn"``.
        tile: (m, n, k) elements.
        cluster: (m, n) CTAs, with neighbouring tiles; they load what they share once.
        tree: whether leaves of K are added.
        leaves: whether K is cut into leaves; None: as ``tree``.
        consumers: warpgroups that multiply.
        space: bytes of shared memory for the ring and D.
    """

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        d_dtype: type[cutlass.Numeric] | None,
        majors: tuple[str, str],
        tile: tuple[int, int, int],
        cluster: tuple[int, int] = (1, 1),
        tree: bool = False,
        leaves: bool | None = None,
        consumers: int = CONSUMERS,
        space: int = SHARED_BYTES,
    ):
        stores = d_dtype is not None
        space -= epilogue.shared_bytes(consumers) if stores else 0
        self.dtype, self.d_dtype, self.cluster, self.tree = dtype, d_dtype, cluster, tree
        self.has_leaves = tree if leaves is None else leaves
        self.tile_m, self.tile_n, self.tile_k = tile
        self.product = Mainloop(dtype, majors, tile, cluster, consumers, space)
        self.output = epilogue.Epilogue(self.product, d_dtype) if stores else None

    #: Warp that loads, and the first warpgroup that multiplies.
    producer_warp, first_consumer = 0, 1
    #: Rows of clusters in a raster group: those in flight share B in the L2 cache.
    raster_group = 8
    #: Registers that hold a value over the walk: block counts of K, or coordinates of tCrC.
    holds = "counts"

    # ---- what a kernel gives ---------------------------------------------------------------------

    def tiles(self, cta: Cta, args: Arguments) -> Tiles:
        """Tiles of a launch; here: of one matrix D, whose `grid_counts` are ``args.counts``."""
        tile = self.tile_m, self.tile_n
        return GridTiles(args.counts, tile, self.raster_group, self.cluster)

    def registers(self, args: Arguments) -> Registers | None:
        """Allocate registers that a consumer keeps over its tiles."""

    def shared_fields(self) -> dict[str, cute.struct.MemRange | cute.struct.Align]:
        """Fields of shared memory besides the ring, the tiles and D."""
        return {}

    def clear_shared(self, storage: cute.struct):
        """Fill `shared_fields` that other CTAs of the cluster access, before they may."""

    def prepare(self, storage: cute.struct, args: Arguments) -> Shared | None:
        """Fill `shared_fields`, by all threads, which meet afterwards."""

    @cute.jit
    def load(
        self,
        cta: Cta,
        a: tma.Source,
        b: tma.Source,
        state: PipelineState,
        tile: Tile,
        args: Arguments,
    ) -> PipelineState:
        """Producer warp: load the K blocks of A and B of one tile, ascending, leaf by leaf."""
        k = cute.size(a.tensor, mode=[1])
        if cutlass.const_expr(self.has_leaves):
            for leaf in cutlass.range(self.leaf_count(k, args), unroll=1):
                start, size = self.leaf(leaf, k, args)
                state = self.load_range(cta, a, b, state, tile, start, size)
        else:
            state = self.load_range(cta, a, b, state, tile)
        return state

    @cute.jit
    def mainloop(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        tile: Tile,
        args: Arguments,
    ) -> tuple[PipelineState, PipelineState]:
        """tCrC = Σ_k A[m, k] B[n, k] of one tile; states: of the ring's reads and releases."""
        if cutlass.const_expr(self.tree):
            # The neutral element is -0: +0 would change the sign of a leaf of -0.
            consumer.tCrC.fill(-0.0)
            k = self.problem_shape(consumer.cta)[2]
            for leaf in cutlass.range(self.leaf_count(k, args), unroll=1):
                _, size = self.leaf(leaf, k, args)
                states = self.chain(consumer, states, size)
                consumer.tCrC.store(consumer.tCrC.load() + consumer.tCrLeaf.load())
        else:
            consumer.tCrC.fill(0.0)
            states = self.add_all(consumer, states)
        return states

    @cute.jit
    def epilogue(
        self, consumer: Consumer, buffer: cutlass.Int32, tile: Tile, args: Arguments
    ) -> cutlass.Int32:
        """D = round(tCrC) of one tile; ``buffer``: as in `Epilogue.store`."""
        return self.store(consumer, consumer.d, tile, buffer)

    @cute.jit
    def compute(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        buffer: cutlass.Int32,
        tile: Tile,
        args: Arguments,
    ) -> tuple[tuple[PipelineState, PipelineState], cutlass.Int32]:
        """Mainloop and epilogue of one tile."""
        states = self.mainloop(consumer, states, tile, args)
        return states, self.epilogue(consumer, buffer, tile, args)

    # ---- what its methods use --------------------------------------------------------------------

    def leaf_count(self, k: cutlass.Int32, args: Arguments) -> cutlass.Int32:
        """Number of leaves of K."""
        return leaves.count(k)

    def leaf(
        self, leaf: cutlass.Int32, k: cutlass.Int32, args: Arguments
    ) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(first k, number of elements) of a leaf."""
        return leaf * leaves.length(k), leaves.size(leaf, k, cutlass.min, cutlass.max)

    @cute.jit
    def load_range(
        self,
        cta: Cta,
        a: tma.Source,
        b: tma.Source,
        state: PipelineState,
        tile: Tile,
        start: cutlass.Int32 | None = None,
        size: cutlass.Int32 | None = None,
        blocks: cutlass.Int32 | None = None,
    ) -> PipelineState:
        """Load the blocks of ``size`` elements of K from ``start`` on; None: all of K."""
        if cutlass.const_expr(start is not None):
            a, b = tma.shifted(a, (0, start)), tma.shifted(b, (0, start))
        loads = self.product.loads((a, b), cta.sA, cta.sB, cta.cluster, cta.rank)
        # A tile wholly outside loads the last one: zeros that TMA fills in cost more than data.
        m, n = tile.m, tile.n
        if cutlass.const_expr(self.clips[0]):
            m = cutlass.min(m, loads.a.tiles - 1)
        if cutlass.const_expr(self.clips[1]):
            n = cutlass.min(n, loads.b.tiles - 1)
        if cutlass.const_expr(size is not None):
            blocks = cute.ceil_div(size, self.tile_k)
        elif cutlass.const_expr(blocks is None):
            blocks = loads.blocks
        return self.product.load(loads, cta.ab_pipeline, state, m, n, blocks)

    @property
    def clips(self) -> tuple[bool, bool]:
        """Whether a tile may lie wholly outside along M and N."""
        return self.cluster[0] > 1, self.cluster[1] > 1

    def count_blocks(self, size: cutlass.Int32) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(whole blocks, groups of 16 behind them) of ``size`` elements of K."""
        blocks = size // self.tile_k
        return blocks, cute.ceil_div(size - blocks * self.tile_k, mma.K_GROUP)

    @cute.jit
    def chain(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        size: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """tCrLeaf = Σ A B over the next ``size`` elements of K, from zero."""
        consumer.tCrLeaf.fill(0.0)
        return self.add_chain(consumer, states, size)

    @cute.jit
    def add_chain(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        size: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """tCrLeaf += Σ A B over the next ``size`` elements of K."""
        blocks, tail_groups = self.count_blocks(size)
        ring, operands = consumer.cta.ab_pipeline, consumer.operands
        return self.product.chain(operands, consumer.tCrLeaf, ring, states, blocks, tail_groups)

    @cute.jit
    def add_all(
        self, consumer: Consumer, states: tuple[PipelineState, PipelineState]
    ) -> tuple[PipelineState, PipelineState]:
        """tCrC += Σ A B over all of K."""
        counts = consumer.counts
        if cutlass.const_expr(counts is None):
            counts = self.count_blocks(self.problem_shape(consumer.cta)[2])
        ring, operands = consumer.cta.ab_pipeline, consumer.operands
        return self.product.chain(operands, consumer.tCrC, ring, states, *counts)

    @cute.jit
    def start_from(
        self,
        consumer: Consumer,
        mD: cute.Tensor,
        row0: cutlass.Int32,
        column0: cutlass.Int32,
        outer: tuple[cutlass.Int32, ...] = (),
    ):
        """tCrC = D[*outer] (fp32); elements outside read its last row or column pair instead."""
        rows, columns = mD.shape[len(outer)], mD.shape[len(outer) + 1]
        last_pair = (columns - 1) // 2 * 2
        tCcC = self.coordinates(consumer)
        # Nested loops: the DSL warns of long ones, and the warning would reach the user.
        for four in cutlass.range_constexpr(cute.size(consumer.tCrC) // 4):
            for first in cutlass.range_constexpr(4 * four, 4 * four + 4, 2):
                row = cutlass.min(row0 + tCcC[first][0], rows - 1)
                column = cutlass.min(column0 + tCcC[first][1], last_pair)
                # Rows are 16-byte aligned and the column is even: one 8-byte load.
                values = copy.vector(mD, (*outer, row, column), 2).load()
                consumer.tCrC[first] = values[0]
                consumer.tCrC[first + 1] = values[1]

    @cute.jit
    def add_bias(
        self,
        consumer: Consumer,
        mBias: cute.Tensor,
        column0: cutlass.Int32,
        outer: tuple[cutlass.Int32, ...] = (),
    ):
        """tCrC[m, n] += bias[*outer, n], in fp32; columns outside, never stored, read the last."""
        tCrC, tCcC = consumer.tCrC, self.coordinates(consumer)
        last = mBias.shape[len(outer)] - 1
        # Values 4 i + {0, 1} and 4 i + {2, 3} of a thread are two rows of the same two columns.
        for four in cutlass.range_constexpr(cute.size(tCrC) // 4):
            for side in cutlass.range_constexpr(2):
                column = cutlass.min(column0 + tCcC[4 * four + side][1], last)
                bias = mBias[(*outer, column)].to(cutlass.Float32)
                tCrC[4 * four + side] += bias
                tCrC[4 * four + side + 2] += bias

    @cute.jit
    def store(
        self, consumer: Consumer, d: tma.Source, tile: Tile, buffer: cutlass.Int32
    ) -> cutlass.Int32:
        """D = round(tCrC) of one tile, by TMA."""
        coord = (tile.m * CONSUMERS + consumer.index, tile.n)
        tCrC, sD, lane = consumer.tCrC, consumer.cta.sD, consumer.lane
        return self.output.store(tCrC, d, sD, consumer.index, lane, coord, buffer)

    def coordinates(self, consumer: Consumer) -> cute.Tensor:
        """tCcC: (row, column) of each value of tCrC, of the 64 rows of a warpgroup."""
        if consumer.tCcC is not None:
            return consumer.tCcC
        return consumer.thr_mma.partition_C(cute.make_identity_tensor((64, self.tile_n)))

    # ---- the kernel ------------------------------------------------------------------------------

    def grid_counts(self, rows: cutlass.Int32, columns: cutlass.Int32) -> cute.Shape:
        """Number of clusters of tiles that cover [rows, columns]; host code."""
        step_m, step_n = self.tile_m * self.cluster[0], self.tile_n * self.cluster[1]
        return cute.ceil_div(rows, step_m), cute.ceil_div(columns, step_n)

    def launch(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor | None,
        args: Arguments,
        clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch ``clusters`` persistent clusters on A [M, K] and B [N, K]; host code."""
        a, b = self.product.sources(mA, mB)
        d = None if self.output is None else self.output.target(mD)
        self.storage = self.make_storage()
        self.kernel(a, b, d, args).launch(
            grid=(*self.cluster, clusters),
            block=(THREADS, 1, 1),
            cluster=(*self.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def make_storage(self) -> type:
        """Return the struct of a CTA's shared memory; host code."""
        sA_layout, sB_layout = self.product.layouts()
        barriers = cute.struct.MemRange[cutlass.Int64, 2 * self.product.stages]
        fields = {"barriers": barriers, **self.shared_fields()}
        # Adjacent: kernels may reuse the memory of both.
        fields |= {"sA": smem.tiles(self.dtype, sA_layout), "sB": smem.tiles(self.dtype, sB_layout)}
        if self.output is not None:
            fields["sD"] = smem.tiles(self.d_dtype, self.output.layout())
        return smem.struct(**fields)

    @cute.kernel
    def kernel(self, a: tma.Source, b: tma.Source, d: tma.Source | None, args: Arguments):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.producer_warp:
            for source in (a, b) if d is None else (a, b, d):
                cpasync.prefetch_descriptor(source.atom)
        storage = SmemAllocator().allocate(self.storage)
        cta = self.make_cta(storage, a, b, args)
        pipeline.await_barriers(self.barrier_cluster)
        self.run_roles(cta, a, b, d, args)

    @cute.jit
    def run_roles(
        self, cta: Cta, a: tma.Source, b: tma.Source, d: tma.Source | None, args: Arguments
    ):
        """Split the warps of the CTA."""
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == self.producer_warp:
                self.produce(cta, a, b, args)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(cta, d, args)

    def cluster_layout(self) -> cute.Layout:
        """CTAs of a cluster: those that share A, then those that share B, then others."""
        return cute.make_layout((*self.cluster, 1))

    @property
    def barrier_cluster(self) -> tuple[int, int]:
        """CTAs of a cluster, which meet after their barriers are made."""
        return self.cluster

    def problem_shape(self, cta: Cta) -> cute.Shape:
        """(M, N, K): rows of A and of B, and elements of their sums.

        A role asks for it: read before the roles split, it moves instructions of the epilogue.
        """
        m, n = cute.size(cta.a.tensor, mode=[0]), cute.size(cta.b.tensor, mode=[0])
        return m, n, cute.size(cta.a.tensor, mode=[1])

    @cute.jit
    def make_cta(self, storage: cute.struct, a: tma.Source, b: tma.Source, args: Arguments) -> Cta:
        """View the tiles in shared memory, make the ring and announce its barriers."""
        sA_layout, sB_layout = self.product.layouts()
        sA = storage.sA.get_tensor(sA_layout.outer, swizzle=sA_layout.inner)
        sB = storage.sB.get_tensor(sB_layout.outer, swizzle=sB_layout.inner)
        sD = None
        if cutlass.const_expr(self.output is not None):
            sD_layout = self.output.layout()
            sD = storage.sD.get_tensor(sD_layout.outer, swizzle=sD_layout.inner)
        cluster = self.cluster_layout()
        ab_pipeline = self.product.ring(storage.barriers.data_ptr(), cluster)
        self.clear_shared(storage)
        pipeline.announce_barriers(self.barrier_cluster)
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank, shared = cluster.get_flat_coord(cta), self.prepare(storage, args)
        return Cta(a, b, sA, sB, sD, ab_pipeline, cluster, rank, shared)

    @cute.jit
    def produce(self, cta: Cta, a: tma.Source, b: tma.Source, args: Arguments):
        """Producer warp: load tile after tile."""
        state = pipeline.producer_state(self.product.stages)
        tiles = self.tiles(cta, args)
        index, step = self.first_and_step()
        walk = tiles.seek(index, tiles.start())
        while tiles.has(index, walk):
            state = self.load(cta, a, b, state, tiles.at(index, walk, cta.rank), args)
            index += step
            walk = tiles.seek(index, walk)
        # A CTA must not exit while others of its cluster may still arrive on its barriers.
        cta.ab_pipeline.producer_tail(state)

    @cute.jit
    def consume(self, cta: Cta, d: tma.Source | None, args: Arguments):
        """Consumer warpgroup: multiply and store 64 rows of tile after tile."""
        consumer = self.make_consumer(cta, d, args)
        states = self.consumer_states()
        buffer = cutlass.Int32(0)
        tiles = self.tiles(cta, args)
        index, step = self.first_and_step()
        walk = tiles.seek(index, tiles.start())
        while tiles.has(index, walk):
            tile = tiles.at(index, walk, cta.rank)
            states, buffer = self.compute(consumer, states, buffer, tile, args)
            index += step
            walk = tiles.seek(index, walk)
        self.finish(consumer, args)

    @cute.jit
    def finish(self, consumer: Consumer, args: Arguments):
        """Consumer warpgroup, after its last tile: its stores have read shared memory."""
        if cutlass.const_expr(self.output is not None):
            self.output.finish(consumer.lane)

    def consumer_states(self) -> tuple[PipelineState, PipelineState]:
        """States of a consumer at its first tile: of the ring's reads, and of its releases."""
        return tuple(pipeline.consumer_state(self.product.stages) for _ in range(2))

    def first_and_step(self) -> tuple[cutlass.Int32, cutlass.Int32]:
        """First tile index of the calling cluster, and the step to its next one."""
        _, _, cluster_index = cute.arch.block_idx()
        _, _, clusters = cute.arch.grid_dim()
        return cluster_index, clusters

    def place(self) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(consumer warpgroup, lane in it) of the calling thread."""
        tidx, _, _ = cute.arch.thread_idx()
        warpgroup = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        return warpgroup - self.first_consumer, tidx % mma.WARPGROUP

    def make_consumer(self, cta: Cta, d: tma.Source | None, args: Arguments) -> Consumer:
        """Allocate the registers of the calling thread's warpgroup."""
        index, lane = self.place()
        # The slice of one warpgroup gives the coordinates of this thread's values.
        thr_mma = self.product.tiled_mma(1).get_slice(lane)
        counts = tCcC = None
        if cutlass.const_expr(self.holds == "coordinates"):
            tCcC = thr_mma.partition_C(cute.make_identity_tensor((64, self.tile_n)))
        operands = self.product.operands(cta.sA, cta.sB, index)
        tCrLeaf = self.product.accumulator(operands)
        tCrC = self.product.accumulator(operands) if self.tree else tCrLeaf
        if cutlass.const_expr(self.holds == "counts" and not self.tree):
            counts = self.count_blocks(self.problem_shape(cta)[2])
        sums, registers = (tCrC, tCrLeaf), self.registers(args)
        return Consumer(cta, index, lane, d, operands, *sums, thr_mma, counts, tCcC, registers)
