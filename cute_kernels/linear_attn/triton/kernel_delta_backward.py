"""The gated delta rule in Triton, backward: six kernels, from what the forward left.

With P, A, S^ and u of the forward, Z = β 2^G dR, and dS', the gradient of the state behind a
chunk:

    local_gradient_kernel      dU = Pᵀ dO
    chain_gradient_kernel      the last chunk first: dU += 2^(G_C - G) k dS';  dR = Aᵀ dU;
                      dS = 2^G_C dS' + scale (2^G q)ᵀ dO - kᵀ Z
    scores_gradient_kernel     D1 = scale 2^(G_i - G_j) dO uᵀ, j <= i;  dv = β dR
                               D2 = -β_i 2^(G_i - G_j) dR uᵀ, j < i
    queries_gradient_kernel    dq = scale 2^G dO S^ᵀ + D1 k
    keys_gradient_kernel       dk = 2^(G_C - G) u dS'ᵀ - Z S^ᵀ + D1ᵀ q + (D2 + D2ᵀ) k
    gates_gradient_kernel      dβ, and dg_j = Σ_{i>=j} dG_i of the decays

Layouts are those of kernel_delta.py; gradients of states are [slots, HV, K, V] bf16, as states are.

Order of sums.  Products as in the forward: bf16 operands, ascending k16 steps into fp32.  k dS'
starts from zero and is added, times 2^(G_C - G), by one fma to what local_gradient_kernel left; dS
takes the q from zero, then the k, and is added by one fma.
dq and dk of a k head add its v heads, ascending.  Sums along a row or a column add neighbours, then
their sums, those over K in parts of 64, ascending; dG stays fp32.  Rounded to bf16: dU, dR, Z,
scale 2^G dO, D1, D2 + D2ᵀ, dS', and results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.triton_sums import pairs
from .kernel import sequence_rows
from .kernel_delta import (
    CHUNK,
    decays_of,
    gates_at,
    product,
    rows_at,
    scaled,
    scores,
    sequence_of,
    square_at,
    state_at,
    to_end,
    weighted_keys,
    whole_decay,
)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def local_gradient_kernel(
    d_out_ptr, q_ptr, k_ptr, decay_ptr, scores_ptr, offsets_ptr, du_ptr,
    N, LENGTH, SEQUENCES, scale, q_row, q_head, k_row, k_head, d_row, d_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHANNELS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dU = Pᵀ dO of a chunk of a v head."""
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    if sequence == SEQUENCES or start >= end:
        return
    head = tl.program_id(1)
    row = start + tl.arange(0, CHUNK)
    inside = row < end
    d, columns = tl.arange(0, K), tl.arange(0, V)
    d_out = rows_at(d_out_ptr, row, head, columns, d_row, d_head, inside)
    if CHANNELS:
        p = square_at(scores_ptr, row, head, HV, inside)
    else:
        q = rows_at(q_ptr, row, head // GROUP, d, q_row, q_head, inside)
        k = rows_at(k_ptr, row, head // GROUP, d, k_row, k_head, inside)
        decay = decays_of(decay_ptr, row, end, head, HV, False)
        p = scores(q, k, decay, scale, UPCAST)
    du = product(tl.trans(p), d_out, tl.zeros([CHUNK, V], tl.float32), UPCAST)
    offset = (row[:, None] * HV + head) * V + columns[None, :]
    tl.store(du_ptr + offset, du.to(tl.bfloat16), mask=inside[:, None])


@triton.jit(do_not_specialize=["LENGTH"])
def chain_gradient_kernel(
    d_out_ptr, q_ptr, k_ptr, beta_ptr, decay_ptr, weighted_ptr, inner_ptr, du_ptr, d_final_ptr,
    offsets_ptr, dr_ptr, d_states_ptr, d_initial_ptr,
    LENGTH, scale, q_row, q_head, k_row, k_head, d_row, d_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dR and the gradients of the states of a sequence and v head, the last chunk first."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, K)
    first, end, first_slot = sequence_of(offsets_ptr, sequence, LENGTH, CHUNK)
    at = state_at(sequence, head, columns, HV, K, V)
    ds = tl.zeros([K, COLUMNS], tl.float32)
    if d_final_ptr is not None:
        ds = tl.load(d_final_ptr + at)
    chunks = tl.cdiv(end - first, CHUNK)
    for i in range(0, chunks):
        chunk = chunks - 1 - i
        start = first + chunk * CHUNK
        row = start + tl.arange(0, CHUNK)
        inside = row < end
        q = rows_at(q_ptr, row, head // GROUP, d, q_row, q_head, inside)
        k = rows_at(k_ptr, row, head // GROUP, d, k_row, k_head, inside)
        d_out = rows_at(d_out_ptr, row, head, columns, d_row, d_head, inside)
        du = rows_at(du_ptr, row, head, columns, HV * V, V, inside).to(tl.float32)
        inner = square_at(inner_ptr, row, head, HV, inside)
        decay = decays_of(decay_ptr, row, end, head, HV, CHANNELS)
        beta = gates_at(beta_ptr, row, head, HV, inside)
        last = tl.minimum(start + CHUNK, end) - 1
        whole = whole_decay(decay_ptr, last, head, HV, K, CHANNELS)
        ds_hat = ds.to(tl.bfloat16)
        tl.store(d_states_ptr + state_at(first_slot + chunk, head, columns, HV, K, V), ds_hat)
        grown = tl.exp2(decay)
        weighted = weighted_keys(weighted_ptr, k, row, head, HV, K, inside, CHANNELS)
        of_state = product(weighted, ds_hat, tl.zeros([CHUNK, COLUMNS], tl.float32), UPCAST)
        du = tl.fma(tl.broadcast_to(to_end(decay, whole, CHANNELS), du.shape), of_state, du)
        du = tl.where(inside[:, None], du, 0.0).to(tl.bfloat16)
        dr = product(tl.trans(inner), du, tl.zeros([CHUNK, COLUMNS], tl.float32), UPCAST)
        dr = dr.to(tl.bfloat16)
        offset = (row[:, None] * HV + head) * V + columns[None, :]
        tl.store(dr_ptr + offset, dr, mask=inside[:, None])
        d_out = scaled(d_out, (grown * scale)[:, None])
        update = product(tl.trans(q), d_out, tl.zeros([K, COLUMNS], tl.float32), UPCAST)
        z = (dr.to(tl.float32) * -(beta * grown)[:, None]).to(tl.bfloat16)
        update = product(tl.trans(k), z, update, UPCAST)
        ds = tl.fma(tl.broadcast_to(tl.exp2(whole), ds.shape), ds, update)
    if d_initial_ptr is not None:
        tl.store(d_initial_ptr + at, ds)


@triton.jit
def _store_rows(ptr, value, row, head, size: tl.constexpr, heads: tl.constexpr, inside):
    """Dense rows of a head, with the one rounding."""
    offset = (row[:, None] * heads + head) * size + tl.arange(0, size)[None, :]
    tl.store(ptr + offset, value.to(ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def scores_gradient_kernel(
    d_out_ptr, q_ptr, k_ptr, v_ptr, beta_ptr, decay_ptr, u_ptr, dr_ptr, offsets_ptr,
    d1_ptr, d2_ptr, dv_ptr, d_decay_ptr, of_beta_ptr, N, LENGTH, SEQUENCES, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, d_row, d_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHANNELS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """D1, D2 + D2ᵀ, dv of a chunk of a v head, and what P, L and v owe to dG and dβ.

    With CHANNELS, whose decays are in no D: D1, dL + D2ᵀ, dv, and what v owes to dβ.
    """
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    row = start + i
    inside = row < end
    there = inside & (sequence < SEQUENCES)
    d, columns = tl.arange(0, K), tl.arange(0, V)
    square = tl.zeros([CHUNK, CHUNK], tl.float32)
    beta = gates_at(beta_ptr, row, head, HV, there)
    if CHANNELS:
        decay = tl.zeros([CHUNK], tl.float32)
    else:
        # As `decays_of`, where there may be no row.
        near = tl.minimum(row, end - 1) * HV + head
        decay = tl.load(decay_ptr + near, mask=(sequence < SEQUENCES) & (start < end), other=0.0)
    weight = tl.exp2(decay[:, None] - decay[None, :])
    d_out = rows_at(d_out_ptr, row, head, columns, d_row, d_head, there)
    u = rows_at(u_ptr, row, head, columns, HV * V, V, there)
    dr = rows_at(dr_ptr, row, head, columns, HV * V, V, there)
    d1 = product(d_out, tl.trans(u), square, UPCAST) * scale * weight
    d1 = tl.where(i[:, None] >= i[None, :], d1, 0.0)
    dl = -product(dr, tl.trans(u), square, UPCAST) * weight
    dl = tl.where(i[:, None] > i[None, :], dl, 0.0)
    v = rows_at(v_ptr, row, head, columns, v_row, v_head, there).to(tl.float32)
    of_v = pairs(dr.to(tl.float32) * v, CHUNK, V)
    _store_rows(dv_ptr, dr.to(tl.float32) * beta[:, None], row, head, V, HV, inside)
    at = row * HV + head
    d2 = dl * beta[:, None]
    if CHANNELS:
        d2 = dl + tl.trans(d2)
    else:
        q = rows_at(q_ptr, row, head // GROUP, d, q_row, q_head, there)
        k = rows_at(k_ptr, row, head // GROUP, d, k_row, k_head, there)
        of_beta = dl * product(k, tl.trans(k), square, UPCAST)
        m = d1 * product(q, tl.trans(k), square, UPCAST)
        m = tl.fma(of_beta, tl.broadcast_to(beta[:, None], m.shape), m)
        d_decay = pairs(m, CHUNK, CHUNK) - pairs(tl.trans(m), CHUNK, CHUNK)
        tl.store(d_decay_ptr + at, d_decay, mask=inside)
        of_v = pairs(of_beta, CHUNK, CHUNK) + of_v
        d2 = d2 + tl.trans(d2)
    _store_rows(d1_ptr, d1, row, head, CHUNK, HV, inside)
    _store_rows(d2_ptr, d2, row, head, CHUNK, HV, inside)
    tl.store(of_beta_ptr + at, of_v, mask=inside)


@triton.jit
def some_rows_of(
    state_ptr, slot, head, d, there, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):
    """Rows d of K of a state, [len(d), V]; 0 where there is no chunk."""
    offset = ((slot * HV + head) * K + d[:, None]) * V + tl.arange(0, V)[None, :]
    return tl.load(state_ptr + offset, mask=there, other=0.0)


@triton.jit
def part_at(part, row, head, N, HV: tl.constexpr):
    """Offsets of a sum over a part of K of rows of a head: parts [parts, N, HV]."""
    return (tl.cast(part, tl.int64) * N + row) * HV + head


@triton.jit
def store_part(ptr, value, row, head, d, size: tl.constexpr, heads: tl.constexpr, inside):
    """Columns d of dense rows of a head, with the one rounding."""
    offset = (row[:, None] * heads + head) * size + d[None, :]
    tl.store(ptr + offset, value.to(ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def queries_gradient_kernel(
    d_out_ptr, q_ptr, k_ptr, decay_ptr, states_ptr, d1_ptr, offsets_ptr, dq_ptr, of_q_ptr,
    N, LENGTH, SEQUENCES, scale, q_row, q_head, k_row, k_head, d_row, d_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """PART columns of dq of a chunk of a k head, and what q owes to dG."""
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    of_k, part = tl.program_id(1), tl.program_id(2)
    slot = tl.program_id(0).to(tl.int64)
    row = start + tl.arange(0, CHUNK)
    inside = row < end
    there = inside & (sequence < SEQUENCES)
    is_chunk = (sequence < SEQUENCES) & (start < end)
    d, columns = part * PART + tl.arange(0, PART), tl.arange(0, V)
    total = tl.zeros([CHUNK, PART], tl.float32)
    for member in tl.range(GROUP, num_stages=1):
        head = of_k * GROUP + member
        decay = gates_at(decay_ptr, row, head, HV, there)
        d_out = rows_at(d_out_ptr, row, head, columns, d_row, d_head, there)
        s = some_rows_of(states_ptr, slot, head, d, is_chunk, HV, K, V)
        dq = product(d_out, tl.trans(s), tl.zeros([CHUNK, PART], tl.float32), UPCAST)
        dq = dq * (tl.exp2(decay) * scale)[:, None]
        q = rows_at(q_ptr, row, of_k, d, q_row, q_head, there).to(tl.float32)
        tl.store(
            of_q_ptr + part_at(part, row, head, N, HV), pairs(q * dq, CHUNK, PART), mask=inside
        )
        k = rows_at(k_ptr, row, of_k, d, k_row, k_head, there)
        total += product(square_at(d1_ptr, row, head, HV, there), k, dq, UPCAST)
    store_part(dq_ptr, total, row, of_k, d, K, HV // GROUP, inside)


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def keys_gradient_kernel(
    q_ptr, k_ptr, beta_ptr, decay_ptr, u_ptr, dr_ptr, states_ptr, d_states_ptr, d1_ptr, d2_ptr,
    offsets_ptr, dk_ptr, of_z_ptr, of_u_ptr, of_states_ptr,
    N, LENGTH, SEQUENCES, q_row, q_head, k_row, k_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """PART columns of dk of a chunk of a k head, and what k and S owe to dG and dβ."""
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    of_k, part = tl.program_id(1), tl.program_id(2)
    slot = tl.program_id(0).to(tl.int64)
    row = start + tl.arange(0, CHUNK)
    inside = row < end
    there = inside & (sequence < SEQUENCES)
    is_chunk = (sequence < SEQUENCES) & (start < end)
    last = tl.minimum(start + CHUNK, end) - 1
    d, columns = part * PART + tl.arange(0, PART), tl.arange(0, V)
    total = tl.zeros([CHUNK, PART], tl.float32)
    for member in tl.range(GROUP, num_stages=1):
        head = of_k * GROUP + member
        decay = gates_at(decay_ptr, row, head, HV, there)
        beta = gates_at(beta_ptr, row, head, HV, there)
        whole = tl.load(decay_ptr + (last * HV + head), mask=sequence < SEQUENCES, other=0.0)
        at = part_at(part, row, head, N, HV)
        s = some_rows_of(states_ptr, slot, head, d, is_chunk, HV, K, V)
        ds = some_rows_of(d_states_ptr, slot, head, d, is_chunk, HV, K, V)
        of_states = pairs(s.to(tl.float32) * ds.to(tl.float32), PART, V)
        tl.store(of_states_ptr + ((slot * HV + head) * K + d), of_states)
        dr = rows_at(dr_ptr, row, head, columns, HV * V, V, there)
        dk = product(dr, tl.trans(s), tl.zeros([CHUNK, PART], tl.float32), UPCAST)
        dk = dk * tl.exp2(decay)[:, None]
        k = rows_at(k_ptr, row, of_k, d, k_row, k_head, there).to(tl.float32)
        tl.store(of_z_ptr + at, pairs(k * dk, CHUNK, PART), mask=inside)
        u = rows_at(u_ptr, row, head, columns, HV * V, V, there)
        of_u = product(u, tl.trans(ds), tl.zeros([CHUNK, PART], tl.float32), UPCAST)
        of_u = of_u * tl.exp2(whole - decay)[:, None]
        tl.store(of_u_ptr + at, pairs(k * of_u, CHUNK, PART), mask=inside)
        dk = of_u - dk * beta[:, None]
        q = rows_at(q_ptr, row, of_k, d, q_row, q_head, there)
        dk = product(tl.trans(square_at(d1_ptr, row, head, HV, there)), q, dk, UPCAST)
        k = rows_at(k_ptr, row, of_k, d, k_row, k_head, there)
        total += product(square_at(d2_ptr, row, head, HV, there), k, dk, UPCAST)
    store_part(dk_ptr, total, row, of_k, d, K, HV // GROUP, inside)


@triton.jit
def sum_of_parts(ptr, row, head, N, HV: tl.constexpr, PARTS: tl.constexpr, inside):
    """Sums over K of rows of a head, parts ascending."""
    total = tl.load(ptr + part_at(0, row, head, N, HV), mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + part_at(part, row, head, N, HV), mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["N", "LENGTH", "SEQUENCES"])
def gates_gradient_kernel(
    beta_ptr, decay_ptr, d_decay_ptr, of_beta_ptr, of_q_ptr, of_z_ptr, of_u_ptr, of_states_ptr,
    offsets_ptr, dg_ptr, d_beta_ptr, N, LENGTH, SEQUENCES,
    HV: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dg and dβ of a chunk of a v head: dG_i, and dg_j = Σ_{i >= j} dG_i."""
    sequence, _, end, start = sequence_rows(offsets_ptr, CHUNK, N, LENGTH, SEQUENCES)
    head = tl.program_id(1)
    slot = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, CHUNK)
    row = start + i
    inside = row < end
    there = inside & (sequence < SEQUENCES)
    is_chunk = (sequence < SEQUENCES) & (start < end)
    last = tl.minimum(start + CHUNK, end) - 1
    beta = gates_at(beta_ptr, row, head, HV, there)
    of_z = sum_of_parts(of_z_ptr, row, head, N, HV, PARTS, there)
    of_u = sum_of_parts(of_u_ptr, row, head, N, HV, PARTS, there)
    d_beta = gates_at(of_beta_ptr, row, head, HV, there) - of_z
    of_states = tl.load(
        of_states_ptr + ((slot * HV + head) * K + tl.arange(0, K)), mask=is_chunk, other=0.0
    )
    whole = tl.load(decay_ptr + (last * HV + head), mask=is_chunk, other=0.0)
    at_last = _total(of_u, CHUNK) + _total(of_states, K) * tl.exp2(whole)
    d_decay = gates_at(d_decay_ptr, row, head, HV, there)
    d_decay += sum_of_parts(of_q_ptr, row, head, N, HV, PARTS, there)
    d_decay = d_decay - beta * of_z - of_u + tl.where(row == last, at_last, 0.0)
    later = tl.where(i[None, :] >= i[:, None], d_decay[None, :], 0.0)
    gates = row * HV + head
    tl.store(dg_ptr + gates, pairs(later, CHUNK, CHUNK), mask=inside)
    tl.store(d_beta_ptr + gates, d_beta.to(d_beta_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _total(v, SIZE: tl.constexpr):
    """[SIZE] -> a number."""
    return tl.max(pairs(tl.reshape(v, [1, SIZE]), 1, SIZE), axis=0)  # of one element
