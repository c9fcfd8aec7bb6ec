"""The gated delta rule in Triton, forward: three kernels, which share the products of a chunk.

Kimi delta attention, with a decay of each of CHANNELS of k, has the last two: see kernel_kda.py.

    u_i = β_i (v_i - 2^g_i S_{i-1}ᵀ k_i)    S_i = 2^g_i S_{i-1} + k_i u_iᵀ    o_i = scale S_iᵀ q_i

    inner_kernel   G and, of each chunk, A = (I + L)⁻¹:  L_ij = β_i (k_i·k_j) 2^(G_i - G_j), j < i
    chain_kernel   chunk after chunk: r_i = β_i (v_i - 2^G_i S^ᵀ k_i);  u = A r
                   S' = 2^G_C S + Σ_j k_j (2^(G_C - G_j) u_j)ᵀ
    output_kernel  o_i = scale 2^G_i S^ᵀ q_i + Σ_{j≤i} P_ij u_j
                   P_ij = (q_i·k_j) 2^(G_i - G_j) scale

Layouts.  Rows [N, H, K] or [N, H, V], neighbours of a head side by side; gates [N, HV]; inner
[N, HV, 64], a row of A; states [slots, HV, K, V], the state before a chunk at its slot of
`Sequences.slots(64)`; S^ is S rounded to bf16.  k head h serves the HV / H v
heads from h HV / H on.

Order of sums.  A sequence's chunks of 64 rows begin at its first row.  g is in log2 units; G_i is
the sum of the rows up to i, neighbours first, in a tree of 64 places that zeros fill.  Products
have bf16 operands and ascending k16 steps into fp32.  Blocks T_b on A's diagonal, of 16 rows, are
made by rows: row i is e_i - Σ_m L_im T_m, m ascending, one fma each.  Then, b ascending, A_b =
T_b (I_b - Σ_{s<b} L_bs A_s), I_b being rows of the unit matrix.  u, P u and the update of S take
k16 steps in ascending order; the update starts from zero and is added by one fma, P u starts from
o's first term; u and o get + 0.0, as steps of zeros make +0 of -0.  Rounded to bf16: S^, T, L
between blocks, I_b - Σ L A, A, r, u, P, 2^(G_C - G_j) u_j of u before its rounding, o.

No row meets a later one: those enter as zeros by selection.  (A NaN in a row may reach the rows
before it in its chunk: 0 · NaN.)  Nothing is fused but `tl.fma`; nothing is atomic or autotuned;
offsets are 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...cpu import elementary
from ...runtime.triton_sums import pairs
from .kernel import sequence_rows

CHUNK = tl.constexpr(64)
BLOCK = tl.constexpr(16)
_BLOCKS = tl.constexpr(4)
_LOG2E = tl.constexpr(elementary.LOG2E_FP32[0])


@triton.jit
def product(a, b, acc, UPCAST: tl.constexpr):
    """acc + a b of bf16 operands.

    UPCAST multiplies in fp32: Triton's interpreter multiplies the bit patterns of bf16.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def rows_at(ptr, row, head, size, row_stride, head_stride, inside):
    """Rows of a head, [rows, size]; 0 outside, of ``size`` columns from a first one."""
    offset = row[:, None] * row_stride + head * head_stride + size[None, :]
    return tl.load(ptr + offset, mask=inside[:, None], other=0.0)


@triton.jit
def square_at(ptr, row, head, HV: tl.constexpr, inside):
    """Rows [64, 64] of a matrix of each chunk, [N, HV, 64]; 0 outside."""
    return rows_at(ptr, row, head, tl.arange(0, CHUNK), HV * CHUNK, CHUNK, inside)


@triton.jit
def gates_at(ptr, row, head, HV, inside):
    """A gate of rows of a head, fp32; 0 outside."""
    return tl.load(ptr + (row * HV + head), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def decays(g):
    """G [64] of a chunk, in log2 units: sums of the rows up to each, neighbours first."""
    i = tl.arange(0, CHUNK)
    steps = tl.where(i[None, :] <= i[:, None], (g * _LOG2E)[None, :], 0.0)
    return pairs(steps, CHUNK, CHUNK)


@triton.jit
def diagonal_blocks(square):
    """[64, 64] -> [4, 16, 16]: its blocks on the diagonal."""
    blocks = tl.reshape(square, [_BLOCKS, BLOCK, _BLOCKS, BLOCK])
    b = tl.arange(0, _BLOCKS)
    own = b[:, None, None, None] == b[None, None, :, None]
    return tl.sum(tl.where(own, blocks, 0.0), axis=2)  # of one block and zeros


@triton.jit
def inverses(lower, BATCH: tl.constexpr):
    """(I + L)⁻¹ of strictly lower L [BATCH, 16, 16]: T_i = e_i - Σ_m L_im T_m, ascending m."""
    i = tl.arange(0, BLOCK)[None, :, None]
    j = tl.arange(0, BLOCK)[None, None, :]
    t = tl.where(i == j, 1.0, tl.zeros([BATCH, BLOCK, BLOCK], tl.float32))
    for m in range(BLOCK - 1):
        column = tl.sum(tl.where(j == m, lower, 0.0), axis=2)[:, :, None]  # of one and zeros
        row = tl.sum(tl.where(i == m, t, 0.0), axis=1)[:, None, :]
        less = tl.fma(tl.broadcast_to(-column, t.shape), tl.broadcast_to(row, t.shape), t)
        t = tl.where(i > m, less, t)
    return t


@triton.jit
def block_diagonal(blocks):
    """[4, 16, 16] -> [64, 64]: blocks on the diagonal, and zeros."""
    b = tl.arange(0, _BLOCKS)
    own = b[:, None, None, None] == b[None, None, :, None]
    return tl.reshape(tl.where(own, blocks[:, :, None, :], 0.0), [CHUNK, CHUNK])


@triton.jit
def inverse(k, beta, decay, UPCAST: tl.constexpr):
    """A = (I + L)⁻¹ of a chunk's rows, rounded."""
    kk = product(k, tl.trans(k), tl.zeros([CHUNK, CHUNK], tl.float32), UPCAST)
    return inverse_of((beta[:, None] * kk) * tl.exp2(decay[:, None] - decay[None, :]), UPCAST)


@triton.jit
def inverse_of(lower, UPCAST: tl.constexpr):
    """A = (I + L)⁻¹ of L below the diagonal, rounded: A_b = T_b (I_b - Σ_{s<b} L_bs A_s)."""
    i = tl.arange(0, CHUNK)
    zero = tl.zeros([CHUNK, CHUNK], tl.float32)
    lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
    t = block_diagonal(inverses(diagonal_blocks(lower), _BLOCKS)).to(tl.bfloat16)
    block, unit = i // BLOCK, tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    lower = tl.where(block[:, None] > block[None, :], lower, 0.0).to(tl.bfloat16)
    a = t
    for b in tl.static_range(1, _BLOCKS):
        own = block[:, None] == b
        rest = unit - product(lower, a, zero, UPCAST)
        rest = tl.where(own, rest, 0.0).to(tl.bfloat16)
        a = tl.where(own, product(t, rest, zero, UPCAST).to(tl.bfloat16), a)
    return a


@triton.jit
def corrected(k, v, beta, decay, inner, s_hat, inside, UPCAST: tl.constexpr):
    """u = A r of a chunk's rows, fp32, r = β (v - 2^G S^ᵀ k), 0 of rows that are not there."""
    zero = tl.zeros(v.shape, tl.float32)
    factor = tl.broadcast_to(-tl.exp2(decay)[:, None], v.shape)
    r = beta[:, None] * tl.fma(factor, product(k, s_hat, zero, UPCAST), v)
    r = tl.where(inside[:, None], r, 0.0).to(tl.bfloat16)
    return product(inner, r, zero, UPCAST) + 0.0


@triton.jit
def scaled(rows, factor):
    """Rows [64, ..] times a factor each, rounded."""
    return (rows.to(tl.float32) * factor).to(tl.bfloat16)


@triton.jit
def next_state(s, k, u, whole, UPCAST: tl.constexpr):
    """S' = 2^G_C S + Σ_j k_j u_jᵀ, with 2^(G_C - G_j) in one of them."""
    update = product(tl.trans(k), u, tl.zeros(s.shape, tl.float32), UPCAST)
    return tl.fma(tl.broadcast_to(tl.exp2(whole), s.shape), s, update)


@triton.jit
def scores(q, k, decay, scale, UPCAST: tl.constexpr):
    """P = (q·k) 2^(G_i - G_j) scale of j <= i, rounded."""
    i = tl.arange(0, CHUNK)
    qk = product(q, tl.trans(k), tl.zeros([CHUNK, CHUNK], tl.float32), UPCAST)
    weight = tl.exp2(decay[:, None] - decay[None, :]) * scale
    return tl.where(i[:, None] >= i[None, :], qk * weight, 0.0).to(tl.bfloat16)


@triton.jit
def outputs(q, p, u, s_hat, decay, scale, UPCAST: tl.constexpr):
    """o of a chunk's rows, before its rounding."""
    out = product(q, s_hat, tl.zeros(u.shape, tl.float32), UPCAST)
    return product(p, u, out * (tl.exp2(decay) * scale)[:, None], UPCAST) + 0.0


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def inner_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, offsets_ptr, decay_ptr, inner_ptr, scores_ptr,
    N, LENGTH, SEQUENCES, scale, q_row, q_head, k_row, k_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """G, A and, where it has a place, P of a chunk of a v head.

    G and A of rows that belong to no sequence are 0.
    """
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    row = start + i
    inside = row < end
    if (sequence == SEQUENCES) | (start >= end):
        tl.store(decay_ptr + (row * HV + head), tl.zeros([CHUNK], tl.float32), mask=inside)
        offset = (row[:, None] * HV + head) * CHUNK + i[None, :]
        nothing = tl.zeros([CHUNK, CHUNK], tl.bfloat16)
        tl.store(inner_ptr + offset, nothing, mask=inside[:, None])
        return
    decay = decays(gates_at(g_ptr, row, head, HV, inside))
    beta = gates_at(beta_ptr, row, head, HV, inside)
    k = rows_at(k_ptr, row, head // GROUP, tl.arange(0, K), k_row, k_head, inside)
    inner = inverse(k, beta, decay, UPCAST)
    tl.store(decay_ptr + (row * HV + head), decay, mask=inside)
    offset = (row[:, None] * HV + head) * CHUNK + i[None, :]
    tl.store(inner_ptr + offset, inner, mask=inside[:, None])
    if scores_ptr is not None:
        q = rows_at(q_ptr, row, head // GROUP, tl.arange(0, K), q_row, q_head, inside)
        p = scores(q, k, decay, scale, UPCAST)
        tl.store(scores_ptr + offset, p, mask=inside[:, None])


@triton.jit
def decays_of(decay_ptr, row, end, head, HV: tl.constexpr, CHANNELS: tl.constexpr):
    """G of rows of a head, the last one's behind it, so that no 2^(G_i - G_j) overflows.

    0 where k and q have the decays of their CHANNELS in them.
    """
    if CHANNELS:
        return tl.zeros(row.shape, tl.float32)
    else:
        return tl.load(decay_ptr + (tl.minimum(row, end - 1) * HV + head))


@triton.jit
def whole_decay(
    decay_ptr, last, head, HV: tl.constexpr, K: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """G_C, of the last row: a number, or [K, 1] of channels."""
    if CHANNELS:
        return tl.load(decay_ptr + ((last * HV + head) * K + tl.arange(0, K)))[:, None]
    else:
        return tl.load(decay_ptr + (last * HV + head))


@triton.jit
def weighted_keys(
    weighted_ptr, k, row, head, HV: tl.constexpr, K: tl.constexpr, inside, CHANNELS: tl.constexpr
):  # fmt: skip
    """k of rows, with 2^(G_C - G) in it if that is by channel."""
    if CHANNELS:
        return rows_at(weighted_ptr, row, head, tl.arange(0, K), HV * K, K, inside)
    else:
        return k


@triton.jit
def to_end(decay, whole, CHANNELS: tl.constexpr):
    """2^(G_C - G) [64, 1] of rows; 1 where k has it."""
    if CHANNELS:
        return tl.exp2(decay)[:, None]  # of zeros
    else:
        return tl.exp2(whole - decay)[:, None]


@triton.jit
def state_at(sequence, head, columns, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Offsets [K, columns] of a state of [.., HV, K, V]."""
    k = tl.arange(0, K)[:, None]
    return ((sequence * HV + head) * K + k) * V + columns[None, :]


@triton.jit
def sequence_of(offsets_ptr, sequence, LENGTH, ROWS: tl.constexpr):
    """(first row, end, slot of the first chunk of ``ROWS`` rows) of a sequence."""
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + sequence).to(tl.int64)
        end = tl.load(offsets_ptr + sequence + 1).to(tl.int64)
        return first, end, first // ROWS + sequence
    else:
        return sequence * LENGTH, (sequence + 1) * LENGTH, sequence * tl.cdiv(LENGTH, ROWS)


@triton.jit
def row_of_last(first, end, LAG, ROWS: tl.constexpr):
    """The row behind which the last state is taken: `tensors.Last`."""
    behind = end
    if LAG >= 0:
        behind = first + tl.maximum(end - first - LAG, 0) // ROWS * ROWS
    return behind


@triton.jit(do_not_specialize=["LENGTH", "LAG"])
def chain_kernel(
    k_ptr, v_ptr, beta_ptr, decay_ptr, weighted_ptr, inner_ptr, initial_ptr, offsets_ptr,
    u_ptr, states_ptr, final_ptr, LENGTH, LAG, k_row, k_head, v_row, v_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """u and the states of a sequence and v head, ``COLUMNS`` of V, chunk after chunk.

    final: the state behind the last row, or, with a LAG >= 0, that of `tensors.Last`.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first, end, slot = sequence_of(offsets_ptr, sequence, LENGTH, CHUNK)
    at = state_at(sequence, head, columns, HV, K, V)
    s = tl.zeros([K, COLUMNS], tl.float32)
    if initial_ptr is not None:
        s = tl.load(initial_ptr + at)
    behind = row_of_last(first, end, LAG, CHUNK)
    if final_ptr is not None:
        if behind == first:
            tl.store(final_ptr + at, s)
    for start in range(first, end, CHUNK):
        row = start + tl.arange(0, CHUNK)
        inside = row < end
        k = rows_at(k_ptr, row, head // GROUP, tl.arange(0, K), k_row, k_head, inside)
        v = rows_at(v_ptr, row, head, columns, v_row, v_head, inside).to(tl.float32)
        inner = square_at(inner_ptr, row, head, HV, inside)
        decay = decays_of(decay_ptr, row, end, head, HV, CHANNELS)
        beta = gates_at(beta_ptr, row, head, HV, inside)
        last = tl.minimum(start + CHUNK, end) - 1
        whole = whole_decay(decay_ptr, last, head, HV, K, CHANNELS)
        s_hat = s.to(tl.bfloat16)
        tl.store(states_ptr + state_at(slot, head, columns, HV, K, V), s_hat)
        u = corrected(k, v, beta, decay, inner, s_hat, inside, UPCAST)
        offset = (row[:, None] * HV + head) * V + columns[None, :]
        tl.store(u_ptr + offset, u.to(tl.bfloat16), mask=inside[:, None])
        k = weighted_keys(weighted_ptr, k, row, head, HV, K, inside, CHANNELS)
        s = next_state(s, k, scaled(u, to_end(decay, whole, CHANNELS)), whole, UPCAST)
        if final_ptr is not None:
            if last + 1 == behind:
                tl.store(final_ptr + at, s)
        slot += 1


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def output_kernel(
    q_ptr, k_ptr, u_ptr, decay_ptr, scores_ptr, states_ptr, offsets_ptr, out_ptr,
    N, LENGTH, SEQUENCES, scale, q_row, q_head, k_row, k_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """o of a chunk of a v head, ``COLUMNS`` of V; 0 of rows that belong to no sequence.

    So are their u, and the states of slots that no chunk has: results follow no old memory.
    """
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    head = tl.program_id(1)
    slot = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row = start + tl.arange(0, CHUNK)
    inside = row < end
    at = state_at(slot, head, columns, HV, K, V)
    offset = (row[:, None] * HV + head) * V + columns[None, :]
    if (sequence == SEQUENCES) | (start >= end):
        nothing = tl.zeros([CHUNK, COLUMNS], tl.bfloat16)
        tl.store(out_ptr + offset, nothing, mask=inside[:, None])
        tl.store(u_ptr + offset, nothing, mask=inside[:, None])
        tl.store(states_ptr + at, tl.zeros([K, COLUMNS], tl.bfloat16))
        return
    d = tl.arange(0, K)
    q = rows_at(q_ptr, row, head // GROUP, d, q_row, q_head, inside)
    u = rows_at(u_ptr, row, head, columns, HV * V, V, inside)
    decay = decays_of(decay_ptr, row, end, head, HV, CHANNELS)
    if CHANNELS:
        p = square_at(scores_ptr, row, head, HV, inside)
    else:
        k = rows_at(k_ptr, row, head // GROUP, d, k_row, k_head, inside)
        p = scores(q, k, decay, scale, UPCAST)
    out = outputs(q, p, u, tl.load(states_ptr + at), decay, scale, UPCAST)
    tl.store(out_ptr + offset, out.to(tl.bfloat16), mask=inside[:, None])
