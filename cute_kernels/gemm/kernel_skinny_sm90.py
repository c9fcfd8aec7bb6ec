"""Y[m, n] = round(Σ_k W[n, k] X[m, k] + bias[m, n]) for few rows m, on SM90.

Layouts      W [N, K] row- or column-major, X [M, K] row-major (16-byte strides); Y [M, N] with rows
             of whole 16 bytes; bias [M, N], whose row stride may be 0.
Operands     swapped: 64 rows of W along M of ``wgmma.m64nTk16``, T tokens along N, so that one
             token does not pay for 64.  The swap changes no bit (docs/numerics.md).
Order        ``chain``: as in kernel_sm90: one fp32 accumulator, K ascending in groups of 16.
             ``tree``: K is cut into leaves (schedulers/tiles/leaves.py), a leaf is a chain from
             zero; leaves are added in fp32, ascending.  Then the bias, in fp32, and one rounding.
Split        ``split`` CTAs of a cluster compute the leaves of one tile and store their leaf sums in
             shared memory; then each CTA adds a slice of the tile, reading all leaves in their
             order.  ``unordered`` adds leaves as they arrive instead, by atomics in the shared
             memory of the CTA that has the slice.
K tail       as in dsl/mainloop.py, at the end of every leaf.
M, N tails   loads beyond give zeros; what lies beyond is not stored, except N's columns up to the
             next multiple of 4, which are padding of Y's own rows.
Pair         two CTAs of a cluster have the same rows of W and different tokens: each loads half of
             W's rows and multicasts it to both.
Roles        ``tile_n`` / 64 warpgroups multiply, one more warp loads; one tile per CTA.
Limits       SM90a only; bf16 and fp16; M, N, K < 2^31.
Measured     docs/status.md.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from ..compile import fake
from ..dsl import cluster, mma, pipeline, smem, swapped, tma
from ..dsl.mainloop import Mainloop, Operands
from ..dsl.swapped import QUAD, SharedTiles, SwappedTile, TileBounds
from ..schedulers.tiles import leaves
from .config import ORDER, UNORDERED, SkinnyConfig

#: Shared memory of an SM; what each CTA needs of it for barriers, alignment and the system.
SM_BYTES = 233472
CTA_BYTES = 4096
#: Named barrier of the consumer warpgroups.
CONSUMER_BARRIER = 1


class SkinnySm90:
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: SkinnyConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.consumers = config.tile_n // 64
        self.threads = self.consumers * mma.WARPGROUP
        self.tree = config.order != ORDER
        self.ordered = config.order != UNORDERED
        assert leaves.LEAVES % config.split == 0 and (self.tree or config.split == 1)
        #: Leaf sums that a CTA stores: one, where it adds all leaves in registers.
        self.leaf_sums = leaves.LEAVES // config.split if config.split > 1 else 1
        space = SM_BYTES // config.ctas_per_sm - CTA_BYTES - self.slice_bytes()
        tile = (config.tile_n, config.tile_m, config.tile_k)
        majors = (config.w_major, "k")
        self.cluster = config.split * config.pair
        assert config.split == 1 or config.pair == 1
        cluster = (1, config.pair)
        self.mainloop = Mainloop(self.dtype, majors, tile, cluster, self.consumers, space)
        self.tile = SwappedTile(self.mainloop)
        ring = self.mainloop.stages * self.mainloop.stage_bytes
        assert not self.ordered or self.leaf_sums * self.tile.sums_size * 4 <= ring, (
            "sums reuse the ring"
        )

    def slice_bytes(self) -> int:
        """Bytes of a CTA's slice of the tile, to which ``unordered`` adds leaves atomically."""
        config = self.config
        return 0 if self.ordered else config.tile_m * config.tile_n // config.split * 4

    @cute.jit
    def __call__(
        self,
        mW: cute.Tensor,
        mX: cute.Tensor,
        mY: cute.Tensor,
        mBias: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        config = self.config
        sW_layout, sX_layout = self.mainloop.layouts()
        w, x = self.mainloop.sources(mW, mX)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.mainloop.stages]
            slice: cute.struct.Align[
                cute.struct.MemRange[cutlass.Float32, self.slice_bytes() // 4], 16
            ]
            # Adjacent: leaf sums reuse the memory of both.
            sW: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sW_layout)], smem.ALIGN
            ]
            sX: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sX_layout)], smem.ALIGN
            ]

        self.storage = Storage
        tiles_n = cute.ceil_div(mY.shape[1], config.tile_n)
        # Whole pairs: a tile beyond M stores no row.
        tiles_m = cute.ceil_div(mY.shape[0], config.tile_m * config.pair) * config.pair
        self.kernel(w, x, mY, mBias, tiles_m).launch(
            grid=(config.split * tiles_m * tiles_n, 1, 1),
            block=(self.threads + 32, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=config.ctas_per_sm,
            # In percent.  Without it the compiler would ask a device, and a host may have none.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        w: tma.Source,
        x: tma.Source,
        mY: cute.Tensor,
        mBias: cute.Tensor | None,
        tiles_m: cutlass.Int32,
    ):
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.threads // 32:
            for source in (w, x):
                cpasync.prefetch_descriptor(source.atom)

        storage = SmemAllocator().allocate(self.storage)
        sW_layout, sX_layout = self.mainloop.layouts()
        sW = storage.sW.get_tensor(sW_layout.outer, swizzle=sW_layout.inner)
        sX = storage.sX.get_tensor(sX_layout.outer, swizzle=sX_layout.inner)
        smem_tiles = SharedTiles(sW, sX)
        sums = storage.slice.data_ptr()
        if cutlass.const_expr(self.ordered):
            sums = cute.recast_ptr(storage.sW.data_ptr(), dtype=cutlass.Float32)

        # CTAs that split a tile share no loads; the CTAs of a pair share those of W.
        ctas = cute.make_layout((1, config.pair, config.split))
        ring = self.mainloop.ring(storage.barriers.data_ptr(), ctas)
        if cutlass.const_expr(not self.ordered):
            self.clear(sums, tidx)
            # The arrival that publishes the barriers is relaxed: it would not publish these zeros.
            cute.arch.fence_acq_rel_cluster()
        pipeline.announce_barriers((1, self.cluster))
        rank = ctas.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        split_rank = rank[2]
        pipeline.await_barriers((1, self.cluster))

        # Neighbouring clusters have the same rows of W: they hit in L2.
        tile = block // config.split
        m, n = tile % tiles_m * config.tile_m, tile // tiles_m * config.tile_n
        bounds = self.tile.bounds(m, n, mY)
        k = cute.size(w.tensor, mode=[1])
        if warp == self.threads // 32:
            self.load(w, x, smem_tiles, ring, ctas, rank, bounds, k)
        else:
            self.multiply(smem_tiles, sums, ring, split_rank, k)
        # After this barrier the leaf sums of every CTA are written; the producer warp is done.
        self.sync_cluster()
        if warp < self.threads // 32:
            self.finish(sums, mY, mBias, split_rank, bounds, tidx)
        if cutlass.const_expr(config.split > 1 and self.ordered):
            # A CTA must not exit while others read its leaf sums.
            self.sync_cluster()

    @cute.jit
    def load(
        self,
        w: tma.Source,
        x: tma.Source,
        smem_tiles: SharedTiles,
        ring: PipelineTmaAsync,
        ctas: cute.Layout,
        rank: cute.Coord,
        bounds: TileBounds,
        k: cutlass.Int32,
    ):
        """Producer warp: load the K blocks of W and X of each of this CTA's leaves, ascending."""
        state = pipeline.producer_state(self.mainloop.stages)
        first, end = self.leaf_range(rank[2], k)
        for leaf in cutlass.range(first, end, unroll=1):
            start, size = self.span(leaf, k)
            origin = (bounds.start_n, bounds.start_m, start)
            loads = self.mainloop.loads((w, x), smem_tiles.sW, smem_tiles.sX, ctas, rank, origin)
            blocks = (size + self.config.tile_k - 1) // self.config.tile_k
            state = self.mainloop.load(loads, ring, state, 0, 0, (0, blocks))

    @cute.jit
    def multiply(
        self,
        smem_tiles: SharedTiles,
        sums: cute.Pointer,
        ring: PipelineTmaAsync,
        split_rank: cutlass.Int32,
        k: cutlass.Int32,
    ):
        """Consumer warpgroup: 64 rows of W times the tokens, leaf by leaf, into ``sums``."""
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        operands = self.mainloop.operands(smem_tiles.sW, smem_tiles.sX, consumer)
        states = tuple(pipeline.consumer_state(self.mainloop.stages) for _ in range(2))
        first, end = self.leaf_range(split_rank, k)
        accs = [self.mainloop.accumulator(operands) for _ in range(self.leaf_sums)]
        if cutlass.const_expr(self.leaf_sums == 1 and self.tree and self.config.split == 1):
            # total = ((leaf 0 + leaf 1) + leaf 2) + ...; the neutral element is -0, not +0.
            total = accs[0]
            acc = self.mainloop.accumulator(operands)
            total.fill(-0.0)
            for leaf in cutlass.range(first, end, unroll=1):
                states = self.leaf(operands, acc, ring, states, leaf, k)
                total.store(total.load() + acc.load())
        else:
            for i in cutlass.range_constexpr(self.leaf_sums):
                states = self.leaf(operands, accs[i], ring, states, first + i, k)
        if cutlass.const_expr(self.ordered):
            # All consumers have read the ring, whose memory the leaf sums reuse.
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.threads)
            for i in cutlass.range_constexpr(self.leaf_sums):
                self.tile.store_sums(accs[i], sums + i * self.tile.sums_size, tidx)
        else:
            for i in cutlass.range_constexpr(self.leaf_sums):
                self.add_unordered(accs[i], sums, tidx)

    @cute.jit
    def leaf(
        self,
        operands: Operands,
        acc: cute.Tensor,
        ring: PipelineTmaAsync,
        states: tuple[PipelineState, PipelineState],
        leaf: cutlass.Int32,
        k: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """acc = Σ_k W X over one leaf, a chain from zero; -0 for an empty leaf."""
        _, size = self.span(leaf, k)
        tile_k = self.config.tile_k
        blocks = size // tile_k
        tail_groups = (size - blocks * tile_k + mma.K_GROUP - 1) // mma.K_GROUP
        acc.fill(0.0)
        states = self.mainloop.chain(operands, acc, ring, states, blocks, tail_groups)
        if size == 0:
            acc.fill(-0.0)
        return states

    @cute.jit
    def add_unordered(self, acc: cute.Tensor, sums: cute.Pointer, tidx: cutlass.Int32):
        """sums[token, row] += acc[row, token] on the CTA of the element's slice, atomically."""
        config = self.config
        owned = config.tile_m * config.tile_n // config.split
        tCcC = self.tile.coordinates(tidx)
        for four in cutlass.range_constexpr(cute.size(acc) // QUAD):
            for i in cutlass.range_constexpr(QUAD * four, QUAD * four + QUAD):
                # By hand: the tile is contiguous over the CTAs of the cluster, ``owned`` on each.
                index = tCcC[i][1] * config.tile_n + tCcC[i][0]
                cluster.add(sums + index % owned, index // owned, acc[i])

    @cute.jit
    def finish(
        self,
        sums: cute.Pointer,
        mY: cute.Tensor,
        mBias: cute.Tensor | None,
        split_rank: cutlass.Int32,
        bounds: TileBounds,
        tidx: cutlass.Int32,
    ):
        """Y = round(leaf 0 + leaf 1 + ... + bias), for this CTA's slice of the tile."""
        config = self.config
        rows, columns = mY.shape[0], mY.shape[1]
        quads = config.tile_n // QUAD
        owned = config.tile_m * quads // config.split
        for i in cutlass.range_constexpr(cute.ceil_div(owned, self.threads)):
            # By hand: quads of the tile, token-major, ``owned`` on each CTA; no layout divides so.
            local = i * self.threads + tidx
            index = split_rank * owned + local
            token, quad = index // quads, index % quads * QUAD
            row, column = bounds.start_m + token, bounds.start_n + quad
            inside_m = (row >= bounds.first_m) & (row < rows)
            inside = inside_m & (column >= bounds.first_n) & (column < columns)
            if (local < owned) & inside:
                rTotal = self.read_sums(sums, local, token * self.tile.pitch + quad)
                swapped.store_quad(rTotal, mY, (row, column), mBias, row)

    @cute.jit
    def read_sums(
        self, sums: cute.Pointer, quad: cutlass.Int32, offset: cutlass.Int32
    ) -> cute.Tensor:
        """rTotal = ((leaf 0 + leaf 1) + leaf 2) + ... of four columns.

        ``offset``: of the quad in each leaf's sums; ``quad``: its number in the CTA's slice, where
        ``unordered`` has added the leaves already.
        """
        rTotal = cute.make_rmem_tensor(QUAD, cutlass.Float32)
        layout = cute.make_layout(QUAD)
        if cutlass.const_expr(not self.ordered):
            rTotal.store(cute.make_tensor((sums + quad * QUAD).align(16), layout).load())
        else:
            for leaf in cutlass.range_constexpr(self.leaf_sums * self.config.split):
                source = (sums + (leaf % self.leaf_sums * self.tile.sums_size + offset)).align(16)
                if cutlass.const_expr(self.config.split > 1):
                    values = cluster.load4(source, leaf // self.leaf_sums)
                else:
                    values = cute.make_tensor(source, layout).load()
                if cutlass.const_expr(leaf == 0):
                    rTotal.store(values)
                else:
                    rTotal.store(rTotal.load() + values)
        return rTotal

    @cute.jit
    def clear(self, sums: cute.Pointer, tidx: cutlass.Int32):
        """sSlice[i] = 0 for the CTA's slice of the tile."""
        count = self.slice_bytes() // 4
        sSlice = cute.make_tensor(sums, cute.make_layout(count))
        for i in cutlass.range_constexpr(cute.ceil_div(count, self.threads)):
            index = i * self.threads + tidx
            if (tidx < self.threads) & (index < count):
                sSlice[index] = cutlass.Float32(0.0)

    @cute.jit
    def sync_cluster(self):
        """Barrier of all threads of the cluster, or of the CTA if it is alone; orders memory."""
        if cutlass.const_expr(self.cluster > 1):
            # A pair needs it too: no CTA may exit while the other arrives on its barriers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def leaf_range(
        self, split_rank: cutlass.Int32, k: cutlass.Int32
    ) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(first, end) of a CTA's leaves."""
        if not self.tree:
            return cutlass.Int32(0), cutlass.Int32(1)
        if self.config.split == 1:
            return cutlass.Int32(0), leaves.count(k)
        return split_rank * self.leaf_sums, split_rank * self.leaf_sums + self.leaf_sums

    def span(self, leaf: cutlass.Int32, k: cutlass.Int32) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(first k, number of elements) of a leaf."""
        if not self.tree:
            return cutlass.Int32(0), k
        return leaf * leaves.length(k), leaves.size(leaf, k, cutlass.min, cutlass.max)


def build(config: SkinnyConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    m, n, k = fake.size(), fake.size(), fake.size()
    return compile(
        SkinnySm90(config),
        fake.matrix(config.dtype, n, k, config.w_major),
        fake.matrix(config.dtype, m, k, "k"),
        fake.matrix(config.dtype, m, n, "k"),
        fake.rows(config.dtype, m, n) if config.bias else None,
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
