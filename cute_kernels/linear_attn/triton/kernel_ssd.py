"""The state space scan in Triton, forward: three kernels.

    S_i = 2^g_i S_{i-1} + dt_i x_i B_iᵀ    y_i = S_i C_i + D x_i    g_i = log2(e) A dt_i

    steps_kernel   dt = clamp(softplus(dt + dt_bias)) and G, the running sum of a chunk's g
    state_kernel   chunk after chunk: S' = 2^G_C S + Σ_j x_j (2^(G_C - G_j) dt_j B_j)ᵀ
    scan_kernel    y_i = 2^G_i S^ C_i + Σ_{j≤i} P_ij x_j + D x_i,
                   P_ij = (C_i·B_j) 2^(G_i - G_j) dt_j

Layouts.  Rows [N, H, P] or [N, G, N_], neighbours of a head side by side; steps and G [H, N];
states [slots, H, P, N_], the state before a chunk at its slot of `Sequences.slots(128)`; S^ is S
rounded to bf16.  Group g serves the H / G heads from g H / G on.

Order of sums.  A sequence's chunks of 128 rows begin at its first row.  G is a chain of its rows
from 0, one fma each.  Products have bf16 operands and ascending k16 steps into fp32.  y starts from
2^G (S^ C), takes P x, and D x by one fma; with z, y silu(z) is rounded, and y for the backward.
The update of S starts from zero and is added by one fma.  Rounded to bf16: S^, P,
2^(G_C - G_j) dt_j B_j, results.

No row meets a later one: those enter as zeros by selection.  Nothing is fused but `tl.fma`; nothing
is atomic or autotuned; offsets are 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...cpu import elementary
from ...runtime.triton_elementary import activation_value
from .kernel import sequence_rows
from .kernel_delta import (
    gates_at,
    product,
    row_of_last,
    rows_at,
    sequence_of,
    state_at,
)
from .kernel_gate import softplus

CHUNK = tl.constexpr(128)
HALF = tl.constexpr(64)
#: Rows whose steps are loaded at once.
AT_ONCE = tl.constexpr(8)
_LOG2E = tl.constexpr(elementary.LOG2E_FP32[0])


@triton.jit
def steps_at(dt_ptr, dt_bias_ptr, row, head, dt_row, mask, SOFTPLUS: tl.constexpr):
    """(dt + dt_bias, the step before its limits) of rows and heads, fp32."""
    offset = row[:, None] * dt_row + head[None, :]
    x = tl.load(dt_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + head[None, :], mask=mask, other=0.0)
        x = x + bias.to(tl.float32)
    if SOFTPLUS:
        return x, softplus(x)
    else:
        return x, x


@triton.jit
def row_of(tile, r, i):
    """Row i of [rows, heads]; r: numbers of the rows."""
    return tl.sum(tl.where(r[:, None] == i, tile, 0.0), axis=0)  # of one and zeros


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES", "H", "dt_row"])
def steps_kernel(
    dt_ptr, A_ptr, dt_bias_ptr, offsets_ptr, step_ptr, decay_ptr,
    N, LENGTH, SEQUENCES, H, dt_row, low, high,
    SOFTPLUS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Steps and G of a chunk, of ``HEADS`` heads; 0 of rows of no sequence."""
    sequence, beginning, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    rate = tl.load(A_ptr + head, mask=head < H, other=0.0) * _LOG2E
    r = tl.arange(0, AT_ONCE)
    total = tl.zeros([HEADS], tl.float32)
    for first in range(start, tl.minimum(start + CHUNK, end), AT_ONCE):
        row = first + r
        mask = (row < end)[:, None] & (head < H)[None, :]
        raw, step = steps_at(dt_ptr, dt_bias_ptr, row, head, dt_row, mask, SOFTPLUS)
        step = tl.where(step < low, low, tl.where(step > high, high, step))
        step = tl.where(sequence < SEQUENCES, step, 0.0)
        decay = tl.zeros([AT_ONCE, HEADS], tl.float32)
        for i in tl.static_range(AT_ONCE):
            total = tl.fma(rate, row_of(step, r, i), total)
            decay = tl.where(r[:, None] == i, total[None, :], decay)
        offset = head[None, :] * N + row[:, None]
        tl.store(step_ptr + offset, step, mask=mask)
        tl.store(decay_ptr + offset, decay, mask=mask)


@triton.jit(do_not_specialize=["N", "LENGTH", "LAG"])
def state_kernel(
    x_ptr, B_ptr, step_ptr, decay_ptr, initial_ptr, offsets_ptr, states_ptr, final_ptr,
    N, LENGTH, LAG, x_row, x_head, B_row, B_head,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, STATE: tl.constexpr,
    COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The states of a sequence and head, ``COLUMNS`` of N_, chunk after chunk.

    final: the state behind the last row, or, with a LAG >= 0, that of `tensors.Last`.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first, end, slot = sequence_of(offsets_ptr, sequence, LENGTH, CHUNK)
    at = state_at(sequence, head, columns, H, P, STATE)
    s = tl.zeros([P, COLUMNS], tl.float32)
    if initial_ptr is not None:
        s = tl.load(initial_ptr + at)
    behind = row_of_last(first, end, LAG, CHUNK)
    if final_ptr is not None:
        if behind == first:
            tl.store(final_ptr + at, s)
    for start in range(first, end, CHUNK):
        tl.store(states_ptr + state_at(slot, head, columns, H, P, STATE), s.to(tl.bfloat16))
        row = start + tl.arange(0, CHUNK)
        inside = row < end
        x = rows_at(x_ptr, row, head, tl.arange(0, P), x_row, x_head, inside)
        b = rows_at(B_ptr, row, head // GROUP, columns, B_row, B_head, inside)
        decay = gates_at(decay_ptr, row, head * N, 1, inside)
        step = gates_at(step_ptr, row, head * N, 1, inside)
        stop = tl.minimum(start + CHUNK, end)
        whole = tl.load(decay_ptr + head * N + stop - 1)  # G_C
        weight = tl.where(inside, tl.exp2(whole - decay) * step, 0.0)
        b = (b.to(tl.float32) * weight[:, None]).to(tl.bfloat16)
        update = product(tl.trans(x), b, tl.zeros([P, COLUMNS], tl.float32), UPCAST)
        s = tl.fma(tl.broadcast_to(tl.exp2(whole), s.shape), s, update + 0.0)
        if final_ptr is not None:
            if stop == behind:
                tl.store(final_ptr + at, s)
        slot += 1


@triton.jit
def weights(later, earlier, step):
    """2^(G_i - G_j) dt_j, [i, j], of G of i and G and dt of j; for use where j <= i."""
    return tl.exp2(later[:, None] - earlier[None, :]) * step[None, :]


@triton.jit
def skip_at(D_ptr, head, columns, D_head, D_column):
    """D of a head, fp32, [1, columns]."""
    return tl.load(D_ptr + (head * D_head + columns * D_column)).to(tl.float32)[None, :]


@triton.jit
def _take_rows(
    y, cb, x_ptr, step_ptr, decay_ptr, decay, start, i, j, end, head, N, x_row, x_head, p,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """y + P x of rows j, in which cb is C_i·B_j."""
    row = start + j
    inside = row < end
    weight = weights(
        decay, gates_at(decay_ptr, row, head * N, 1, inside),
        gates_at(step_ptr, row, head * N, 1, inside),
    )  # fmt: skip
    scores = tl.where(i[:, None] >= j[None, :], cb * weight, 0.0).to(tl.bfloat16)
    return product(scores, rows_at(x_ptr, row, head, p, x_row, x_head, inside), y, UPCAST)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def scan_kernel(
    x_ptr, B_ptr, C_ptr, D_ptr, z_ptr, step_ptr, decay_ptr, states_ptr, offsets_ptr,
    out_ptr, ungated_ptr,
    N, LENGTH, SEQUENCES, x_row, x_head, B_row, B_head, C_row, C_head, z_row, z_head,
    D_head, D_column,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, STATE: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of a chunk of ``HEADS`` heads of a group; 0 of rows of no sequence.

    States of slots that no chunk has are 0 too: results of an op follow no old memory.
    """
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    slot = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * HEADS
    i = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = start + i
    inside = row < end
    p = tl.arange(0, P)
    n = tl.arange(0, STATE)
    if (sequence == SEQUENCES) | (start >= end):
        for member in range(HEADS):
            offset = (row[:, None] * H + first + member) * P + p[None, :]
            nothing = tl.zeros([ROWS, P], tl.bfloat16)
            tl.store(out_ptr + offset, nothing, mask=inside[:, None])
            if z_ptr is not None:
                tl.store(ungated_ptr + offset, nothing, mask=inside[:, None])
            at = state_at(slot, first + member, n, H, P, STATE)
            tl.store(states_ptr + at, tl.zeros([P, STATE], tl.bfloat16))
        return
    c = rows_at(C_ptr, row, first // GROUP, n, C_row, C_head, inside)
    # Halves of the rows j, which need fewer registers than all of them at once.
    j0 = tl.arange(0, HALF)
    j1 = HALF + tl.arange(0, HALF)
    b0 = rows_at(B_ptr, start + j0, first // GROUP, n, B_row, B_head, start + j0 < end)
    b1 = rows_at(B_ptr, start + j1, first // GROUP, n, B_row, B_head, start + j1 < end)
    square = tl.zeros([ROWS, HALF], tl.float32)
    cb0 = product(c, tl.trans(b0), square, UPCAST)
    cb1 = product(c, tl.trans(b1), square, UPCAST)
    for member in range(HEADS):
        head = first + member
        decay = gates_at(decay_ptr, row, head * N, 1, inside)
        at = state_at(slot, head, n, H, P, STATE)
        s_hat = tl.load(states_ptr + at)
        y = product(c, tl.trans(s_hat), tl.zeros([ROWS, P], tl.float32), UPCAST)
        y = y * tl.exp2(decay)[:, None]
        y = _take_rows(
            y, cb0, x_ptr, step_ptr, decay_ptr, decay, start, i, j0, end, head, N, x_row, x_head,
            p, UPCAST,
        )  # fmt: skip
        y = _take_rows(
            y, cb1, x_ptr, step_ptr, decay_ptr, decay, start, i, j1, end, head, N, x_row, x_head,
            p, UPCAST,
        )  # fmt: skip
        y = y + 0.0
        offset = (row[:, None] * H + head) * P + p[None, :]
        if D_ptr is not None:
            own = rows_at(x_ptr, row, head, p, x_row, x_head, inside).to(tl.float32)
            skip = skip_at(D_ptr, head, p, D_head, D_column)
            y = tl.fma(tl.broadcast_to(skip, y.shape), own, y)
        if z_ptr is not None:
            tl.store(ungated_ptr + offset, y.to(tl.bfloat16), mask=inside[:, None])
            z = rows_at(z_ptr, row, head, p, z_row, z_head, inside).to(tl.float32)
            y = y * activation_value(z, "silu")
        tl.store(out_ptr + offset, y.to(tl.bfloat16), mask=inside[:, None])
