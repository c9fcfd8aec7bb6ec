"""The state space scan in Triton, backward: five kernels, from what the forward left.

With P, S^, G and dt of kernel_ssd.py and the gradient dS' of the state behind a chunk:

    gate_gradient_kernel    dz = dout y silu'(z);  dy = dout silu(z), of scans with z
    state_gradient_kernel   the last chunk first: dS = 2^G_C dS' + Σ_i dy_i (2^G_i C_i)ᵀ;  <dS', S^>
    row_gradient_kernel     D1_ij = Σ_heads (dy_i·x_j) 2^(G_i - G_j) dt_j, j <= i
                            dC_i = Σ_heads 2^G_i S^ᵀ dy_i + Σ_j D1_ij B_j
                            q_i = dy_i·(2^G_i S^ C_i + Σ_j P_ij x_j)
    column_gradient_kernel  k_j = 2^(G_C - G_j) dt_j dS' B_j + Σ_{i≥j} P_ij dy_i
                            dx_j = k_j + D dy_j;  e_j = x_j·k_j / dt_j;  dD = Σ dy x
                            dB_j = Σ_heads 2^(G_C - G_j) dt_j dS'ᵀ x_j + Σ_i D1_ij C_i
    steps_gradient_kernel   dG_i = q_i - dt_i e_i;  dg_j = Σ_{i≥j} dG_i and what S' owes to G_C
                            d(dt)_j = (e_j + A dg_j) softplus'(dt + dt_bias) inside the limits
                            dA = Σ dt dg;  d_dt_bias = Σ d(dt)

Layouts are those of kernel_ssd.py; gradients of states are [slots, H, P, N_] bf16, as the states
are; D1 is [slots, G, 128, 128] bf16.

Order of sums.  Products as in the forward.  dS takes a chunk's rows from zero and is added by one
fma; a column block's share of <dS', S^> is a halving tree, and column blocks are added ascending.
D1, dC and dB add the heads of a group, ascending, by one fma each; the product with D1, rounded to
bf16, comes last.  q and e are halving trees over P; dD of 64 rows is one over them, and one over P
if a head's channels share D.  dg starts from what S' owes to G_C: the sum over j of
dt_j 2^(G_C - G_j) x_j·(dS' B_j), a tree of each 64 rows, and 2^G_C <dS', S^>; then the last row
comes first, and so do sums over a chunk's rows.  Chunks are added by `add_sums_kernel`.  Rounded to
bf16: dS', dy with z, P, 2^G_i C_i, D1, results.  q and e have the same P: what cancels in dG, as
terms of i = j do, cancels in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.triton_elementary import activation_slope, activation_value
from ...runtime.triton_sums import halves, lane_sum, over_columns, rows_of
from .kernel import add_sums_kernel as add_sums_kernel
from .kernel import sequence_rows, store_sums
from .kernel_delta import gates_at, product, rows_at, sequence_of, state_at
from .kernel_ssd import AT_ONCE, CHUNK, HALF, row_of, skip_at, steps_at, weights


@triton.jit(do_not_specialize=["N", "SEQUENCES"])
def gate_gradient_kernel(
    d_out_ptr, z_ptr, ungated_ptr, offsets_ptr, dy_ptr, dz_ptr,
    N, SEQUENCES, d_row, d_head, z_row, z_head,
    H: tl.constexpr, P: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """dy and dz of ``ELEMENTS`` of [N, H, P]; 0 of rows of no sequence."""
    index = rows_of(tl.program_id(0), ELEMENTS)
    row, head, p = index // (H * P), index // P % H, index % P
    end = tl.cast(N, tl.int64)
    if offsets_ptr is not None:
        end = tl.load(offsets_ptr + SEQUENCES).to(tl.int64)
    mask = row < N
    d_out = tl.load(d_out_ptr + row * d_row + head * d_head + p, mask=mask, other=0.0)
    z = tl.load(z_ptr + row * z_row + head * z_head + p, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(ungated_ptr + index, mask=mask, other=0.0).to(tl.float32)
    d_out = d_out.to(tl.float32)
    dy = tl.where(row < end, d_out * activation_value(z, "silu"), 0.0)
    dz = tl.where(row < end, d_out * y * activation_slope(z, "silu"), 0.0)
    tl.store(dy_ptr + index, dy.to(tl.bfloat16), mask=mask)
    tl.store(dz_ptr + index, dz.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["N", "LENGTH"])
def state_gradient_kernel(
    dy_ptr, C_ptr, decay_ptr, states_ptr, d_final_ptr, offsets_ptr,
    d_states_ptr, of_states_ptr, d_initial_ptr,
    N, LENGTH, d_row, d_head, C_row, C_head,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, STATE: tl.constexpr,
    COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of the states of a sequence and head, ``COLUMNS`` of N_, the last chunk first.

    of_states [slots, N_ / COLUMNS, H]: shares of <dS', S^>.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    first, end, first_slot = sequence_of(offsets_ptr, sequence, LENGTH, CHUNK)
    at = state_at(sequence, head, columns, H, P, STATE)
    ds = tl.zeros([P, COLUMNS], tl.float32)
    if d_final_ptr is not None:
        ds = tl.load(d_final_ptr + at)
    chunks = tl.cdiv(end - first, CHUNK)
    for k in range(0, chunks):
        chunk = chunks - 1 - k
        start, slot = first + chunk * CHUNK, first_slot + chunk
        at_slot = state_at(slot, head, columns, H, P, STATE)
        tl.store(d_states_ptr + at_slot, ds.to(tl.bfloat16))
        s = tl.load(states_ptr + at_slot).to(tl.float32)
        share = lane_sum(tl.reshape(ds * s, [P * COLUMNS]), P * COLUMNS)
        tl.store(of_states_ptr + (slot * (STATE // COLUMNS) + block) * H + head, share)
        row = start + tl.arange(0, CHUNK)
        inside = row < end
        dy = rows_at(dy_ptr, row, head, tl.arange(0, P), d_row, d_head, inside)
        c = rows_at(C_ptr, row, head // GROUP, columns, C_row, C_head, inside)
        decay = gates_at(decay_ptr, row, head * N, 1, inside)
        whole = tl.load(decay_ptr + head * N + tl.minimum(start + CHUNK, end) - 1)
        c = (c.to(tl.float32) * tl.exp2(decay)[:, None]).to(tl.bfloat16)
        update = product(tl.trans(dy), c, tl.zeros([P, COLUMNS], tl.float32), UPCAST)
        ds = tl.fma(tl.broadcast_to(tl.exp2(whole), ds.shape), ds, update + 0.0)
    if d_initial_ptr is not None:
        tl.store(d_initial_ptr + at, ds)


@triton.jit
def _store_group(ptr, value, row, group, GROUPS: tl.constexpr, SIZE: tl.constexpr, inside):
    """Dense rows of a group, with the one rounding."""
    offset = (row[:, None] * GROUPS + group) * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(ptr + offset, value.to(ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _scores_at(slot, group, i, j, GROUPS: tl.constexpr):
    """Offsets [i, j] in D1."""
    return ((slot * GROUPS + group) * CHUNK + i[:, None]) * CHUNK + j[None, :]


@triton.jit
def _row_half(
    y, d_scores, dy, c, b, x_ptr, step_ptr, decay_ptr, decay, start, i, j, end, head, N, x_row,
    x_head, p, UPCAST: tl.constexpr,
):  # fmt: skip
    """y + P x, and D1 with a head's share, of rows j."""
    row = start + j
    inside = row < end
    weight = weights(
        decay, gates_at(decay_ptr, row, head * N, 1, inside),
        gates_at(step_ptr, row, head * N, 1, inside),
    )  # fmt: skip
    weight = tl.where(i[:, None] >= j[None, :], weight, 0.0)
    square = tl.zeros(weight.shape, tl.float32)
    x = rows_at(x_ptr, row, head, p, x_row, x_head, inside)
    scores = (product(c, tl.trans(b), square, UPCAST) * weight).to(tl.bfloat16)
    d_scores = tl.fma(product(dy, tl.trans(x), square, UPCAST), weight, d_scores)
    return product(scores, x, y, UPCAST), d_scores


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def row_gradient_kernel(
    dy_ptr, x_ptr, B_ptr, C_ptr, step_ptr, decay_ptr, states_ptr, offsets_ptr,
    dC_ptr, d_scores_ptr, of_rows_ptr,
    N, LENGTH, SEQUENCES, d_row, d_head, x_row, x_head, B_row, B_head, C_row, C_head,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, STATE: tl.constexpr,
    ROWS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dC, D1 and q of ``ROWS`` rows i of a chunk and a group."""
    sequence, beginning, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    slot = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    i = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = start + i
    inside = row < end
    if sequence == SEQUENCES:
        nothing = tl.zeros([ROWS, STATE], tl.float32)
        _store_group(dC_ptr, nothing, row, group, H // GROUP, STATE, inside)
        return
    n, p = tl.arange(0, STATE), tl.arange(0, P)
    c = rows_at(C_ptr, row, group, n, C_row, C_head, inside)
    j0 = tl.arange(0, HALF)
    j1 = HALF + tl.arange(0, HALF)
    b0 = rows_at(B_ptr, start + j0, group, n, B_row, B_head, start + j0 < end)
    b1 = rows_at(B_ptr, start + j1, group, n, B_row, B_head, start + j1 < end)
    d0 = tl.zeros([ROWS, HALF], tl.float32)
    d1 = d0
    dC = tl.zeros([ROWS, STATE], tl.float32)
    for member in range(GROUP):
        head = group * GROUP + member
        # Of rows behind the last one its decay: no weight is inf.
        near = head * N + tl.minimum(row, end - 1)
        decay = tl.load(decay_ptr + near, mask=start < end, other=0.0)
        dy = rows_at(dy_ptr, row, head, p, d_row, d_head, inside)
        at = state_at(slot, head, n, H, P, STATE)
        s = tl.load(states_ptr + at, mask=start < end, other=0.0)
        grown = tl.exp2(decay)
        y = product(c, tl.trans(s), tl.zeros([ROWS, P], tl.float32), UPCAST) * grown[:, None]
        y, d0 = _row_half(
            y, d0, dy, c, b0, x_ptr, step_ptr, decay_ptr, decay, start, i, j0, end, head, N,
            x_row, x_head, p, UPCAST,
        )  # fmt: skip
        y, d1 = _row_half(
            y, d1, dy, c, b1, x_ptr, step_ptr, decay_ptr, decay, start, i, j1, end, head, N,
            x_row, x_head, p, UPCAST,
        )  # fmt: skip
        of_rows = over_columns(dy.to(tl.float32) * (y + 0.0), ROWS, P)
        tl.store(of_rows_ptr + head * N + row, of_rows, mask=inside)
        read = product(dy, s, tl.zeros([ROWS, STATE], tl.float32), UPCAST)
        dC = tl.fma(tl.broadcast_to(grown[:, None], dC.shape), read, dC)
    d0 = (d0 + 0.0).to(tl.bfloat16)
    d1 = (d1 + 0.0).to(tl.bfloat16)
    tl.store(d_scores_ptr + _scores_at(slot, group, i, j0, H // GROUP), d0)
    tl.store(d_scores_ptr + _scores_at(slot, group, i, j1, H // GROUP), d1)
    dC = product(d1, b1, product(d0, b0, dC, UPCAST), UPCAST) + 0.0
    _store_group(dC_ptr, dC, row, group, H // GROUP, STATE, inside)


@triton.jit
def _column_half(
    acc, b, c, dy_ptr, decay_ptr, decay, step, start, i, j, end, head, N, d_row, d_head, p,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """acc + Σ_i P_ij dy_i of rows i."""
    row = start + i
    inside = row < end
    later = gates_at(decay_ptr, row, head * N, 1, inside)
    weight = tl.exp2(later[None, :] - decay[:, None]) * step[:, None]
    bc = product(b, tl.trans(c), tl.zeros(weight.shape, tl.float32), UPCAST)
    # Rows behind the last one have no decay: its weight may be inf.
    scores = tl.where(inside[None, :] & (i[None, :] >= j[:, None]), bc * weight, 0.0)
    scores = scores.to(tl.bfloat16)
    return product(scores, rows_at(dy_ptr, row, head, p, d_row, d_head, inside), acc, UPCAST)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def column_gradient_kernel(
    dy_ptr, x_ptr, B_ptr, C_ptr, D_ptr, step_ptr, decay_ptr, d_states_ptr, d_scores_ptr,
    offsets_ptr, dx_ptr, dB_ptr, of_steps_ptr, of_ends_ptr, sums_ptr,
    N, LENGTH, SEQUENCES, d_row, d_head, x_row, x_head, B_row, B_head, C_row, C_head,
    D_head, D_column,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, STATE: tl.constexpr,
    ROWS: tl.constexpr, SKIPS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dx, dB and e of ``ROWS`` rows j of a chunk and a group.

    of_ends [slots, 128 / ROWS, H]: Σ_j dt_j 2^(G_C - G_j) x_j·(dS' B_j).  sums [slots 128 / ROWS,
    SKIPS, H]: dD of these rows, of P channels or of one that they share; -0 where there are none.
    """
    sequence, beginning, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    slot = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    parts = slot * (CHUNK // ROWS) + part
    j = part * ROWS + tl.arange(0, ROWS)
    row = start + j
    inside = row < end
    n, p = tl.arange(0, STATE), tl.arange(0, P)
    channel = tl.arange(0, SKIPS)
    whole_row = tl.minimum(start + CHUNK, end) - 1
    if sequence == SEQUENCES:
        nothing = tl.zeros([ROWS, STATE], tl.float32)
        _store_group(dB_ptr, nothing, row, group, H // GROUP, STATE, inside)
        for member in range(GROUP):
            head = group * GROUP + member
            offset = (row[:, None] * H + head) * P + p[None, :]
            tl.store(dx_ptr + offset, tl.zeros([ROWS, P], tl.bfloat16), mask=inside[:, None])
            if D_ptr is not None:
                dD = tl.zeros([SKIPS], tl.float32)
                _store_skip(sums_ptr, dD, parts, channel, head, sequence < 0, H, SKIPS)
        return
    b = rows_at(B_ptr, row, group, n, B_row, B_head, inside)
    i0 = tl.arange(0, HALF)
    i1 = HALF + tl.arange(0, HALF)
    c0 = rows_at(C_ptr, start + i0, group, n, C_row, C_head, start + i0 < end)
    c1 = rows_at(C_ptr, start + i1, group, n, C_row, C_head, start + i1 < end)
    dB = tl.zeros([ROWS, STATE], tl.float32)
    for member in range(GROUP):
        head = group * GROUP + member
        decay = gates_at(decay_ptr, row, head * N, 1, inside)
        step = gates_at(step_ptr, row, head * N, 1, inside)
        whole = tl.load(decay_ptr + head * N + whole_row, mask=start < end, other=0.0)
        to_end = tl.where(inside, tl.exp2(whole - decay), 0.0)
        x = rows_at(x_ptr, row, head, p, x_row, x_head, inside)
        ds = tl.load(
            d_states_ptr + state_at(slot, head, n, H, P, STATE), mask=start < end, other=0.0
        )  # fmt: skip
        x32 = x.to(tl.float32)
        # Rows of a step of 0 have no dx, but a gradient of the step: 1 stands for it.
        none = step == 0.0
        factor = tl.where(none, 1.0, step)
        acc = product(b, tl.trans(ds), tl.zeros([ROWS, P], tl.float32), UPCAST)
        acc = acc * (to_end * factor)[:, None]
        of_end = tl.where(none, 0.0, over_columns(x32 * acc, ROWS, P))
        of_end = lane_sum(of_end, ROWS)
        tl.store(of_ends_ptr + parts * H + head, of_end)
        acc = _column_half(
            acc, b, c0, dy_ptr, decay_ptr, decay, factor, start, i0, j, end, head, N, d_row,
            d_head, p, UPCAST,
        )  # fmt: skip
        acc = _column_half(
            acc, b, c1, dy_ptr, decay_ptr, decay, factor, start, i1, j, end, head, N, d_row,
            d_head, p, UPCAST,
        )  # fmt: skip
        acc = acc + 0.0
        of_steps = tl.div_rn(over_columns(x32 * acc, ROWS, P), factor)
        tl.store(of_steps_ptr + head * N + row, of_steps, mask=inside)
        dx = tl.where(none[:, None], 0.0, acc)
        if D_ptr is not None:
            own = rows_at(dy_ptr, row, head, p, d_row, d_head, inside).to(tl.float32)
            skip = skip_at(D_ptr, head, p, D_head, D_column)
            dx = tl.fma(tl.broadcast_to(skip, dx.shape), own, dx)
            terms = own * x32
            if SKIPS == 1:
                terms = tl.reshape(over_columns(terms, ROWS, P), [ROWS, 1])
            dD = tl.reshape(halves(terms, 1, ROWS, SKIPS), [SKIPS])
            _store_skip(sums_ptr, dD, parts, channel, head, start + part * ROWS < end, H, SKIPS)
        offset = (row[:, None] * H + head) * P + p[None, :]
        tl.store(dx_ptr + offset, dx.to(tl.bfloat16), mask=inside[:, None])
        read = product(x, ds, tl.zeros([ROWS, STATE], tl.float32), UPCAST)
        dB = tl.fma(tl.broadcast_to((to_end * step)[:, None], dB.shape), read, dB)
    d0 = tl.trans(tl.load(d_scores_ptr + _scores_at(slot, group, i0, j, H // GROUP)))
    d1 = tl.trans(tl.load(d_scores_ptr + _scores_at(slot, group, i1, j, H // GROUP)))
    dB = product(d1, c1, product(d0, c0, dB, UPCAST), UPCAST) + 0.0
    _store_group(dB_ptr, dB, row, group, H // GROUP, STATE, inside)


@triton.jit
def _store_skip(sums_ptr, total, part, channel, head, some, H: tl.constexpr, SKIPS: tl.constexpr):
    """sums [parts, SKIPS, H]: dD of a part of a chunk; -0 where there are no rows."""
    nothing = tl.full(total.shape, -2147483648, tl.int32).to(tl.float32, bitcast=True)
    tl.store(sums_ptr + (part * SKIPS + channel) * H + head, tl.where(some, total, nothing))


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "H", "dt_row"])
def steps_gradient_kernel(
    dt_ptr, A_ptr, dt_bias_ptr, step_ptr, decay_ptr, of_rows_ptr, of_steps_ptr, of_ends_ptr,
    of_states_ptr, offsets_ptr, d_dt_ptr, sums_ptr,
    N, LENGTH, SEQUENCES, H, dt_row, low, high,
    SOFTPLUS: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """d(dt) of a chunk of ``HEADS`` heads; sums [slots, 2, H]: dA and d_dt_bias of it."""
    sequence, beginning, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    heads = head < H
    r = tl.arange(0, AT_ONCE)
    stop = tl.minimum(start + CHUNK, end)
    some = (sequence < SEQUENCES) & (start < end)
    A = tl.load(A_ptr + head, mask=heads, other=0.0)
    # dg of the row behind the last: what S' owes to G_C
    dg = tl.zeros([HEADS], tl.float32)
    for part in tl.static_range(PARTS):
        dg += tl.load(of_ends_ptr + (slot * PARTS + part) * H + head, mask=heads & some, other=0.0)
    of_states = tl.zeros([HEADS], tl.float32)
    for block in tl.static_range(BLOCKS):
        at = of_states_ptr + (slot * BLOCKS + block) * H + head
        of_states += tl.load(at, mask=heads & some, other=0.0)
    whole = tl.load(decay_ptr + (head * N + stop - 1), mask=heads & some, other=0.0)
    dg = tl.fma(tl.exp2(whole), of_states, dg)
    dA = tl.zeros([HEADS], tl.float32)
    d_bias = dA
    blocks = tl.cdiv(stop - start, AT_ONCE)
    for k in range(0, blocks):
        row = start + (blocks - 1 - k) * AT_ONCE + r
        mask = (row < end)[:, None] & heads[None, :]
        there = mask & (sequence < SEQUENCES)
        x, raw = steps_at(dt_ptr, dt_bias_ptr, row, head, dt_row, there, SOFTPLUS)
        offset = head[None, :] * N + row[:, None]
        step = tl.load(step_ptr + offset, mask=there, other=0.0)
        of_rows = tl.load(of_rows_ptr + offset, mask=there, other=0.0)
        of_steps = tl.load(of_steps_ptr + offset, mask=there, other=0.0)
        decays = tl.zeros([AT_ONCE, HEADS], tl.float32)
        for i in tl.static_range(AT_ONCE):
            rest = dg + row_of(of_rows, r, AT_ONCE - 1 - i)
            own = row_of(step, r, AT_ONCE - 1 - i)
            dg = tl.fma(-own, row_of(of_steps, r, AT_ONCE - 1 - i), rest)
            dA = tl.fma(own, dg, dA)
            decays = tl.where(r[:, None] == AT_ONCE - 1 - i, dg[None, :], decays)
        d_dt = tl.fma(tl.broadcast_to(A[None, :], decays.shape), decays, of_steps)
        if SOFTPLUS:
            d_dt = d_dt * activation_value(x, "sigmoid")
        d_dt = tl.where(there & (raw >= low) & (raw <= high), d_dt, 0.0)
        for i in tl.static_range(AT_ONCE):
            d_bias += row_of(d_dt, r, AT_ONCE - 1 - i)
        offset = row[:, None] * H + head[None, :]
        tl.store(d_dt_ptr + offset, d_dt.to(d_dt_ptr.dtype.element_ty), mask=mask)
    sums = tl.where(r[:, None] == 0, dA[None, :], d_bias[None, :])
    store_sums(sums_ptr, sums, r, head, sequence, start, end, SEQUENCES, H, 2)
