"""The selective scan in Triton, forward and backward: the recurrence, row by row.

    S_n = e^(A_n dt) S_n + (dt x) B_n    y = Σ_n S_n C_n + D x    out = y silu(z)

    scan_kernel            dt = softplus(delta + delta_bias), out, the states of a sequence
    state_gradient_kernel  the last row first: dS_n ← e^(A_n dt) G_n, G_n = dy C_n + dS_n
    gradient_kernel        a chunk, whose states are computed again from the one before it:
                           dC_n = Σ_channels dy S_n    dB_n = Σ_channels (dt x) G_n
                           r = Σ_n G_n B_n    h_n = G_n S_n' e^(A_n dt), S' before the row
                           dx = dt r + D dy    d_delta = (x r + Σ_n A_n h_n) softplus'
                           dA_n = Σ dt h_n    dD = Σ dy x    d_delta_bias = Σ d_delta
                           dy = dout silu(z)    dz = dout y silu'(z)

Layouts.  A program has `CHANNELS` channels of one group, a lane each, and all n: S is a tuple of
vectors.  Rows [N, D], neighbours of a channel side by side; B and C [N, G, N_]; states and their
gradients [slots, N_, D], those before and behind a chunk of 32 rows, at its slot of
`Sequences.slots(32)`.

Order of sums.  e^(A dt) is 2^((log2(e) A) dt).  S and dS are fp32 behind each row, and each is one
fma and one product; y, r and Σ A h are chains, n ascending, one fma each, D x last.  dB and dC add
a program's channels as halves, and programs ascending.  Sums over a chunk's rows are chains, the
last row first; chunks are added by `add_sums_kernel`.  Results are rounded once.

Rows beyond an end leave S and sums as they are, by selection.  Nothing is fused but `tl.fma`;
nothing is atomic or autotuned; offsets are 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...cpu import elementary
from ...runtime.triton_elementary import activation_slope, activation_value
from ...runtime.triton_sums import halves
from ..config import SELECTIVE_CHUNK
from .kernel import add_sums_kernel as add_sums_kernel
from .kernel import sequence_rows, store_sums, store_zeros
from .kernel_delta import row_of_last, sequence_of
from .kernel_gate import softplus

CHUNK = tl.constexpr(SELECTIVE_CHUNK)
_LOG2E = tl.constexpr(elementary.LOG2E_FP32[0])


@triton.jit
def _channels(D, GROUPS: tl.constexpr, CHANNELS: tl.constexpr):
    """(group, channels of a program; D stands for what lies beyond those of the group)."""
    group = tl.program_id(1).to(tl.int64)
    each = D // GROUPS
    channel = tl.program_id(2).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    return group, tl.where(channel < each, group * each + channel, D)


@triton.jit
def _row(ptr, row, stride, channel, D, inside):
    """A row of channels, fp32."""
    mask = (channel < D) & inside
    return tl.load(ptr + row * stride + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _number(ptr, offset, inside):
    """A number of B or C, fp32."""
    return tl.load(ptr + offset, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _columns(ptr, base, channel, stride, step, D, STATE: tl.constexpr):
    """For each n the numbers of channels at base + channel stride + n step, fp32; or zeros."""
    out = ()
    for n in tl.static_range(STATE):
        if ptr is not None:
            offset = base + channel * stride + n * step
            value = tl.load(ptr + offset, mask=channel < D, other=0.0).to(tl.float32)
        else:
            value = tl.zeros(channel.shape, tl.float32)
        out = out + (value,)
    return out


@triton.jit
def _store_columns(ptr, values, base, channel, stride, step, D, STATE: tl.constexpr):
    """The inverse of `_columns`."""
    for n in tl.static_range(STATE):
        offset = base + channel * stride + n * step
        tl.store(ptr + offset, values[n], mask=channel < D)


@triton.jit
def _next_state(s, A, step, x, B_ptr, at, inside, STATE: tl.constexpr):
    """S behind a row, of which B lies at ``at``; S itself where there is none."""
    out, update = (), step * x
    for n in tl.static_range(STATE):
        added = update * _number(B_ptr, at + n, inside)
        out = out + (tl.where(inside, tl.fma(tl.exp2(A[n] * _LOG2E * step), s[n], added), s[n]),)
    return out


@triton.jit
def _over_channels(terms, COUNT: tl.constexpr, CHANNELS: tl.constexpr):
    """Sums of COUNT vectors, a power of two of them, each half onto half: [COUNT]."""
    for level in tl.static_range(10):
        if (COUNT >> level) > 1:
            joined = ()
            for i in tl.static_range(COUNT >> (level + 1)):
                joined = joined + (tl.join(terms[i], terms[i + (COUNT >> (level + 1))]),)
            terms = joined
    tile = tl.reshape(terms[0], [1, CHANNELS, COUNT])
    return tl.reshape(halves(tile, 1, CHANNELS, COUNT), [COUNT])


@triton.jit
def _read(s, C_ptr, at, skip, x, inside, STATE: tl.constexpr):
    """Σ_n S_n C_n + D x of a row."""
    y = tl.zeros(x.shape, tl.float32)
    for n in tl.static_range(STATE):
        c = _number(C_ptr, at + n, inside)
        y = tl.fma(s[n], tl.broadcast_to(c, y.shape), y)
    return tl.fma(skip, x, y)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "SLOTS", "LAG", "D"])
def scan_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, initial_ptr, offsets_ptr,
    out_ptr, step_ptr, states_ptr, final_ptr,
    N, LENGTH, SEQUENCES, SLOTS, LAG, D, x_row, dt_row, z_row, B_row, B_group, C_row, C_group,
    GROUPS: tl.constexpr, STATE: tl.constexpr, SOFTPLUS: tl.constexpr, LAGS: tl.constexpr,
    CHANNELS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows and states of a sequence; of a pack, program `SEQUENCES` has what lies behind it.

    final: the state behind the last row; if it LAGS, that of `tensors.Last`, of chunks of one row.
    Rows of no sequence, and states of slots that no chunk has, are 0.
    """
    sequence = tl.program_id(0).to(tl.int64)
    group, channel = _channels(D, GROUPS, CHANNELS)
    if offsets_ptr is not None:
        # Slots of this sequence that no chunk has; those behind the pack.
        begin = tl.load(offsets_ptr + sequence).to(tl.int64)
        stop = tl.load(offsets_ptr + tl.minimum(sequence + 1, SEQUENCES)).to(tl.int64)
        slot = begin // CHUNK + sequence + tl.cdiv(stop - begin, CHUNK)
        following = stop // CHUNK + sequence + 1
        following = tl.where(sequence == SEQUENCES, SLOTS, following)
        for empty in range(slot, following):
            store_zeros(states_ptr, empty * STATE, (empty + 1) * STATE, channel, D)
        if sequence == SEQUENCES:
            store_zeros(step_ptr, begin, N, channel, D)
            store_zeros(out_ptr, begin, N, channel, D)
            return
    first, end, slot = sequence_of(offsets_ptr, sequence, LENGTH, CHUNK)
    A = _columns(A_ptr, 0, channel, STATE, 1, D, STATE)
    bias = _columns(dt_bias_ptr, 0, channel, 1, 0, D, 1)[0]
    skip = _columns(D_ptr, 0, channel, 1, 0, D, 1)[0]
    of_sequence = sequence * D * STATE
    s = _columns(initial_ptr, of_sequence, channel, STATE, 1, D, STATE)
    behind = row_of_last(first, end, LAG, 1)
    if LAGS:
        if behind == first:
            _store_columns(final_ptr, s, of_sequence, channel, STATE, 1, D, STATE)
    for start in range(first, end, CHUNK):
        _store_columns(states_ptr, s, slot * STATE * D, channel, 1, D, D, STATE)
        stop = tl.minimum(start + CHUNK, end)
        for row in range(start, stop, AHEAD):
            # Nothing is stored before the last of these rows, so loads may run ahead.
            steps, results = (), ()
            for i in tl.static_range(AHEAD):
                inside = row + i < stop
                x = _row(x_ptr, row + i, x_row, channel, D, inside)
                step = _row(dt_ptr, row + i, dt_row, channel, D, inside) + bias
                if SOFTPLUS:
                    step = softplus(step)
                at = (row + i) * B_row + group * B_group
                s = _next_state(s, A, step, x, B_ptr, at, inside, STATE)
                at = (row + i) * C_row + group * C_group
                y = _read(s, C_ptr, at, skip, x, inside, STATE)
                if z_ptr is not None:
                    y = y * activation_value(
                        _row(z_ptr, row + i, z_row, channel, D, inside), "silu"
                    )
                if LAGS:
                    if row + i + 1 == behind:
                        _store_columns(final_ptr, s, of_sequence, channel, STATE, 1, D, STATE)
                steps, results = steps + (step,), results + (y,)
            for i in tl.static_range(AHEAD):
                mask, at = (channel < D) & (row + i < stop), (row + i) * D + channel
                tl.store(step_ptr + at, steps[i], mask=mask)
                tl.store(out_ptr + at, results[i].to(out_ptr.dtype.element_ty), mask=mask)
        slot += 1
    if final_ptr is not None:
        if not LAGS:
            _store_columns(final_ptr, s, of_sequence, channel, STATE, 1, D, STATE)


@triton.jit
def _slope(d_out_ptr, z_ptr, row, d_row, z_row, channel, D, inside):
    """dy of a row."""
    dy = _row(d_out_ptr, row, d_row, channel, D, inside)
    if z_ptr is not None:
        dy = dy * activation_value(_row(z_ptr, row, z_row, channel, D, inside), "silu")
    return dy


@triton.jit(do_not_specialize=["LENGTH", "D"])
def state_gradient_kernel(
    d_out_ptr, A_ptr, C_ptr, z_ptr, step_ptr, d_final_ptr, offsets_ptr, d_states_ptr, d_initial_ptr,
    LENGTH, D, d_row, z_row, C_row, C_group,
    GROUPS: tl.constexpr, STATE: tl.constexpr, CHANNELS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Gradients of the states behind the chunks of a sequence, the last row first."""
    sequence = tl.program_id(0).to(tl.int64)
    group, channel = _channels(D, GROUPS, CHANNELS)
    first, end, first_slot = sequence_of(offsets_ptr, sequence, LENGTH, CHUNK)
    A = _columns(A_ptr, 0, channel, STATE, 1, D, STATE)
    of_sequence = sequence * D * STATE
    ds = _columns(d_final_ptr, of_sequence, channel, STATE, 1, D, STATE)
    chunks = tl.cdiv(end - first, CHUNK)
    for k in range(0, chunks):
        chunk = chunks - 1 - k
        start, at_slot = first + chunk * CHUNK, (first_slot + chunk) * STATE * D
        _store_columns(d_states_ptr, ds, at_slot, channel, 1, D, D, STATE)
        count = tl.minimum(start + CHUNK, end) - start
        for back in range(0, count, AHEAD):
            for i in tl.static_range(AHEAD):
                row = start + count - 1 - back - i
                inside = row >= start
                dy = _slope(d_out_ptr, z_ptr, row, d_row, z_row, channel, D, inside)
                step = _row(step_ptr, row, D, channel, D, inside)
                before = ()
                for n in tl.static_range(STATE):
                    c = _number(C_ptr, row * C_row + group * C_group + n, inside)
                    g = tl.fma(dy, tl.broadcast_to(c, dy.shape), ds[n])
                    g = tl.exp2(A[n] * _LOG2E * step) * g
                    before = before + (tl.where(inside, g, ds[n]),)
                ds = before
    if d_initial_ptr is not None:
        _store_columns(d_initial_ptr, ds, of_sequence, channel, STATE, 1, D, STATE)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "D"])
def gradient_kernel(
    d_out_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, offsets_ptr,
    step_ptr, states_ptr, d_states_ptr, dx_ptr, d_dt_ptr, dz_ptr, parts_ptr, sums_ptr,
    N, LENGTH, SEQUENCES, D, d_row, x_row, dt_row, z_row, B_row, B_group, C_row, C_group,
    GROUPS: tl.constexpr, STATE: tl.constexpr, SOFTPLUS: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk; the states of ``ROWS`` rows are held at a time.

    parts [D / CHANNELS, 2, N, G, N_]: dB and dC of a program's channels.  sums [slots, N_ + 2, D]:
    dA by n, dD, d_delta_bias; -0 where there is no chunk.  Rows of no sequence are 0.
    """
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    at_slot = tl.program_id(0).to(tl.int64) * STATE * D
    group, channel = _channels(D, GROUPS, CHANNELS)
    lines = tl.cast(N, tl.int64) * (GROUPS * STATE)
    parts_ptr += tl.program_id(2) * 2 * lines + group * STATE
    stop = tl.minimum(start + CHUNK, end)
    zeros = tl.zeros(channel.shape, tl.float32)
    if sequence == SEQUENCES:
        store_zeros(dx_ptr, start, stop, channel, D)
        store_zeros(d_dt_ptr, start, stop, channel, D)
        if z_ptr is not None:
            store_zeros(dz_ptr, start, stop, channel, D)
        for row in range(start, stop):
            for n in tl.static_range(STATE):
                tl.store(parts_ptr + row * (GROUPS * STATE) + n, 0.0)
                tl.store(parts_ptr + lines + row * (GROUPS * STATE) + n, 0.0)
        stop = start
    A = _columns(A_ptr, 0, channel, STATE, 1, D, STATE)
    bias = _columns(dt_bias_ptr, 0, channel, 1, 0, D, 1)[0]
    skip = _columns(D_ptr, 0, channel, 1, 0, D, 1)[0]
    ds = _columns(d_states_ptr, at_slot, channel, 1, D, D, STATE)
    dA = _columns(None, 0, channel, 1, D, D, STATE)
    dD, d_bias = zeros, zeros
    blocks = tl.cdiv(tl.maximum(stop - start, 0), ROWS)
    for k in range(0, blocks):
        top = start + (blocks - 1 - k) * ROWS
        s = _columns(states_ptr, at_slot, channel, 1, D, D, STATE)
        for row in range(start, top):
            x = _row(x_ptr, row, x_row, channel, D, True)
            step = _row(step_ptr, row, D, channel, D, True)
            s = _next_state(s, A, step, x, B_ptr, row * B_row + group * B_group, True, STATE)
        kept = ()
        for i in tl.static_range(ROWS):
            row = top + i
            kept = kept + (s,)
            if row < stop:
                x = _row(x_ptr, row, x_row, channel, D, True)
                step = _row(step_ptr, row, D, channel, D, True)
                s = _next_state(s, A, step, x, B_ptr, row * B_row + group * B_group, True, STATE)
        for back in tl.static_range(ROWS):
            row = top + (ROWS - 1 - back)
            before = kept[ROWS - 1 - back]
            if row < stop:
                x = _row(x_ptr, row, x_row, channel, D, True)
                step = _row(step_ptr, row, D, channel, D, True)
                dy = _slope(d_out_ptr, z_ptr, row, d_row, z_row, channel, D, True)
                read, of_step, y = zeros, zeros, zeros
                rest, of_A, of_B, of_C = (), (), (), ()
                for n in tl.static_range(STATE):
                    b = _number(B_ptr, row * B_row + group * B_group + n, True)
                    c = _number(C_ptr, row * C_row + group * C_group + n, True)
                    b, c = tl.broadcast_to(b, y.shape), tl.broadcast_to(c, y.shape)
                    g = tl.fma(dy, c, ds[n])
                    of_B, of_C = of_B + (step * x * g,), of_C + (dy * s[n],)
                    read = tl.fma(g, b, read)
                    y = tl.fma(s[n], c, y)
                    decay = tl.exp2(A[n] * _LOG2E * step)
                    h = g * before[n] * decay
                    of_step = tl.fma(A[n], h, of_step)
                    of_A, rest = of_A + (tl.fma(step, h, dA[n]),), rest + (decay * g,)
                ds, dA = rest, of_A
                which = tl.arange(0, 2 * STATE)
                place = which // STATE * lines + row * (GROUPS * STATE) + which % STATE
                tl.store(parts_ptr + place, _over_channels(of_B + of_C, 2 * STATE, CHANNELS))
                mask, offset = channel < D, row * D + channel
                dx = tl.fma(skip, dy, read * step)
                d_dt = tl.fma(x, read, of_step)
                if SOFTPLUS:
                    raw = _row(dt_ptr, row, dt_row, channel, D, True) + bias
                    d_dt = d_dt * activation_value(raw, "sigmoid")
                tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                tl.store(d_dt_ptr + offset, d_dt.to(d_dt_ptr.dtype.element_ty), mask=mask)
                if z_ptr is not None:
                    z = _row(z_ptr, row, z_row, channel, D, True)
                    d_out = _row(d_out_ptr, row, d_row, channel, D, True)
                    dz = d_out * tl.fma(skip, x, y) * activation_slope(z, "silu")
                    tl.store(dz_ptr + offset, dz.to(dz_ptr.dtype.element_ty), mask=mask)
                dD = tl.fma(dy, x, dD)
                d_bias += d_dt
            s = before
    sums = dA + (dD, d_bias)
    for n in tl.static_range(STATE + 2):
        store_sums(
            sums_ptr, sums[n][None, :], n + tl.arange(0, 1), channel, sequence, start, end,
            SEQUENCES, D, STATE + 2,
        )  # fmt: skip
