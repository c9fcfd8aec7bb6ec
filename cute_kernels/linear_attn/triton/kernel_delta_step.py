"""One launch of decoding for the gated delta rule in Triton: the blocks of rows that are new.

A program has a v head of a sequence and ``COLUMNS`` of V.  From the grid on a sequence has old
rows, of rings, and then new ones.  What a block of 16 rows needs of those before it in its chunk is
in rings too: r, u and rows of A (kernel_delta.py), of rows that an earlier launch has made.  A
program makes them for the blocks that are left, in the order of kernel_delta.py; stores o of the
new rows, and the state, where it moves.

A row of a block has the bytes that it has in products of 64 rows; blocks behind it would add zeros,
as those before it here do that are not there.

Layouts.  Rings [slots R + 1, H, ...] with the row of position p of a slot at slot R + p mod R; a
sequence has at most R rows from its grid on, so new rows lie on no old one.  grid, length, made
[slots]: rows before ``made`` have r, u and A, if they are still there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel_delta import (
    BLOCK,
    CHUNK,
    decays,
    inverses,
    next_state,
    product,
    scaled,
    state_at,
)


@triton.jit
def _ring_rows(ring_ptr, place, head, heads: tl.constexpr, size: tl.constexpr, columns, there):
    """Columns of rows of a head in a ring; 0 where they are not there."""
    offset = (place[:, None] * heads + head) * size + columns[None, :]
    return tl.load(ring_ptr + offset, mask=there[:, None], other=0.0)


@triton.jit
def _rows(
    ring_ptr, new_ptr, place, row, head, heads: tl.constexpr, size: tl.constexpr, columns,
    row_stride, head_stride, old, new,
):  # fmt: skip
    """Columns of rows of a head: old ones of a ring, new ones, and 0."""
    kept = _ring_rows(ring_ptr, place, head, heads, size, columns, old)
    given = row[:, None] * row_stride + (head * head_stride + columns[None, :])
    given = tl.load(new_ptr + given, mask=new[:, None], other=0.0)
    return tl.where(old[:, None], kept, given)


@triton.jit
def _gates(ring_ptr, new_ptr, place, row, head, HV: tl.constexpr, old, new):
    """A gate of rows of a head, fp32: old ones of a ring, new ones, and 0."""
    kept = tl.load(ring_ptr + (place * HV + head), mask=old, other=0.0)
    given = tl.load(new_ptr + (row * HV + head), mask=new, other=0.0).to(tl.float32)
    return tl.where(old, kept, given)


@triton.jit
def _keep(
    ring_ptr, rows, place, head, heads: tl.constexpr, size: tl.constexpr, columns, there
):  # fmt: skip
    """Store columns of rows in a ring."""
    offset = (place[:, None] * heads + head) * size + columns[None, :]
    tl.store(ring_ptr + offset, rows.to(ring_ptr.dtype.element_ty), mask=there[:, None])


@triton.jit
def _own(values, i):
    """Those of 64 values whose numbers are i: sums of one and zeros."""
    j = tl.arange(0, CHUNK)
    return tl.sum(tl.where(i[:, None] == j[None, :], values[None, :], 0.0), axis=1)


@triton.jit
def _rows_of_inverse(own_k, k, own_beta, own_decay, decay, b, before, UPCAST: tl.constexpr):
    """T of block b of a chunk, and its rows of A, from those before, both rounded."""
    n, j = tl.arange(0, BLOCK), tl.arange(0, CHUNK)
    square = tl.zeros([BLOCK, BLOCK], tl.float32)
    wide = tl.zeros([BLOCK, CHUNK], tl.float32)
    lower = own_beta[:, None] * product(own_k, tl.trans(own_k), square, UPCAST)
    lower = lower * tl.exp2(own_decay[:, None] - own_decay[None, :])
    lower = tl.where(n[:, None] > n[None, :], lower, 0.0)
    t = tl.reshape(inverses(tl.reshape(lower, [1, BLOCK, BLOCK]), 1), [BLOCK, BLOCK])
    t = t.to(tl.bfloat16)
    lower = own_beta[:, None] * product(own_k, tl.trans(k), wide, UPCAST)
    lower = lower * tl.exp2(own_decay[:, None] - decay[None, :])
    lower = tl.where(j[None, :] < b * BLOCK, lower, 0.0).to(tl.bfloat16)
    i = b * BLOCK + n
    unit = tl.where(i[:, None] == j[None, :], 1.0, 0.0)
    rest = (unit - product(lower, before, wide, UPCAST)).to(tl.bfloat16)
    return t, product(t, rest, wide, UPCAST).to(tl.bfloat16)


@triton.jit(do_not_specialize=["LENGTH", "DRAFTS"])
def step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, offsets_ptr, slots_ptr, grid_ptr, length_ptr, made_ptr,
    state_ptr, k_ring_ptr, v_ring_ptr, g_ring_ptr, beta_ring_ptr, r_ring_ptr, u_ring_ptr,
    inner_ring_ptr, out_ptr,
    LENGTH, DRAFTS, scale, q_row, q_head, k_row, k_head, v_row, v_head,
    R: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """o of the new rows of a sequence and v head, and its record without the counters."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    first = sequence * LENGTH
    count = tl.zeros_like(first) + LENGTH
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + sequence).to(tl.int64)
        count = tl.load(offsets_ptr + sequence + 1).to(tl.int64) - first
    slot = sequence
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
    base = tl.load(grid_ptr + slot)
    opened = tl.load(length_ptr + slot) - base
    made = tl.minimum(tl.maximum(tl.load(made_ptr + slot) - base, 0), opened)
    total = opened + count
    whole_rows = tl.maximum(total - DRAFTS, 0) // CHUNK * CHUNK
    j, d = tl.arange(0, CHUNK), tl.arange(0, K)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    of_k: tl.constexpr = HV // GROUP
    at = state_at(slot, head, columns, HV, K, V)
    s = tl.load(state_ptr + at)
    for start in tl.range(0, total, CHUNK, num_stages=1):
        p = start + j
        old = p < opened
        there = p < total
        new = there & (p >= opened)
        place = slot * R + (base + p) % R
        row = first + p - opened
        k = _rows(k_ring_ptr, k_ptr, place, row, head // GROUP, of_k, K, d, k_row, k_head, old, new)
        g = _gates(g_ring_ptr, g_ptr, place, row, head, HV, old, new)
        beta = _gates(beta_ring_ptr, beta_ptr, place, row, head, HV, old, new)
        decay = decays(g)
        s_hat = s.to(tl.bfloat16)
        for b in tl.range(
            tl.maximum(made - start, 0) // BLOCK,
            tl.minimum(tl.cdiv(total - start, BLOCK), CHUNK // BLOCK),
            num_stages=1,
        ):
            n = tl.arange(0, BLOCK)
            i = b * BLOCK + n
            own_p = start + i
            own_there = own_p < total
            own_new = own_there & (own_p >= opened)
            own_place = slot * R + (base + own_p) % R
            own_row = first + own_p - opened
            before = j < b * BLOCK
            own_k = _rows(
                k_ring_ptr, k_ptr, own_place, own_row, head // GROUP, of_k, K, d, k_row, k_head,
                own_p < opened, own_new,
            )  # fmt: skip
            v = _rows(
                v_ring_ptr, v_ptr, own_place, own_row, head, HV, V, columns, v_row, v_head,
                own_p < opened, own_new,
            )  # fmt: skip
            own_decay, own_beta = _own(decay, i), _own(beta, i)
            weight = tl.exp2(own_decay[:, None] - decay[None, :])
            own_weight = tl.exp2(own_decay[:, None] - own_decay[None, :])
            square = tl.zeros([BLOCK, BLOCK], tl.float32)
            wide = tl.zeros([BLOCK, CHUNK], tl.float32)
            narrow = tl.zeros([BLOCK, COLUMNS], tl.float32)
            t, a = _rows_of_inverse(
                own_k, k, own_beta, own_decay, decay, b,
                _ring_rows(inner_ring_ptr, place, head, HV, CHUNK, j, before), UPCAST,
            )  # fmt: skip
            # r, and u = A r
            factor = tl.broadcast_to(-tl.exp2(own_decay)[:, None], v.shape)
            r = tl.fma(factor, product(own_k, s_hat, narrow, UPCAST), v.to(tl.float32))
            r = tl.where(own_there[:, None], own_beta[:, None] * r, 0.0).to(tl.bfloat16)
            r_before = _ring_rows(r_ring_ptr, place, head, HV, V, columns, before)
            zero = tl.zeros_like(a)
            u = product(tl.where(before[None, :], a, zero), r_before, narrow, UPCAST)
            u = (product(t, r, u, UPCAST) + 0.0).to(tl.bfloat16)
            # o = scale 2^G S^ᵀ q + P u
            q = own_row[:, None] * q_row + (head // GROUP * q_head + d[None, :])
            q = tl.load(q_ptr + q, mask=own_new[:, None], other=0.0)
            scores = product(q, tl.trans(k), wide, UPCAST) * (weight * scale)
            scores = tl.where(before[None, :], scores, 0.0).to(tl.bfloat16)
            own_scores = product(q, tl.trans(own_k), square, UPCAST) * (own_weight * scale)
            own_scores = tl.where(n[:, None] >= n[None, :], own_scores, 0.0).to(tl.bfloat16)
            u_before = _ring_rows(u_ring_ptr, place, head, HV, V, columns, before)
            out = product(q, s_hat, narrow, UPCAST) * (tl.exp2(own_decay) * scale)[:, None]
            out = product(own_scores, u, product(scores, u_before, out, UPCAST), UPCAST) + 0.0
            offset = (own_row[:, None] * HV + head) * V + columns[None, :]
            tl.store(out_ptr + offset, out.to(tl.bfloat16), mask=own_new[:, None])
            _keep(r_ring_ptr, r, own_place, head, HV, V, columns, own_there)
            _keep(u_ring_ptr, u, own_place, head, HV, V, columns, own_there)
            _keep(v_ring_ptr, v, own_place, head, HV, V, columns, own_new)
            # Each part of V stores A, for itself: the bytes are the same.
            _keep(inner_ring_ptr, a, own_place, head, HV, CHUNK, j, own_there)
            if part == 0:
                if head % GROUP == 0:
                    _keep(k_ring_ptr, own_k, own_place, head // GROUP, of_k, K, d, own_new)
            tl.debug_barrier()  # blocks behind read what is in the rings now
        if part == 0:
            tl.store(g_ring_ptr + (place * HV + head), g, mask=new)
            tl.store(beta_ring_ptr + (place * HV + head), beta, mask=new)
        if start + CHUNK <= total:
            a = _ring_rows(inner_ring_ptr, place, head, HV, CHUNK, j, there)
            r = _ring_rows(r_ring_ptr, place, head, HV, V, columns, there)
            u = product(a, r, tl.zeros([CHUNK, COLUMNS], tl.float32), UPCAST) + 0.0
            # G of the last row of a whole chunk: a sum of it and zeros.
            whole = tl.sum(tl.where(j == CHUNK - 1, decay, 0.0), axis=0)
            s = next_state(s, k, scaled(u, tl.exp2(whole - decay)[:, None]), whole, UPCAST)
            if start + CHUNK <= whole_rows:
                tl.store(state_ptr + at, s)


@triton.jit(do_not_specialize=["LENGTH", "DRAFTS"])
def advance_kernel(
    offsets_ptr, slots_ptr, grid_ptr, length_ptr, made_ptr, rounded_at_ptr, LENGTH, DRAFTS,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """The counters of a sequence behind its new rows."""
    sequence = tl.program_id(0).to(tl.int64)
    count = tl.zeros_like(sequence) + LENGTH
    if offsets_ptr is not None:
        count = tl.load(offsets_ptr + sequence + 1).to(tl.int64)
        count -= tl.load(offsets_ptr + sequence).to(tl.int64)
    slot = sequence
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
    base = tl.load(grid_ptr + slot)
    length = tl.load(length_ptr + slot) + count
    tl.store(length_ptr + slot, length)
    tl.store(made_ptr + slot, length)
    moved = tl.maximum(length - base - DRAFTS, 0) // CHUNK * CHUNK
    tl.store(grid_ptr + slot, base + moved)
    tl.store(rounded_at_ptr + slot, base + moved + 1 if ROUNDED else 0)
