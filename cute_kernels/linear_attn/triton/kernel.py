"""The causal convolution in Triton: rows, their gradients, and sums over the rows of a chunk.

A program has `ROWS` rows of one sequence and some channels; `sequence_rows` finds them from its
slot and the offsets, so no host reads these.  It walks its rows: the WIDTH - 1 inputs before a row
stay in registers, and the next rows are in flight.  The backward reads x and dy once: dx, the
gradient of the initial state, dweight and dbias need the same slopes, each computed once.

A row is a chain of multiply-adds, the oldest input first; the gradient of an input one of slopes,
its own row's first; a sum over a chunk's rows one too, the first row first.  Nothing is atomic or
autotuned, and nothing is fused but `tl.fma`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...cpu import elementary
from ...runtime.triton_sums import halves
from ...runtime.triton_tiles import multiples

_LOG2E = tl.constexpr(elementary.LOG2E_FP32[0])
_LOG2E_LOW = tl.constexpr(elementary.LOG2E_FP32[1])
_LN2 = tl.constexpr(elementary.LN2)


@triton.jit
def sequence_rows(offsets_ptr, ROWS: tl.constexpr, N, LENGTH, SEQUENCES):
    """(sequence, its first row, its end, the program's first row); see `Sequences.slots`.

    Of a pack the sequence `SEQUENCES` is what lies behind the last one.
    """
    slot = tl.program_id(0).to(tl.int64)
    if offsets_ptr is not None:
        low = tl.full((), 0, tl.int64)
        high = tl.full((), 0, tl.int64) + SEQUENCES
        while low < high:
            middle = (low + high + 1) // 2
            begin = tl.load(offsets_ptr + middle).to(tl.int64)
            here = begin // ROWS + middle <= slot
            low = tl.where(here, middle, low)
            high = tl.where(here, high, middle - 1)
        first = tl.load(offsets_ptr + low).to(tl.int64)
        last = tl.minimum(low + 1, SEQUENCES)
        end = tl.where(low == SEQUENCES, N, tl.load(offsets_ptr + last).to(tl.int64))
        chunk = slot - first // ROWS - low
        return low, first, end, first + chunk * ROWS
    else:
        chunks = tl.cdiv(LENGTH, ROWS)
        sequence = slot // chunks
        first = sequence * LENGTH
        return sequence, first, first + LENGTH, first + (slot % chunks) * ROWS


@triton.jit
def _exp_parts(x):
    """(y, m) with e^-x = 2^y (1 + m) in the steps of `triton_elementary.exp`."""
    near = tl.maximum(x, -110.0, propagate_nan=tl.PropagateNan.ALL)
    near = tl.minimum(near, 110.0, propagate_nan=tl.PropagateNan.ALL)
    # The signs are in the constants: Triton's -x is 0 - x, an instruction.
    y = near * -_LOG2E
    low = tl.fma(near, tl.full(x.shape, _LOG2E, tl.float32), y) + near * _LOG2E_LOW
    return y, low * -_LN2


@triton.jit
def _silu(x):
    """`activation_value` of "silu", the same bits."""
    y, m = _exp_parts(x)
    return tl.div_rn(x, tl.exp2(y) * (m + 1.0) + 1.0)


@triton.jit
def _silu_slope(x):
    """`activation_slope` of "silu", the same bits: σ(x) + x e / (1 + e)², e = e^-|x|."""
    y, m = _exp_parts(x)
    one = tl.full(x.shape, 1.0, tl.float32)
    sigmoid = tl.div_rn(one, tl.exp2(y) * (m + 1.0) + 1.0)
    # e^-|x| is 2^-|y| (1 + m), with the sign of m flipped unless y has a sign.
    flip = (y.to(tl.int32, bitcast=True) ^ -1) & -2147483648
    m = (m.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)
    e = tl.exp2(tl.abs(y) * -1.0) * (m + 1.0)
    below = e + 1.0
    square = below * below
    # IEEE's e / square without a branch.  σ(|x|)² is its inverse within 2^-20, a step of Newton's
    # makes that the nearest float, or its neighbour where 2^-40 decides, and the remainder corrects
    # the quotient: for every e of [0, 1] it was compared with the division, neighbours included.
    inverse = tl.maximum(sigmoid, 1.0 - sigmoid)
    inverse = inverse * inverse
    inverse = tl.fma(tl.fma(square * -1.0, inverse, one), inverse, inverse)
    quotient = e * inverse
    quotient = tl.fma(tl.fma(square * -1.0, quotient, e), inverse, quotient)
    return sigmoid + x * quotient


@triton.jit
def _taps(weight_ptr, channel, D, WIDTH: tl.constexpr):
    """The taps of each channel, fp32, the oldest input's first."""
    out = ()
    for w in tl.static_range(WIDTH):
        tap = tl.load((weight_ptr + w) + channel * WIDTH, mask=channel < D, other=0.0)
        out = out + (tap.to(tl.float32),)
    return out


@triton.jit
def _bias(bias_ptr, channel, D):
    """0 + the bias of each channel, fp32."""
    total = tl.zeros(channel.shape, tl.float32)
    if bias_ptr is not None:
        total = total + tl.load(bias_ptr + channel, mask=channel < D, other=0.0).to(tl.float32)
    return total


@triton.jit
def _inputs_before(
    x_ptr, initial_ptr, start, channel, sequence, first, end, SEQUENCES, D, x_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The WIDTH - 1 inputs before a row, fp32: rows of x, of the initial state, or 0."""
    out = ()
    for i in tl.static_range(WIDTH - 1):
        row = start + (i - (WIDTH - 1))
        inside = (row >= first) & (row < end)
        source, _step = _rows_from(x_ptr, row, x_stride, channel)
        value = tl.load(source, mask=inside & (channel < D), other=0.0)
        if initial_ptr is not None:
            place = row - first + (WIDTH - 1)
            before = (row < first) & (sequence < SEQUENCES)
            offset = (sequence * D + channel) * (WIDTH - 1) + place
            state = tl.load(initial_ptr + offset, mask=before & (channel < D), other=0.0)
            value = tl.where(row < first, state, value)
        out = out + (value.to(tl.float32),)
    return out


@triton.jit
def _rows_from(ptr, row, stride, channel):
    """(pointers to the channels of a row, what leads to the next row)."""
    step = tl.cast(stride, tl.int64)
    return (ptr + row * step) + channel, step


@triton.jit
def _load_rows(source, stride, left, COUNT: tl.constexpr):
    """COUNT rows from pointers on, not converted; 0 of those that are not left."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (tl.load(source + i * stride, mask=i < left, other=0.0),)
    return out


@triton.jit
def _chain(total, rows, taps, WIDTH: tl.constexpr):
    """total + Σ_i rows[i] taps[i], ascending."""
    for i in tl.static_range(WIDTH):
        total = tl.fma(rows[i], taps[i], total)
    return total


@triton.jit
def _backwards(taps, WIDTH: tl.constexpr):
    """The taps, the newest input's first."""
    out = ()
    for w in tl.static_range(WIDTH):
        out = out + (taps[WIDTH - 1 - w],)
    return out


@triton.jit
def _zeros(channel, COUNT: tl.constexpr):
    """COUNT rows of 0."""
    out = ()
    for i in tl.static_range(COUNT):  # noqa: B007  (Triton has no `_` of two types)
        out = out + (tl.zeros(channel.shape, tl.float32),)
    return out


@triton.jit
def _without_first(rows, WIDTH: tl.constexpr):
    """The last WIDTH - 1 of WIDTH rows."""
    out = ()
    for i in tl.static_range(1, WIDTH):
        out = out + (rows[i],)
    return out


@triton.jit
def store_zeros(out_ptr, start, stop, channel, D):
    """Rows that belong to no sequence."""
    for row in range(start, stop):
        zeros = tl.zeros(channel.shape, out_ptr.dtype.element_ty)
        tl.store((out_ptr + row * D) + channel, zeros, mask=channel < D)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "D", "x_stride"])
def conv_kernel(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, offsets_ptr, out_ptr,
    N, LENGTH, SEQUENCES, D, x_stride, WIDTH: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, AHEAD: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Rows of the convolution; rows that belong to no sequence are 0."""
    D, x_stride = multiples((D, x_stride), ALIGN)
    sequence, first, end, start = sequence_rows(offsets_ptr, ROWS, N, LENGTH, SEQUENCES)
    stop = tl.minimum(start + ROWS, end)
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    if sequence < SEQUENCES:
        taps, bias = _taps(weight_ptr, channel, D, WIDTH), _bias(bias_ptr, channel, D)
        before = _inputs_before(
            x_ptr, initial_ptr, start, channel, sequence, first, end, SEQUENCES, D, x_stride, WIDTH
        )
        count = (stop - start).to(tl.int32)
        left = tl.where(channel < D, count, 0)
        source, x_row = _rows_from(x_ptr, start, x_stride, channel)
        target, row = _rows_from(out_ptr, start, D, channel)
        following = _load_rows(source, x_row, left, AHEAD)
        for _ in range(0, count, AHEAD):
            rows = following
            source += AHEAD * x_row
            following = _load_rows(source, x_row, left - AHEAD, AHEAD)
            for i in tl.static_range(AHEAD):
                inputs = before + (rows[i].to(tl.float32),)
                y = _chain(bias, inputs, taps, WIDTH)
                if SILU:
                    y = _silu(y)
                tl.store(target + i * row, y.to(out_ptr.dtype.element_ty), mask=i < left)
                before = _without_first(inputs, WIDTH)
            target += AHEAD * row
            left -= AHEAD
    else:
        store_zeros(out_ptr, start, stop, channel, D)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "D", "x_stride"])
def conv_gradient_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, offsets_ptr, dx_ptr, d_initial_ptr, sums_ptr,
    N, LENGTH, SEQUENCES, D, x_stride, WIDTH: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, AHEAD: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """dx of a chunk, of the initial state of its sequence if it is the first, and its sums.

    sums [slots, WIDTH + 1, D]: dweight by tap, and dbias; -0 of no rows.  Rows of dx that belong to
    no sequence are 0.  The gradient of a row needs slopes of the WIDTH - 1 rows behind it.
    """
    D, x_stride = multiples((D, x_stride), ALIGN)
    sequence, first, end, start = sequence_rows(offsets_ptr, ROWS, N, LENGTH, SEQUENCES)
    stop = tl.minimum(start + ROWS, end)
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    sums = _zeros(channel, WIDTH + 1)
    if sequence < SEQUENCES:
        taps, bias = _taps(weight_ptr, channel, D, WIDTH), _bias(bias_ptr, channel, D)
        backwards, slopes = _backwards(taps, WIDTH), _zeros(channel, WIDTH - 1)
        before = _inputs_before(
            x_ptr, initial_ptr, start, channel, sequence, first, end, SEQUENCES, D, x_stride, WIDTH
        )
        count = tl.maximum(stop - start, 0).to(tl.int32)
        # Rows of the sequence, and of dx as it is behind by WIDTH - 1 rows, that are left.
        left = tl.where(channel < D, tl.minimum(end - start, ROWS + WIDTH).to(tl.int32), 0)
        left_dx = tl.where(channel < D, count + (WIDTH - 1), 0)
        initial_rows = tl.where(start == first, WIDTH - 1, 0)
        count_summed = 0 if sums_ptr is None else count
        source_x, x_row = _rows_from(x_ptr, start, x_stride, channel)
        source_dy, row = _rows_from(dy_ptr, start, D, channel)
        following_x = _load_rows(source_x, x_row, left, AHEAD)
        following_dy = _load_rows(source_dy, row, left, AHEAD)
        if dx_ptr is not None:
            target, row = _rows_from(dx_ptr, start - (WIDTH - 1), D, channel)
        for step in range(0, count + (WIDTH - 1), AHEAD):
            xs, dys = following_x, following_dy
            source_x += AHEAD * x_row
            source_dy += AHEAD * row
            following_x = _load_rows(source_x, x_row, left - AHEAD, AHEAD)
            following_dy = _load_rows(source_dy, row, left - AHEAD, AHEAD)
            for i in tl.static_range(AHEAD):
                inputs = before + (xs[i].to(tl.float32),)
                slope = dys[i].to(tl.float32)
                if SILU:
                    slope = _silu_slope(_chain(bias, inputs, taps, WIDTH)) * slope
                slope = tl.where(i < left, slope, 0.0)
                if step + i < count_summed:
                    sums = _summed(sums, inputs, slope, WIDTH)
                # Of the row WIDTH - 1 rows before.
                of_rows = slopes + (slope,)
                dx = _chain(tl.zeros(channel.shape, tl.float32), of_rows, backwards, WIDTH)
                if dx_ptr is not None:
                    mask = (step + i >= WIDTH - 1) & (i < left_dx)
                    tl.store(target + i * row, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                if d_initial_ptr is not None:
                    offset = (sequence * D + channel) * (WIDTH - 1) + (step + i)
                    value = dx.to(d_initial_ptr.dtype.element_ty)
                    mask = (channel < D) & (step + i < initial_rows)
                    tl.store(d_initial_ptr + offset, value, mask=mask)
                before = _without_first(inputs, WIDTH)
                slopes = _without_first(of_rows, WIDTH)
            left -= AHEAD
            left_dx -= AHEAD
            if dx_ptr is not None:
                target += AHEAD * row
    elif dx_ptr is not None:
        store_zeros(dx_ptr, start, stop, channel, D)
    if sums_ptr is not None:
        for w in tl.static_range(WIDTH + 1):
            store_sums(
                sums_ptr, sums[w][None, :], w + tl.arange(0, 1), channel, sequence, start, end,
                SEQUENCES, D, WIDTH + 1,
            )  # fmt: skip


@triton.jit
def _summed(sums, inputs, slope, WIDTH: tl.constexpr):
    """Sums by tap of input times slope, and of the slope, with one row more."""
    out = ()
    for w in tl.static_range(WIDTH):
        out = out + (tl.fma(inputs[w], slope, sums[w]),)
    return out + (sums[WIDTH] + slope,)


@triton.jit
def store_sums(
    sums_ptr, total, row, channel, sequence, start, end, SEQUENCES, D, EACH: tl.constexpr
):  # fmt: skip
    """sums [slots, EACH, D]: a chunk's totals, of rows below EACH; -0 where there is no chunk."""
    # -0, which adds nothing to -0 either; Triton makes +0 of a literal.
    nothing = tl.full(total.shape, -2147483648, tl.int32).to(tl.float32, bitcast=True)
    total = tl.where((sequence < SEQUENCES) & (start < end), total, nothing)
    slot = tl.program_id(0).to(tl.int64)
    offset = (slot * EACH + row[:, None]) * D + channel[None, :]
    mask = (row < EACH)[:, None] & (channel < D)[None, :]
    tl.store(sums_ptr + offset, total, mask=mask)


@triton.jit
def _slots_added(
    total, source, stride, COUNT, mask, AHEAD: tl.constexpr, FOLD: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """total + the next AHEAD groups of FOLD slots, of COUNT slots, ascending."""
    fold = tl.arange(0, FOLD)[:, None]
    ahead = ()
    for i in tl.static_range(AHEAD):
        # The last slot again behind it: with a mask each, few loads would be in flight.
        slot = tl.minimum(i * FOLD + fold, COUNT - 1)
        ahead = ahead + (tl.load(source + slot * stride, mask=mask, other=0.0),)
    for i in tl.static_range(AHEAD):
        slots = ahead[i]
        if FOLD > 1:
            slots = tl.where(i * FOLD + fold < COUNT, slots, 0.0)
        added = total + halves(slots, 1, FOLD, CHANNELS)
        total = tl.where(i * FOLD < COUNT, added, total)
    return total


@triton.jit(do_not_specialize=["SLOTS", "D", "channel_stride"])
def add_sums_kernel(
    sums_ptr, into_ptr, SLOTS, D, channel_stride, ROW: tl.constexpr, EACH: tl.constexpr,
    CHANNELS: tl.constexpr, AHEAD: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """into[d, tap] += sums[slot, tap, d], slots ascending; one tap a program.

    FOLD slots are added half onto half before; AHEAD of these sums are loaded together.
    """
    tap = tl.program_id(1).to(tl.int64)
    channel = (tl.program_id(0).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    mask = channel < D
    target = into_ptr + channel * channel_stride + tap
    total = tl.load(target, mask=mask, other=0.0)
    source = sums_ptr + (ROW + tap) * D + channel
    stride = tl.cast(D, tl.int64) * EACH
    for _ in range(0, SLOTS // (AHEAD * FOLD)):
        total = _slots_added(total, source, stride, AHEAD * FOLD, mask, AHEAD, FOLD, CHANNELS)
        source += stride * (AHEAD * FOLD)
    for first in range(SLOTS // (AHEAD * FOLD) * (AHEAD * FOLD), SLOTS, 4 * FOLD):
        total = _slots_added(total, source, stride, SLOTS - first, mask, 4, FOLD, CHANNELS)
        source += stride * (4 * FOLD)
    tl.store(target, total, mask=mask)
