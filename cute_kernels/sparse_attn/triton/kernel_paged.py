"""The portable kernels of attention over paged caches, in Triton: ROCm, and CUDA without SM90.

    paged_forward_kernel   out, lse            one program per (row tile, KV head)
    write_kv_kernel        k_cache, v_cache    one program per token

Rows.  A row is one query head of one token.  The rows of a sequence under a KV head are counted
token by token, in each the query heads of the group ascending, and cut into tiles of BLOCK_M rows:
a tile never has rows of two sequences.  Sequence i has the tile slots from
cu_seqlens_q[i] * GROUP // BLOCK_M + i on, which are as many as its rows can need; a program finds
its sequence by a binary search over these formulas and returns if its slot has no rows.  Tokens
after the last sequence are rows of one without keys and sinks: out 0, lse -inf.

Summation order.  That of ``forward_kernel`` (kernel.py), whose tiles, dots, formulas and options
these are: blocks of BLOCK_N keys ascending, counted from the sequence's first key, in one fp32
chain that is never split.  A row's bits do not depend on its place in a tile, nor on the blocks
that its neighbours need, so a row has the bytes of its row in a dense forward over the keys
gathered from their pages.

A key is loaded only if it lies between the first and the last key that some row of the tile sees:
K and V of all others are zeros, whatever is in their pages, and such pages are not read.  A page
index outside the cache stands for a page of zeros.

No atomics, no split sums, no autotuning.  Compiled for sm_90, gfx942 and gfx950; not run on a GPU.
"""

import triton
import triton.language as tl

from ...runtime.triton_tiles import load_rows, store_rows
from .kernel_softmax import LOG2E, NOTHING, product, softmax_end, softmax_step, through


@triton.jit
def _first_slot(cu_ptr, sequence, GROUP, BLOCK_M: tl.constexpr):
    """First tile slot of a sequence; ``cu_ptr[0]``, which is 0, is not read."""
    start = tl.load(cu_ptr + sequence, mask=sequence > 0, other=0).to(tl.int32)
    return start * GROUP // BLOCK_M + sequence


@triton.jit
def _sequence_of(cu_ptr, slot, SEQUENCES, GROUP, BLOCK_M: tl.constexpr):
    """The last sequence whose first slot is ``slot`` or before; SEQUENCES: tokens of none."""
    low = slot * 0
    high = low + SEQUENCES
    while low < high:
        middle = (low + high + 1) // 2
        is_before = _first_slot(cu_ptr, middle, GROUP, BLOCK_M) <= slot
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    return low


@triton.jit(
    do_not_specialize=[
        *("TOKENS", "SEQUENCES", "GROUP", "KV_HEADS", "PAGES", "TABLE", "lo", "hi"),
        *("factor", "bend"),
    ]
)
def paged_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    seqlens_ptr,
    cu_ptr,
    sinks_ptr,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    TOKENS,
    SEQUENCES,
    GROUP,
    KV_HEADS,
    PAGES,
    TABLE,
    lo,
    hi,
    factor,
    bend,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
):
    """BLOCK_M rows of out [TOKENS, Hq, DV] and of lse [Hq, TOKENS], which is contiguous.

    q_strides, out_strides: of tokens and heads.  k_strides, v_strides: of pages, keys and heads.
    table_ptr: int [SEQUENCES, TABLE], contiguous; seqlens_ptr: int [SEQUENCES]; cu_ptr: int
    [SEQUENCES + 1]; sinks_ptr: fp32 [Hq] or None.
    A query at position p sees the keys from p + lo to p + hi; the last is at seqlens - 1.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    slot = tl.program_id(0) // KV_HEADS
    sequence = _sequence_of(cu_ptr, slot, SEQUENCES, GROUP, BLOCK_M)
    is_sequence = sequence < SEQUENCES
    begin = tl.load(cu_ptr + sequence, mask=sequence > 0, other=0).to(tl.int32)
    end = tl.load(cu_ptr + sequence + 1, mask=is_sequence, other=TOKENS).to(tl.int32)
    first = (slot - _first_slot(cu_ptr, sequence, GROUP, BLOCK_M)) * BLOCK_M
    rows = (tl.minimum(end, TOKENS) - begin) * GROUP
    if first >= rows:
        return
    kv_len = tl.load(seqlens_ptr + sequence, mask=is_sequence, other=0).to(tl.int32)
    kv_len = tl.minimum(kv_len, TABLE * PAGE)

    r = first + tl.arange(0, BLOCK_M)
    is_row = r < rows
    token = (begin + r // GROUP).to(tl.int64)
    head = (kv_head * GROUP + r % GROUP).to(tl.int64)
    # The last token's query is at the position of the last key.
    shift = kv_len - (end - begin)
    position = shift + r // GROUP
    first_key = tl.maximum(shift + first // GROUP + lo, 0)
    last_row = tl.minimum(first + BLOCK_M, rows) - 1
    end_key = tl.maximum(tl.minimum(shift + last_row // GROUP + hi + 1, kv_len), 0)

    q_offset = token * q_strides[0] + head * q_strides[1]
    q = load_rows(q_ptr, q_offset, is_row, D, BLOCK_D)
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        # As after a key of the sink's score with a value of zeros.
        top = tl.load(sinks_ptr + head, mask=is_row & is_sequence, other=NOTHING) * LOG2E
        total += 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    table_ptr += sequence.to(tl.int64) * TABLE
    k_ptr += kv_head.to(tl.int64) * k_strides[2]
    v_ptr += kv_head.to(tl.int64) * v_strides[2]
    for step in tl.range(first_key // BLOCK_N, (end_key + BLOCK_N - 1) // BLOCK_N):
        n = step * BLOCK_N + tl.arange(0, BLOCK_N)
        is_seen = (n >= first_key) & (n < end_key)
        page = tl.load(table_ptr + n // PAGE, mask=is_seen, other=-1).to(tl.int64)
        is_held = is_seen & (page >= 0) & (page < PAGES)
        # s = q kᵀ, or its soft cap, but for the factor.
        k_offset = page * k_strides[0] + (n % PAGE).to(tl.int64) * k_strides[1]
        k = load_rows(k_ptr, k_offset, is_held, D, BLOCK_D)
        s = product(q, k, bend, SOFTCAP)
        gap = n[None, :] - position[:, None]
        allowed = is_row[:, None] & (n < kv_len)[None, :] & (gap >= lo) & (gap <= hi)
        s = tl.where(allowed, s, NOTHING)
        p, top, total, shrink = softmax_step(s, top, total, factor)
        # acc = acc shrink + P v
        v_offset = page * v_strides[0] + (n % PAGE).to(tl.int64) * v_strides[1]
        v = load_rows(v_ptr, v_offset, is_held, DV, BLOCK_DV)
        acc = tl.dot(through(p, v, ROUND), v, acc * shrink[:, None], input_precision="ieee")

    out, lse = softmax_end(acc, top, total)
    out_offset = token * out_strides[0] + head * out_strides[1]
    store_rows(out_ptr, out, out_offset, is_row, DV, BLOCK_DV)
    tl.store(lse_ptr + head * TOKENS + token, lse, mask=is_row)


@triton.jit(do_not_specialize=["KV_HEADS", "PAGES"])
def write_kv_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    key_strides,
    value_strides,
    k_strides,
    v_strides,
    KV_HEADS,
    PAGES,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """K and V of one token into their slot, PAGE * page + key; one outside the cache is skipped.

    key_strides, value_strides: of tokens and heads.  k_strides, v_strides: of pages, keys, heads.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    page = slot // PAGE
    if (slot < 0) | (page >= PAGES):
        return
    key_ptr += token * key_strides[0]
    value_ptr += token * value_strides[0]
    k_ptr += page * k_strides[0] + slot % PAGE * k_strides[1]
    v_ptr += page * v_strides[0] + slot % PAGE * v_strides[1]
    for first in tl.range(0, KV_HEADS, BLOCK_H):
        head = (first + tl.arange(0, BLOCK_H)).to(tl.int64)
        is_head = head < KV_HEADS
        key = load_rows(key_ptr, head * key_strides[1], is_head, D, BLOCK_D)
        value = load_rows(value_ptr, head * value_strides[1], is_head, DV, BLOCK_DV)
        store_rows(k_ptr, key, head * k_strides[2], is_head, D, BLOCK_D)
        store_rows(v_ptr, value, head * v_strides[2], is_head, DV, BLOCK_DV)
