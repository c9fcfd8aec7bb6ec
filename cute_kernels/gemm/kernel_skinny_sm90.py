"""Y[m, n] = round(Σ_k W[n, k] X[m, k] + bias[m, n]) for few rows m, on SM90: weights stream.

Layouts      W [N, K] row- or column-major, X [M, K] row-major (16-byte strides); Y [M, N] with rows
             of whole 16 bytes; bias [M, N], whose row stride may be 0.
Operands     swapped: 64 rows of W on the long side of ``wgmma.m64nTk16``, T tokens on the other,
             so that one token does not pay for 64.  Neither shows in a bit (docs/numerics.md).
Order        ``chain``: as in kernel_sm90: one fp32 accumulator, K ascending in groups of 16.
             ``tree``: K is cut into leaves (schedulers/tiles/leaves.py), a leaf is a chain from
             zero; leaves are added in fp32, ascending.  Then the bias, in fp32, and one rounding.
Split        a tile's leaves are computed by ``split`` CTAs of a cluster side by side.  Each keeps
             the sums of its own in shared memory; then each adds a share of the tile, reading all
             leaves in their order.  ``unordered`` adds them as they arrive instead, by atomics
             in the shared memory of the share's owner.
K tail       as in dsl/mainloop.py, at the end of every leaf.
M, N tails   loads beyond give zeros; what lies beyond is not stored, except N's columns up to the
             next multiple of 4, which are padding of Y's own rows.
Pair         two CTAs of a cluster have the same rows of W and tokens of their own: each loads half
             of W's and multicasts it to both.
Roles        ``tile_n`` / 64 warpgroups multiply, one more warp loads; one tile per CTA.
Limits       SM90a only; bf16 and fp16; M, N, K < 2^31.
Measured     docs/status.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..compile import fake
from ..dsl import cluster, copy, mma, pipeline, smem, tma
from ..dsl.mainloop import Mainloop
from ..schedulers.tiles import leaves
from .config import ORDER, UNORDERED, SkinnyConfig

#: Shared memory of an SM, less what each CTA on it has for barriers, alignment and its own needs.
SM_BYTES = 233472
CTA_BYTES = 4096
#: Neighbours along N that one thread sums and stores.
QUAD = 4
#: Named barrier of the warpgroups that multiply.
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
        #: Leaves whose sums a CTA keeps apart: one, where it adds all of them in registers.
        self.kept = leaves.LEAVES // config.split if config.split > 1 else 1
        #: fp32 elements of a row of sums: no two threads of a warp meet in a bank.
        self.pitch = config.tile_n + QUAD
        self.sums = config.tile_m * self.pitch
        space = SM_BYTES // config.ctas_per_sm - CTA_BYTES - self.share_bytes()
        tile = (config.tile_n, config.tile_m, config.tile_k)
        majors = (config.w_major, "k")
        self.cluster = config.split * config.pair
        assert config.split == 1 or config.pair == 1
        cluster = (1, config.pair)
        self.mainloop = Mainloop(self.dtype, majors, tile, cluster, self.consumers, space)
        ring = self.mainloop.stages * self.mainloop.stage_bytes
        assert not self.ordered or self.kept * self.sums * 4 <= ring, "sums reuse the ring"

    def share_bytes(self) -> int:
        """Of the sums that are added as they arrive, on the CTA that owns them."""
        config = self.config
        return 0 if self.ordered else config.tile_m * config.tile_n // config.split * 4

    @cute.jit
    def __call__(
        self,
        mW: cute.Tensor,
        mX: cute.Tensor,
        mY: cute.Tensor,
        mBias: cute.Tensor | None,
        stream,
    ):
        config = self.config
        sW_layout, sX_layout = self.mainloop.layouts()
        w, x = self.mainloop.sources(mW, mX)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.mainloop.stages]
            share: cute.struct.Align[
                cute.struct.MemRange[cutlass.Float32, self.share_bytes() // 4], 16
            ]
            # One after the other: sums reuse the memory of both.
            sW: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sW_layout)], smem.ALIGN
            ]
            sX: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sX_layout)], smem.ALIGN
            ]

        self.storage = Storage
        tiles_n = cute.ceil_div(mY.shape[1], config.tile_n)
        # Whole pairs: what is beyond has no row to store.
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
        sums = storage.share.data_ptr()
        if cutlass.const_expr(self.ordered):
            sums = cute.recast_ptr(storage.sW.data_ptr(), dtype=cutlass.Float32)

        # CTAs that share a tile share none of its loads; those of a pair share W's.
        ctas = cute.make_layout((1, config.pair, config.split))
        ring = self.mainloop.ring(storage.barriers.data_ptr(), ctas)
        if cutlass.const_expr(not self.ordered):
            self.clear(sums, tidx)
            # The arrival that publishes the barriers is relaxed: it would not publish these zeros.
            cute.arch.fence_acq_rel_cluster()
        pipeline.announce_barriers((1, self.cluster))
        rank = ctas.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        part = rank[2]
        pipeline.await_barriers((1, self.cluster))

        # Neighbouring clusters share the rows of W: one of them finds those in L2.
        tile = block // config.split
        m, n = tile % tiles_m * config.tile_m, tile // tiles_m * config.tile_n
        # The last tile begins where it ends inside, if it can: TMA's zeros cost more than data do.
        # What it has in common with the one before is stored there.  Quads stay quads.
        rows, columns = mY.shape[0], mY.shape[1]
        from_m = cutlass.max(cutlass.min(m, rows - config.tile_m), 0)
        by_quads = (columns - config.tile_n + QUAD - 1) // QUAD * QUAD
        from_n = cutlass.max(cutlass.min(n, by_quads), 0)
        k = cute.size(w.tensor, mode=[1])
        if warp == self.threads // 32:
            self.load((w, x), (sW, sX), ring, (ctas, rank), (from_n, from_m), k)
        else:
            self.multiply((sW, sX), sums, ring, part, k)
        # Sums of every CTA are written; this is also the last that the producer warp does.
        self.meet()
        if warp < self.threads // 32:
            self.finish(sums, mY, mBias, part, (m, n), (from_m, from_n), tidx)
        if cutlass.const_expr(config.split > 1 and self.ordered):
            # A CTA must not exit while others read its sums.
            self.meet()

    @cute.jit
    def load(self, sources, shared, ring, place, rows, k):
        """The producer warp: of each of this CTA's leaves, every K block of W and X, in order."""
        state = pipeline.producer_state(self.mainloop.stages)
        ctas, rank = place
        first, end = self.leaf_range(rank[2], k)
        for leaf in cutlass.range(first, end, unroll=1):
            start, size = self.span(leaf, k)
            loads = self.mainloop.loads(sources, *shared, ctas, rank, (*rows, start))
            blocks = (size + self.config.tile_k - 1) // self.config.tile_k
            state = self.mainloop.load(loads, ring, state, 0, 0, (0, blocks))

    @cute.jit
    def multiply(self, shared, sums, ring, part, k):
        """A consumer warpgroup: 64 rows of W times the tokens, leaf by leaf, into ``sums``."""
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP)
        operands = self.mainloop.operands(*shared, consumer)
        states = tuple(pipeline.consumer_state(self.mainloop.stages) for _ in range(2))
        first, end = self.leaf_range(part, k)
        accs = [self.mainloop.accumulator(operands) for _ in range(self.kept)]
        if cutlass.const_expr(self.kept == 1 and self.tree and self.config.split == 1):
            # total = ((leaf 0 + leaf 1) + leaf 2) + ...; -0 is what adds nothing, not +0.
            total = accs[0]
            acc = self.mainloop.accumulator(operands)
            total.fill(-0.0)
            for leaf in cutlass.range(first, end, unroll=1):
                states = self.leaf(operands, acc, ring, states, leaf, k)
                total.store(total.load() + acc.load())
        else:
            for i in cutlass.range_constexpr(self.kept):
                states = self.leaf(operands, accs[i], ring, states, first + i, k)
        if cutlass.const_expr(self.ordered):
            # Everyone has read the ring, whose memory the sums take.
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.threads)
            for i in cutlass.range_constexpr(self.kept):
                self.keep(accs[i], sums + i * self.sums, tidx)
        else:
            for i in cutlass.range_constexpr(self.kept):
                self.add_as_it_comes(accs[i], sums, tidx)

    @cute.jit
    def leaf(self, operands, acc, ring, states, leaf, k):
        """acc = Σ_k W X over one leaf: a chain from zero.  Where there is none, -0."""
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
    def keep(self, acc, sums, tidx):
        """sums[token, row] = acc[row, token]."""
        at = self.coordinates(tidx)
        kept = cute.make_tensor(
            sums, cute.make_layout(self.mainloop.tile[:2], stride=(1, self.pitch))
        )
        # In fours: the DSL warns of long loops, and a warning would reach the user.
        for four in cutlass.range_constexpr(cute.size(acc) // QUAD):
            for i in cutlass.range_constexpr(QUAD * four, QUAD * four + QUAD):
                kept[at[i]] = acc[i]

    @cute.jit
    def add_as_it_comes(self, acc, share, tidx):
        """share[...] += acc[row, token] on the CTA that owns the element, in arrival order."""
        config = self.config
        owned = config.tile_m * config.tile_n // config.split
        at = self.coordinates(tidx)
        for four in cutlass.range_constexpr(cute.size(acc) // QUAD):
            for i in cutlass.range_constexpr(QUAD * four, QUAD * four + QUAD):
                index = at[i][1] * config.tile_n + at[i][0]
                cluster.add(share + index % owned, index // owned, acc[i])

    @cute.jit
    def finish(self, sums, mY, mBias, part, tile, start, tidx):
        """Y = round(leaf 0 + leaf 1 + ... + bias), for this CTA's share of the tile.

        The tile was computed from ``start`` on, and is stored from ``tile`` on.
        """
        config = self.config
        rows, columns = mY.shape[0], mY.shape[1]
        across = config.tile_n // QUAD
        owned = config.tile_m * across // config.split
        for i in cutlass.range_constexpr(cute.ceil_div(owned, self.threads)):
            own = i * self.threads + tidx
            index = part * owned + own
            token, quad = index // across, index % across * QUAD
            row, column = start[0] + token, start[1] + quad
            inside = (row >= tile[0]) & (row < rows) & (column >= tile[1]) & (column < columns)
            if (own < owned) & inside:
                total = self.read_sums(sums, own, token * self.pitch + quad)
                if cutlass.const_expr(mBias is not None):
                    for j in cutlass.range_constexpr(QUAD):
                        # A column beyond N reads the last one; it is padding of Y.
                        c = cutlass.min(column + j, columns - 1)
                        offset = cutlass.Int64(row) * mBias.stride[0] + c
                        total[j] += cute.make_tensor(mBias.iterator + offset, cute.make_layout(1))[
                            0
                        ].to(cutlass.Float32)
                out = cute.make_rmem_tensor(QUAD, self.dtype)
                out.store(total.load().to(self.dtype))
                copy.vector(mY, (row, column), QUAD).store(out.load())

    @cute.jit
    def read_sums(self, sums, own, at):
        """Four sums: of the leaves in their order, or of the share that was added already."""
        total = cute.make_rmem_tensor(QUAD, cutlass.Float32)
        layout = cute.make_layout(QUAD)
        if cutlass.const_expr(not self.ordered):
            total.store(cute.make_tensor((sums + own * QUAD).align(16), layout).load())
        else:
            for leaf in cutlass.range_constexpr(self.kept * self.config.split):
                source = (sums + (leaf % self.kept * self.sums + at)).align(16)
                if cutlass.const_expr(self.config.split > 1):
                    values = cluster.load4(source, leaf // self.kept)
                else:
                    values = cute.make_tensor(source, layout).load()
                if cutlass.const_expr(leaf == 0):
                    total.store(values)
                else:
                    total.store(total.load() + values)
        return total

    @cute.jit
    def clear(self, share, tidx):
        """share = 0."""
        count = self.share_bytes() // 4
        own = cute.make_tensor(share, cute.make_layout(count))
        for i in cutlass.range_constexpr(cute.ceil_div(count, self.threads)):
            at = i * self.threads + tidx
            if (tidx < self.threads) & (at < count):
                own[at] = cutlass.Float32(0.0)

    @cute.jit
    def meet(self):
        """All threads of the CTAs that share a tile; what was written before is seen after."""
        if cutlass.const_expr(self.cluster > 1):
            # Of a pair too: one must not exit while the other may still arrive on its barriers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def coordinates(self, tidx):
        """(row of W, token) of each value of a thread's accumulator, in the tile."""
        part = self.mainloop.tiled_mma(self.consumers).get_slice(tidx)
        return part.partition_C(cute.make_identity_tensor(self.mainloop.tile[:2]))

    def leaf_range(self, part, k):
        """The first leaf of a CTA and the one behind its last."""
        if not self.tree:
            return cutlass.Int32(0), cutlass.Int32(1)
        if self.config.split == 1:
            return cutlass.Int32(0), leaves.count(k)
        return part * self.kept, part * self.kept + self.kept

    def span(self, leaf, k):
        """(first k, elements) of a leaf."""
        if not self.tree:
            return cutlass.Int32(0), k
        return leaf * leaves.length(k), leaves.size(leaf, k, cutlass.min, cutlass.max)


def build(config: SkinnyConfig, compile=cute.compile):
    """Compiles one configuration against fake tensors; no GPU needed."""
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
