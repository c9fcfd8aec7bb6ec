"""Online softmax in base 2 on the scores of one warpgroup's WGMMA accumulator (64 rows).

A thread holds two rows of an accumulator of ``wgmma.m64nNk16``: value ``4 i + 2 half + side`` is
row ``16 warp + lane / 4 + 8 half``, column ``8 i + 2 (lane mod 4) + side``.  A row has four lanes.

A row whose block has no score above -inf keeps every bit of its state: the maximum stays, the
factor is exp2(0) = 1, and zeros are added.
"""

import math

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

#: Rows of a thread, and the lanes that share one.
ROWS = 2
QUAD = 4


def first_row(base: cutlass.Int32, lane: cutlass.Int32):
    """Return the first row of a warpgroup's thread, rows counted from ``base``; the second: + 8."""
    return base + lane // 32 * 16 + lane % 32 // 4


@cute.jit
def start(row_max: cute.Tensor, row_sum: cute.Tensor):
    """Initialise the state: m = -inf, sum = 0."""
    row_max.fill(-cutlass.Float32.inf)
    row_sum.fill(0.0)


@cute.jit
def start_at_sinks(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    sinks: cute.Tensor,
    row: cutlass.Int32,
    lane: cutlass.Int32,
    c: cutlass.Float32,
):
    """Start with a key of a sink's score and a value of zeros: m = sink / c', c' = c / log2 e.

    The sum is exp2(c (m - m)) = 1, in one lane of each row.  sinks: one for each row of the head;
    row: a thread's first row, the second is 8 below.
    """
    for half in cutlass.range_constexpr(ROWS):
        index = cutlass.min(row + 8 * half, sinks.shape[0] - 1)
        start_row_at_sink(row_max, row_sum, half, sinks[index], lane, c)


@cute.jit
def start_row_at_sink(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    half: cutlass.Constexpr,
    sink: cutlass.Float32,
    lane: cutlass.Int32,
    c: cutlass.Float32,
):
    """`start_at_sinks` of one of a thread's rows."""
    row_max[half] = sink * cutlass.Float32(math.log2(math.e)) / c
    row_sum[half] = cutlass.Float32(1.0) if lane % 4 == 0 else cutlass.Float32(0.0)


@cute.jit
def raise_max(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    factor: cute.Tensor,
    shift: cute.Tensor,
    scale: cutlass.Float32,
):
    """First half of a block: m' = max(m, s); factor = exp2((m - m') scale); shift = -m' scale.

    ``scale`` is positive.  ``row_max`` is the maximum over whole rows.
    """
    for half in cutlass.range_constexpr(ROWS):
        old_max = row_max[half]
        top = cute.arch.fmax(old_max, block_max(scores, half))
        row_max[half] = top
        # Nothing allowed so far: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
        base = top if top != -cutlass.Float32.inf else cutlass.Float32(0.0)
        factor[half] = cute.math.exp2((old_max - base) * scale, fastmath=True)
        shift[half] = -(base * scale)


@cute.jit
def exponentiate(
    scores: cute.Tensor,
    row_sum: cute.Tensor,
    factor: cute.Tensor,
    shift: cute.Tensor,
    scale: cutlass.Float32,
):
    """Second half of a block: s = exp2(s scale + shift); sum = sum factor + Σ s.

    ``row_sum`` is a sum over this lane's columns (see ``finish``).
    """
    for half in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(scores) // 4):
            for side in cutlass.range_constexpr(2):
                index = 4 * i + 2 * half + side
                power = cute.math.fma(scores[index], scale, shift[half])
                scores[index] = cute.math.exp2(power, fastmath=True)
        row_sum[half] = cute.math.fma(row_sum[half], factor[half], block_sum(scores, half))


@cute.jit
def block_max(scores: cute.Tensor, half: cutlass.Constexpr[int]) -> cutlass.Float32:
    """Largest score of a row in this block, NaN ignored; the same in its four lanes."""
    top = cute.arch.fmax(scores[2 * half], scores[2 * half + 1])
    for i in cutlass.range_constexpr(1, cute.size(scores) // 4):
        for side in cutlass.range_constexpr(2):
            top = cute.arch.fmax(top, scores[4 * i + 2 * half + side])
    return cute.arch.warp_reduction_max(top, threads_in_group=QUAD)


@cute.jit
def block_sum(scores: cute.Tensor, half: cutlass.Constexpr[int]) -> cutlass.Float32:
    """Σ over this lane's columns of a row: even and odd columns ascending, then their sum."""
    even, odd = scores[2 * half], scores[2 * half + 1]
    for i in cutlass.range_constexpr(1, cute.size(scores) // 4):
        even = even + scores[4 * i + 2 * half]
        odd = odd + scores[4 * i + 2 * half + 1]
    return even + odd


@cute.jit
def rescale(values: cute.Tensor, factor: cute.Tensor):
    """values[row] *= factor[row], for each row of an accumulator."""
    for i in cutlass.range_constexpr(cute.size(values) // 4):
        for half in cutlass.range_constexpr(ROWS):
            for side in cutlass.range_constexpr(2):
                index = 4 * i + 2 * half + side
                values[index] = values[index] * factor[half]


@cute.jit
def finish(row_sum: cute.Tensor):
    """Reduce row_sum over a row's four lanes, which all get it: lanes 2 apart first."""
    for half in cutlass.range_constexpr(ROWS):
        row_sum[half] = cute.arch.warp_reduction_sum(row_sum[half], threads_in_group=QUAD)


@cute.jit
def log_sum(row_max: cutlass.Float32, row_sum: cutlass.Float32, c: cutlass.Float32):
    """Return LSE = ln(sum) + ln 2 c max of a row; -inf without keys."""
    log2 = cute.math.fma(row_max, c, cute.math.log2(row_sum, fastmath=True))
    return -cutlass.Float32.inf if row_sum == 0.0 else log2 * cutlass.Float32(math.log(2.0))


@cute.jit
def normalise(values: cute.Tensor, row_sum: cute.Tensor, half: cutlass.Constexpr):
    """O = acc / sum of one of a thread's rows."""
    empty = row_sum[half] == 0.0
    divide(values, half, empty, cute.arch.rcp_approx(row_sum[half]))


@cute.jit
def divide(
    acc_o: cute.Tensor,
    half: cutlass.Constexpr,
    empty: cutlass.Boolean,
    inverse: cutlass.Float32,
):
    """Multiply a row of O by 1 / sum; +0 for a row without keys.

    And +0 for -0, which would show whether other rows made the tile add a block of zeros.
    """
    for i in cutlass.range_constexpr(cute.size(acc_o) // 4):
        for side in cutlass.range_constexpr(2):
            index = 4 * i + 2 * half + side
            value = cute.math.fma(acc_o[index], inverse, cutlass.Float32(0.0))
            acc_o[index] = cutlass.Float32(0.0) if empty else value


@cute.jit
def cap(scores: cute.Tensor, inner: cutlass.Float32):
    """s = tanh(s inner / (2 log2 e)) as 1 - 2 / (1 + exp2(s inner)); ±1 far out, never NaN."""
    for i in cutlass.range_constexpr(cute.size(scores) // 4):
        for index in cutlass.range_constexpr(4 * i, 4 * i + 4):
            power = cute.math.exp2(scores[index] * inner, fastmath=True)
            reciprocal = cute.arch.rcp_approx(power + 1.0)
            scores[index] = cute.math.fma(reciprocal, cutlass.Float32(-2.0), cutlass.Float32(1.0))


@cute.jit
def round_pairs(values: cute.Tensor, rounded: cute.Tensor):
    """rounded = round(values), at this point of the program.

    LLVM moves an ordinary cast into the next iteration, before the products, and keeps the fp32
    values until there.
    """
    pairs = cute.recast_tensor(rounded, cutlass.Int32)
    name = "bf16x2" if rounded.element_type is cutlass.BFloat16 else "f16x2"
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = _rounded_pair(values[2 * i], values[2 * i + 1], name)


@dsl_user_op
def _rounded_pair(
    low: cutlass.Float32, high: cutlass.Float32, name: str, *, loc=None, ip=None
) -> cutlass.Int32:
    operands = [cutlass.Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    pair = llvm.inline_asm(
        T.i32(),
        operands,
        f"cvt.rn.{name}.f32 $0, $1, $2;",
        "=r,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return cutlass.Int32(pair)
