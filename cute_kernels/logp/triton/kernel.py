"""States and gradients of logits in Triton, for ROCm and for CUDA without SM90.

    states       the exact sum Σ 2^y over columns of the vocabulary, added to a state: exact.py
    gradients    dlogits = (1[v = target] - p) dlogp / τ - p (ln p + H) dentropy / τ
    scale        a finished gradient times a number in memory
    finish       log p, log2 Σ 2^y and the entropy of states, in the fp64 operations of exact.py

with z = softcap tanh((logit + bias) / softcap) in fp32, y = z · scale, p = 2^(z · scale - lse2).

Order of the states.  A unit is 16 columns from a multiple of 16 of the vocabulary.  M is max z
times scale, rounded once, clamped, then rounded to the nearest even whole number; a value is
2^(z · scale - M) by one fma and `tl.exp2`.  Its 16 values are added as a tree of pairs: `tl.sum`
over an axis of two, which has one result whoever adds it, so that the order is that of the shapes:

    [2, 8] -> 8    v and v + 8        [4, 2] -> 4    neighbours
    [2, 2] -> 2    two apart          [2] -> 1       four apart

From there on everything is a sum of whole numbers of 64 bits.  A lane of a program keeps a state of
its own units, lanes meet at the end of the program, and the result is added to the state in memory:
tiles, parts and blocks of the vocabulary do not show in a bit.  In fp32 s 2^(24 + r) is the same
number as in the fp64 of exact.py: a product with a power of two, rounded to a whole number by
adding and subtracting 2^23 where it has a fraction.  What exceeds 32 is no sum of a unit: an
overflow of the clamp, NaN or infinity.

Values that are compared come first: NaN fails a comparison, and goes on as NaN.  Nothing is fused
but `tl.fma` (enable_fp_fusion is off), nothing is atomic, nothing is autotuned, sizes are not
specialised on.  Rows of another token and padding of the vocabulary are dropped by select.

Limits.  Columns that are not contiguous are loaded one by one.  Ran on an H100 and an H200
(tests/logp/test_gpu.py, 2026-11-22); not timed; on AMD GPUs: not run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import config

_UNIT = tl.constexpr(config.UNIT)
_BIN = tl.constexpr(config.BIN)
_FRACTION = tl.constexpr(config.FRACTION)
_MAX_EXPONENT = tl.constexpr(float(config.MAX_EXPONENT))
_MIN_POWER = tl.constexpr(config.MIN_POWER)
_EMPTY = tl.constexpr(config.EMPTY)
_LOST = tl.constexpr(config.LOST)
_TOP = tl.constexpr(config.TOP)
_SUMS = tl.constexpr(config.SUMS)
_CHOSEN = tl.constexpr(config.CHOSEN)
_WEIGHTED = tl.constexpr(config.WEIGHTED)
_LN2 = tl.constexpr(config.LN2)
_BINS = tl.constexpr(config.BINS)
#: A bin's weight beside the one above it, and its width.
_STEP, _WIDTH = tl.constexpr(2.0**-config.BIN), tl.constexpr(float(config.BIN))
_SERIES = tl.constexpr(config.LOG2_SERIES)
_TERMS = tl.constexpr(len(config.LOG2_SERIES))
_SQRT_HALF = tl.constexpr(config.SQRT_HALF)
_OUTSIDE, _MASKED = tl.constexpr(config.OUTSIDE), tl.constexpr(config.MASKED)
#: 1.5 · 2^23: adding it rounds what is below 2^22; and its bits.
_ROUND = tl.constexpr(12582912.0)
_ROUND_BITS = tl.constexpr(0x4B400000)
#: From here on fp32 has no fractions.
_WHOLE = tl.constexpr(8388608.0)
#: More than 16 values of at most 2^0.6 come to.
_MOST = tl.constexpr(32.0)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _tree(v, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """[ROWS, UNITS, 16] -> [ROWS, UNITS]; the order of the module's docstring."""
    half = tl.sum(tl.reshape(v, [ROWS, UNITS, 2, 8]), axis=2)
    pair = tl.sum(tl.reshape(half, [ROWS, UNITS, 4, 2]), axis=3)
    four = tl.sum(tl.reshape(pair, [ROWS, UNITS, 2, 2]), axis=3)
    return tl.sum(four, axis=2)


@triton.jit
def _logit(z, bias, factor, softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """softcap tanh((z + bias) / softcap), as 1 - 2 / (1 + e^(2 z / softcap))."""
    z = z.to(tl.float32)
    if BIAS:
        z = z + bias.to(tl.float32)
    if SOFTCAP:
        power = z * factor
        power = tl.where(power < -120.0, -120.0, power)
        power = tl.exp2(tl.where(power > 120.0, 120.0, power))
        z = (1.0 - tl.div_rn(tl.full(z.shape, 2.0, tl.float32), power + 1.0)) * softcap
    return z


@triton.jit
def _logit_as_sm90(z, bias, inner, softcap, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """`_logit` in the operations of dsl/softmax.py `cap`: with an approximate reciprocal."""
    if BIAS:
        z += bias.to(tl.float32)
    if SOFTCAP:
        reciprocal = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            [tl.exp2(z * inner) + 1.0],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        z = tl.fma(reciprocal, tl.zeros_like(z) - 2.0, tl.zeros_like(z) + 1.0) * softcap
    return z


@triton.jit
def _whole(x):
    """fp32 -> int64, to the nearest even."""
    size = tl.abs(x)
    size = tl.where(size < _WHOLE, (size + _WHOLE) - _WHOLE, size).to(tl.int64)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _below(s, by):
    """Sums of four bins as those of bins that begin ``by`` higher."""
    out = ()
    for j in tl.static_range(_BINS):
        moved = tl.zeros_like(s[0])
        for i in tl.static_range(_BINS):
            if i <= j:
                moved = tl.where(by == j - i, s[i], moved)
        out = out + (moved,)
    return out


@triton.jit
def _with(s, below, value):
    """Sums of four bins, and a value of the bin so many below the first."""
    out = ()
    for j in tl.static_range(_BINS):
        out = out + (s[j] + tl.where(below == j, value, tl.zeros_like(value)),)
    return out


@triton.jit
def _of_lanes(s, by):
    """The sum over the lanes of a row, each moved ``by`` bins: exact, in any order."""
    moved = _below(s, by)
    out = ()
    for j in tl.static_range(_BINS):
        out = out + (tl.sum(moved[j], axis=1),)
    return out


@triton.jit
def _into_memory(out_ptrs, s, by, in_t):
    """Adds four sums to those in memory, which begin ``by`` bins too low."""
    stored = ()
    for j in tl.static_range(_BINS):
        stored = stored + (tl.load(out_ptrs + j, mask=in_t, other=0),)
    stored = _below(stored, by)
    for j in tl.static_range(_BINS):
        tl.store(out_ptrs + j, stored[j] + s[j], mask=in_t)


@triton.jit(do_not_specialize=["T", "N", "start", "valid", "parts", "share", "out_p"])
def states_kernel(
    logits_ptr,
    bias_ptr,
    target_ptr,
    scale_ptr,
    out_ptr,
    T,
    N,
    start,
    valid,
    parts,
    share,
    logits_t,
    logits_n,
    bias_n,
    out_p,
    factor,
    softcap,
    ALIGN_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    STATE: tl.constexpr,
):
    """Adds ``share`` tiles of ROWS rows of logits [T, N] to states [parts, T, STATE].

    Program: part + parts · block of rows.  Column 0 is entry ``start`` of the vocabulary; columns
    from ``valid`` on are padding.
    """
    # The host found this multiple; saying so lets loads be wide.
    N = N // ALIGN_N * ALIGN_N
    UNITS: tl.constexpr = COLUMNS // _UNIT
    part = tl.program_id(0) % parts
    rows = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    in_t = rows < T
    row_ptrs = logits_ptr + rows.to(tl.int64) * logits_t
    scale = tl.load(scale_ptr + rows, mask=in_t, other=1.0)
    scales = scale[:, None, None]
    in_tile = tl.arange(0, UNITS)[:, None] * _UNIT + tl.arange(0, _UNIT)[None, :]

    top = tl.full((ROWS, UNITS), _EMPTY, tl.int32)
    zero = tl.zeros((ROWS, UNITS), tl.int64)
    sums = (zero, zero, zero, zero)
    weighted = (zero, zero, zero, zero)
    first = part * share
    last = tl.minimum(first + share, (N - 1) // COLUMNS + 1)
    for tile in tl.range(first, last):
        columns = (tile * COLUMNS + in_tile)[None, :, :]
        ptrs = row_ptrs[:, None, None] + columns.to(tl.int64) * logits_n
        z = tl.load(ptrs, mask=in_t[:, None, None] & (columns < N), other=0.0)
        bias = 0.0
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + columns.to(tl.int64) * bias_n, mask=columns < N, other=0.0)
        z = _logit(z, bias, factor, softcap, bias_ptr is not None, SOFTCAP)
        z = tl.where(columns < valid, z, -_INFINITY)

        # M = round(max y), a whole number in the low bits of a float.
        y = tl.max(z, axis=2) * scale[:, None]
        y = tl.where(y < -_MAX_EXPONENT, -_MAX_EXPONENT, y)
        y = tl.where(y > _MAX_EXPONENT, _MAX_EXPONENT, y) + _ROUND
        exponent = y.to(tl.int32, bitcast=True) - _ROUND_BITS
        power = tl.fma(z, scales, -(y - _ROUND)[:, :, None])
        values = tl.exp2(power)
        total = _tree(values, ROWS, UNITS)

        alive = (total > 0.0) & (total < _MOST)
        bins = exponent >> 4
        place = exponent & (_BIN - 1)
        unit_top = tl.where(alive, bins, tl.where(total < _MOST, _EMPTY, _LOST))
        new_top = tl.maximum(top, unit_top)
        below = tl.where(alive, new_top - bins, -1)
        unit = ((place + (127 + _FRACTION)) << 23).to(tl.float32, bitcast=True)
        # What is not alive may be NaN, which is no integer.
        value = _whole(tl.where(alive, total, 0.0) * unit)
        sums = _with(_below(sums, new_top - top), below, value)
        if ENTROPY:
            power = tl.where(power < _MIN_POWER, _MIN_POWER, power)
            moved = tl.fma(total, place.to(tl.float32), _tree(values * power, ROWS, UNITS))
            moved = _whole(tl.where(alive, moved, 0.0) * unit)
            weighted = _with(_below(weighted, new_top - top), below, moved)
        top = new_top

    out_ptrs = out_ptr + tl.cast(part, tl.int64) * out_p + rows.to(tl.int64) * STATE
    row_top = tl.max(top, axis=1)
    stored_top = tl.load(out_ptrs + _TOP, mask=in_t, other=_EMPTY).to(tl.int32)
    new_top = tl.maximum(row_top, stored_top)
    by = new_top[:, None] - top
    sums = _of_lanes(sums, by)
    tl.store(out_ptrs + _TOP, new_top.to(tl.int64), mask=in_t)
    _into_memory(out_ptrs + _SUMS, sums, new_top - stored_top, in_t)
    if ENTROPY:
        weighted = _of_lanes(weighted, by)
        _into_memory(out_ptrs + _WEIGHTED, weighted, new_top - stored_top, in_t)

    # The target's logit again, where it is in this part.
    target = tl.load(target_ptr + rows, mask=in_t, other=-1) - start
    here = (target >= first * COLUMNS) & (target < tl.minimum(last * COLUMNS, N))
    z = tl.load(row_ptrs + target * logits_n, mask=here, other=0.0)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + target * bias_n, mask=here, other=0.0)
    z = _logit(z, bias, factor, softcap, bias_ptr is not None, SOFTCAP)
    chosen = z.to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(out_ptrs + _CHOSEN, chosen, mask=here)


@triton.jit(do_not_specialize=["T", "N", "start", "valid", "tiles"])
def gradients_kernel(
    logits_ptr,
    bias_ptr,
    target_ptr,
    scale_ptr,
    lse2_ptr,
    of_logp_ptr,
    of_entropy_ptr,
    entropy_ptr,
    out_ptr,
    T,
    N,
    start,
    valid,
    tiles,
    logits_t,
    logits_n,
    bias_n,
    out_t,
    factor,
    softcap,
    inverse_cap,
    ALIGN_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    AS_SM90: tl.constexpr,
):
    """out [T, N] = the gradient of logits [T, N]; one tile of [ROWS, COLUMNS] a program.

    AS_SM90: with the operations of device/gradient.py, where the entropy or a softcap has a part.
    """
    N = N // ALIGN_N * ALIGN_N
    rows = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    in_t = rows < T
    inside = in_t[:, None] & (columns < N)
    row = rows.to(tl.int64)[:, None]
    column = columns.to(tl.int64)
    z = tl.load(logits_ptr + row * logits_t + column * logits_n, mask=inside, other=0.0)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column * bias_n, mask=columns < N, other=0.0)
    if AS_SM90:
        z = _logit_as_sm90(z, bias, factor, softcap, bias_ptr is not None, SOFTCAP)
    else:
        z = _logit(z, bias, factor, softcap, bias_ptr is not None, SOFTCAP)

    target = tl.load(target_ptr + rows, mask=in_t, other=-1)[:, None]
    scale = tl.load(scale_ptr + rows, mask=in_t, other=1.0)[:, None]
    lse2 = tl.load(lse2_ptr + rows, mask=in_t, other=0.0)[:, None]
    of_logp = tl.load(of_logp_ptr + rows, mask=in_t, other=0.0)[:, None]
    power = tl.fma(z, scale, lse2 * -1.0)
    p = tl.exp2(power)
    gradient = (tl.where(column + start == target, 1.0, 0.0) - p) * of_logp
    if of_entropy_ptr is not None:
        of_entropy = tl.load(of_entropy_ptr + rows, mask=in_t, other=0.0)[:, None]
        entropy = tl.load(entropy_ptr + rows, mask=in_t, other=0.0)[:, None]
        finite = tl.where(power < _MIN_POWER, _MIN_POWER, power)
        if AS_SM90:
            ln_p_plus_h = tl.fma(finite, tl.zeros_like(z) + _LN2, entropy + tl.zeros_like(z))
            gradient = tl.fma(p * of_entropy * -1.0, ln_p_plus_h, gradient)
        else:
            gradient = gradient - (p * of_entropy) * (finite * _LN2 + entropy)
    if SOFTCAP:
        if AS_SM90:
            share = z * inverse_cap
            gradient = gradient * tl.fma(share * -1.0, share, tl.zeros_like(z) + 1.0)
        else:
            share = tl.div_rn(z, tl.zeros_like(z) + softcap)
            gradient = gradient * (1.0 - share * share)
    gradient = tl.where((columns < valid) & (target >= 0), gradient, 0.0)
    out_ptrs = out_ptr + row * out_t + column
    tl.store(out_ptrs, gradient.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "blocks"])
def scale_kernel(
    x_ptr,
    factor_ptr,
    out_ptr,
    N,
    blocks,
    ALIGN_N: tl.constexpr,
    IN_PLACE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """out = x factor: a product in fp32, rounded once; every program takes blocks of ELEMENTS.

    In place, a factor of 1 touches no memory but its own.
    """
    N = N // ALIGN_N * ALIGN_N
    factor = tl.load(factor_ptr)
    last = blocks
    if IN_PLACE:
        last = tl.where(factor == 1.0, 0, blocks)
    for block in range(tl.program_id(0), last, tl.num_programs(0)):
        index = tl.cast(block, tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        x = tl.load(x_ptr + index, mask=index < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + index, (x * factor).to(out_ptr.dtype.element_ty), mask=index < N)


@triton.jit
def _fp64(value: tl.constexpr, ROWS: tl.constexpr):
    """A constant in fp64: a number beside a tensor may be rounded to fp32 first."""
    return tl.full((ROWS,), value, tl.float64)


@triton.jit
def _mantissas(s):
    """Σ_j s_j 2^(-16 j) in fp64, from the smallest on."""
    total = s[_BINS - 1]
    for j in tl.static_range(1, _BINS):
        total = total * _STEP + s[_BINS - 1 - j]
    return total


@triton.jit
def _log2(x, ROWS: tl.constexpr):
    """log2 of x > 0 in fp64, as exact.py makes it."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    m = ((bits & ((1 << 52) - 1)) | (1022 << 52)).to(tl.float64, bitcast=True)
    small = m < _fp64(_SQRT_HALF, ROWS)
    m = tl.where(small, m + m, m)
    exponent = tl.where(small, exponent - 1, exponent)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = _fp64(_SERIES[_TERMS - 1], ROWS)
    for i in tl.static_range(1, _TERMS):
        series = series * square + _fp64(_SERIES[_TERMS - 1 - i], ROWS)
    return series * s + exponent.to(tl.float64)


@triton.jit
def _of_parts(column_ptrs, at, here):
    """A column of the states of rows [R] in some parts [P]: [R, P], 0 where there is none."""
    return tl.load(column_ptrs[:, None] + at, mask=here, other=0)


@triton.jit
def _add_parts(s, column_ptrs, at, here, own, by):
    """Sums of four bins that begin ``own`` lower now, and those of some parts, ``by`` lower."""
    s = _below(s, own)
    parts = ()
    for j in tl.static_range(_BINS):
        parts = parts + (_of_parts(column_ptrs + j, at, here),)
    parts = _of_lanes(parts, by)
    out = ()
    for j in tl.static_range(_BINS):
        out = out + (s[j] + parts[j],)
    return out


@triton.jit(do_not_specialize=["T", "parts", "states_p"])
def finish_kernel(
    states_ptr,
    target_ptr,
    scale_ptr,
    logp_ptr,
    lse2_ptr,
    entropy_ptr,
    T,
    parts,
    states_p,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    ENTROPY: tl.constexpr,
    STATE: tl.constexpr,
):
    """exact.finish of states [parts, T, STATE]: fp32 [T] each."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_t = rows < T
    row_ptrs = states_ptr + rows.to(tl.int64) * STATE

    top = tl.full((ROWS,), _EMPTY, tl.int64)
    zero = tl.zeros((ROWS,), tl.int64)
    chosen = zero
    sums = (zero, zero, zero, zero)
    weighted = (zero, zero, zero, zero)
    for first in tl.range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        here = in_t[:, None] & (part < parts)[None, :]
        at = (part.to(tl.int64) * states_p)[None, :]
        tops = tl.load((row_ptrs + _TOP)[:, None] + at, mask=here, other=_EMPTY)
        new_top = tl.maximum(top, tl.max(tops, axis=1))
        by, own = new_top[:, None] - tops, new_top - top
        sums = _add_parts(sums, row_ptrs + _SUMS, at, here, own, by)
        if ENTROPY:
            weighted = _add_parts(weighted, row_ptrs + _WEIGHTED, at, here, own, by)
        chosen += tl.sum(_of_parts(row_ptrs + _CHOSEN, at, here), axis=1)
        top = new_top

    # log2 Σ 2^y = 16 top - 24 + log2 Σ_j S_j 2^(-16 j)
    mantissas = ()
    for j in tl.static_range(_BINS):
        mantissas = mantissas + (sums[j].to(tl.float64),)
    total = _mantissas(mantissas)
    known = (top < _LOST) & (total > 0.0)
    total = tl.where(known, total, 1.0)
    nan = _fp64(float("nan"), ROWS)
    log2_of_mantissa = _log2(total, ROWS) - _FRACTION
    lse2 = (top * _BIN).to(tl.float64) + log2_of_mantissa
    lse2 = tl.where(known, lse2, nan)
    tl.store(lse2_ptr + rows, lse2.to(tl.float32), mask=in_t)

    # log p = (y - log2 Σ 2^y) ln 2, at most 0
    target = tl.load(target_ptr + rows, mask=in_t, other=0)
    logit = chosen.to(tl.int32).to(tl.float32, bitcast=True)
    scale = tl.load(scale_ptr + rows, mask=in_t, other=1.0)
    ln2 = _fp64(_LN2, ROWS)
    logp = (logit.to(tl.float64) * scale.to(tl.float64) - lse2) * ln2
    logp = tl.where(logp > 0.0, 0.0, logp)
    logp = tl.where(target == _OUTSIDE, nan, logp)
    logp = tl.where(target == _MASKED, 0.0, logp)
    tl.store(logp_ptr + rows, logp.to(tl.float32), mask=in_t)

    if ENTROPY:
        # H = (log2 Σ_j S_j 2^(-16 j) - 24 - Σ 2^y (y - 16 top) / Σ 2^y) ln 2, at least 0
        moved = (weighted[0].to(tl.float64),)
        for j in tl.static_range(1, _BINS):
            moved = moved + (weighted[j].to(tl.float64) - mantissas[j] * (j * _WIDTH),)
        entropy = (log2_of_mantissa - _mantissas(moved) / total) * ln2
        entropy = tl.where(entropy < 0.0, 0.0, entropy)
        entropy = tl.where(known, entropy, nan)
        entropy = tl.where(target == _MASKED, 0.0, entropy)
        tl.store(entropy_ptr + rows, entropy.to(tl.float32), mask=in_t)
