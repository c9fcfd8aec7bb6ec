"""Warp-level products of bf16 terms: ``mma.sync.m16n8k16``, and its fragments from rows.

Lane l of a warp has row g = l / 4 and column group t = l mod 4.  An octet is eight elements that
one lane holds of one row, in four registers of two.  The octets of a row's four lanes are two k16
steps: the order of k inside a step is free, as long as both operands have the same.

    A   rows g and g + 8, alternating: registers 2 u of both rows' octets, then 2 u + 1, are step u
    B   column g: registers 2 u and 2 u + 1 of the octet of row g are step u
    D   rows g, g + 8; columns 2 t, 2 t + 1

Rows that are used as loaded are operand B, where the registers of a step are neighbours.
"""

import cutlass
from cutlass import cute

#: Rows of A, and accumulators of a lane in one 16 x 8 tile.
ROWS, SUMS = 16, 4


@cute.jit
def multiply(
    acc: cute.Tensor,
    tile: cutlass.Constexpr[int],
    rA: tuple[cutlass.Int32, ...],
    rB: tuple[cutlass.Int32, ...],
):
    """acc[4 tile : 4 tile + 4] += A B of one k16 step; rA: four registers, rB: two."""
    first = tile * SUMS
    acc[first], acc[first + 1], acc[first + 2], acc[first + 3] = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[cutlass.Float32] * SUMS,
        read_only_args=[*rA, *rB, *(acc[first + i] for i in range(SUMS))],
    )


@cute.jit
def multiply_half(
    acc: cute.Tensor,
    tile: cutlass.Constexpr[int],
    rA: tuple[cutlass.Int32, ...],
    rB: cutlass.Int32,
):
    """acc[4 tile : 4 tile + 4] += A B of one k8 step; rA: two registers, rB: one."""
    first = tile * SUMS
    acc[first], acc[first + 1], acc[first + 2], acc[first + 3] = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}}, {{$r2}}, "
        "{{$r3}, {$r4}, {$r5}, {$r6}};",
        write_only_types=[cutlass.Float32] * SUMS,
        read_only_args=[*rA, rB, *(acc[first + i] for i in range(SUMS))],
    )


@cute.jit
def transposed(register: cutlass.Int32) -> cutlass.Int32:
    """Transpose an 8 x 8 matrix of 16-bit elements; a lane has pair t of row g."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[cutlass.Int32],
        read_only_args=[register],
    )


@cute.jit
def terms(values: cute.Tensor, count: cutlass.Constexpr[int]) -> list[cute.Tensor]:
    """Split values into bf16 terms, in registers of two: bf16 into one, fp32 into ``count``.

    term_i = bf16(values - term_0 - ... - term_(i - 1))
    """
    parts = []
    if cutlass.const_expr(values.element_type is cutlass.BFloat16):
        parts.append(cute.recast_tensor(values, cutlass.Int32))
    else:
        rest = cute.make_rmem_tensor(cute.make_layout(cute.size(values)), cutlass.Float32)
        rest.store(values.load())
        for _ in cutlass.range_constexpr(count):
            term = cute.make_rmem_tensor(cute.make_layout(cute.size(values)), cutlass.BFloat16)
            term.store(rest.load().to(cutlass.BFloat16))
            rest.store(rest.load() - term.load().to(cutlass.Float32))
            parts.append(cute.recast_tensor(term, cutlass.Int32))
    return parts
