"""The shared-memory operands of an attention forward, and the products that read them."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from ...dsl import mma, smem, tma
from .chunks import piece_bytes

#: Query rows and keys of a block of the mask.
BLOCK = 128
#: Rows of a consumer warpgroup: half a block, so that it has one list.
ROWS = BLOCK // 2


@dataclass(frozen=True)
class ForwardTiles:
    """Q [64 consumers, D] against ``stages`` of K [128, D / parts] and of V [128 / parts, Dv].

    parts: what a block of K, and of V, comes in: K by columns, V by keys, each in WGMMA's order.
    packed: whether rows and keys are those of sequences where they lie (``packed``).
    """

    dtype: type
    head_dim: int
    value_dim: int
    consumers: int
    stages: int
    parts: int
    packed: bool

    @property
    def rows(self) -> int:
        """Of Q."""
        return self.consumers * ROWS

    @property
    def box_rows(self) -> int:
        """Rows that lie side by side: a pack's of a block, and three consumers have rows of two."""
        return ROWS if self.packed and self.consumers == 3 else self.rows

    @property
    def k_box(self) -> tuple[int, int]:
        """Of one stage: keys, columns."""
        return BLOCK, self.head_dim // self.parts

    @property
    def v_box(self) -> tuple[int, int]:
        """Likewise."""
        return BLOCK // self.parts, self.value_dim

    @property
    def stage_bytes(self) -> tuple[int, int, int]:
        """Of Q, of K and of V."""
        boxes = (self.rows, self.head_dim), self.k_box, self.v_box
        return tuple(rows * columns * self.dtype.width // 8 for rows, columns in boxes)

    @property
    def barriers(self) -> int:
        """Of Q and of the stages, and a pack's own."""
        return 2 * (1 + 2 * self.stages) + self.packed

    @property
    def of_o(self) -> tuple[int, int, int]:
        """A consumer's tile of O, as ``packed`` has it."""
        row_bytes = self.value_dim * self.dtype.width // 8
        return ROWS, piece_bytes(self.dtype, self.value_dim), row_bytes

    @property
    def o_per_stage(self) -> int:
        """Such tiles that a stage of V has room for."""
        return self.v_box[0] // ROWS

    @property
    def o_stages(self) -> int:
        """Stages of V that O of all consumers takes."""
        return -(-self.consumers // self.o_per_stage)

    @property
    def of_v(self) -> tuple[int, int, int]:
        """A stage of V likewise."""
        return self.v_box[0], *self.of_o[1:]

    def qk_mma(self) -> cute.TiledMma:
        """Q K^T: both operands from shared memory, the consumers stacked along the rows."""
        return mma.tiled_mma(self.dtype, "k", "k", self.consumers, BLOCK)

    def pv_mma(self) -> cute.TiledMma:
        """P V of one consumer: P from registers, V with its keys along the reduction."""
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
        """Of Q and of the stages of K and V."""
        keys, columns = self.v_box
        return (
            smem.operand_layout(self.dtype, self.rows, self.head_dim, "k", 1),
            smem.operand_layout(self.dtype, *self.k_box, "k", self.stages),
            smem.operand_layout(self.dtype, columns, keys, "mn", self.stages),
        )

    def o_layout(self) -> cute.ComposedLayout:
        """Of a consumer's O."""
        return smem.operand_layout(self.dtype, ROWS, self.value_dim, "k", 1)

    def box_layout(self) -> cute.ComposedLayout:
        """Of the rows of Q that lie side by side."""
        return smem.operand_layout(self.dtype, self.box_rows, self.head_dim, "k", 1)

    def box(self, source, buffer, row, n: int):
        """(shared, global) views of the ``n``-th rows of a tile of Q, which lie from ``row`` on."""
        shape = (self.box_rows, self.head_dim)
        moved = cute.domain_offset((row, 0), source.tensor)
        s = cute.local_tile(buffer, (*shape, 1), (n, 0, 0))
        g = cute.local_tile(moved, shape, (None, 0))
        s, g = tma.partition(source.atom, 0, cute.make_layout(1), s, g)
        return s[None, 0], g[None, 0]

    def storage(self) -> type:
        """All of a CTA's shared memory."""
        sQ_layout, sK_layout, sV_layout = self.layouts()

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, self.barriers]
            words: cute.struct.MemRange[cutlass.Int32, 4 * (1 + self.stages)]
            of_o: cute.struct.MemRange[cutlass.Int64, 2 * self.consumers]
            told: cute.struct.MemRange[cutlass.Int32, 5]
            told_o: cute.struct.MemRange[cutlass.Int32, 4 * self.consumers]
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
