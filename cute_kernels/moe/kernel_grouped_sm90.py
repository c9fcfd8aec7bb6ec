"""D[t, n] = round(Σ_k A[t, k] B[n, k, e] + bias[e, n]), e the expert of row t, on SM90.

Layouts      A [T, K] row-major; B [N, K, E], each expert row- or column-major (16-byte strides);
             D [T, N] row-major, rows of whole 16 bytes; offsets int32 [E + 1]: expert e has the
             rows offsets[e] to offsets[e + 1], clamped to [0, T] and to ascend.
Order        ``chain``, by the mainloop of gemm's kernel: one fp32 accumulator per output, K
             ascending in whole groups of 16, bias added in fp32, one rounding.  So a row has the
             bytes of ``ck.linear`` with its expert's weight.
Work         persistent: cluster c computes units c, c + clusters, ...; a unit is a row of tiles of
             one expert, one for each CTA of the cluster, which load a part of the tile of A each
             and multicast it.  Each role walks the offsets as its units ascend: no schedule in
             memory, no host.
K tail       TMA fills zeros inside the last group of 16, of B expert by expert, as they are a
             dimension of their own; groups wholly beyond K are skipped.
M tail       a tile may load rows of the next expert, which no output reads.  A warpgroup whose 64
             rows are all its expert's stores them by TMA at the expert's first row; else each
             thread stores its pairs of values that lie inside.
N tail       TMA clips the store, threads skip pairs beyond N; loads beyond N give zeros, and a
             tile wholly beyond N loads the last one.
Roles        warpgroup 0: one warp loads; warpgroups 1, 2: 64 rows of the tile each.
Limits       SM90a only; bf16 and fp16; T, N, K < 2^31.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.pipeline import PipelineState

from ..compile import fake
from ..dsl import copy, tma
from ..dsl.product import Arguments, Consumer, Cta, Frame, Tile, Tiles, Walk
from ..schedulers.tiles.raster import tile_at
from .config import GroupedConfig, GroupedTreeConfig
from .device import operands
from .device.experts import rows_of


@dataclass(frozen=True)
class GroupedArguments(Arguments):
    """D [T, N], offsets [E + 1], bias [E, N] or None; elements of a leaf, in a tree."""

    mD: cute.Tensor
    mOffsets: cute.Tensor
    mBias: cute.Tensor | None
    length: cutlass.Int32 | None = None


@dataclass(frozen=True)
class ExpertWalk(Walk):
    """An expert; E when there is no unit any more.

    row0, rows: its first row, and how many it has.  end: units of all experts up to it.
    """

    expert: cutlass.Int32
    row0: cutlass.Int32
    rows: cutlass.Int32
    end: cutlass.Int32


@dataclass(frozen=True)
class ExpertTile(Tile):
    """Tile (m, n) of the rows of an expert."""

    expert: cutlass.Int32
    row0: cutlass.Int32
    rows: cutlass.Int32
    blocks: cutlass.Int32


@dataclass(frozen=True)
class ExpertTiles(Tiles):
    """Units of all experts: rows of tiles of one expert, one for each CTA of a cluster.

    blocks: of K.
    """

    mD: cute.Tensor
    mOffsets: cute.Tensor
    config: GroupedConfig | GroupedTreeConfig
    blocks: cutlass.Int32
    experts: cutlass.Int32

    @cute.jit
    def start(self) -> ExpertWalk:
        """Expert 0."""
        row0, rows = rows_of(cutlass.Int32(0), self.mOffsets, self.mD.shape[0])
        return ExpertWalk(cutlass.Int32(0), row0, rows, self.units_of(rows))

    @cute.jit
    def seek(self, index: cutlass.Int32, walk: ExpertWalk) -> ExpertWalk:
        """Expert of unit ``index``, which is not before the one of ``walk``."""
        expert, row0, rows, end = walk.expert, walk.row0, walk.rows, walk.end
        walking = index >= end
        while walking:
            expert += 1
            last = cutlass.min(expert, self.experts - 1)
            row0, rows = rows_of(last, self.mOffsets, self.mD.shape[0])
            end += self.units_of(rows)
            walking = (expert < self.experts) & (index >= end)
        return ExpertWalk(expert, row0, rows, end)

    def has(self, index: cutlass.Int32, walk: ExpertWalk) -> cutlass.Boolean:
        """Whether there is a unit ``index``."""
        return walk.expert < self.experts

    def at(self, index: cutlass.Int32, walk: ExpertWalk, rank: cute.Coord) -> ExpertTile:
        """Tile of CTA ``rank`` of the cluster."""
        rows = cute.ceil_div(walk.rows, self.config.tile_m)
        local = index - (walk.end - self.units_of(walk.rows))
        m, n = tile_at(local, rows, self.columns, self.config.raster_group, cutlass.min)
        n = n * self.config.cluster_n + rank[1]
        return ExpertTile(m, n, walk.expert, walk.row0, walk.rows, self.blocks)

    def units_of(self, rows: cutlass.Int32) -> cutlass.Int32:
        """Number of units of an expert with so many rows."""
        return cute.ceil_div(rows, self.config.tile_m) * self.columns

    @property
    def columns(self) -> cutlass.Int32:
        """Number of units side by side."""
        return cute.ceil_div(self.mD.shape[1], self.config.tile_n * self.config.cluster_n)


class GroupedSm90(Frame):
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: GroupedConfig):
        self.config = config
        dtype, tile = fake.DTYPES[config.dtype], (config.tile_m, config.tile_n, config.tile_k)
        super().__init__(dtype, dtype, ("k", config.b_major), tile, (1, config.cluster_n))

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        mOffsets: cute.Tensor,
        mBias: cute.Tensor | None,
        clusters: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        self.launch(mA, mB, mD, GroupedArguments(mD, mOffsets, mBias), clusters, stream)

    def tiles(self, cta: Cta, args: GroupedArguments) -> ExpertTiles:
        """Tiles of all experts."""
        blocks = cute.ceil_div(self.problem_shape(cta)[2], self.tile_k)
        return ExpertTiles(args.mD, args.mOffsets, self.config, blocks, args.mOffsets.shape[0] - 1)

    @cute.jit
    def load(
        self,
        cta: Cta,
        a: tma.Source,
        b: tma.Source,
        state: PipelineState,
        tile: ExpertTile,
        args: GroupedArguments,
    ) -> PipelineState:
        """Producer warp: load the K blocks of A and B of one unit, ascending."""
        # B of one expert, and A from its first row on.
        b_expert, a_rows = tma.sliced(b, tile.expert), tma.shifted(a, (tile.row0, 0))
        if cutlass.const_expr(self.has_leaves):
            state = Frame.load(self, cta, a_rows, b_expert, state, tile, args)
        else:
            state = self.load_range(cta, a_rows, b_expert, state, tile, blocks=tile.blocks)
        return state

    @cute.jit
    def epilogue(
        self,
        consumer: Consumer,
        buffer: cutlass.Int32,
        tile: ExpertTile,
        args: GroupedArguments,
    ) -> cutlass.Int32:
        """D = round(tCrC + bias) for the rows of this warpgroup that its expert has."""
        if cutlass.const_expr(args.mBias is not None):
            self.add_bias(consumer, args.mBias, tile.n * self.tile_n, (tile.expert,))
        return self.store_rows(consumer, consumer.d, args.mD, tile, buffer)

    @cute.jit
    def store_rows(
        self,
        consumer: Consumer,
        d: tma.Source,
        mD: cute.Tensor,
        tile: ExpertTile,
        buffer: cutlass.Int32,
    ) -> cutlass.Int32:
        """D[t, n] = round(tCrC) for rows of the expert; d, mD: D for TMA, and D, [T, N]."""
        row = tile.m * self.tile_m + consumer.index * 64
        if row + 64 <= tile.rows:
            buffer = self.store(consumer, tma.shifted(d, (tile.row0, 0)), tile, buffer)
        else:
            self.store_pairs(consumer, mD, tile, (row, tile.n * self.tile_n))
        return buffer

    @cute.jit
    def store_pairs(
        self, consumer: Consumer, mD: cute.Tensor, tile: ExpertTile, origin: cute.Coord
    ):
        """D[t, n] = round(tCrC) for rows of the expert alone; ``origin``: of these 64 rows."""
        row0, column0 = origin
        tCrC, tCcC = consumer.tCrC, self.coordinates(consumer)
        rPair = cute.make_rmem_tensor(cute.make_layout(2), self.d_dtype)
        # Values 4 i + {0, 1} and 4 i + {2, 3} of a thread are two rows of the same two columns.
        for four in cutlass.range_constexpr(cute.size(tCrC) // 4):
            for side in cutlass.range_constexpr(2):
                first = 4 * four + 2 * side
                row, column = row0 + tCcC[first][0], column0 + tCcC[first][1]
                rPair[0] = tCrC[first].to(self.d_dtype)
                rPair[1] = tCrC[first + 1].to(self.d_dtype)
                if row < tile.rows:
                    # A pair that begins inside ends inside its row of whole 16 bytes.
                    if column < mD.shape[1]:
                        copy.vector(mD, (tile.row0 + row, column), 2).store(rPair.load())


def build(config: GroupedConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    arguments = operands.fakes(config.dtype, config.b_major, config.bias)
    return compile(GroupedSm90(config), *arguments, fake.stream(), options=fake.SM90_OPTIONS)
