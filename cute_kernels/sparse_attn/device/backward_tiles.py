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
from ...schedulers.tiles.ticket_device import STAGES
from ..config import VALUE_DIMS, BackwardConfig
from .chunks import piece_bytes

WARPGROUPS = 2
#: Keys of a block of the mask.
BLOCK = 128


@dataclass(frozen=True)
class BackwardTiles:
    """Tiles of ``tile_m`` query rows against tiles of ``keys`` keys, 64 a warpgroup of scores.

    K [keys, D] and V [keys, Dv] in one stage; Q [tile_m, D] in ``stages``, dO [tile_m, Dv] in
    ``do_stages``; dS [keys, tile_m] in ``ds_stages``.  Views by ``major``: ``"k"`` is [rows,
    contiguous], ``"mn"`` the same bytes transposed.
    """

    dtype: type
    head_dim: int
    value_dim: int
    keys: int
    tile_m: int
    stages: int
    do_stages: int
    ds_stages: int

    @classmethod
    def of(cls, config: BackwardConfig, dtype: type) -> "BackwardTiles":
        stages = config.stages, config.do_stages, config.ds_stages
        widths = config.head_dim, VALUE_DIMS[config.head_dim]
        return cls(dtype, *widths, config.keys, config.tile_m, *stages)

    @property
    def dq_columns(self) -> int:
        """Columns of dQ, and of K as its operand, that one warpgroup has."""
        return self.head_dim * self.tile_m // (64 * WARPGROUPS)

    @property
    def dq_size(self) -> int:
        """Of a tile of the fp32 dQ."""
        return self.tile_m * self.head_dim

    @property
    def of_k(self) -> tuple[int, int, int]:
        """K's tile, as ``packed`` has it."""
        return self._tile(self.keys, self.head_dim, self.dq_columns)

    @property
    def of_v(self) -> tuple[int, int, int]:
        """V's likewise: its swizzle is K's where their rows are equal."""
        return self._tile(self.keys, self.value_dim, self._part_of_v)

    @property
    def of_q(self) -> tuple[int, int, int]:
        """A stage of Q likewise."""
        return self._tile(self.tile_m, self.head_dim, self.head_dim)

    @property
    def of_do(self) -> tuple[int, int, int]:
        """And of dO."""
        return self._tile(self.tile_m, self.value_dim, self.value_dim)

    def _tile(self, rows: int, columns: int, part: int) -> tuple[int, int, int]:
        """(rows, bytes that a row has in a piece, bytes of a row); part: columns of an operand."""
        return rows, piece_bytes(self.dtype, part), columns * self.dtype.width // 8

    @property
    def _part_of_v(self) -> int:
        return self.dq_columns if self.keys == BLOCK else self.value_dim

    def score_mma(self, warpgroups: int | None = None) -> cute.TiledMma:
        """K Qᵀ and V dOᵀ: 64 keys a warpgroup by the rows, both from shared memory."""
        return mma.tiled_mma(self.dtype, "k", "k", warpgroups or self.keys // 64, self.tile_m)

    def kv_mma(self, columns: int, warpgroups: int | None = None) -> cute.TiledMma:
        """Pᵀ dO and dSᵀ Q: 64 keys a warpgroup by D; A from registers, B's rows are reduced."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            cutlass.Float32,
            (warpgroups or self.keys // 64, 1, 1),
            (64, columns),
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

    def k_layout(self, major: str = "k") -> cute.ComposedLayout:
        """Of K: [keys, D, 1]."""
        return self._layout(self.keys, self.head_dim, 1, major, self.dq_columns)

    def v_layout(self, major: str = "k") -> cute.ComposedLayout:
        """Of V: [keys, Dv, 1]."""
        return self._layout(self.keys, self.value_dim, 1, major, self._part_of_v)

    def q_layout(self, major: str = "k") -> cute.ComposedLayout:
        """Of Q: [tile_m, D, stages]."""
        return self._layout(self.tile_m, self.head_dim, self.stages, major)

    def do_layout(self, major: str = "k") -> cute.ComposedLayout:
        """Of dO: [tile_m, Dv, stages]."""
        return self._layout(self.tile_m, self.value_dim, self.do_stages, major)

    def _layout(
        self, rows: int, columns: int, stages: int, major: str, part: int | None = None
    ) -> cute.ComposedLayout:
        size = (rows, columns) if major == "k" else (columns, rows)
        return smem.operand_layout(self.dtype, *size, major, stages, part)

    def k(self, buffer, major: str = "k") -> cute.Tensor:
        return _view(buffer, self.k_layout(major))

    def v(self, buffer, major: str = "k") -> cute.Tensor:
        return _view(buffer, self.v_layout(major))

    def q(self, buffer, major: str = "k") -> cute.Tensor:
        return _view(buffer, self.q_layout(major))

    def do(self, buffer, major: str = "k") -> cute.Tensor:
        return _view(buffer, self.do_layout(major))

    def ds(self, buffer, major: str) -> cute.Tensor:
        """dS: [keys, rows], or ("mn") [rows, keys]."""
        size = (self.keys, self.tile_m) if major == "k" else (self.tile_m, self.keys)
        return _view(buffer, smem.operand_layout(self.dtype, *size, major, self.ds_stages))

    def boxes(self, source: tma.Source, s: cute.Tensor, head, batch, place=None):
        """(shared, global) views of one head's matrix, a box of the buffer's rows first."""
        size, matrix = cute.shape(s)[:2], source.tensor[None, None, head, batch]
        if place is not None:
            matrix = cute.domain_offset((-place[0], 0), matrix)
        tiles = cute.local_tile(matrix, tuple(cute.size(n) for n in size), (None, 0))
        return tma.partition(source.atom, 0, cute.make_layout(1), s, tiles)

    def statistics(self, buffer, stages: int, stage, lane) -> cute.Tensor:
        """[(2, 2), tile_m / 16]: the fp32 values of the query rows that a lane holds of a score.

        In the order of ``statistics_place``, so that a lane reads 16 bytes at once.
        """
        layout = cute.make_layout(((2, 2), 4, self.tile_m // 16, stages))
        return buffer.get_tensor(layout)[None, lane % 4, None, stage]

    def storage(self, of_dq: int, dq_barriers: int, others: int) -> type:
        """All of a CTA's shared memory, with room for ``of_dq`` fp32 of dQ.

        Barriers and row statistics first, so that the buffers behind them need no padding.
        """
        rows, of_do = self.tile_m * self.stages, self.tile_m * self.do_stages

        def barriers(count: int):
            return cute.struct.MemRange[cutlass.Int64, count]

        def buffer(element, count: int):
            return cute.struct.Align[cute.struct.MemRange[element, count], smem.ALIGN]

        @cute.struct
        class Storage:
            q_ring: barriers(2 * self.stages)
            do_ring: barriers(2 * self.do_stages)
            singles: barriers(others)
            dq: barriers(dq_barriers)
            tickets: barriers(2 * STAGES)
            slots: cute.struct.MemRange[cutlass.Int32, STAGES]
            sLse2: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, rows], 128]
            sDelta: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, of_do], 128]
            sK: buffer(self.dtype, self.keys * self.head_dim)
            sV: buffer(self.dtype, self.keys * self.value_dim)
            sQ: buffer(self.dtype, rows * self.head_dim)
            sdO: buffer(self.dtype, of_do * self.value_dim)
            sdS: buffer(self.dtype, self.keys * self.tile_m * self.ds_stages)
            sdQ: buffer(cutlass.Float32, of_dq)

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
