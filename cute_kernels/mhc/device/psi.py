"""Terms of psi in shared memory, in the order in which lanes have x."""

import cutlass
from cutlass import cute

from . import matrix, staged, unit
from .panels import PANEL, STEP, Panels

OCTET = 8


@cute.jit
def split(
    sPhi: cute.Tensor,
    sWeight: cute.Tensor | None,
    sPsi: cute.Tensor,
    panels: cutlass.Constexpr[Panels],
    shape: cutlass.Constexpr[tuple[int, int]],
    stage: cutlass.Int32,
    thread: cutlass.Int32,
):
    """Write the bf16 terms of a stage of psi = phi, or phi ⊙ norm_weight.

    ``shape``: (columns of H, terms).  Element 8 t + 4 u + 2 b + d of 32 is at 16 u + 8 b + 2 t + d.
    A thread has the elements of one u of one row: 16 of them.
    """
    columns, terms = shape
    row, part = thread // 4, thread % 4
    row_bytes = PANEL * sPsi.element_type.width // 8
    values = cute.make_rmem_tensor(cute.make_layout(16), cutlass.Float32)
    for t in cutlass.range_constexpr(4):
        step, element = part // 2, 8 * t + part % 2 * 4
        first = panels.place(stage * columns, row, columns, step) + element
        rPhi = staged.read(staged.neighbours(sPhi, first, 4))
        if cutlass.const_expr(sWeight is not None):
            weight = staged.read(
                staged.neighbours(sWeight, stage * PANEL + step * STEP + element, 4)
            )
            for i in cutlass.range_constexpr(4):
                # One rounded product: with -0 added, nothing is fused to it.
                rPhi[i] = cute.math.fma(rPhi[i], weight[i], cutlass.Float32(-0.0))
        for i in cutlass.range_constexpr(4):
            values[i // 2 * 8 + 2 * t + i % 2] = rPhi[i]
    for b, rTerm in enumerate(matrix.terms(values, terms)):
        rPieces = cute.recast_tensor(rTerm, sPsi.element_type)
        for half in cutlass.range_constexpr(2):
            offset = (b * columns + row) * row_bytes + part * 32 + half * 16
            base = stage * (terms * columns * row_bytes)
            sOctet = staged.swizzled(sPsi, offset, row_bytes, base, OCTET)
            sOctet.store(unit.piece(rPieces, half * OCTET, OCTET).load())
