"""G = dlogits of a block of the vocabulary, on SM90: the logits are recomputed, and not stored.

    z, y as in kernel_fwd_sm90      p[t, v] = 2^(y - lse2[t])
    G[t, v] = (1[v = target[t]] - p) a[t] - p (ln p + H[t]) b[t]     times dz/d(uncapped z)

with a = dlogp / τ, b = dentropy / τ.

Layouts      H [T, D], W [V', D] and G [T, V'] row-major, strides of 16 bytes; G of the dtype of H.
Order        z: as kernel_fwd_sm90; everything else is element by element, rounded once at the end.
Masks        a row without a target, and a column that is not of the vocabulary, are exactly 0.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond D are skipped.
T, V tails   loads beyond give zeros; TMA clips the store.
Roles        as gemm's kernel_sm90: a producer warp, two consumer warpgroups of 64 tokens each.
Limits       SM90a only; bf16 and fp16; T, D < 2^31, V <= 2^19.
Measured     docs/status.md.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.pipeline import PipelineState

from ..compile import fake
from ..dsl import tma
from ..dsl.product import Consumer, Cta, Frame, GridTile, Tile
from .config import Config
from .device import gradient, tile, vectors
from .device.gradient import GradientArguments


class LogpGradientSm90(Frame):
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    #: `load` clips tiles itself.
    clips = (False, False)
    holds = "coordinates"

    def __init__(self, config: Config):
        self.config = config
        dtype, shape = fake.DTYPES[config.dtype], (config.tile_m, config.tile_n, config.tile_k)
        cluster, tree = (config.cluster_m, 1), config.order == "tree"
        super().__init__(dtype, dtype, ("k", "k"), shape, cluster, tree)

    @cute.jit
    def __call__(
        self,
        mH: cute.Tensor,
        mW: cute.Tensor,
        mBias: cute.Tensor | None,
        mTarget: cute.Tensor,
        mScale: cute.Tensor,
        mLse2: cute.Tensor,
        mDlogp: cute.Tensor,
        mDentropy: cute.Tensor | None,
        mEntropy: cute.Tensor | None,
        mG: cute.Tensor,
        start: cutlass.Int32,
        vocab: cutlass.Int32,
        softcap: cutlass.Float32,
        max_clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        counts = self.grid_counts(mG.shape[0], mG.shape[1])
        head = start, vocab, softcap
        args = GradientArguments(
            mBias, mTarget, mScale, mLse2, mDlogp, mDentropy, mEntropy, *head, counts
        )
        clusters = cutlass.min(counts[0] * counts[1], max_clusters)
        self.launch(mH, mW, mG, args, clusters, stream)

    def registers(self, args: GradientArguments) -> gradient.TokenRegisters:
        """Registers of the tokens of a thread."""
        return gradient.make_registers(vectors.ROWS, self.config.entropy)

    @cute.jit
    def load(
        self,
        cta: Cta,
        h: tma.Source,
        w: tma.Source,
        state: PipelineState,
        coord: GridTile,
        args: GradientArguments,
    ) -> PipelineState:
        """Producer warp: load the blocks of H and W of one tile."""
        # A tile wholly outside loads the last one: TMA takes longer for zeros than for data.
        m = cutlass.min(coord.m, cute.ceil_div(self.problem_shape(cta)[0], self.tile_m) - 1)
        n = cutlass.min(coord.n, cute.ceil_div(self.problem_shape(cta)[1], self.tile_n) - 1)
        return Frame.load(self, cta, h, w, state, Tile(m, n), args)

    @cute.jit
    def mainloop(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        coord: GridTile,
        args: GradientArguments,
    ) -> tuple[PipelineState, PipelineState]:
        """z[t, v] = Σ_d H[t, d] W[v, d] of one tile; its tokens are loaded meanwhile."""
        row0 = coord.m * self.tile_m + consumer.index * 64
        gradient.load(consumer.registers, args, row0, consumer.tCcC)
        return Frame.mainloop(self, consumer, states, coord, args)

    @cute.jit
    def epilogue(
        self, consumer: Consumer, buffer: cutlass.Int32, coord: GridTile, args: GradientArguments
    ) -> cutlass.Int32:
        """Gradient of one tile of logits."""
        rows, tCrC, tCcC = consumer.registers, consumer.tCrC, consumer.tCcC
        # z = softcap tanh((z + bias) / softcap)
        if cutlass.const_expr(args.mBias is not None):
            self.add_bias(consumer, args.mBias, coord.column)
        if cutlass.const_expr(self.config.softcap):
            tile.cap(tCrC, args.softcap)
        # G = (1[v = target] - p) a - p (ln p + H) b, times dz/d(uncapped z)
        gradient.from_logits(tCrC, rows, tCcC, coord.column, args.softcap, self.config.softcap)
        gradient.mask(tCrC, rows, tCcC, coord.column, args.vocab - args.start)
        return self.store(consumer, consumer.d, coord, buffer)


def build(config: Config, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    t, v, d = fake.size(), fake.size(), fake.size()
    entropy = (fake.vector("fp32", t), fake.vector("fp32", t)) if config.entropy else (None, None)
    return compile(
        LogpGradientSm90(config),
        fake.matrix(config.dtype, t, d, "k"),
        fake.matrix(config.dtype, v, d, "k"),
        fake.vector(config.dtype, v) if config.bias else None,
        fake.compact(cutlass.Int64, (t,), 8),
        *(fake.vector("fp32", t) for _ in range(3)),
        *entropy,
        fake.matrix(config.dtype, t, v, "k"),
        cutlass.Int32(0),
        cutlass.Int32(1),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
