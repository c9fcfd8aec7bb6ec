"""IEEE fp64 operations that are never contracted, so that all devices give the same bits."""

import cutlass
from cutlass import cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ..config import LOG2_SERIES, SQRT_HALF


@dsl_user_op
def add(
    a: cutlass.Float64 | float, b: cutlass.Float64 | float, *, loc=None, ip=None
) -> cutlass.Float64:
    """a + b, rounded once."""
    return _operate("add.rn.f64", a, b, loc, ip)


@dsl_user_op
def mul(
    a: cutlass.Float64 | float, b: cutlass.Float64 | float, *, loc=None, ip=None
) -> cutlass.Float64:
    """a b, rounded once."""
    return _operate("mul.rn.f64", a, b, loc, ip)


@dsl_user_op
def div(
    a: cutlass.Float64 | float, b: cutlass.Float64 | float, *, loc=None, ip=None
) -> cutlass.Float64:
    """a / b, rounded once."""
    return _operate("div.rn.f64", a, b, loc, ip)


def _operate(
    name: str,
    a: cutlass.Float64 | float,
    b: cutlass.Float64 | float,
    loc: ir.Location | None,
    ip: ir.InsertionPoint | None,
) -> cutlass.Float64:
    operands = [cutlass.Float64(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return cutlass.Float64(
        llvm.inline_asm(
            T.f64(),
            operands,
            f"{name} $0, $1, $2;",
            "=d,d,d",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )


@cute.jit
def log2(x: cutlass.Float64) -> cutlass.Float64:
    """log2(x) of x > 0.

    x = 2^exponent m, √½ <= m < √2      s = (m - 1) / (m + 1)
    log2(x) = exponent + s Σ_i LOG2_SERIES[i] s^(2 i)
    """
    bits = _bits(x)
    exponent = (bits >> 52) - 1022
    m = _of_bits((bits & ((1 << 52) - 1)) | (1022 << 52))
    small = m < SQRT_HALF
    m = add(m, m) if small else m
    exponent = exponent - 1 if small else exponent
    s = div(add(m, -1.0), add(m, 1.0))
    square = mul(s, s)
    series = cutlass.Float64(LOG2_SERIES[-1])
    for i in cutlass.range_constexpr(len(LOG2_SERIES) - 2, -1, -1):
        series = add(mul(series, square), LOG2_SERIES[i])
    return add(mul(series, s), exponent.to(cutlass.Float64))


@dsl_user_op
def _bits(value: cutlass.Float64, *, loc=None, ip=None) -> cutlass.Int64:
    return cutlass.Int64(llvm.bitcast(T.i64(), value.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def _of_bits(bits: cutlass.Int64, *, loc=None, ip=None) -> cutlass.Float64:
    return cutlass.Float64(llvm.bitcast(T.f64(), bits.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
