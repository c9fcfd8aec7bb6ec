"""Shared-memory operands of an attention forward, and the products that read them."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from ...dsl import mma, smem, tma
from ...dsl.smem import piece_bytes
from .block_union import BLOCK
from .varlen import TileShape

#: Rows of a consumer warpgroup: half a block, so that it has one list.
ROWS = BLOCK // 2


@dataclass(frozen=True)
class ForwardTiles:
    """Q [64 consumers, D] against ``stages`` of K [128, D / parts] and of V [128 / parts, Dv].

    parts: pieces in which a block of K, and of V, is loaded: K by columns, V by keys, each in
    WGMMA's order.  packed: whether the batch is varlen, read in place (``varlen``).
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    value_dim: int
    consumers: int
    stages: int
    parts: int
    packed: bool

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.consumers * ROWS

    @property
    def box_rows(self) -> int:
        """Query rows of one TMA box.

        Rows of a varlen batch are contiguous inside a block, and three consumers have rows of two.
        """
        return ROWS if self.packed and self.consumers == 3 else self.rows

    @property
    def k_box(self) -> tuple[int, int]:
        """Keys and columns of one stage of K."""
        return BLOCK, self.head_dim // self.parts

    @property
    def v_box(self) -> tuple[int, int]:
        """Keys and columns of one stage of V."""
        return BLOCK // self.parts, self.value_dim

    @property
    def stage_bytes(self) -> tuple[int, int, int]:
        """Bytes of a stage of Q, of K and of V."""
        boxes = (self.rows, self.head_dim), self.k_box, self.v_box
        return tuple(rows * columns * self.dtype.width // 8 for rows, columns in boxes)

    @property
    def barriers(self) -> int:
        """Number of mbarriers of the rings, and a varlen batch's tail barrier."""
        return 2 * (1 + 2 * self.stages) + self.packed

    @property
    def o_shape(self) -> TileShape:
        """A consumer's tile of O in shared memory."""
        row_bytes = self.value_dim * self.dtype.width // 8
        return TileShape(ROWS, piece_bytes(self.dtype, self.value_dim), row_bytes)

    @property
    def o_per_stage(self) -> int:
        """Number of consumers' tiles of O that fit into a stage of V."""
        return self.v_box[0] // ROWS

    @property
    def o_stages(self) -> int:
        """Stages of V that O of all consumers takes."""
        return -(-self.consumers // self.o_per_stage)

    @property
    def v_shape(self) -> TileShape:
        """A stage of V in shared memory."""
        return TileShape(self.v_box[0], self.o_shape.piece, self.o_shape.row_bytes)

    def qk_mma(self) -> cute.TiledMma:
        """Return the product Q K^T: operands in shared memory, consumers stacked along the rows."""
        return mma.tiled_mma(self.dtype, "k", "k", self.consumers, BLOCK)

    def pv_mma(self) -> cute.TiledMma:
        """Return one consumer's product P V: P in registers, reduced over the keys."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            cutlass.Float32,
            (1, 1, 1),
            (ROWS, self.value_dim),
            warpgroup.OperandSource.RMEM,
        )

    def layouts(self) -> tuple[cute.ComposedLayout, ...]:
        """Return the layouts of Q and of the stages of K and V."""
        keys, columns = self.v_box
        return (
            smem.operand_layout(self.dtype, self.rows, self.head_dim, "k", 1),
            smem.operand_layout(self.dtype, *self.k_box, "k", self.stages),
            smem.operand_layout(self.dtype, columns, keys, "mn", self.stages),
        )

    def o_layout(self) -> cute.ComposedLayout:
        """Return the layout of a consumer's O."""
        return smem.operand_layout(self.dtype, ROWS, self.value_dim, "k", 1)

    def box_layout(self) -> cute.ComposedLayout:
        """Return the layout of one TMA box of Q."""
        return smem.operand_layout(self.dtype, self.box_rows, self.head_dim, "k", 1)

    def box(self, source: tma.Source, sQ: cute.Tensor, row: cutlass.Int32, n: int):
        """Return (shared, global) views of box ``n`` of a tile of Q, its rows from ``row`` on."""
        shape = (self.box_rows, self.head_dim)
        moved = cute.domain_offset((row, 0), source.tensor)
        sBox = cute.local_tile(sQ, (*shape, 1), (n, 0, 0))
        gBox = cute.local_tile(moved, shape, (None, 0))
        tQsQ, tQgQ = tma.partition(source.atom, 0, cute.make_layout(1), sBox, gBox)
        return tQsQ[None, 0], tQgQ[None, 0]

    def storage(self) -> type:
        """Return the struct of all of a CTA's shared memory."""
        sQ_layout, sK_layout, sV_layout = self.layouts()

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, self.barriers]
            steps: cute.struct.MemRange[cutlass.Int32, 4 * (1 + self.stages)]
            o_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.consumers]
            tile_info: cute.struct.MemRange[cutlass.Int32, 5]
            o_info: cute.struct.MemRange[cutlass.Int32, 4 * self.consumers]
            sQ: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sQ_layout)], smem.ALIGN
            ]
            sK: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sK_layout)], smem.ALIGN
            ]
            sV: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sV_layout)], smem.ALIGN
            ]

        return Storage
