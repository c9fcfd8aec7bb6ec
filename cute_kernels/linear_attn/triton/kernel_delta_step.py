"""One launch of decoding for the gated delta rule in Triton: the open chunk again, and what is new.

A program has a v head of a sequence: its rows from the grid on are old ones, of a ring, and then
new ones.  It computes their chunks with the functions of kernel_delta.py, so rows have the bytes of
one pass; it stores o of the new rows, the rows themselves, and the state, where it moves.

Layouts.  Rings [slots R + 1, H, ...] with the row of position p of a slot at slot R + p mod R; a
sequence has at most R rows from its grid on, so new rows lie on no old one.  grid, length [slots].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel_delta import (
    CHUNK,
    corrected,
    decays,
    inverse,
    next_state,
    outputs,
    scaled,
    scores,
    state_at,
    upper_plane,
)


@triton.jit
def _rows(
    ring_ptr, new_ptr, place, row, head, heads: tl.constexpr, size: tl.constexpr, row_stride,
    head_stride, old, new,
):  # fmt: skip
    """Rows of a head [64, size]: old ones of a ring, new ones, and 0."""
    columns = tl.arange(0, size)[None, :]
    kept = (place[:, None] * heads + head) * size + columns
    kept = tl.load(ring_ptr + kept, mask=old[:, None], other=0.0)
    given = row[:, None] * row_stride + (head * head_stride + columns)
    given = tl.load(new_ptr + given, mask=new[:, None], other=0.0)
    return tl.where(old[:, None], kept, given)


@triton.jit
def _gates(ring_ptr, new_ptr, place, row, head, HV: tl.constexpr, old, new):
    """A gate of rows of a head, fp32 [64]: old ones of a ring, new ones, and 0."""
    kept = tl.load(ring_ptr + (place * HV + head), mask=old, other=0.0)
    given = tl.load(new_ptr + (row * HV + head), mask=new, other=0.0).to(tl.float32)
    return tl.where(old, kept, given)


@triton.jit
def _keep(ring_ptr, rows, place, head, heads: tl.constexpr, size: tl.constexpr, new):
    """Store new rows in a ring."""
    offset = (place[:, None] * heads + head) * size + tl.arange(0, size)[None, :]
    tl.store(ring_ptr + offset, rows.to(ring_ptr.dtype.element_ty), mask=new[:, None])


@triton.jit(do_not_specialize=["LENGTH", "DRAFTS"])
def step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, offsets_ptr, slots_ptr, grid_ptr, length_ptr,
    state_ptr, k_ring_ptr, v_ring_ptr, g_ring_ptr, beta_ring_ptr, out_ptr,
    LENGTH, DRAFTS, scale, q_row, q_head, k_row, k_head, v_row, v_head,
    R: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """o of the new rows of a sequence and v head, and its record without grid and length."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
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
    total = opened + count
    whole_rows = tl.maximum(total - DRAFTS, 0) // CHUNK * CHUNK
    at = state_at(slot, head, tl.arange(0, V), HV, K, V)
    s = tl.load(state_ptr + at)
    for start in tl.range(0, total, CHUNK, num_stages=1):
        p = start + tl.arange(0, CHUNK)
        old = p < opened
        there = p < total
        new = there & (p >= opened)
        place = slot * R + (base + p) % R
        row = first + p - opened
        k = _rows(
            k_ring_ptr, k_ptr, place, row, head // GROUP, HV // GROUP, K, k_row, k_head, old, new
        )
        v = _rows(v_ring_ptr, v_ptr, place, row, head, HV, V, v_row, v_head, old, new)
        g = _gates(g_ring_ptr, g_ptr, place, row, head, HV, old, new)
        beta = _gates(beta_ring_ptr, beta_ptr, place, row, head, HV, old, new)
        decay = decays(g)
        s_hat = upper_plane(s)
        inner = inverse(k, beta, decay, UPCAST)
        u = corrected(k, v.to(tl.float32), beta, decay, inner, s_hat, there, UPCAST)
        q = row[:, None] * q_row + (head // GROUP * q_head + tl.arange(0, K)[None, :])
        q = tl.load(q_ptr + q, mask=new[:, None], other=0.0)
        out = outputs(q, scores(q, k, decay, scale, UPCAST), u, s_hat, decay, scale, UPCAST)
        offset = (row[:, None] * HV + head) * V + tl.arange(0, V)[None, :]
        tl.store(out_ptr + offset, out.to(tl.bfloat16), mask=new[:, None])
        if start + CHUNK <= total:
            # G of the last row of a whole chunk: a sum of it and zeros.
            whole = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, decay, 0.0), axis=0)
            s = next_state(s, scaled(k, tl.exp2(whole - decay)[:, None]), u, whole, UPCAST)
            if start + CHUNK <= whole_rows:
                tl.store(state_ptr + at, s)
        keep = new & (p >= whole_rows)
        if head % GROUP == 0:
            _keep(k_ring_ptr, k, place, head // GROUP, HV // GROUP, K, keep)
        _keep(v_ring_ptr, v, place, head, HV, V, keep)
        tl.store(g_ring_ptr + (place * HV + head), g, mask=keep)
        tl.store(beta_ring_ptr + (place * HV + head), beta, mask=keep)


@triton.jit(do_not_specialize=["LENGTH", "DRAFTS"])
def advance_kernel(offsets_ptr, slots_ptr, grid_ptr, length_ptr, LENGTH, DRAFTS):
    """grid and length of a sequence behind its new rows."""
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
    moved = tl.maximum(length - base - DRAFTS, 0) // CHUNK * CHUNK
    tl.store(grid_ptr + slot, base + moved)
