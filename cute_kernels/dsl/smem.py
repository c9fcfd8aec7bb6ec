"""Shared-memory layouts that WGMMA and TMA both understand."""

import cutlass
from cutlass import cute
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

#: Alignment of the buffers that WGMMA and 128-byte-swizzled TMA need, in bytes.
ALIGN = 1024


def major_of(name: str) -> LayoutEnum:
    """Translate ``"k"`` (reduction dimension contiguous) or ``"mn"`` to the DSL's enum."""
    return LayoutEnum.ROW_MAJOR if name == "k" else LayoutEnum.COL_MAJOR


def operand_layout(
    dtype: type[cutlass.Numeric],
    rows: int,
    k: int,
    major: str,
    stages: int,
    part: int | None = None,
) -> cute.ComposedLayout:
    """Return the layout of a staged, swizzled [rows, k, stages] operand.

    The swizzle follows the contiguous extent, or ``part`` of it where an instruction takes no more:
    an instruction begins with a whole atom of the swizzle.
    """
    contiguous = part or (k if major == "k" else rows)
    atom = hopper_helpers.get_smem_layout_atom(major_of(major), dtype, contiguous)
    order = (0, 1, 2) if major == "k" else (1, 0, 2)
    layout_atom = cute.nvgpu.warpgroup.make_smem_layout_atom(atom, dtype)
    return cute.tile_to_shape(layout_atom, (rows, k, stages), order=order)
