"""States of few tokens, on SM90: reads the head once, and gives the bits of the forward kernel.

    z[t, v] = Σ_d H[t, d] W[v, d] + bias[v]      y = z scale[t]      states: logp/exact.py

Layouts      as kernel_fwd_sm90; T <= tile_m; states of P CTAs.
Operands     swapped: 64 entries of the vocabulary on the long side of ``wgmma.m64nTk16``, T tokens
             on the other.  Bits do not depend on it (docs/numerics.md).
Order        A logit: the chain or the tree of the forward.  16 entries are the 16 rows of a warp:
             v and v + 8 are one thread's, neighbours are lanes 4, 8 and 16 apart, which is the
             order of logp/config.py.  Sums of 16 entries are added in integers.
Work         a CTA takes every P-th tile of the head; at its end its warps' states are added in
             shared memory.
K tail       TMA fills zeros inside the last group of 16; groups wholly beyond D are skipped.
T, V tails   loads beyond give zeros; entries beyond the vocabulary become -inf; tokens beyond T
             are not stored.
Roles        ``tile_n`` / 64 consumer warpgroups, then a producer warp.
Limits       SM90a only; bf16 and fp16; T <= 128, D < 2^31, V <= 2^19.
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
from ..dsl.product import Arguments, Consumer, Cta, Registers, Shared, Tile, Tiles
from ..dsl.swapped import SwappedFrame
from .config import FewConfig, columns_of_state
from .device import column, exact, tile


@dataclass(frozen=True)
class FewArguments(Arguments):
    """What the states need besides W and H.

    mBias: [V] or None.  mTarget: Int64 [T].  mScale: fp32 [T].  mStates: Int64 [P, T, C], result.
    start: vocabulary index of the head's first row.  vocab: size of the vocabulary.
    """

    mBias: cute.Tensor | None
    mTarget: cute.Tensor
    mScale: cute.Tensor
    mStates: cute.Tensor
    start: cutlass.Int32
    vocab: cutlass.Int32
    softcap: cutlass.Float32


@dataclass(frozen=True)
class FewShared(Shared):
    """Scales of the tokens, fp32 [tile_m]; states of the warps, Int64 [warp, token, column]."""

    sScale: cute.Tensor
    warp_states: cute.Pointer


@dataclass(frozen=True)
class FewRegisters(Registers):
    """States of a thread's tokens, and their targets, loaded before the first tile."""

    state: exact.State
    rRow: cute.Tensor


@dataclass(frozen=True)
class HeadTiles(Tiles):
    """Tiles of W; all tokens are one tile."""

    count: cutlass.Int32
    valid: cutlass.Int32

    def has(self, index: cutlass.Int32, walk: None) -> cutlass.Boolean:
        """Whether there is a tile ``index``."""
        return index < self.count

    def at(self, index: cutlass.Int32, walk: None, rank: cute.Coord) -> Tile:
        """Tile ``index`` of W."""
        return HeadTile(index, 0, self.valid)


@dataclass(frozen=True)
class HeadTile(Tile):
    """Tile m of W; valid: rows of W that are in the vocabulary."""

    valid: cutlass.Int32


class LogpFewSm90(SwappedFrame):
    """Kernel of one configuration; ``__call__`` is the host function that is compiled."""

    holds = "coordinates"

    def __init__(self, config: FewConfig):
        self.config = config
        shape, tree = (config.tile_n, config.tile_m, config.tile_k), config.order == "tree"
        dtype, ctas_per_sm = fake.DTYPES[config.dtype], config.ctas_per_sm
        super().__init__(dtype, "k", shape, ctas_per_sm=ctas_per_sm, tree=tree)
        self.columns = columns_of_state(config.entropy)
        states = self.threads // 32 * config.tile_m * self.columns * 8
        ring = self.product.stages * self.product.stage_bytes
        assert states <= ring, "the warps' states reuse the ring"
        assert config.tile_m <= self.threads, "one thread adds the states of each token"

    @cute.jit
    def __call__(
        self,
        mH: cute.Tensor,
        mW: cute.Tensor,
        mBias: cute.Tensor | None,
        mTarget: cute.Tensor,
        mScale: cute.Tensor,
        mStates: cute.Tensor,
        start: cutlass.Int32,
        vocab: cutlass.Int32,
        softcap: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        args = FewArguments(mBias, mTarget, mScale, mStates, start, vocab, softcap)
        self.launch(mW, mH, args, stream, grid=(mStates.shape[0], 1, 1))

    def shared_fields(self) -> dict[str, cute.struct.MemRange | cute.struct.Align]:
        """Scales of the tokens."""
        return {"scale": cute.struct.MemRange[cutlass.Float32, self.config.tile_m]}

    @cute.jit
    def prepare(self, storage: cute.struct, args: FewArguments) -> FewShared:
        """Load the scales; the states of the warps lie over the ring."""
        tidx, _, _ = cute.arch.thread_idx()
        layout = cute.make_layout(self.config.tile_m)
        sScale = cute.make_tensor(storage.scale.data_ptr(), layout)
        warp_states = cute.recast_ptr(storage.sA.data_ptr(), dtype=cutlass.Int64)
        tokens = args.mTarget.shape[0]
        if tidx < self.config.tile_m:
            sScale[tidx] = args.mScale[cutlass.min(tidx, tokens - 1)]
        return FewShared(sScale, warp_states)

    def tiles(self, cta: Cta, args: FewArguments) -> HeadTiles:
        """Tiles of W."""
        rows_of_w = self.problem_shape(cta)[0]
        tiles = cute.ceil_div(rows_of_w, self.tile_m)
        return HeadTiles(tiles, cutlass.min(rows_of_w, args.vocab - args.start))

    @cute.jit
    def registers(self, args: FewArguments) -> FewRegisters:
        """Registers of the tokens of a thread."""
        state = exact.make_state(column.slots(self.config.tile_m), self.config.entropy)
        exact.clear(state)
        return FewRegisters(state, column.load_targets(state, args.mTarget, args.start))

    @cute.jit
    def run_roles(self, cta: Cta, w: tma.Source, h: tma.Source, d: None, args: FewArguments):
        """Split the warps of the CTA, when all scales are in shared memory."""
        cute.arch.sync_threads()
        SwappedFrame.run_roles(self, cta, w, h, d, args)

    @cute.jit
    def compute(
        self,
        consumer: Consumer,
        states: tuple[PipelineState, PipelineState],
        buffer: cutlass.Int32,
        coord: HeadTile,
        args: FewArguments,
    ) -> tuple[tuple[PipelineState, PipelineState], cutlass.Int32]:
        """Add 64 entries of the vocabulary, 16 a warp, to the states of all tokens."""
        tokens, tCrC, tCcC = consumer.registers, consumer.tCrC, consumer.tCcC
        row0 = coord.m * self.tile_m + consumer.index * 64
        # z[t, v] = Σ_d H[t, d] W[v, d]
        states = self.mainloop(consumer, states, coord, args)
        # z = softcap tanh((z + bias) / softcap); -inf beyond the vocabulary
        if cutlass.const_expr(args.mBias is not None):
            column.add_bias(tCrC, args.mBias, tCcC, row0)
        if cutlass.const_expr(self.config.softcap):
            tile.cap(tCrC, args.softcap)
        targets = column.Targets(args.mTarget, tokens.rRow, args.start)
        column.choose(tCrC, tokens.state, targets, tCcC, row0)
        column.mask(tCrC, tCcC, row0, coord.valid)
        # state += Σ_v 2^y, of 16 entries at a time
        column.add_tile(tCrC, tokens.state, consumer.cta.shared.sScale)
        return states, buffer

    @cute.jit
    def finish(self, consumer: Consumer, args: FewArguments):
        """mStates[CTA, token] = Σ of the warps' states; a thread for each token."""
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_states = consumer.cta.shared.warp_states
        # The states overwrite the ring: all consumers must have read it.
        self.sync_consumers()
        column.store_warp(consumer.registers.state, warp_states, self.config.tile_m, self.columns)
        self.sync_consumers()
        if tidx < args.mStates.shape[1]:
            total = exact.make_state(1, self.config.entropy)
            exact.clear(total)
            for warp in cutlass.range(self.threads // 32, unroll=1):
                offset = (warp * self.config.tile_m + tidx) * self.columns
                sState = cute.make_tensor(warp_states + offset, cute.make_layout(self.columns))
                exact.add_stored(total, 0, sState)
            exact.store(total, 0, tile.row_of(args.mStates, block, tidx))

    def first_and_step(self) -> tuple[cutlass.Int32, cutlass.Int32]:
        """First tile of the calling CTA, and the step to its next one."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return block, blocks


def build(config: FewConfig, compile: Callable = cute.compile) -> Callable:
    """Compile one configuration against fake tensors; needs no GPU."""
    t, v, d, ctas = fake.size(), fake.size(), fake.size(), fake.size()
    return compile(
        LogpFewSm90(config),
        fake.matrix(config.dtype, t, d, "k"),
        fake.matrix(config.dtype, v, d, "k"),
        fake.vector(config.dtype, v) if config.bias else None,
        fake.compact(cutlass.Int64, (t,), 8),
        fake.vector("fp32", t),
        fake.compact(cutlass.Int64, (ctas, t, columns_of_state(config.entropy)), 8),
        cutlass.Int32(0),
        cutlass.Int32(1),
        cutlass.Float32(1.0),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
