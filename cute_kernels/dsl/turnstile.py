"""Turnstile: CTAs add their fp32 tiles to one tile in global memory, in the order of their ranks.

A semaphore counts the tiles that have landed.  One thread of a CTA takes a whole turn:

    wait_turn    spins, acquiring at gpu scope, until the count equals its rank
    add          one bulk reduce-add of shared memory, committed as a group of its own
    store        in its place for rank 0, of values that went through ``add_zero``: the tile needs
                 no zeros before
    finish_turn  waits until that group has landed (a ``.read`` wait would only free the shared
                 memory), then releases the next rank at gpu scope

The same thread does all three: bulk groups belong to the thread that committed them.  Unordered
kernels call ``add`` and ``land`` alone.
"""

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@cute.jit
def wait_turn(semaphore: cute.Pointer, rank: cutlass.Int32):
    """Wait until ``rank`` tiles have landed; the adds of this turn come after theirs."""
    seen = cute.arch.load(semaphore, cutlass.Int32, sem="acquire", scope="gpu")
    while seen != rank:
        seen = cute.arch.load(semaphore, cutlass.Int32, sem="acquire", scope="gpu")
    # The acquire is a generic access; the adds that it orders are made by the async proxy.
    cute.arch.fence_proxy("async.global")


@cute.jit
def add(destination: cute.Pointer, source: cute.Pointer, size: cutlass.Constexpr[int]):
    """destination[i] += source[i] over ``size`` bytes of fp32: asynchronous, one bulk group.

    destination: global, source: shared; 16-byte aligned, as ``size`` is.  The shared memory was
    written before a ``fence.proxy.async`` of its writers and a barrier.
    """
    _bulk_copy(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", destination, source, size
    )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def store(destination: cute.Pointer, source: cute.Pointer, size: cutlass.Constexpr[int]):
    """destination[i] = source[i] over ``size`` bytes: asynchronous, one bulk group, as ``add``."""
    _bulk_copy("cp.async.bulk.global.shared::cta.bulk_group", destination, source, size)
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def add_or_store(
    destination: cute.Pointer,
    source: cute.Pointer,
    size: cutlass.Constexpr[int],
    rank: cutlass.Int32,
    first_stores: cutlass.Constexpr[bool],
):
    """Add ``size`` bytes to those of the ranks before; with ``first_stores`` rank 0 stores them."""
    if cutlass.const_expr(first_stores):
        if rank == 0:
            store(destination, source, size)
        else:
            add(destination, source, size)
    else:
        add(destination, source, size)


@cute.jit
def add_zero(tensor: cute.Tensor):
    """Make each fp32 value in registers what ``add`` makes of it and +0.

    -0 becomes +0, and so do subnormal numbers, which bulk adds of fp32 flush.
    """
    for i in cutlass.range_constexpr(cute.size(tensor)):
        tensor[i] = _add_zero(tensor[i])


@cute.jit
def land():
    """Wait until every add of this thread has landed; its shared memory may then be reused."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)


@cute.jit
def finish_turn(semaphore: cute.Pointer):
    """Wait until the tile has landed, then let rank + 1 add its own."""
    land()
    cute.arch.red(semaphore, cutlass.Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@dsl_user_op
def _add_zero(value: cutlass.Float32, *, loc=None, ip=None) -> cutlass.Float32:
    return cutlass.Float32(
        llvm.inline_asm(
            cutlass.Float32.mlir_type,
            [value.ir_value(loc=loc, ip=ip)],
            "add.rn.ftz.f32 $0, $1, 0f00000000;",
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def _bulk_copy(
    opcode: str, destination: cute.Pointer, source: cute.Pointer, size: int, *, loc=None, ip=None
) -> None:
    llvm.inline_asm(
        None,
        [
            destination.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            cutlass.Int32(size).ir_value(loc=loc, ip=ip),
        ],
        f"{opcode} [$0], [$1], $2;",
        "l,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
