"""Distributed shared memory: load from, and add to, the shared memory of a CTA of the cluster.

A cluster barrier must separate a CTA's own stores from these accesses, and another one must come
before a CTA whose memory is accessed exits.
"""

import cutlass
from cutlass import cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def load4(pointer: cute.Pointer, rank: cutlass.Int32, *, loc=None, ip=None) -> cute.TensorSSA:
    """Load four fp32 from CTA ``rank``, at its ``pointer``, aligned to 16 bytes."""
    f32 = cutlass.Float32.mlir_type
    vector = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        _operands(pointer, rank, loc, ip),
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, $4, $5; "
        "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [a]; }",
        "=f,=f,=f,=f,r,r,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    rValues = cute.make_rmem_tensor(4, cutlass.Float32, loc=loc, ip=ip)
    for i in range(4):
        rValues[i] = cutlass.Float32(llvm.extractvalue(f32, vector, [i], loc=loc, ip=ip))
    return rValues.load()


@dsl_user_op
def add(
    pointer: cute.Pointer, rank: cutlass.Int32, value: cutlass.Float32, *, loc=None, ip=None
) -> None:
    """Add ``value`` to ``pointer`` of CTA ``rank``: atomic, in arrival order."""
    llvm.inline_asm(
        None,
        [*_operands(pointer, rank, loc, ip), value.ir_value(loc=loc, ip=ip)],
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, $0, $1; "
        "red.relaxed.cluster.shared::cluster.add.f32 [a], $2; }",
        "r,r,f,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )


def _operands(
    pointer: cute.Pointer,
    rank: cutlass.Int32,
    loc: ir.Location | None,
    ip: ir.InsertionPoint | None,
) -> list[ir.Value]:
    address = cutlass.Int32(pointer.toint(loc=loc, ip=ip))
    return [address.ir_value(loc=loc, ip=ip), cutlass.Int32(rank).ir_value(loc=loc, ip=ip)]
