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
from cutlass.pipeline import PipelineState

from ..compile import fake
from ..dsl import tma
from ..dsl.product import Consumer, Frame
from .config import GroupedTreeConfig
from .device import operands as arguments
from .kernel_grouped_sm90 import ExpertTile, GroupedArguments, GroupedSm90


class GroupedTreeSm90(GroupedSm90):
    """One configuration of the kernel; tiles, bias and stores are those of `GroupedSm90`."""

    def __init__(self, config: GroupedTreeConfig):
        self.config = config
        self.stores_leaves = config.epilogue == "leaves"
        dtype, tile = fake.DTYPES[config.dtype], (config.tile_m, config.tile_n, config.tile_k)
        d_dtype = cutlass.Float32 if self.stores_leaves else dtype
        majors = ("k", config.b_major)
        Frame.__init__(self, dtype, d_dtype, majors, tile, tree=not self.stores_leaves, leaves=True)

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
        self.launch(mA, mB, mD, GroupedArguments(mD, mOffsets, mBias, length), ctas, stream)

    def leaf_count(self, k: cutlass.Int32, args: GroupedArguments) -> cutlass.Int32:
        """Number of leaves of K."""
        return cute.ceil_div(k, args.length)

    def leaf(
        self, leaf: cutlass.Int32, k: cutlass.Int32, args: GroupedArguments
    ) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(first k, number of elements) of a leaf."""
        return leaf * args.length, cutlass.min(args.length, k - leaf * args.length)

    @cute.jit
    def compute(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        buffer: cutlass.Int32,
        tile: ExpertTile,
        args: GroupedArguments,
    ) -> tuple[tuple[PipelineState, PipelineState], cutlass.Int32]:
        """Mainloop and epilogue of one unit, or of each of its leaves."""
        if cutlass.const_expr(self.stores_leaves):
            k = self.problem_shape(consumer.cta)[2]
            for leaf in cutlass.range(self.leaf_count(k, args), unroll=1):
                _, size = self.leaf(leaf, k, args)
                states = self.chain(consumer, states, size)
                # By hand: the cast to 64 bits must come before the product.
                first = args.mD.iterator + cutlass.Int64(leaf) * args.mD.stride[2]
                mLeaf = cute.make_tensor(first, cute.select(args.mD.layout, mode=[0, 1]))
                d_leaf = tma.sliced(consumer.d, leaf)
                buffer = self.store_rows(consumer, d_leaf, mLeaf, tile, buffer)
        else:
            states, buffer = Frame.compute(self, consumer, states, buffer, tile, args)
        return states, buffer


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
