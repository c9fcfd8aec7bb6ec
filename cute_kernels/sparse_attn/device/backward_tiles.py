"""Shared-memory operands of an attention backward, and the products that read them.

Scores have the keys as rows, so that P and dS are register operands of dV and dK as they are, and
only dS goes through shared memory, for dQ.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ...dsl import mma, smem, tma
from ...dsl.smem import piece_bytes
from ...schedulers.tiles.ticket_device import STAGES
from ..config import VALUE_DIMS, BackwardConfig
from .backward_state import SharedStorage
from .block_union import BLOCK
from .varlen import RowRange, TileShape

WARPGROUPS = 2


@dataclass(frozen=True)
class BackwardTiles:
    """Tiles of ``tile_m`` query rows against tiles of ``keys`` keys, 64 a warpgroup of scores.

    K [keys, D] and V [keys, Dv] in one stage; Q [tile_m, D] in ``stages``, dO [tile_m, Dv] in
    ``do_stages``; dS [keys, tile_m] in ``ds_stages``.  Views by ``major``: ``"k"`` is [rows,
    contiguous], ``"mn"`` the same bytes transposed.
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    value_dim: int
    keys: int
    tile_m: int
    stages: int
    do_stages: int
    ds_stages: int

    @classmethod
    def of(cls, config: BackwardConfig, dtype: type[cutlass.Numeric]) -> "BackwardTiles":
        """Return the tiles of a configuration."""
        stages = config.stages, config.do_stages, config.ds_stages
        widths = config.head_dim, VALUE_DIMS[config.head_dim]
        return cls(dtype, *widths, config.keys, config.tile_m, *stages)

    @property
    def dq_columns(self) -> int:
        """Columns of dQ, and of K as its operand, of one warpgroup."""
        return self.head_dim * self.tile_m // (64 * WARPGROUPS)

    @property
    def dq_size(self) -> int:
        """fp32 values of a tile of dQ."""
        return self.tile_m * self.head_dim

    @property
    def k_shape(self) -> TileShape:
        """A tile of K in shared memory."""
        return self._shape(self.keys, self.head_dim, self.dq_columns)

    @property
    def v_shape(self) -> TileShape:
        """A tile of V in shared memory: its swizzle is K's where their rows are equal."""
        return self._shape(self.keys, self.value_dim, self._part_of_v)

    @property
    def q_shape(self) -> TileShape:
        """A stage of Q in shared memory."""
        return self._shape(self.tile_m, self.head_dim, self.head_dim)

    @property
    def do_shape(self) -> TileShape:
        """A stage of dO in shared memory."""
        return self._shape(self.tile_m, self.value_dim, self.value_dim)

    def _shape(self, rows: int, columns: int, part: int) -> TileShape:
        """Return the shape of a tile; part: columns of an operand."""
        return TileShape(rows, piece_bytes(self.dtype, part), columns * self.dtype.width // 8)

    @property
    def _part_of_v(self) -> int:
        return self.dq_columns if self.keys == BLOCK else self.value_dim

    def score_mma(self, warpgroups: int | None = None) -> cute.TiledMma:
        """Return the product K Qᵀ or V dOᵀ: 64 keys a warpgroup by the rows, both in smem."""
        return mma.tiled_mma(self.dtype, "k", "k", warpgroups or self.keys // 64, self.tile_m)

    def kv_mma(self, columns: int, warpgroups: int | None = None) -> cute.TiledMma:
        """Return the product Pᵀ dO or dSᵀ Q: 64 keys a warpgroup by D; A in registers."""
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
        """Return the product dS K: warpgroups along D for 64 rows, along the rows for 128."""
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
        """Return the copy from accumulators to a row-major view."""
        return hopper_helpers.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, cutlass.Float32)

    def k_layout(self, major: str = "k") -> cute.ComposedLayout:
        """Return the layout of K: [keys, D, 1]."""
        return self._layout(self.keys, self.head_dim, 1, major, self.dq_columns)

    def v_layout(self, major: str = "k") -> cute.ComposedLayout:
        """Return the layout of V: [keys, Dv, 1]."""
        return self._layout(self.keys, self.value_dim, 1, major, self._part_of_v)

    def q_layout(self, major: str = "k") -> cute.ComposedLayout:
        """Return the layout of Q: [tile_m, D, stages]."""
        return self._layout(self.tile_m, self.head_dim, self.stages, major)

    def do_layout(self, major: str = "k") -> cute.ComposedLayout:
        """Return the layout of dO: [tile_m, Dv, stages]."""
        return self._layout(self.tile_m, self.value_dim, self.do_stages, major)

    def _layout(
        self, rows: int, columns: int, stages: int, major: str, part: int | None = None
    ) -> cute.ComposedLayout:
        size = (rows, columns) if major == "k" else (columns, rows)
        return smem.operand_layout(self.dtype, *size, major, stages, part)

    def k(self, buffer: cute.struct.MemRange, major: str = "k") -> cute.Tensor:
        """Return sK, a view of a buffer."""
        return _view(buffer, self.k_layout(major))

    def v(self, buffer: cute.struct.MemRange, major: str = "k") -> cute.Tensor:
        """Return sV, a view of a buffer."""
        return _view(buffer, self.v_layout(major))

    def q(self, buffer: cute.struct.MemRange, major: str = "k") -> cute.Tensor:
        """Return sQ, a view of a buffer."""
        return _view(buffer, self.q_layout(major))

    def do(self, buffer: cute.struct.MemRange, major: str = "k") -> cute.Tensor:
        """Return sdO, a view of a buffer."""
        return _view(buffer, self.do_layout(major))

    def ds(self, buffer: cute.struct.MemRange, major: str) -> cute.Tensor:
        """Return sdS, [keys, rows] or ("mn") [rows, keys], a view of a buffer."""
        size = (self.keys, self.tile_m) if major == "k" else (self.tile_m, self.keys)
        return _view(buffer, smem.operand_layout(self.dtype, *size, major, self.ds_stages))

    def operands(
        self,
        shared: SharedStorage,
        first: cutlass.Int32,
        score: cute.TiledMma,
        sum_kv: cute.TiledMma,
        sum_q: cute.TiledMma,
    ):
        """Return the operands in shared memory: of S, dP and dQ both, of dK and dV the second.

        first: the warpgroup's first thread among the consumers.
        """
        keys, dims = (self.k(shared.sK, major) for major in ("k", "mn"))
        of_s = mma.operands(score, first, keys, self.q(shared.sQ))
        of_p = mma.operands(score, first, self.v(shared.sV), self.do(shared.sdO))
        of_q = mma.operands(sum_q, first, self.ds(shared.sdS, "mn"), dims)
        slice_kv = sum_kv.get_slice(first)
        rows = self.q(shared.sQ, "mn"), self.do(shared.sdO, "mn")
        of_kv = (sum_kv.make_fragment_B(slice_kv.partition_B(each)) for each in rows)
        return *of_s, *of_p, *of_q, *of_kv

    def accumulators(
        self,
        first: cutlass.Int32,
        score: cute.TiledMma,
        sum_kv: cute.TiledMma,
        sum_q: cute.TiledMma,
    ):
        """Return (S, dP, round(P), round(dS), both as register operands, dK, dV, dQ) of a thread.

        first: the warpgroup's first thread among the consumers.
        """
        slice_kv = sum_kv.get_slice(first)
        scores_shape = score.get_slice(first).partition_shape_C((BLOCK, self.tile_m))
        rS, rdP = (cute.make_rmem_tensor(scores_shape, cutlass.Float32) for _ in range(2))
        # Rounded in the order of the accumulators, which is that of register operands too.
        rP, rdS = (cute.make_rmem_tensor(scores_shape, self.dtype) for _ in range(2))
        layout = cute.make_layout(slice_kv.partition_shape_A((BLOCK, self.tile_m)))
        tVrP, tKrS = (cute.make_tensor(r.iterator, layout) for r in (rP, rdS))
        kv_shape = slice_kv.partition_shape_C((BLOCK, self.head_dim))
        rdK, rdV = (cute.make_rmem_tensor(kv_shape, cutlass.Float32) for _ in range(2))
        q_shape = sum_q.get_slice(first).partition_shape_C((self.tile_m, self.head_dim))
        rdQ = cute.make_rmem_tensor(q_shape, cutlass.Float32)
        return rS, rdP, rP, rdS, tVrP, tKrS, rdK, rdV, rdQ

    def boxes(
        self,
        source: tma.Source,
        sX: cute.Tensor,
        head: cutlass.Int32,
        batch: cutlass.Int32,
        rows: RowRange | None = None,
    ):
        """Return (shared, global) boxes of one head's matrix, each of the rows of the buffer sX."""
        size, matrix = cute.shape(sX)[:2], source.tensor[None, None, head, batch]
        if rows is not None:
            matrix = cute.domain_offset((-rows.shift, 0), matrix)
        gX = cute.local_tile(matrix, tuple(cute.size(n) for n in size), (None, 0))
        return tma.partition(source.atom, 0, cute.make_layout(1), sX, gX)

    def statistics(
        self,
        buffer: cute.struct.MemRange,
        stages: int,
        stage: cutlass.Int32,
        lane: cutlass.Int32,
        fetched: bool = False,
    ) -> cute.Tensor:
        """Return the fp32 values, [(2, 2), tile_m / 16], of the query rows of a lane's scores.

        In the order of ``statistics_place``, so that a lane reads 16 bytes at once.  fetched:
        in registers.
        """
        layout = cute.make_layout(((2, 2), 4, self.tile_m // 16, stages))
        statistics = buffer.get_tensor(layout)[None, lane % 4, None, stage]
        if not fetched:
            return statistics
        registers = cute.make_rmem_tensor(statistics.shape, cutlass.Float32)
        cute.autovec_copy(statistics, registers)
        return registers

    def storage(self, dq_size: int, dq_barriers: int, others: int) -> type:
        """Return the struct of a CTA's shared memory, with ``dq_size`` fp32 of dQ.

        Barriers and row statistics first, so that the buffers after them need no padding.
        """
        rows, do_rows = self.tile_m * self.stages, self.tile_m * self.do_stages

        def barriers(count: int):
            return cute.struct.MemRange[cutlass.Int64, count]

        def buffer(element: type[cutlass.Numeric], count: int):
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
            sDelta: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, do_rows], 128]
            sK: buffer(self.dtype, self.keys * self.head_dim)
            sV: buffer(self.dtype, self.keys * self.value_dim)
            sQ: buffer(self.dtype, rows * self.head_dim)
            sdO: buffer(self.dtype, do_rows * self.value_dim)
            sdS: buffer(self.dtype, self.keys * self.tile_m * self.ds_stages)
            sdQ: buffer(cutlass.Float32, dq_size)

        return Storage


def dq_layout(fours: int) -> cute.Layout:
    """Return the layout of a tile of the fp32 dQ: accumulators of the product, thread by thread.

    (4 values, thread, group of 4, warpgroup): neighbours write 16 bytes each, side by side.  A
    group is two values of a row, then two of the row 8 below, as in ``softmax``; the warpgroups are
    stacked along 128 rows, and side by side along D for 64 rows.
    """
    return cute.make_layout((4, mma.WARPGROUP, fours, WARPGROUPS))


def statistics_place(row: cutlass.Int32):
    """Return the index of the statistic of a tile's query row.

    16 rows are kept together, in the order in which the lanes of a score's accumulator hold them:
    rows 2 l, 2 l + 1, 2 l + 8 and 2 l + 9 of lane l, one lane (mod 4) after another.
    """
    return row // 16 * 16 + row % 8 // 2 * 4 + row % 16 // 8 * 2 + row % 2


def _view(buffer: cute.struct.MemRange, layout: cute.ComposedLayout) -> cute.Tensor:
    return buffer.get_tensor(layout.outer, swizzle=layout.inner)
