"""Kimi delta attention in Triton, backward: six kernels, of which three are the gated delta rule's.

With P, A, S^ and u of the forward, decayed rows scale 2^G q, 2^G k and 2^(G_C - G) k, Z = β dR, and
dS', the gradient of the state behind a chunk:

    channel_inner_kernel          of kernel_kda.py: the decayed rows again
    local_gradient_kernel, chain_gradient_kernel, scores_gradient_kernel
                                  of kernel_delta_backward.py, without other decays than G_C:
                                  dR, dS, D1 = scale dO uᵀ, j <= i, dL = -dR uᵀ, j < i, dv
    channels_gradient_kernel      dq, dk and dG:
        dq_i = scale 2^G_i (dO S^ᵀ)_i + Σ_j D1_ij 2^(G_i - G_j) k_j
        z_i  = -2^G_i (dR S^ᵀ)_i + Σ_j dL_ij 2^(G_i - G_j) k_j
        m_j  = 2^(G_C - G_j) (u dS'ᵀ)_j + Σ_i 2^(G_i - G_j) (D1_ij q_i + β_i dL_ij k_i)
        dk = β z + m,   dG = q dq + k (β z - m), and dG_C = Σ_j of k times the first of m, and
        2^G_C <dS', S>, more.  P_ii has no part in z, m and dG.
    channel_gates_gradient_kernel  dβ_i = dR_i·v_i + k_i·z_i, dg_j = Σ_{i>=j} dG_i

Order.  Decays between rows are those of kernel_kda.py, level by level: D1 and dL of a level's pairs
times rows times their factor, rounded to bf16, then the other row's factor in fp32, onto the sum.
Sums over the rows of a chunk for dG_C add each half onto half, <dS', S> neighbours; dg is a chain,
the last row first.  dq and dk of a k head add its v heads, ascending.  The rest is as in
kernel_delta_backward.py, which rounds D1 and dL + (β dL)ᵀ to bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.triton_sums import halves, pairs
from .kernel import sequence_rows
from .kernel_delta import CHUNK, gates_at, product, rows_at, scaled, square_at
from .kernel_delta_backward import chain_gradient_kernel as chain_gradient_kernel
from .kernel_delta_backward import gates_gradient_kernel as gates_gradient_kernel
from .kernel_delta_backward import keys_gradient_kernel as keys_gradient_kernel
from .kernel_delta_backward import local_gradient_kernel as local_gradient_kernel
from .kernel_delta_backward import part_at, some_rows_of, store_part, sum_of_parts
from .kernel_delta_backward import queries_gradient_kernel as queries_gradient_kernel
from .kernel_delta_backward import scores_gradient_kernel as scores_gradient_kernel
from .kernel_kda import LEVELS, channel_decays, level_factors, running_sums
from .kernel_kda import channel_inner_kernel as channel_inner_kernel


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def channels_gradient_kernel(
    d_out_ptr, q_ptr, k_ptr, beta_ptr, decay_ptr, u_ptr, dr_ptr, states_ptr, d_states_ptr,
    d1_ptr, d2_ptr, offsets_ptr, dq_ptr, dk_ptr, d_decay_ptr, of_z_ptr,
    N, LENGTH, SEQUENCES, scale, q_row, q_head, k_row, k_head, d_row, d_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """PART columns of dq, dk and dG of a chunk of a k head, and of what k owes to dβ.

    0 of rows that belong to no sequence.
    """
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    of_k, part = tl.program_id(1), tl.program_id(2)
    slot = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, CHUNK)
    row = start + i
    inside = row < end
    d, columns = part * PART + tl.arange(0, PART), tl.arange(0, V)
    zero = tl.zeros([CHUNK, PART], tl.float32)
    total_q, total_k = zero, zero
    if (sequence == SEQUENCES) | (start >= end):
        for member in tl.range(GROUP, num_stages=1):
            store_part(d_decay_ptr, zero, row, of_k * GROUP + member, d, K, HV, inside)
    else:
        last = tl.minimum(start + CHUNK, end) - 1
        q = rows_at(q_ptr, row, of_k, d, q_row, q_head, inside)
        k = rows_at(k_ptr, row, of_k, d, k_row, k_head, inside)
        for member in tl.range(GROUP, num_stages=1):
            head = of_k * GROUP + member
            decay = channel_decays(decay_ptr, row, last, head, d, HV, K)
            whole = tl.load(decay_ptr + ((last * HV + head) * K + d))
            beta = gates_at(beta_ptr, row, head, HV, inside)[:, None]
            s = some_rows_of(states_ptr, slot, head, d, True, HV, K, V)
            ds = some_rows_of(d_states_ptr, slot, head, d, True, HV, K, V)
            d_out = rows_at(d_out_ptr, row, head, columns, d_row, d_head, inside)
            dq = product(d_out, tl.trans(s), zero, UPCAST) * (tl.exp2(decay) * scale)
            dr = rows_at(dr_ptr, row, head, columns, HV * V, V, inside)
            z = -product(dr, tl.trans(s), zero, UPCAST) * tl.exp2(decay)
            u = rows_at(u_ptr, row, head, columns, HV * V, V, inside)
            m = product(u, tl.trans(ds), zero, UPCAST) * tl.exp2(whole[None, :] - decay)
            at_last = tl.reshape(halves(k.to(tl.float32) * m, 1, CHUNK, PART), [PART])
            of_states = pairs(s.to(tl.float32) * ds.to(tl.float32), PART, V)
            at_last += of_states * tl.exp2(whole)
            d1 = square_at(d1_ptr, row, head, HV, inside)
            d2 = square_at(d2_ptr, row, head, HV, inside)
            for level in tl.range(LEVELS, num_stages=1):
                factor, second, pair = level_factors(
                    decay_ptr, decay, start, last, head, d, level, HV, K
                )  # fmt: skip
                keys, queries = scaled(k, factor), scaled(q, factor)
                of_level = tl.where(pair, d1, 0.0)
                dq += product(of_level, keys, zero, UPCAST) * factor
                both = product(tl.trans(of_level), queries, zero, UPCAST)
                of_level = tl.where(pair | tl.trans(pair), d2, 0.0)
                both = product(of_level, keys, both, UPCAST) * factor
                z += tl.where(second[:, None], both, 0.0)
                m += tl.where(second[:, None], 0.0, both)
            q32, k32 = q.to(tl.float32), k.to(tl.float32)
            tl.store(of_z_ptr + part_at(part, row, head, N, HV), pairs(k32 * z, CHUNK, PART),
                     mask=inside)  # fmt: skip
            z = beta * z
            d_decay = q32 * dq + k32 * (z - m)
            d_decay += tl.where((row == last)[:, None], at_last[None, :], 0.0)
            store_part(d_decay_ptr, d_decay, row, head, d, K, HV, inside)
            same = tl.sum(tl.where(i[:, None] == i[None, :], d1, 0.0), axis=1)[:, None]
            total_q += dq + same * k32
            total_k += z + m + same * q32
    store_part(dq_ptr, total_q, row, of_k, d, K, HV // GROUP, inside)
    store_part(dk_ptr, total_k, row, of_k, d, K, HV // GROUP, inside)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def channel_gates_gradient_kernel(
    of_beta_ptr, of_z_ptr, offsets_ptr, dg_ptr, d_beta_ptr, N, LENGTH, SEQUENCES,
    HV: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dβ and, from dG in its place, dg of a chunk of a v head."""
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    head = tl.program_id(1)
    row = start + tl.arange(0, CHUNK)
    inside = row < end
    there = inside & (sequence < SEQUENCES)
    d_beta = gates_at(of_beta_ptr, row, head, HV, there)
    d_beta += sum_of_parts(of_z_ptr, row, head, N, HV, PARTS, there)
    d_beta = tl.where(there, d_beta, 0.0).to(d_beta_ptr.dtype.element_ty)
    tl.store(d_beta_ptr + (row * HV + head), d_beta, mask=inside)
    last = tl.minimum(start + CHUNK, end) - 1
    running_sums(
        dg_ptr, dg_ptr, last, -1, last - start + 1, head, sequence < SEQUENCES, 1.0, HV, K
    )  # fmt: skip
