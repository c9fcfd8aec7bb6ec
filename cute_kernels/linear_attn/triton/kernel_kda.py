"""Kimi delta attention in Triton, forward: a gated delta rule whose state decays by channel of k.

    u_i = β_i (v_i - S_{i-1}ᵀ (2^g_i k_i))    S_i = 2^g_i S_{i-1} + k_i u_iᵀ    o_i = scale S_iᵀ q_i

    channel_decays_kernel   G of each chunk, [N, HV, K]
    channel_inner_kernel    A and P:  L_ij = β_i Σ_d k_id k_jd 2^(G_id - G_jd),  A = (I + L)⁻¹,
                            P_ij = scale Σ_d q_id k_jd 2^(G_id - G_jd), and rounded rows:
                            scale 2^G q, 2^G k and 2^(G_C - G) k, with which chain_kernel and
                            output_kernel of kernel_delta.py need no other decays than G_C

Layouts are those of kernel_delta.py, and P that of A.

Order.  g is in log2 units; G_i is a chain: the chunk's rows up to i, ascending.  A pair of rows
j < i is of one of six levels: both lie in one pair of blocks of 32, 16, 8, 4, 2 or 1 rows, j in the
first and i in the second.  With E, G of the first block's last row, which is before i, the decay
between them is 2^(G_i - E) 2^(E - G_j), factors of at most 1: whatever the gates, nothing
overflows, and a factor underflows only where the decay does.  Rows times their factor are rounded
to bf16, and a level is one product of them; rows themselves make P_ii.  Sums over K are added in
parts of 64, each from zero.  The rest is as in kernel_delta.py.

So row i depends on no bit of a later one, and a partial chunk has the bytes of the whole.  (A NaN
in a row may reach the rows before it in its chunk: 0 · NaN.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...cpu import elementary
from .kernel import sequence_rows
from .kernel_delta import CHUNK, gates_at, inverse_of, product, rows_at, scaled
from .kernel_delta import chain_kernel as chain_kernel
from .kernel_delta import inner_kernel as inner_kernel
from .kernel_delta import output_kernel as output_kernel

#: Blocks of 32 rows, and their halves, down to rows.
LEVELS = tl.constexpr(6)
_LOG2E = tl.constexpr(elementary.LOG2E_FP32[0])
_AHEAD = tl.constexpr(16)


@triton.jit
def running_sums(
    x_ptr, sums_ptr, first, step, count, head, there, factor,
    HV: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sums of ``count`` rows of a head, times a factor, from one row on by steps; 0 of no rows."""
    d = tl.arange(0, K)
    total = tl.zeros([K], tl.float32)
    for start in tl.range(0, count, _AHEAD, num_stages=1):
        rows = ()
        for i in tl.static_range(_AHEAD):
            at = ((first + (start + i) * step) * HV + head) * K + d
            mask = there & (start + i < count)
            rows = rows + (tl.load(x_ptr + at, mask=mask, other=0.0),)
        for i in tl.static_range(_AHEAD):
            total += rows[i] * factor
            at = ((first + (start + i) * step) * HV + head) * K + d
            tl.store(sums_ptr + at, total, mask=start + i < count)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def channel_decays_kernel(
    g_ptr, decay_ptr, offsets_ptr, N, LENGTH, SEQUENCES, HV: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """G of a chunk of a v head; 0 of rows that belong to no sequence."""
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    count = tl.minimum(start + CHUNK, end) - start
    there = sequence < SEQUENCES
    running_sums(g_ptr, decay_ptr, start, 1, count, tl.program_id(1), there, _LOG2E, HV, K)


@triton.jit
def channel_decays(decay_ptr, row, last, head, d, HV: tl.constexpr, K: tl.constexpr):
    """Columns d of G of rows of a head, [64, len(d)]; the last one's of rows behind it."""
    offset = (tl.minimum(row, last)[:, None] * HV + head) * K + d[None, :]
    return tl.load(decay_ptr + offset)


@triton.jit
def level_factors(
    decay_ptr, decay, start, last, head, d, level, HV: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """(rows' factors [64, len(d)], which rows are in second blocks, [64, 64] pairs of a level).

    Of a pair the first index is in the second block.
    """
    i = tl.arange(0, CHUNK)
    block = i >> (LEVELS - 1 - level)
    second = block % 2 == 1
    reference = (((block >> 1) * 2 + 1) << (LEVELS - 1 - level)) - 1
    e = channel_decays(decay_ptr, start + reference, last, head, d, HV, K)
    factor = tl.exp2(tl.where(second[:, None], decay - e, e - decay))
    pair = (block[:, None] == block[None, :] + 1) & second[:, None]
    return factor, second, pair


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def channel_inner_kernel(
    q_ptr, k_ptr, beta_ptr, decay_ptr, offsets_ptr, inner_ptr, scores_ptr,
    queries_ptr, keys_ptr, weighted_ptr,
    N, LENGTH, SEQUENCES, scale, q_row, q_head, k_row, k_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, PART: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The decayed rows of a chunk of a v head, and, if asked for, A and P.

    A and P of rows that belong to no sequence are 0.
    """
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    row = start + i
    inside = row < end
    square = (row[:, None] * HV + head) * CHUNK + i[None, :]
    if (sequence == SEQUENCES) | (start >= end):
        if inner_ptr is not None:
            nothing = tl.zeros([CHUNK, CHUNK], tl.bfloat16)
            tl.store(inner_ptr + square, nothing, mask=inside[:, None])
            tl.store(scores_ptr + square, nothing, mask=inside[:, None])
        return
    last = tl.minimum(start + CHUNK, end) - 1
    beta = gates_at(beta_ptr, row, head, HV, inside)
    zero = tl.zeros([CHUNK, CHUNK], tl.float32)
    kk, qk = zero, zero
    for part in tl.range(K // PART, num_stages=1):
        d = part * PART + tl.arange(0, PART)
        q = rows_at(q_ptr, row, head // GROUP, d, q_row, q_head, inside)
        k = rows_at(k_ptr, row, head // GROUP, d, k_row, k_head, inside)
        decay = channel_decays(decay_ptr, row, last, head, d, HV, K)
        whole = tl.load(decay_ptr + ((last * HV + head) * K + d))[None, :]
        grown = tl.exp2(decay)
        at = (row[:, None] * HV + head) * K + d[None, :]
        tl.store(queries_ptr + at, scaled(q, grown * scale), mask=inside[:, None])
        tl.store(keys_ptr + at, scaled(k, grown), mask=inside[:, None])
        tl.store(weighted_ptr + at, scaled(k, tl.exp2(whole - decay)), mask=inside[:, None])
        if inner_ptr is not None:
            kk_part, qk_part = zero, product(q, tl.trans(k), zero, UPCAST)
            for level in tl.range(LEVELS, num_stages=1):
                factor, _second, pair = level_factors(
                    decay_ptr, decay, start, last, head, d, level, HV, K
                )  # fmt: skip
                columns = tl.trans(scaled(k, factor))
                kk_part = tl.where(pair, product(scaled(k, factor), columns, zero, UPCAST), kk_part)
                qk_part = tl.where(pair, product(scaled(q, factor), columns, zero, UPCAST), qk_part)
            kk += kk_part
            qk += qk_part
    if inner_ptr is not None:
        scores = tl.where(i[:, None] >= i[None, :], qk * scale, 0.0).to(tl.bfloat16)
        tl.store(scores_ptr + square, scores, mask=inside[:, None])
        tl.store(inner_ptr + square, inverse_of(beta[:, None] * kk, UPCAST), mask=inside[:, None])
