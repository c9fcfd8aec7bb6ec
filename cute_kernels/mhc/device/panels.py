"""Panels of x and of psi that TMA loads: 64 elements of a row, in either layout of streams.

cn    64 neighbouring elements: 16 channels (n = 4) of all streams
nc    two steps of 32 channels, of neighbouring streams; the steps of a panel lie one after
      another in shared memory, each with rows of 64 bytes of x
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ...dsl import smem, tma

#: Tokens of a unit, which one warp has, and of a warpgroup's tile.
UNIT, TILE = 16, 64
#: Elements of a panel: a row of 128 bytes of x, two steps of 32.
PANEL, STEP = 64, 32


@dataclass(frozen=True)
class Panels:
    """Boxes and layouts of panels.

    chunk:     channels of a chunk.
    x_stages:  stages of x, of all consumers.  psi_stages: of phi.
    """

    n: int
    layout: str
    chunk: int
    x_stages: int
    psi_stages: int

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Element type of x."""
        return cutlass.BFloat16

    @property
    def steps(self) -> int:
        """Steps of a panel that are boxes of their own in a unit."""
        return 1 if self.layout == "cn" else PANEL // STEP

    @property
    def parts(self) -> int:
        """Boxes of units in a tile."""
        return TILE // UNIT * self.steps

    def box(self, rows: int, steps: int = PANEL // STEP) -> tuple[int, ...]:
        """Shape of a TMA box of ``rows`` rows of a panel.

        In "nc" the ``steps`` of a panel are of neighbouring streams, one after another.
        """
        return (PANEL, rows) if self.layout == "cn" else (STEP, rows, steps)

    def boxes(self, shape: tuple[int, ...], stages: int) -> cute.ComposedLayout:
        """Layout of staged boxes of x, whose rows are swizzled."""
        if self.layout == "cn":
            return smem.operand_layout(self.dtype, *shape, "mn", stages)
        atom = smem.operand_layout(self.dtype, *shape[:2], "mn", 1)
        order = (0, 1, 2, 3)
        return cute.make_composed_layout(
            atom.inner, 0, cute.make_ordered_layout((*shape, stages), order=order)
        )

    def x_layout(self) -> cute.ComposedLayout:
        """Layout of staged panels of x."""
        return self.boxes(self.box(TILE), self.x_stages)

    def unit_layout(self) -> cute.ComposedLayout:
        """Layout of the same memory in boxes of one unit."""
        count = self.x_stages * self.parts
        return self.boxes(self.box(UNIT, 1), count)

    def fp32_layout(self, rows: int) -> cute.Layout:
        """Layout of staged panels of phi, or of norm_weight."""
        shape = (*self.box(rows), self.psi_stages)
        return cute.make_ordered_layout(shape, order=tuple(range(len(shape))))

    @cute.jit
    def source(
        self,
        mX: cute.Tensor,
        layout: cute.Layout | cute.ComposedLayout,
        box: cutlass.Constexpr[tuple[int, ...]],
    ) -> tma.Source:
        """Source of loads of boxes of a [rows, K] tensor."""
        m, k = mX.shape
        n = self.n
        tensor = tma.view(mX, [1, 0])
        if cutlass.const_expr(self.layout == "nc"):
            strides = (1, mX.stride[0], k // n)
            tensor = cute.make_tensor(mX.iterator, cute.make_layout((k // n, m, n), stride=strides))
        one_stage = cute.slice_(layout, (*(None for _ in box), 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        return tma.Source(*cpasync.make_tiled_tma_atom(op, tensor, one_stage, box))

    def count(self, channels: cutlass.Int32) -> cutlass.Int32:
        """Number of panels of that many channels of a chunk."""
        n = self.n
        if self.layout == "cn":
            return (channels * n + PANEL - 1) // PANEL
        return (channels + STEP - 1) // STEP * (n * STEP // PANEL)

    @cute.jit
    def tiles(
        self,
        source: tma.Source,
        sX: cute.Tensor,
        box: cutlass.Constexpr[tuple[int, ...]],
        row: cutlass.Int32,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """(tXsX [box, stage], tXgX [box, coordinates of the box]) of boxes from ``row`` on."""
        modes = len(box)
        start = (0, row) if self.layout == "cn" else (0, row, 0)
        gX = cute.local_tile(
            cute.domain_offset(start, source.tensor), box, tuple(None for _ in box)
        )
        return cpasync.tma_partition(
            source.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(sX, 0, modes),
            cute.group_modes(gX, 0, modes),
        )

    @cute.jit
    def coord(
        self,
        chunk: cutlass.Int32,
        panel: cutlass.Int32,
        row: cutlass.Int32,
        step: cutlass.Constexpr[int | None] = None,
    ) -> cute.Coord:
        """Coordinates of the box of a panel of a chunk, ``row`` boxes down.

        ``step``: of a box of one step, in "nc".
        """
        n = self.n
        if cutlass.const_expr(self.layout == "cn"):
            return None, chunk * (self.chunk * n // PANEL) + panel, row
        pairs = n * STEP // PANEL
        channel, pair = chunk * (self.chunk // STEP) + panel // pairs, panel % pairs
        if cutlass.const_expr(step is None):
            return None, channel, row, pair
        return None, channel, row, pair * (PANEL // STEP) + step

    def place(
        self, stage_rows: cutlass.Int32, row: cutlass.Int32, rows: int, step: cutlass.Int32
    ) -> cutlass.Int32:
        """First element of a step of a row in a stage of panels of ``rows`` rows."""
        if self.layout == "cn":
            return (stage_rows + row) * PANEL + step * STEP
        return stage_rows * PANEL + (step * rows + row) * STEP
