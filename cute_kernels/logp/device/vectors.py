"""Vectors of 16 vocabulary entries in a WGMMA accumulator [tokens, vocabulary], and their sums.

In an accumulator of ``wgmma.m64nNk16`` a thread has two rows; its value ``4 i + 2 half + side`` is
column ``8 i + 2 (lane mod 4) + side`` of row ``half``.  Vector u is i = 2 u and 2 u + 1: four
values in each of a row's four lanes.  The fp32 sum of a vector has the order of logp/config.py:
v and v + 8, of one thread; neighbours, of one thread; then lanes 1 and 2 apart.
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
#: 1.5 2^23: a number added to it is rounded to an integer, in the lowest bits of the sum.
_MAGIC, _MAGIC_BITS = 12582912.0, 0x4B400000


@cute.jit
def add_tile(acc: cute.Tensor, state: exact.State, rScale: cute.Tensor):
    """Add every vector of the accumulator to the rows' states: of four vectors, one on each lane.

    M = round(max y)      s = Σ 2^(y - M)      weighted: Σ 2^(y - M) (y - M)      y = z scale
    """
    lane = cute.arch.lane_idx() % QUAD
    odd, high = (lane & 1) == 1, lane >= 2
    for four in cutlass.range_constexpr(cute.size(acc) // 32):
        for half in cutlass.range_constexpr(ROWS):
            partials = [_partial(acc, 4 * four + u, half, rScale[half], state) for u in range(4)]
            exponents, sums, weighted = (list(group) for group in zip(*partials, strict=True))
            exponent = _of_lane(exponents, odd, high)
            total = _to_lanes(sums, odd, high)
            weighted_total = total
            if cutlass.const_expr(state.weighted is not None):
                weighted_total = _to_lanes(weighted, odd, high)
            exact.add(state, half, exponent, total, weighted_total)


@cute.jit
def _partial(
    acc: cute.Tensor,
    vector: cutlass.Constexpr[int],
    half: cutlass.Constexpr[int],
    scale: cutlass.Float32,
    state: exact.State,
) -> tuple[cutlass.Int32, cutlass.Float32, cutlass.Float32]:
    """(M, this thread's part of s, of the weighted sum) of one vector of one row."""
    low, high = 8 * vector + 2 * half, 8 * vector + 4 + 2 * half
    z = [acc[low], acc[high], acc[low + 1], acc[high + 1]]
    top = cute.arch.fmax(cute.arch.fmax(z[0], z[1]), cute.arch.fmax(z[2], z[3]))
    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
    exponent, shift = exponent_of(top, scale)
    powers = [cute.math.fma(value, scale, shift) for value in z]
    v = [cute.math.exp2(power, fastmath=True) for power in powers]
    total = (v[0] + v[1]) + (v[2] + v[3])
    weighted = total
    if cutlass.const_expr(state.weighted is not None):
        w = [weigh(v[i], powers[i]) for i in range(4)]
        weighted = (w[0] + w[1]) + (w[2] + w[3])
    return exponent, total, weighted


@cute.jit
def exponent_of(
    top: cutlass.Float32, scale: cutlass.Float32
) -> tuple[cutlass.Int32, cutlass.Float32]:
    """(M, -M in fp32) of a vector whose largest logit is ``top``: M = y to the nearest integer."""
    y = cute.arch.fmax(top * scale, cutlass.Float32(-MAX_EXPONENT))
    shifted = cute.arch.fmin(y, cutlass.Float32(MAX_EXPONENT)) + cutlass.Float32(_MAGIC)
    return bits(shifted) - _MAGIC_BITS, cutlass.Float32(_MAGIC) - shifted


@dsl_user_op
def weigh(value: cutlass.Float32, power: cutlass.Float32, *, loc=None, ip=None) -> cutlass.Float32:
    """2^y y from ``value`` = 2^y and ``power`` = y; 0 where 2^y is 0.

    Rounded once: the asm keeps the compiler from contracting the product into a sum.
    """
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
def _to_lanes(
    partials: list[cutlass.Float32], odd: cutlass.Boolean, high: cutlass.Boolean
) -> cutlass.Float32:
    """Σ over a row's four lanes of the partial sums of four vectors: vector ``lane mod 4`` here."""
    pairs = []
    for first in cutlass.range_constexpr(0, 4, 2):
        local = partials[first + 1] if odd else partials[first]
        sent = partials[first] if odd else partials[first + 1]
        pairs.append(local + cute.arch.shuffle_sync_bfly(sent, offset=1))
    local = pairs[1] if high else pairs[0]
    sent = pairs[0] if high else pairs[1]
    return local + cute.arch.shuffle_sync_bfly(sent, offset=2)


@cute.jit
def _of_lane(
    values: list[cutlass.Numeric], odd: cutlass.Boolean, high: cutlass.Boolean
) -> cutlass.Numeric:
    """values[lane mod 4]."""
    below = values[1] if odd else values[0]
    above = values[3] if odd else values[2]
    return above if high else below


@dsl_user_op
def bits(value: cutlass.Float32, *, loc=None, ip=None) -> cutlass.Int32:
    """Bits of an fp32, as an integer."""
    return cutlass.Int32(llvm.bitcast(T.i32(), value.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def of_bits(value: cutlass.Int32, *, loc=None, ip=None) -> cutlass.Float32:
    """Return the fp32 whose bits are ``value``."""
    return cutlass.Float32(llvm.bitcast(T.f32(), value.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
