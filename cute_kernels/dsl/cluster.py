"""The shared memory of the other CTAs of a cluster: read it, add to it.

A barrier of the cluster must lie between a CTA's own stores and these, and another one before a CTA
whose memory is read may exit.
"""

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def load4(pointer: cute.Pointer, rank, *, loc=None, ip=None) -> cute.TensorSSA:
    """The four fp32 at ``pointer``, of 16 bytes' alignment, as CTA ``rank`` has them."""
    f32 = cutlass.Float32.mlir_type
    four = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        _operands(pointer, rank, loc, ip),
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, $4, $5; "
        "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [a]; }",
        "=f,=f,=f,=f,r,r,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    values = cute.make_rmem_tensor(4, cutlass.Float32, loc=loc, ip=ip)
    for i in range(4):
        values[i] = cutlass.Float32(llvm.extractvalue(f32, four, [i], loc=loc, ip=ip))
    return values.load()


@dsl_user_op
def add(pointer: cute.Pointer, rank, value: cutlass.Float32, *, loc=None, ip=None) -> None:
    """``pointer`` of CTA ``rank`` += value, atomically, in no order."""
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


def _operands(pointer, rank, loc, ip):
    address = cutlass.Int32(pointer.toint(loc=loc, ip=ip))
    return [address.ir_value(loc=loc, ip=ip), cutlass.Int32(rank).ir_value(loc=loc, ip=ip)]
