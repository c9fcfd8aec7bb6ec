"""States of tokens over runs of the vocabulary, on SM90: TMA and WGMMA.

Logits stay in registers, but for those of the first tokens if the configuration keeps them.

    z[t, v] = Σ_d H[t, d] W[v, d] + bias[v]      y = z scale[t]      states: logp/exact.py

Layouts      H [T, D] row-major, W [V, D] row-major (16-byte strides); states int64
             [P, T, C], C = 6, or 10 with an entropy.  Kept sums over D: fp32 [T', V'], T' <= T, V'
             a multiple of 4 that is not below V; columns from V on are 0.
Order        A logit is the chain (or tree) of gemm's kernel_sm90: the same instructions in the
             same order.  16 entries are added in fp32 in the order of logp/config.py; their sums
             are added in integers, so that bits do not depend on runs, tiles or CTAs.
Work         A work item is 256 tokens (a cluster's two CTAs, which share the loads of W) by a run
             of tiles of 256 entries; clusters take items run by run, so that items in flight read
             the same W.  At the end of an item a row's four lanes are added, and it is stored.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond D are skipped.
T, V tails   loads beyond give zeros; columns beyond the vocabulary become -inf; rows beyond T are
             not stored.
Roles        as gemm's kernel_sm90: a producer warp, two consumer warpgroups of 64 tokens each.
Limits       SM90a only; bf16 and fp16; D < 2^31, V <= 2^19.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass.pipeline import PipelineState

from ..compile import fake
from ..dsl import tma
from ..dsl.product import Arguments, Consumer, Cta, Frame, Registers, Tile, Tiles
from .config import Config, columns_of_state
from .device import exact, tile, vectors


@dataclass(frozen=True)
class ForwardArguments(Arguments):
    """What the states need besides H and W.

    mBias:   [V], or None.
    mTarget: Int64 [T].
    mScale:  fp32 [T].
    mStates: Int64 [P, T, C], the result.
    mSums:   fp32 [T', V'], sums over D of the first T' tokens, a second result; or None.
    start:   vocabulary index of the head's first row.
    vocab:   size of the vocabulary.
    groups:  of tokens, a cluster's.
    """

    mBias: cute.Tensor | None
    mTarget: cute.Tensor
    mScale: cute.Tensor
    mStates: cute.Tensor
    mSums: cute.Tensor | None
    start: cutlass.Int32
    vocab: cutlass.Int32
    softcap: cutlass.Float32
    groups: cutlass.Int32


@dataclass(frozen=True)
class TokenRegisters(Registers):
    """States of the two tokens of a thread, their scales, and the rows of W of their targets."""

    state: exact.State
    rScale: cute.Tensor
    rTarget: cute.Tensor


@dataclass(frozen=True)
class Run:
    """Work item ``index``: a run of W's tiles by tile m of tokens."""

    m: cutlass.Int32
    index: cutlass.Int32
    runs: "Runs"

    @property
    def number(self) -> cutlass.Int32:
        """Number of the run."""
        return self.index // self.runs.groups

    def tiles(self) -> tuple[cutlass.Int32, cutlass.Int32]:
        """(first, end): tiles of W."""
        number, tiles, runs = self.number, self.runs.tiles, self.runs.runs
        return number * tiles // runs, (number + 1) * tiles // runs


@dataclass(frozen=True)
class Runs(Tiles):
    """Work items, run by run, so that those in flight read the same W.

    cluster: tiles of tokens of a cluster.  tiles: of W.  last: tile of tokens.  valid: rows of W
    that are in the vocabulary.
    """

    groups: cutlass.Int32
    runs: cutlass.Int32
    cluster: int
    tiles: cutlass.Int32
    last: cutlass.Int32
    valid: cutlass.Int32

    def has(self, index: cutlass.Int32, walk: None) -> cutlass.Boolean:
        """Whether there is an item ``index``."""
        return index < self.groups * self.runs

    def at(self, index: cutlass.Int32, walk: None, rank: cute.Coord) -> Run:
        """Item of CTA ``rank`` of the cluster."""
        return Run(index % self.groups * self.cluster + rank[0], index, self)


class LogpForwardSm90(Frame):
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    #: `load` clips tiles of tokens itself.
    clips = (False, False)
    holds = "coordinates"

    def __init__(self, config: Config):
        self.config = config
        dtype, shape = fake.DTYPES[config.dtype], (config.tile_m, config.tile_n, config.tile_k)
        cluster, tree = (config.cluster_m, 1), config.order == "tree"
        super().__init__(dtype, None, ("k", "k"), shape, cluster, tree)

    @cute.jit
    def __call__(
        self,
        mH: cute.Tensor,
        mW: cute.Tensor,
        mBias: cute.Tensor | None,
        mTarget: cute.Tensor,
        mScale: cute.Tensor,
        mStates: cute.Tensor,
        mSums: cute.Tensor | None,
        start: cutlass.Int32,
        vocab: cutlass.Int32,
        softcap: cutlass.Float32,
        max_clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        groups = cute.ceil_div(mH.shape[0], self.tile_m * self.config.cluster_m)
        head = start, vocab, softcap
        args = ForwardArguments(mBias, mTarget, mScale, mStates, mSums, *head, groups)
        clusters = cutlass.min(groups * mStates.shape[0], max_clusters)
        self.launch(mH, mW, None, args, clusters, stream)

    def tiles(self, cta: Cta, args: ForwardArguments) -> Runs:
        """Groups of tokens by runs of W's tiles."""
        tokens, rows_of_w, _ = self.problem_shape(cta)
        tiles = cute.ceil_div(rows_of_w, self.tile_n)
        last = cute.ceil_div(tokens, self.tile_m) - 1
        valid = cutlass.min(rows_of_w, args.vocab - args.start)
        runs = args.mStates.shape[0]
        return Runs(args.groups, runs, self.config.cluster_m, tiles, last, valid)

    def registers(self, args: ForwardArguments) -> TokenRegisters:
        """Registers of the tokens of a thread."""
        return TokenRegisters(
            exact.make_state(vectors.ROWS, self.config.entropy),
            cute.make_rmem_tensor(vectors.ROWS, cutlass.Float32),
            cute.make_rmem_tensor(vectors.ROWS, cutlass.Int32),
        )

    @cute.jit
    def load(
        self,
        cta: Cta,
        h: tma.Source,
        w: tma.Source,
        state: PipelineState,
        run: Run,
        args: ForwardArguments,
    ) -> PipelineState:
        """Producer warp: load every K block of the tokens and of each tile of W of a run."""
        # A group of tokens may end inside the cluster: a tile wholly outside loads the last one.
        m = cutlass.min(run.m, run.runs.last)
        first, end = run.tiles()
        for n in cutlass.range(first, end, unroll=1):
            state = Frame.load(self, cta, h, w, state, Tile(m, n), args)
        return state

    @cute.jit
    def mainloop(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        run: Run,
        args: ForwardArguments,
    ) -> tuple[PipelineState, PipelineState]:
        """States of 64 tokens over a run of W."""
        tCrC, tokens = consumer.tCrC, consumer.registers
        tCcC, state = consumer.tCcC, tokens.state
        row0 = run.m * self.tile_m + consumer.index * 64
        for half in cutlass.range_constexpr(vectors.ROWS):
            row = cutlass.min(row0 + tCcC[2 * half][0], args.mStates.shape[1] - 1)
            tokens.rScale[half] = args.mScale[row]
            tokens.rTarget[half] = args.mTarget[row].to(cutlass.Int32) - args.start
        exact.clear(state)
        first, end = run.tiles()
        for n in cutlass.range(first, end, unroll=1):
            column0 = n * self.tile_n
            # z[t, v] = Σ_d H[t, d] W[v, d]
            states = Frame.mainloop(self, consumer, states, run, args)
            if cutlass.const_expr(self.config.keep):
                tile.keep(tCrC, args.mSums, tCcC, row0, column0)
            # z = softcap tanh((z + bias) / softcap); -inf beyond the vocabulary
            if cutlass.const_expr(args.mBias is not None):
                self.add_bias(consumer, args.mBias, column0)
            if cutlass.const_expr(self.config.softcap):
                tile.cap(tCrC, args.softcap)
            tile.choose(tCrC, tCcC, tokens.rTarget, column0, state.chosen)
            tile.mask(tCrC, tCcC, column0, run.runs.valid)
            # state += Σ_v 2^y, of 16 entries at a time
            vectors.add_tile(tCrC, state, tokens.rScale)
        return states

    @cute.jit
    def epilogue(
        self, consumer: Consumer, buffer: cutlass.Int32, run: Run, args: ForwardArguments
    ) -> cutlass.Int32:
        """Add the four lanes of a token, and store its state."""
        state, tCcC = consumer.registers.state, consumer.tCcC
        row0 = run.m * self.tile_m + consumer.index * 64
        for half in cutlass.range_constexpr(vectors.ROWS):
            exact.add_lane(state, half, 1)
            exact.add_lane(state, half, 2)
            row = row0 + tCcC[2 * half][0]
            if (consumer.lane % vectors.QUAD == 0) & (row < args.mStates.shape[1]):
                exact.store(state, half, tile.row_of(args.mStates, run.number, row))
        return buffer


def build(config: Config, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    t, v, d, runs = fake.size(), fake.size(), fake.size(), fake.size()
    return compile(
        LogpForwardSm90(config),
        fake.matrix(config.dtype, t, d, "k"),
        fake.matrix(config.dtype, v, d, "k"),
        fake.vector(config.dtype, v) if config.bias else None,
        fake.compact(cutlass.Int64, (t,), 8),
        fake.vector("fp32", t),
        fake.compact(cutlass.Int64, (runs, t, columns_of_state(config.entropy)), 8),
        fake.matrix("fp32", fake.size(), fake.size(4), "k") if config.keep else None,
        cutlass.Int32(0),
        cutlass.Int32(1),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
