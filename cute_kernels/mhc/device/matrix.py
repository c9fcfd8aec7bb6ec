"""Warp-level products of bf16 terms: ``mma.sync.m16n8k16``, and fragments that come from rows.

Lane l of a warp is row g = l / 4 and place t = l mod 4.  An octet is eight elements that one lane
holds of one row, four registers of two.  The octets of a row's four lanes are two k16 steps: the
order of k inside a step is free, as long as both operands have the same.

    A   rows g and g + 8, in turns: registers 2 u of both rows' octets, then 2 u + 1, are step u
    B   column g: registers 2 u and 2 u + 1 of the octet of row g are step u
    D   rows g, g + 8; columns 2 t, 2 t + 1

So rows that are loaded as they are go to B, where their registers are neighbours.
"""

import cutlass
from cutlass import cute

#: Rows of A, and sums of a lane in one 16 x 8 tile.
ROWS, SUMS = 16, 4


@cute.jit
def multiply(acc: cute.Tensor, tile: cutlass.Constexpr, a: tuple, b: tuple):
    """acc[4 tile : 4 tile + 4] += A B of one k16 step; a: four registers, b: two."""
    at = tile * SUMS
    acc[at], acc[at + 1], acc[at + 2], acc[at + 3] = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[cutlass.Float32] * SUMS,
        read_only_args=[*a, *b, *(acc[at + i] for i in range(SUMS))],
    )


@cute.jit
def multiply_half(acc: cute.Tensor, tile: cutlass.Constexpr, a: tuple, b):
    """The same of eight k; a: two registers, b: one."""
    at = tile * SUMS
    acc[at], acc[at + 1], acc[at + 2], acc[at + 3] = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}}, {{$r2}}, "
        "{{$r3}, {$r4}, {$r5}, {$r6}};",
        write_only_types=[cutlass.Float32] * SUMS,
        read_only_args=[*a, b, *(acc[at + i] for i in range(SUMS))],
    )


@cute.jit
def transposed(register):
    """An 8 x 8 matrix of 16 bits, a row g's pair t in each lane, by columns."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[cutlass.Int32],
        read_only_args=[register],
    )


@cute.jit
def terms(values: cute.Tensor, count: cutlass.Constexpr) -> list:
    """bf16 values as one term, or fp32 values as ``count``: each what the ones before leave.

    Each as registers of two.
    """
    found = []
    if cutlass.const_expr(values.element_type is cutlass.BFloat16):
        found.append(cute.recast_tensor(values, cutlass.Int32))
    else:
        rest = cute.make_rmem_tensor(cute.make_layout(cute.size(values)), cutlass.Float32)
        rest.store(values.load())
        for _ in cutlass.range_constexpr(count):
            term = cute.make_rmem_tensor(cute.make_layout(cute.size(values)), cutlass.BFloat16)
            term.store(rest.load().to(cutlass.BFloat16))
            rest.store(rest.load() - term.load().to(cutlass.Float32))
            found.append(cute.recast_tensor(term, cutlass.Int32))
    return found
