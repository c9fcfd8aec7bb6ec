"""D[t, n] = round(Σ_l S[l, t, n] + bias[e, n]), S[l, t, n] = Σ_k A[t, k] B[n, k, e], on SM90.

k is in leaf l of K, and e is the expert of row t: kernel_grouped_sm90 in the order ``tree``.

Layouts      those of kernel_grouped_sm90.  With the epilogue ``leaves`` D is [T, N, leaves] in
             fp32, of which every leaf has rows of whole 16 bytes.
Order        a leaf is a chain from zero over ``length`` elements of K, the last one maybe fewer.
             ``plain``, ``bias``: leaves are added in fp32, ascending, into a second accumulator
             that starts from -0; bias in fp32; one rounding.  So a row has the bytes of
             ``ck.linear(order="tree")`` with its expert's weight.
             ``leaves``: each is stored as it is, for the ranks that exchange them.
Work         a unit is a tile of one expert, with all its leaves; the walk is kernel_grouped_sm90's.
K tail       of each leaf: the last block's groups behind the leaf are loaded and not multiplied.
M, N tails   as in kernel_grouped_sm90.
Roles        as there; the ring of loads runs on from leaf to leaf and from unit to unit.
Limits       SM90a only; bf16 and fp16; T, N, K < 2^31; ``length`` a multiple of 16.
Measured     times: not run.  Bytes on an H200: tests/moe/test_gpu.py.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from ..compile import fake
from ..dsl import mma, pipeline, tma
from ..dsl.mainloop import Operands
from ..dsl.product import (
    THREADS,
    Frame,
    SharedTiles,
)
from ..schedulers.tiles import persistent_device as persistent
from .config import GroupedTreeConfig
from .device import operands as arguments
from .kernel_grouped_sm90 import GroupedSm90


class GroupedTreeSm90(GroupedSm90):
    """One configuration of the kernel; units, bias and stores are those of `GroupedSm90`."""

    def __init__(self, config: GroupedTreeConfig):
        self.config = config
        self.dtype = fake.DTYPES[config.dtype]
        self.stores_leaves = config.epilogue == "leaves"
        self.d_dtype = cutlass.Float32 if self.stores_leaves else self.dtype
        tile = config.tile_m, config.tile_n, config.tile_k
        self.frame = Frame(self.dtype, self.d_dtype, ("k", config.b_major), tile)
        self.mainloop, self.epilogue = self.frame.mainloop, self.frame.epilogue

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        mOffsets: cute.Tensor,
        mBias: cute.Tensor | None,
        length: cutlass.Int32,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        a, b = self.mainloop.sources(mA, mB)
        d = self.epilogue.target(mD)
        self.storage = self.frame.storage()
        self.kernel(a, b, d, mD, mOffsets, mBias, length).launch(
            grid=(1, 1, ctas),
            block=(THREADS, 1, 1),
            cluster=(*self.frame.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

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
        length: cutlass.Int32,
    ):
        """Producer warp: load the K blocks of A and B of each unit, ascending, leaf by leaf."""
        a, b = sources
        k = cute.size(a.tensor, mode=[1])
        experts = mOffsets.shape[0] - 1
        state = pipeline.producer_state(self.mainloop.stages)
        index, step = persistent.first_and_step()
        unit = self.unit_at(index, self.first_unit(mD, mOffsets), mD, mOffsets)
        while unit.expert < experts:
            m, n = self.tile_of(index, unit, mD, rank)
            # B of one expert, and A from its first row on.
            b_expert = tma.Source(b.atom, b.tensor[None, None, unit.expert])
            for leaf in cutlass.range(cute.ceil_div(k, length), unroll=1):
                start, size = leaf * length, cutlass.min(length, k - leaf * length)
                origin = (unit.row0, 0, start)
                loads = self.mainloop.loads(
                    (a, b_expert), smem_tiles.sA, smem_tiles.sB, cluster, rank, origin
                )
                blocks = cute.ceil_div(size, self.config.tile_k)
                state = self.mainloop.load(loads, ring, state, m, n, (0, blocks))
            index += step
            unit = self.unit_at(index, unit, mD, mOffsets)
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
        extent: tuple[cutlass.Int32, cutlass.Int32],
    ):
        """Consumer warpgroup: compute and store 64 rows of each unit; extent: (K, length)."""
        k, length = extent
        tidx, _, _ = cute.arch.thread_idx()
        consumer = cute.arch.make_warp_uniform(tidx // mma.WARPGROUP) - 1
        lane = tidx % mma.WARPGROUP

        # The slice of one warpgroup gives the coordinates of this thread's values.
        thr_mma = self.mainloop.tiled_mma(1).get_slice(lane)
        operands = self.mainloop.operands(smem_tiles.sA, smem_tiles.sB, consumer)
        acc = self.mainloop.accumulator(operands)
        total = acc
        if cutlass.const_expr(not self.stores_leaves):
            total = self.mainloop.accumulator(operands)

        states = tuple(pipeline.consumer_state(self.mainloop.stages) for _ in range(2))
        buffer = cutlass.Int32(0)
        experts = mOffsets.shape[0] - 1
        index, step = persistent.first_and_step()
        unit = self.unit_at(index, self.first_unit(mD, mOffsets), mD, mOffsets)
        while unit.expert < experts:
            m, n = self.tile_of(index, unit, mD, rank)
            if cutlass.const_expr(self.stores_leaves):
                for leaf in cutlass.range(cute.ceil_div(k, length), unroll=1):
                    size = cutlass.min(length, k - leaf * length)
                    states = self.chain_of(operands, acc, ring, states, size)
                    target = self.leaf_of(d, mD, leaf)
                    buffer = self.store_unit(acc, target, smem_tiles, unit, (m, n), thr_mma, buffer)
            else:
                # The neutral element is -0: +0 would change the sign of a leaf of -0.
                total.fill(-0.0)
                for leaf in cutlass.range(cute.ceil_div(k, length), unroll=1):
                    size = cutlass.min(length, k - leaf * length)
                    states = self.chain_of(operands, acc, ring, states, size)
                    total.store(total.load() + acc.load())
                # D = round(total + bias)
                if cutlass.const_expr(mBias is not None):
                    column = n * self.config.tile_n
                    self.add_bias(total, mBias, unit.expert, column, thr_mma)
                buffer = self.store_unit(total, (d, mD), smem_tiles, unit, (m, n), thr_mma, buffer)
            index += step
            unit = self.unit_at(index, unit, mD, mOffsets)
        self.epilogue.finish(lane)

    @cute.jit
    def chain_of(
        self,
        operands: Operands,
        acc: cute.Tensor,
        ring: PipelineTmaAsync,
        states: tuple[PipelineState, PipelineState],
        size: cutlass.Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """acc = Σ_k A[t, k] B[n, k, e] over the next ``size`` elements of K, from zero."""
        blocks = size // self.config.tile_k
        tail_groups = cute.ceil_div(size - blocks * self.config.tile_k, mma.K_GROUP)
        acc.fill(0.0)
        return self.mainloop.chain(operands, acc, ring, states, blocks, tail_groups)

    @cute.jit
    def leaf_of(
        self, d: tma.Source, mD: cute.Tensor, leaf: cutlass.Int32
    ) -> tuple[tma.Source, cute.Tensor]:
        """One leaf of D for TMA, and of D, [T, N]."""
        # By hand: the cast to 64 bits must come before the product.
        first = mD.iterator + cutlass.Int64(leaf) * mD.stride[2]
        mLeaf = cute.make_tensor(first, cute.select(mD.layout, mode=[0, 1]))
        return tma.Source(d.atom, d.tensor[None, None, leaf]), mLeaf


def build(config: GroupedTreeConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    mA, mB, mD, mOffsets, mBias, ctas = arguments.fakes(
        config.dtype, config.b_major, config.epilogue == "bias"
    )
    if config.epilogue == "leaves":
        mD = arguments.leaves(*mD.shape)
    return compile(
        GroupedTreeSm90(config),
        mA,
        mB,
        mD,
        mOffsets,
        mBias,
        cutlass.Int32(1),
        ctas,
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
