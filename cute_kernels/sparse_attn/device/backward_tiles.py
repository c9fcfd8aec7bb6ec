"""The shared-memory operands of an attention backward, and the products that read them.

Scores are made with the keys as rows, so that P and dS are register operands of dV and dK as they
are, and only dS goes through shared memory, for dQ.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ...dsl import mma, smem, tma
from .chunks import piece_bytes

WARPGROUPS = 2
#: Keys of a block: 64 a warpgroup.
BLOCK = 64 * WARPGROUPS


@dataclass(frozen=True)
class BackwardTiles:
    """Tiles of ``tile_m`` query rows against blocks of 128 keys.

    K, V [128, D] in one stage; Q, dO [tile_m, D] in ``stages``; dS [128, tile_m] in ``ds_stages``.
    Views by ``major``: ``"k"`` is [rows, contiguous], ``"mn"`` the same bytes transposed.
    """

    dtype: type
    head_dim: int
    tile_m: int
    stages: int
    ds_stages: int

    @property
    def dq_columns(self) -> int:
        """Columns of dQ, and of K as its operand, that one warpgroup has."""
        return self.head_dim * self.tile_m // (64 * WARPGROUPS)

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.dtype.width // 8

    @property
    def of_k(self) -> tuple[int, int, int]:
        """K's tile, as ``packed`` has it."""
        return BLOCK, piece_bytes(self.dtype, self.dq_columns), self.row_bytes

    def score_mma(self, warpgroups: int = WARPGROUPS) -> cute.TiledMma:
        """K Qᵀ and V dOᵀ: 64 keys a warpgroup by the rows, both from shared memory."""
        return mma.tiled_mma(self.dtype, "k", "k", warpgroups, self.tile_m)

    def kv_mma(self, warpgroups: int = WARPGROUPS) -> cute.TiledMma:
        """Pᵀ dO and dSᵀ Q: 64 keys a warpgroup by D; A from registers, B's rows are reduced."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            cutlass.Float32,
            (warpgroups, 1, 1),
            (64, self.head_dim),
            warpgroup.OperandSource.RMEM,
        )

    def dq_mma(self) -> cute.TiledMma:
        """dS K: warpgroups side by side along D for 64 rows, stacked along the rows for 128."""
        side_by_side = self.head_dim // self.dq_columns
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.MN,
            OperandMajorMode.MN,
            cutlass.Float32,
            (WARPGROUPS // side_by_side, side_by_side, 1),
            (64, self.dq_columns),
        )

    def store_atom(self) -> cute.CopyAtom:
        """From accumulators to a row-major view."""
        return hopper_helpers.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, cutlass.Float32)

    def key_layout(self, major: str = "k") -> cute.ComposedLayout:
        """Of K or V: [128, D, 1]."""
        return self._layout(BLOCK, 1, major, self.dq_columns)

    def row_layout(self, major: str = "k") -> cute.ComposedLayout:
        """Of Q or dO: [tile_m, D, stages]."""
        return self._layout(self.tile_m, self.stages, major)

    def _layout(
        self, rows: int, stages: int, major: str, part: int | None = None
    ) -> cute.ComposedLayout:
        size = (rows, self.head_dim) if major == "k" else (self.head_dim, rows)
        return smem.operand_layout(self.dtype, *size, major, stages, part)

    def keys(self, buffer, major: str = "k") -> cute.Tensor:
        """K or V."""
        return _view(buffer, self.key_layout(major))

    def rows(self, buffer, major: str = "k") -> cute.Tensor:
        """Q or dO."""
        return _view(buffer, self.row_layout(major))

    def ds(self, buffer, major: str) -> cute.Tensor:
        """dS: [keys, rows], or ("mn") [rows, keys]."""
        size = (BLOCK, self.tile_m) if major == "k" else (self.tile_m, BLOCK)
        return _view(buffer, smem.operand_layout(self.dtype, *size, major, self.ds_stages))

    def boxes(self, source: tma.Source, s: cute.Tensor, head, batch, place=None):
        """(shared, global) views of one head's matrix, a box of the buffer's rows first."""
        rows, matrix = cute.size(s, mode=[0]), source.tensor[None, None, head, batch]
        if place is not None:
            matrix = cute.domain_offset((-place[0], 0), matrix)
        tiles = cute.local_tile(matrix, (rows, self.head_dim), (None, 0))
        return tma.partition(source.atom, 0, cute.make_layout(1), s, tiles)

    def statistics(self, buffer, stage, lane) -> cute.Tensor:
        """[(2, 2), tile_m / 16]: the fp32 values of the query rows that a lane holds of a score.

        In the order of ``statistics_place``, so that a lane reads 16 bytes at once.
        """
        layout = cute.make_layout(((2, 2), 4, self.tile_m // 16, self.stages))
        return buffer.get_tensor(layout)[None, lane % 4, None, stage]

    def storage(self, dq_stages: int, ticket_stages: int, others: int) -> type:
        """All of a CTA's shared memory.

        Barriers and row statistics first, so that the buffers behind them need no padding.
        """
        rows = self.tile_m * self.stages

        def barriers(count: int):
            return cute.struct.MemRange[cutlass.Int64, count]

        def buffer(element, count: int):
            return cute.struct.Align[cute.struct.MemRange[element, count], smem.ALIGN]

        @cute.struct
        class Storage:
            q_ring: barriers(2 * self.stages)
            do_ring: barriers(2 * self.stages)
            singles: barriers(others)
            dq: barriers(2 * dq_stages)
            tickets: barriers(2 * ticket_stages)
            slots: cute.struct.MemRange[cutlass.Int32, ticket_stages]
            sLse2: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, rows], 128]
            sDelta: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, rows], 128]
            sK: buffer(self.dtype, BLOCK * self.head_dim)
            sV: buffer(self.dtype, BLOCK * self.head_dim)
            sQ: buffer(self.dtype, rows * self.head_dim)
            sdO: buffer(self.dtype, rows * self.head_dim)
            sdS: buffer(self.dtype, BLOCK * self.tile_m * self.ds_stages)
            sdQ: buffer(cutlass.Float32, self.tile_m * self.head_dim * dq_stages)

        return Storage


def dq_layout(fours: int) -> cute.Layout:
    """A tile of the fp32 dQ in memory: the accumulators of the dQ product, thread by thread.

    (4 values, thread, group of 4, warpgroup): neighbours write 16 bytes each, side by side.  A
    group is two values of a row, then two of the row 8 below, as in ``softmax``; the warpgroups are
    stacked along 128 rows, and side by side along D for 64 rows.
    """
    return cute.make_layout((4, mma.WARPGROUP, fours, WARPGROUPS))


def statistics_place(row):
    """Where the statistic of a tile's query row is kept.

    16 rows are kept together, in the order in which the lanes of a score's accumulator hold them:
    rows 2 l, 2 l + 1, 2 l + 8 and 2 l + 9 of lane l, one lane (mod 4) after another.
    """
    return row // 16 * 16 + row % 8 // 2 * 4 + row % 16 // 8 * 2 + row % 2


def _view(buffer, layout: cute.ComposedLayout) -> cute.Tensor:
    return buffer.get_tensor(layout.outer, swizzle=layout.inner)
