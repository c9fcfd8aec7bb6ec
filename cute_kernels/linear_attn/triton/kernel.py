"""The causal convolution in Triton: rows, their gradients, and sums over the rows of a chunk.

A program has `ROWS` rows of one sequence and some channels; `sequence_rows` finds them from its
slot and the offsets, so no host reads these.  A row is a chain of multiply-adds, the oldest input
first; a sum over a chunk's rows is one too, the first row first.  Nothing is atomic or autotuned,
and nothing is fused but `tl.fma`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.triton_elementary import activation_slope, activation_value
from ...runtime.triton_sums import halves


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
def _input(
    x_ptr, initial_ptr, row, channel, sequence, first, end, SEQUENCES, D, x_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """fp32 rows of x; before a sequence's first one its initial state, or 0."""
    inside = (row >= first) & (row < end)
    mask = inside[:, None] & (channel < D)[None, :]
    offset = row[:, None] * x_stride + channel[None, :]
    out = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if initial_ptr is not None:
        place = row - first + (WIDTH - 1)
        before = (row < first) & (place >= 0) & (sequence < SEQUENCES)
        mask = before[:, None] & (channel < D)[None, :]
        offset = (sequence * D + channel[None, :]) * (WIDTH - 1) + place[:, None]
        state = tl.load(initial_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        out = tl.where(before[:, None], state, out)
    return out


@triton.jit
def _tap(weight_ptr, channel, w, D, WIDTH: tl.constexpr):
    """Tap w of each channel, fp32 [1, channels]."""
    offset = channel * WIDTH + w
    return tl.load(weight_ptr + offset, mask=channel < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _preactivation(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, row, channel, sequence, first, end,
    SEQUENCES, D, x_stride, WIDTH: tl.constexpr,
):  # fmt: skip
    """bias + Σ_w weight[:, w] input(row - WIDTH + 1 + w), the oldest input first."""
    total = tl.zeros((row.shape[0], channel.shape[0]), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=channel < D, other=0.0).to(tl.float32)
        total = total + bias[None, :]
    for w in tl.static_range(WIDTH):
        rows = _input(
            x_ptr, initial_ptr, row - (WIDTH - 1) + w, channel, sequence, first, end,
            SEQUENCES, D, x_stride, WIDTH,
        )  # fmt: skip
        total = tl.fma(rows, _tap(weight_ptr, channel, w, D, WIDTH), total)
    return total


@triton.jit
def _slope(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, row, channel, sequence, first, end,
    SEQUENCES, D, x_stride, WIDTH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Gradient of the preactivation of rows; 0 outside of the sequence."""
    inside = ((row >= first) & (row < end))[:, None] & (channel < D)[None, :]
    offset = row[:, None] * D + channel[None, :]
    dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        pre = _preactivation(
            x_ptr, weight_ptr, bias_ptr, initial_ptr, row, channel, sequence, first, end,
            SEQUENCES, D, x_stride, WIDTH,
        )  # fmt: skip
        dy = activation_slope(pre, "silu") * dy
    return tl.where(inside, dy, 0.0)


@triton.jit
def _store_rows(out_ptr, rows, row, channel, sequence, end, SEQUENCES, D):
    """Store rows of a result; those that belong to no sequence are 0."""
    rows = tl.where(sequence < SEQUENCES, rows, 0.0)
    mask = (row < end)[:, None] & (channel < D)[None, :]
    offset = row[:, None] * D + channel[None, :]
    tl.store(out_ptr + offset, rows.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "D", "x_stride"])
def conv_kernel(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, offsets_ptr, out_ptr,
    N, LENGTH, SEQUENCES, D, x_stride, WIDTH: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Rows of the convolution; rows that belong to no sequence are 0."""
    sequence, first, end, start = sequence_rows(offsets_ptr, ROWS, N, LENGTH, SEQUENCES)
    row = start + tl.arange(0, ROWS)
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    y = _preactivation(
        x_ptr, weight_ptr, bias_ptr, initial_ptr, row, channel, sequence, first, end,
        SEQUENCES, D, x_stride, WIDTH,
    )  # fmt: skip
    if SILU:
        y = activation_value(y, "silu")
    _store_rows(out_ptr, y, row, channel, sequence, end, SEQUENCES, D)


@triton.jit
def _gradient(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, row, channel, sequence, first, end,
    SEQUENCES, D, x_stride, WIDTH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Gradient of inputs: Σ_w slope(row + WIDTH - 1 - w) weight[:, w], the first row first."""
    total = tl.zeros((row.shape[0], channel.shape[0]), tl.float32)
    for i in range(WIDTH):  # unrolled, it would spill
        of_row = _slope(
            dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, row + i, channel, sequence, first,
            end, SEQUENCES, D, x_stride, WIDTH, SILU,
        )  # fmt: skip
        total = tl.fma(of_row, _tap(weight_ptr, channel, WIDTH - 1 - i, D, WIDTH), total)
    return total


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "D", "x_stride"])
def conv_gradient_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, offsets_ptr, dx_ptr,
    N, LENGTH, SEQUENCES, D, x_stride, WIDTH: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx; rows that belong to no sequence are 0."""
    sequence, first, end, start = sequence_rows(offsets_ptr, ROWS, N, LENGTH, SEQUENCES)
    row = start + tl.arange(0, ROWS)
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    dx = _gradient(
        dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, row, channel, sequence, first, end,
        SEQUENCES, D, x_stride, WIDTH, SILU,
    )  # fmt: skip
    _store_rows(dx_ptr, dx, row, channel, sequence, end, SEQUENCES, D)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "D", "x_stride"])
def conv_initial_gradient_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, offsets_ptr, d_initial_ptr,
    N, LENGTH, SEQUENCES, D, x_stride,
    WIDTH: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradient of the initial state of a sequence, one a program: of the rows before its first."""
    sequence = tl.program_id(0).to(tl.int64)
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + sequence).to(tl.int64)
        end = tl.load(offsets_ptr + sequence + 1).to(tl.int64)
    else:
        first = sequence * LENGTH
        end = first + LENGTH
    place = tl.arange(0, 4)  # W - 1 at least, a power of two
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    gradient = _gradient(
        dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, first - (WIDTH - 1) + place, channel,
        sequence, first, end, SEQUENCES, D, x_stride, WIDTH, SILU,
    )  # fmt: skip
    offset = (sequence * D + channel[None, :]) * (WIDTH - 1) + place[:, None]
    mask = (place < WIDTH - 1)[:, None] & (channel < D)[None, :]
    tl.store(d_initial_ptr + offset, gradient.to(d_initial_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "D", "x_stride"])
def conv_sums_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, offsets_ptr, sums_ptr,
    N, LENGTH, SEQUENCES, D, x_stride, WIDTH: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """sums [slots, WIDTH + 1, D]: dweight by tap and dbias of a chunk; -0 where there is none."""
    sequence, first, end, start = sequence_rows(offsets_ptr, ROWS, N, LENGTH, SEQUENCES)
    tap = tl.arange(0, 8)
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((8, CHANNELS), tl.float32)
    stop = tl.minimum(start + ROWS, end)
    for row in range(start, stop):
        of_row = _slope(
            dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, row + tl.arange(0, 1), channel,
            sequence, first, end, SEQUENCES, D, x_stride, WIDTH, SILU,
        )  # fmt: skip
        rows = _input(
            x_ptr, initial_ptr, row - (WIDTH - 1) + tap, channel, sequence, first, end,
            SEQUENCES, D, x_stride, WIDTH,
        )  # fmt: skip
        rows = tl.where((tap == WIDTH)[:, None], 1.0, rows)
        total = tl.fma(rows, tl.broadcast_to(of_row, (8, CHANNELS)), total)
    store_sums(sums_ptr, total, tap, channel, sequence, start, end, SEQUENCES, D, WIDTH + 1)


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
