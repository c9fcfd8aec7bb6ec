"""Units of 16 vocabulary entries in a warpgroup's WGMMA accumulator, and what they add up to.

An accumulator of tokens by vocabulary (`wgmma.m64nNk16`): a thread holds two rows, value
``4 i + 2 half + side`` being column ``8 i + 2 (lane mod 4) + side``; unit u is i = 2 u and 2 u + 1,
four values in each of a row's four lanes.  Sums in fp32 as everywhere (logp/config.py): v and
v + 8, which are one thread's; neighbours, one thread's too; then lanes 1 and 2 apart.
"""

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ..config import MAX_EXPONENT, MIN_POWER
from . import exact

#: Rows of a thread, and the lanes that share one.
ROWS = 2
QUAD = 4
#: 1.5 2^23: what it is added to is rounded to whole numbers, which are then the lowest bits.
_MAGIC, _MAGIC_BITS = 12582912.0, 0x4B400000


@cute.jit
def absorb(acc: cute.Tensor, own: exact.State, scale: cute.Tensor):
    """Every unit of the accumulator into the rows' states: of four units, one on each lane."""
    lane = cute.arch.lane_idx() % QUAD
    odd, high = (lane & 1) == 1, lane >= 2
    for four in cutlass.range_constexpr(cute.size(acc) // 32):
        for half in cutlass.range_constexpr(ROWS):
            parts = [_unit(acc, 4 * four + u, half, scale[half], own) for u in range(4)]
            exponents, sums, weighted = (list(group) for group in zip(*parts, strict=True))
            exponent = _of_lane(exponents, odd, high)
            total = _to_lanes(sums, odd, high)
            moved = total
            if cutlass.const_expr(own.weighted is not None):
                moved = _to_lanes(weighted, odd, high)
            exact.add(own, half, exponent, total, moved)


@cute.jit
def _unit(acc, unit: cutlass.Constexpr, half: cutlass.Constexpr, scale, own):
    """(M, this thread's part of s, of the weighted sum) of one unit of one row."""
    low, high = 8 * unit + 2 * half, 8 * unit + 4 + 2 * half
    z = [acc[low], acc[high], acc[low + 1], acc[high + 1]]
    top = cute.arch.fmax(cute.arch.fmax(z[0], z[1]), cute.arch.fmax(z[2], z[3]))
    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
    exponent, shift = exponent_of(top, scale)
    powers = [cute.math.fma(value, scale, shift) for value in z]
    v = [cute.math.exp2(power, fastmath=True) for power in powers]
    total = (v[0] + v[1]) + (v[2] + v[3])
    weighted = total
    if cutlass.const_expr(own.weighted is not None):
        w = [weigh(v[i], powers[i]) for i in range(4)]
        weighted = (w[0] + w[1]) + (w[2] + w[3])
    return exponent, total, weighted


@cute.jit
def exponent_of(top, scale):
    """(M, -M in fp32) of a unit's largest logit: y rounded to the nearest integer."""
    y = cute.arch.fmax(top * scale, cutlass.Float32(-MAX_EXPONENT))
    shifted = cute.arch.fmin(y, cutlass.Float32(MAX_EXPONENT)) + cutlass.Float32(_MAGIC)
    return bits(shifted) - _MAGIC_BITS, cutlass.Float32(_MAGIC) - shifted


@dsl_user_op
def weigh(value, power, *, loc=None, ip=None) -> cutlass.Float32:
    """2^y y; 0 where 2^y is.  One rounding of its own: nothing may contract it into a sum."""
    finite = cute.arch.fmax(power, cutlass.Float32(MIN_POWER), loc=loc, ip=ip)
    return cutlass.Float32(
        llvm.inline_asm(
            T.f32(),
            [value.ir_value(loc=loc, ip=ip), finite.ir_value(loc=loc, ip=ip)],
            "mul.rn.ftz.f32 $0, $1, $2;",
            "=f,f,f",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )


@cute.jit
def _to_lanes(parts, odd, high):
    """Σ over a row's lanes of four units' parts: unit ``lane mod 4`` on each."""
    pairs = []
    for first in cutlass.range_constexpr(0, 4, 2):
        kept = parts[first + 1] if odd else parts[first]
        given = parts[first] if odd else parts[first + 1]
        pairs.append(kept + cute.arch.shuffle_sync_bfly(given, offset=1))
    kept = pairs[1] if high else pairs[0]
    given = pairs[0] if high else pairs[1]
    return kept + cute.arch.shuffle_sync_bfly(given, offset=2)


@cute.jit
def _of_lane(values, odd, high):
    """values[lane mod 4]."""
    below = values[1] if odd else values[0]
    above = values[3] if odd else values[2]
    return above if high else below


@dsl_user_op
def bits(value: cutlass.Float32, *, loc=None, ip=None) -> cutlass.Int32:
    """The bits of an fp32."""
    return cutlass.Int32(llvm.bitcast(T.i32(), value.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def of_bits(value: cutlass.Int32, *, loc=None, ip=None) -> cutlass.Float32:
    """The fp32 of these bits."""
    return cutlass.Float32(llvm.bitcast(T.f32(), value.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
