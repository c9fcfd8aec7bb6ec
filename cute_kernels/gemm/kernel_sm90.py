"""D[m, n] = round(acc0[m, n] + Σ_k A[m, k] B[n, k] + bias[n]), on SM90: TMA, WGMMA, persistent.

Layouts      A [M, K] and B [N, K], each row- or column-major (16-byte strides); D [M, N] row-major.
Order        ``chain``: one fp32 accumulator per output, K ascending in whole groups of 16, each
             group one ``wgmma.m64nNk16`` as wide as the tile, whose width shows in no bit
             (docs/gemm.md); bias added in fp32; one rounding, at the store.
             ``accumulate``: acc0 is read from D (fp32), which is then overwritten.
             ``fp32``: D is fp32, and no bias: the chain as it is.
             ``tree``: the leaves of K are added in fp32, ascending.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond K are skipped.
M, N tails   TMA clips the store; loads beyond M or N give zeros, in no stored output.
Roles        warpgroup 0: one warp loads; warpgroups 1, 2: 64 rows of the tile each, and their
             own epilogue, which stores by TMA while the loads of the next tile are in flight.
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
from ..dsl.product import Arguments, Consumer, Frame, GridTile
from .config import Config


@dataclass(frozen=True)
class GemmArguments(Arguments):
    """D [M, N], bias [N] or None, and the clusters of tiles along M and N."""

    mD: cute.Tensor
    mBias: cute.Tensor | None
    counts: cute.Shape


class GemmSm90(Frame):
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    #: A tile beyond N is clipped too, though no cluster reaches beyond it.
    clips = (True, True)

    def __init__(self, config: Config):
        self.raster_group = config.raster_group
        self.accumulate = config.epilogue == "accumulate"
        tree = config.order == "tree"
        assert not (tree and self.accumulate), "a tree does not start from what is stored"
        dtype = fake.DTYPES[config.dtype]
        d_dtype = cutlass.Float32 if config.stores_fp32 else dtype
        majors = config.a_major, config.b_major
        tile = config.tile_m, config.tile_n, config.tile_k
        super().__init__(dtype, d_dtype, majors, tile, (config.cluster_m, config.cluster_n), tree)

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        mBias: cute.Tensor | None,
        max_clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        counts = self.grid_counts(mD.shape[0], mD.shape[1])
        clusters = cutlass.min(counts[0] * counts[1], max_clusters)
        self.launch(mA, mB, mD, GemmArguments(mD, mBias, counts), clusters, stream)

    @cute.jit
    def mainloop(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        tile: GridTile,
        args: GemmArguments,
    ) -> tuple[PipelineState, PipelineState]:
        """tCrC = acc0 + Σ_k A[m, k] B[n, k] of one tile."""
        if cutlass.const_expr(self.accumulate):
            self.start_from(consumer, args.mD, tile.row + consumer.index * 64, tile.column)
            states = self.add_all(consumer, states)
        else:
            states = Frame.mainloop(self, consumer, states, tile, args)
        return states

    @cute.jit
    def epilogue(
        self, consumer: Consumer, buffer: cutlass.Int32, tile: GridTile, args: GemmArguments
    ) -> cutlass.Int32:
        """D = round(tCrC + bias) of one tile."""
        if cutlass.const_expr(args.mBias is not None):
            self.add_bias(consumer, args.mBias, tile.column)
        return self.store(consumer, consumer.d, tile, buffer)


def build(config: Config, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    m, n, k = fake.size(), fake.size(), fake.size()
    bias = fake.vector(config.dtype, n) if config.epilogue == "bias" else None
    return compile(
        GemmSm90(config),
        fake.matrix(config.dtype, m, k, config.a_major),
        fake.matrix(config.dtype, n, k, config.b_major),
        fake.matrix("fp32" if config.stores_fp32 else config.dtype, m, n, "k"),
        bias,
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
