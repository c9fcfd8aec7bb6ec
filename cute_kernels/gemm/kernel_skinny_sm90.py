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
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.pipeline import PipelineState

from ..compile import fake
from ..dsl import cluster, mma, pipeline, swapped, tma
from ..dsl.product import Arguments, Consumer, Cta, Shared, Tile
from ..dsl.swapped import QUAD, SwappedFrame, TileBounds
from ..schedulers.tiles import leaves
from .config import ORDER, UNORDERED, SkinnyConfig


@dataclass(frozen=True)
class SkinnyArguments(Arguments):
    """Y [M, N], bias [M, N] or None, and tiles along M."""

    mY: cute.Tensor
    mBias: cute.Tensor | None
    tiles_m: cutlass.Int32


@dataclass(frozen=True)
class SkinnyShared(Shared):
    """Leaf sums: over the ring, or the CTA's slice of the tile where leaves are added unordered."""

    sums: cute.Pointer


class SkinnySm90(SwappedFrame):
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: SkinnyConfig):
        self.config = config
        self.ordered = config.order != UNORDERED
        tree, split = config.order != ORDER, config.split
        assert leaves.LEAVES % split == 0 and (tree or split == 1)
        assert split == 1 or config.pair == 1
        #: Leaf sums that a CTA stores: one, where it adds all leaves in registers.
        self.leaf_sums = leaves.LEAVES // split if split > 1 else 1
        #: Bytes of a CTA's slice of the tile, to which ``unordered`` adds leaves atomically.
        self.slice_bytes = 0 if self.ordered else config.tile_m * config.tile_n // split * 4
        tile, dtype = (config.tile_n, config.tile_m, config.tile_k), fake.DTYPES[config.dtype]
        options = config.ctas_per_sm, config.pair, tree
        super().__init__(dtype, config.w_major, tile, self.slice_bytes, *options)
        self.ctas = split * config.pair
        ring = self.product.stages * self.product.stage_bytes
        assert not self.ordered or self.leaf_sums * self.sums_size * 4 <= ring, (
            "sums reuse the ring"
        )

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
        tiles_n = cute.ceil_div(mY.shape[1], config.tile_n)
        # Whole pairs: a tile beyond M stores no row.
        tiles_m = cute.ceil_div(mY.shape[0], config.tile_m * config.pair) * config.pair
        self.launch(
            mW,
            mX,
            SkinnyArguments(mY, mBias, tiles_m),
            stream,
            grid=(config.split * tiles_m * tiles_n, 1, 1),
            cluster=(self.ctas, 1, 1),
        )

    def shared_fields(self) -> dict[str, cute.struct.MemRange | cute.struct.Align]:
        """The CTA's slice of the tile, where leaves are added unordered."""
        values = cute.struct.MemRange[cutlass.Float32, self.slice_bytes // 4]
        return {"slice": cute.struct.Align[values, 16]}

    def cluster_layout(self) -> cute.Layout:
        """CTAs that split a tile share no loads; the CTAs of a pair share those of W."""
        return cute.make_layout((1, self.config.pair, self.config.split))

    @property
    def barrier_cluster(self) -> tuple[int, int]:
        """All CTAs of a cluster meet."""
        return 1, self.ctas

    def prepare(self, storage: cute.struct, args: SkinnyArguments) -> SkinnyShared:
        """Place the leaf sums."""
        sums = storage.slice.data_ptr()
        if self.ordered:
            sums = cute.recast_ptr(storage.sA.data_ptr(), dtype=cutlass.Float32)
        return SkinnyShared(sums)

    @cute.jit
    def run_roles(self, cta: Cta, w: tma.Source, x: tma.Source, d: None, args: SkinnyArguments):
        """Load and multiply one tile, meet, and store a slice of it."""
        config = self.config
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Neighbouring clusters have the same rows of W: they hit in L2.
        tile = block // config.split
        m, n = tile % args.tiles_m * config.tile_m, tile // args.tiles_m * config.tile_n
        bounds, k = self.bounds(m, n, args.mY), cute.size(w.tensor, mode=[1])
        if warp == self.producer_warp:
            w_rows = tma.shifted(w, (bounds.start_n, 0))
            x_rows = tma.shifted(x, (bounds.start_m, 0))
            self.load_leaves(cta, w_rows, x_rows, k)
        else:
            self.multiply(cta, args, k)
        # After this barrier the leaf sums of every CTA are written; the producer warp is done.
        self.sync_cluster()
        if warp < self.producer_warp:
            self.store_slice(cta, args, bounds)
        if cutlass.const_expr(config.split > 1 and self.ordered):
            # A CTA must not exit while others read its leaf sums.
            self.sync_cluster()

    @cute.jit
    def load_leaves(self, cta: Cta, w: tma.Source, x: tma.Source, k: cutlass.Int32):
        """Producer warp: load the K blocks of W and X of each of this CTA's leaves, ascending."""
        state = pipeline.producer_state(self.product.stages)
        first, end = self.leaf_range(cta.rank[2], k)
        for leaf in cutlass.range(first, end, unroll=1):
            start, size = self.span(leaf, k)
            blocks = (size + self.tile_k - 1) // self.tile_k
            state = self.load_range(cta, w, x, state, Tile(0, 0), start, blocks=blocks)

    @cute.jit
    def multiply(self, cta: Cta, args: SkinnyArguments, k: cutlass.Int32):
        """Consumer warpgroup: 64 rows of W times the tokens, leaf by leaf, into the sums."""
        tidx, _, _ = cute.arch.thread_idx()
        consumer, sums = self.make_consumer(cta, None, args), cta.shared.sums
        states = self.consumer_states()
        first, end = self.leaf_range(cta.rank[2], k)
        tCrSums = [consumer.tCrC]
        tCrSums += [self.product.accumulator(consumer.operands) for _ in range(1, self.leaf_sums)]
        if cutlass.const_expr(self.tree and self.config.split == 1):
            # total = ((leaf 0 + leaf 1) + leaf 2) + ...; the neutral element is -0, not +0.
            consumer.tCrC.fill(-0.0)
            for leaf in cutlass.range(first, end, unroll=1):
                states = self.add_leaf(consumer, consumer.tCrLeaf, states, leaf, k)
                consumer.tCrC.store(consumer.tCrC.load() + consumer.tCrLeaf.load())
        else:
            for i in cutlass.range_constexpr(self.leaf_sums):
                states = self.add_leaf(consumer, tCrSums[i], states, first + i, k)
        if cutlass.const_expr(self.ordered):
            # All consumers have read the ring, whose memory the leaf sums reuse.
            self.sync_consumers()
            for i in cutlass.range_constexpr(self.leaf_sums):
                self.store_sums(tCrSums[i], sums + i * self.sums_size, tidx)
        else:
            for i in cutlass.range_constexpr(self.leaf_sums):
                self.add_unordered(tCrSums[i], sums, tidx)

    @cute.jit
    def add_leaf(
        self,
        consumer: Consumer,
        tCrLeaf: cute.Tensor,
        states: tuple[PipelineState, PipelineState],
        leaf: cutlass.Int32,
        k: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """tCrLeaf = Σ_k W X over one leaf, a chain from zero; -0 for an empty leaf."""
        _, size = self.span(leaf, k)
        blocks = size // self.tile_k
        tail_groups = (size - blocks * self.tile_k + mma.K_GROUP - 1) // mma.K_GROUP
        tCrLeaf.fill(0.0)
        ring, operands = consumer.cta.ab_pipeline, consumer.operands
        states = self.product.chain(operands, tCrLeaf, ring, states, blocks, tail_groups)
        if size == 0:
            tCrLeaf.fill(-0.0)
        return states

    @cute.jit
    def add_unordered(self, tCrC: cute.Tensor, sums: cute.Pointer, tidx: cutlass.Int32):
        """sums[token, row] += tCrC[row, token] on the CTA of the element's slice, atomically."""
        config = self.config
        owned = config.tile_m * config.tile_n // config.split
        tCcC = self.tile_coordinates(tidx)
        for four in cutlass.range_constexpr(cute.size(tCrC) // QUAD):
            for i in cutlass.range_constexpr(QUAD * four, QUAD * four + QUAD):
                # By hand: the tile is contiguous over the CTAs of the cluster, ``owned`` on each.
                index = tCcC[i][1] * config.tile_n + tCcC[i][0]
                cluster.add(sums + index % owned, index // owned, tCrC[i])

    @cute.jit
    def store_slice(self, cta: Cta, args: SkinnyArguments, bounds: TileBounds):
        """Y = round(leaf 0 + leaf 1 + ... + bias), for this CTA's slice of the tile."""
        config, mY, split_rank = self.config, args.mY, cta.rank[2]
        tidx, _, _ = cute.arch.thread_idx()
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
                rTotal = self.read_sums(cta.shared.sums, local, token * self.pitch + quad)
                swapped.store_quad(rTotal, mY, (row, column), args.mBias, row)

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
                source = (sums + (leaf % self.leaf_sums * self.sums_size + offset)).align(16)
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
    def clear_shared(self, storage: cute.struct):
        """sSlice[i] = 0 for the CTA's slice of the tile, where leaves are added unordered."""
        if cutlass.const_expr(not self.ordered):
            tidx, _, _ = cute.arch.thread_idx()
            count = self.slice_bytes // 4
            sSlice = cute.make_tensor(storage.slice.data_ptr(), cute.make_layout(count))
            for i in cutlass.range_constexpr(cute.ceil_div(count, self.threads)):
                index = i * self.threads + tidx
                if (tidx < self.threads) & (index < count):
                    sSlice[index] = cutlass.Float32(0.0)
            # The arrival that publishes the barriers is relaxed: it would not publish these zeros.
            cute.arch.fence_acq_rel_cluster()

    @cute.jit
    def sync_cluster(self):
        """Barrier of all threads of the cluster, or of the CTA if it is alone; orders memory."""
        if cutlass.const_expr(self.ctas > 1):
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
