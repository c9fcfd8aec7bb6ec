"""Y[t, n] = round(Σ_k W[n, k, e] X[t, k] + bias[e, n]), e the expert of row t, few rows, on SM90.

Layouts      X [T, K] row-major; W [N, K, E], each expert row- or column-major (16-byte strides);
             Y [T, N] row-major, rows of whole 16 bytes; offsets int32 [E + 1]: expert e has the
             rows offsets[e] to offsets[e + 1], clamped to [0, T] and to ascend.
Operands     swapped, as in gemm's kernel for few rows: 64 rows of W along M of ``wgmma.m64nTk16``,
             T tokens along N.  The swap changes no bit (docs/numerics.md).
Order        ``chain``, by the mainloop of gemm's kernels: one fp32 accumulator per output, K
             ascending in whole groups of 16, bias added in fp32, one rounding.  So a row has the
             bytes of ``ck.linear`` with its expert's weight, and of kernel_grouped_sm90.
Work         persistent: CTA c computes units c, c + CTAs, ...; a unit is ``tile_n`` rows of one
             expert's W times ``tile_m`` of its tokens.  Each CTA counts the units of all experts
             once, in shared memory; an expert without rows has none, and its W is not read.  Units
             of the same rows of W are neighbours: an expert with more tokens than a tile hits in
             L2.  The ring of loads runs on from unit to unit, through the epilogue.
K tail       as in dsl/mainloop.py.
M, N tails   a tile may load tokens of other experts, of which no output is stored; the last tile
             of T and of N starts early enough to end inside, if it can.  N's columns up to the next
             multiple of 4 are stored: they are padding of Y's own rows.
Roles        ``tile_n`` / 64 warpgroups multiply, one more warp loads.
Limits       SM90a only; bf16 and fp16; T, N, K < 2^31; at most MAX_EXPERTS experts; fewer than
             2^31 units.
Measured     docs/status.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.pipeline import PipelineState

from ..compile import fake
from ..dsl import swapped, tma
from ..dsl.product import Arguments, Consumer, Cta, Shared, Tile, Tiles
from ..dsl.swapped import QUAD, SwappedFrame, TileBounds
from .config import MAX_EXPERTS, GroupedFewConfig
from .device import operands, work_table
from .device.experts import rows_of
from .device.work_table import WorkTable


@dataclass(frozen=True)
class FewArguments(Arguments):
    """Y [T, N], offsets [E + 1], bias [E, N] or None."""

    mY: cute.Tensor
    mOffsets: cute.Tensor
    mBias: cute.Tensor | None


@dataclass(frozen=True)
class FewShared(Shared):
    """Units of all experts, and the sums of a tile."""

    table: WorkTable
    sums: cute.Pointer


@dataclass(frozen=True)
class FewTile(Tile):
    """Some rows of one expert's W times some of its tokens.

    bounds: rows and columns of Y; end_m: the first row after those of the expert.  blocks: of K.
    """

    expert: cutlass.Int32
    bounds: TileBounds
    end_m: cutlass.Int32
    blocks: cutlass.Int32


@dataclass(frozen=True)
class FewTiles(Tiles):
    """Units of all experts."""

    frame: "GroupedFewSm90"
    table: WorkTable
    mY: cute.Tensor
    blocks: cutlass.Int32

    def has(self, index: cutlass.Int32, walk: None) -> cutlass.Boolean:
        """Whether there is a unit ``index``."""
        return index < self.table.count

    @cute.jit
    def at(self, index: cutlass.Int32, walk: None, rank: cute.Coord) -> FewTile:
        """Unit ``index``."""
        tile_m, tile_n = self.frame.config.tile_m, self.frame.config.tile_n
        expert, local = work_table.expert_of(self.table, index)
        row0, rows = rows_of(expert, self.table.mOffsets, self.mY.shape[0])
        # Neighbours have the same rows of W: they hit in L2.
        tiles_m = cute.ceil_div(rows, tile_m)
        first_m = row0 + local % tiles_m * tile_m
        bounds = self.frame.bounds(first_m, local // tiles_m * tile_n, self.mY)
        return FewTile(0, 0, expert, bounds, row0 + rows, self.blocks)


class GroupedFewSm90(SwappedFrame):
    """One configuration of the kernel; ``__call__`` is the host function that is compiled."""

    def __init__(self, config: GroupedFewConfig):
        self.config = config
        tile = config.tile_n, config.tile_m, config.tile_k
        used = 1024 + 4 * MAX_EXPERTS + config.tile_m * (config.tile_n + QUAD) * 4
        super().__init__(fake.DTYPES[config.dtype], config.w_major, tile, used)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mW: cute.Tensor,
        mY: cute.Tensor,
        mOffsets: cute.Tensor,
        mBias: cute.Tensor | None,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        self.launch(mW, mX, FewArguments(mY, mOffsets, mBias), stream, grid=(1, 1, ctas))

    def shared_fields(self) -> dict[str, cute.struct.MemRange | cute.struct.Align]:
        """Units of warps and of experts, and the sums of a tile."""
        sums = cute.struct.MemRange[cutlass.Float32, self.sums_size]
        return {
            "warps": cute.struct.MemRange[cutlass.Int32, work_table.COUNTERS // work_table.WARP],
            "ends": cute.struct.MemRange[cutlass.Int32, MAX_EXPERTS],
            "sums": cute.struct.Align[sums, 16],
        }

    @cute.jit
    def prepare(self, storage: cute.struct, args: FewArguments) -> FewShared:
        """Count the units of all experts."""
        ends = storage.ends.get_tensor(cute.make_layout(MAX_EXPERTS))
        table = WorkTable(args.mOffsets, ends)
        layout = cute.make_layout(work_table.COUNTERS // work_table.WARP)
        columns = cute.ceil_div(args.mY.shape[1], self.config.tile_n)
        tile_m, rows = self.config.tile_m, args.mY.shape[0]
        work_table.count_units(table, storage.warps.get_tensor(layout), rows, columns, tile_m)
        return FewShared(table, storage.sums.data_ptr())

    def tiles(self, cta: Cta, args: FewArguments) -> FewTiles:
        """Units of all experts."""
        blocks = cute.ceil_div(self.problem_shape(cta)[2], self.tile_k)
        return FewTiles(self, cta.shared.table, args.mY, blocks)

    @cute.jit
    def load(
        self,
        cta: Cta,
        w: tma.Source,
        x: tma.Source,
        state: PipelineState,
        tile: FewTile,
        args: FewArguments,
    ) -> PipelineState:
        """Producer warp: load the K blocks of W and X of one unit, ascending."""
        # W of one expert, and X from any of its rows on.
        w = tma.shifted(tma.sliced(w, tile.expert), (tile.bounds.start_n, 0))
        x = tma.shifted(x, (tile.bounds.start_m, 0))
        return self.load_range(cta, w, x, state, tile, blocks=tile.blocks)

    @cute.jit
    def epilogue(
        self, consumer: Consumer, buffer: cutlass.Int32, tile: FewTile, args: FewArguments
    ) -> cutlass.Int32:
        """Y = round(tCrC + bias) for the tokens and columns that the unit stores."""
        tidx, _, _ = cute.arch.thread_idx()
        sums = consumer.cta.shared.sums
        # All consumers have read the sums of the unit before.
        self.sync_consumers()
        self.store_sums(consumer.tCrC, sums, tidx)
        self.sync_consumers()
        bounds, quads = tile.bounds, self.config.tile_n // QUAD
        count = self.config.tile_m * quads
        for i in cutlass.range_constexpr(cute.ceil_div(count, self.threads)):
            # By hand: quads of the tile, token-major.
            local = i * self.threads + tidx
            token, quad = local // quads, local % quads * QUAD
            row, column = bounds.start_m + token, bounds.start_n + quad
            inside_m = (row >= bounds.first_m) & (row < tile.end_m)
            inside = inside_m & (column >= bounds.first_n) & (column < args.mY.shape[1])
            if (local < count) & inside:
                source = (sums + (token * self.pitch + quad)).align(16)
                rTotal = cute.make_rmem_tensor(QUAD, cutlass.Float32)
                rTotal.store(cute.make_tensor(source, cute.make_layout(QUAD)).load())
                swapped.store_quad(rTotal, args.mY, (row, column), args.mBias, tile.expert)
        return buffer


def build(config: GroupedFewConfig, compile: Callable = cute.compile):
    """Compile one configuration against fake tensors; needs no GPU."""
    arguments = operands.fakes(config.dtype, config.w_major, config.bias)
    return compile(GroupedFewSm90(config), *arguments, fake.stream(), options=fake.SM90_OPTIONS)
