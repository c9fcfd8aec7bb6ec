"""The portable kernels of block-sparse attention, in Triton: ROCm, and CUDA without SM90.

    forward_kernel    out, lse        one program per (batch, query head, query block)
    delta_kernel      delta           rowsum(dO * O) - dlse
    writers_kernel    a schedule's lists by query block, in the order of ranks
    dkdv_kernel       dK, dV          one program per (batch, KV head, key block)
    dq_kernel         dQ              one program per (batch, query head, query block)

Summation order.  A score is one `tl.dot` over D, the head size of q and k (96 is padded to 128 with
zeros, 192 to 256); out and delta have DV, that of v.  Forward: key blocks ascending by absolute
index, online softmax in base 2, P in the input dtype, one division at the end.  dK and dV: query
blocks in the schedule's visiting order, in each the query heads of the group ascending; a group
whose heads have lists of their own adds head after head.  dQ: key blocks in the order of ranks.  A
block of 128 is taken in steps, ascending, of the rows that the plan names.  Every sum is one fp32
chain that a program carries from its first step to its last, rounded once.  No atomics, no split
sums, no autotuning; the launch order, and so a schedule's tickets, decides only when a program
runs.

A row's bits in the forward do not depend on which steps its neighbours need.  A step that allows a
row nothing leaves the maximum as it is, scales by exp2(0) = 1 and adds zeros; this can turn a -0 of
the accumulator into +0, so out is stored without -0.  They do not depend on the form of the mask
either: what is fused is written as `tl.fma`, and the compiler may fuse nothing else
(`enable_fp_fusion=False`), so that one arithmetic is compiled for "none", "band" and "bits".

V of a visited block must be finite, or NaN reaches all rows of the query block (0 * NaN).

Run on an H200, on AMD not.  Tests run the sm_90 code in ptxsim and the source in Triton's
interpreter, and read the gfx942 and gfx950 code; tiles, stages and warps are unmeasured guesses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.triton_tiles import load_rows, store_rows
from .kernel_softmax import LOG2E, NOTHING, product, softmax_end, softmax_step, through

BLOCK = tl.constexpr(128)  # rows of a block of the mask
WORDS = tl.constexpr(4)  # int32 words of a row of a bit tile
FAR = tl.constexpr(2**30)  # an open end of a band

_SIZES = ("HEADS", "GROUP", "Q_LEN", "KV_LEN", "LISTED")
_MASK = ("mask_b", "mask_h", "lo", "hi")


@triton.jit
def _rows(ptr, index, stride, size, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows ``index`` of [size, D] as [len, BLOCK_D]; zeros for those that there are not."""
    return load_rows(ptr, index.to(tl.int64) * stride, index < size, D, BLOCK_D)


@triton.jit
def _put_rows(ptr, rows, index, stride, size, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The inverse of ``_rows``, with the one rounding."""
    store_rows(ptr, rows, index.to(tl.int64) * stride, index < size, D, BLOCK_D)


@triton.jit
def _query_tile(Q_LEN, HEADS, BLOCK_M: tl.constexpr):
    """(first query, b HEADS + h, b, h) of a program."""
    tiles = (Q_LEN - 1) // BLOCK_M + 1
    # The last rows first: under a causal mask they take longest.
    first = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    head = tl.program_id(0) // tiles
    return first, head, (head // HEADS).to(tl.int64), (head % HEADS).to(tl.int64)


@triton.jit
def _key_step(
    entry_ptr, tile_ptr, begin, i, STEPS: tl.constexpr, BLOCK_N: tl.constexpr, FORM: tl.constexpr
):
    """(entry, its bit tile, the first key, all keys) of step i of the list at ``begin``."""
    entry = tl.load(entry_ptr + begin + i // STEPS)
    tile = _tile_of(tile_ptr, begin + i // STEPS, FORM)
    start = (entry >> 1) * BLOCK + i % STEPS * BLOCK_N
    return entry, tile, start, start + tl.arange(0, BLOCK_N)


@triton.jit
def _score_gradient(p, dp, s, delta, allowed, SOFTCAP: tl.constexpr):
    """dS = P (dP - delta), through the softcap; 0 of pairs that do not count."""
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * (1.0 - s * s)
    return tl.where(allowed, ds, 0.0)


@triton.jit
def _allowed(
    q, kv, n, q_len, kv_len, entry, tile, words_ptr, lo, hi, FORM: tl.constexpr, WIDE: tl.constexpr
):
    """Mask of the pairs that count; q and kv = n, n + 1, ... (WIDE words) broadcast to a tile."""
    allowed = (q < q_len) & (kv < kv_len)
    partial = (entry & 1) != 0
    if FORM == "band":
        gap = kv - q
        allowed = allowed & (gap >= tl.where(partial, lo, -FAR))
        allowed = allowed & (gap <= tl.where(partial, hi, FAR))
    if FORM == "bits":
        ptrs = words_ptr + tile.to(tl.int64) * (BLOCK * WORDS) + q % BLOCK * WORDS
        ptrs += n % BLOCK // 32
        bits = kv - n // 32 * 32
        for w in tl.static_range(WIDE):
            word = tl.load(ptrs + w, mask=(q < q_len) & partial, other=-1)
            here = ((word >> (bits % 32)) & 1) != 0
            allowed = allowed & (here | (bits // 32 != w))
    return allowed


@triton.jit
def _tile_of(tile_ptr, index, FORM: tl.constexpr):
    """The bit tile of an entry; the other forms have none to read."""
    tile = index * 0
    if FORM == "bits":
        tile = tl.load(tile_ptr + index)
    return tile


@triton.jit(do_not_specialize=[*_SIZES, *_MASK, "factor", "bend"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    count_ptr,
    entry_ptr,
    tile_ptr,
    words_ptr,
    sinks_ptr,
    q_strides,
    k_strides,
    v_strides,
    HEADS,
    GROUP,
    Q_LEN,
    KV_LEN,
    LISTED,
    mask_b,
    mask_h,
    lo,
    hi,
    factor,
    bend,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
):
    """BLOCK_M rows of out [B, Sq, Hq, DV] and lse [B, Hq, Sq], both contiguous.

    sinks_ptr: fp32 [HEADS] or None.
    Query block m of (b, h) visits the count[r] entries [r, LISTED], r = b mask_b + h mask_h + m.
    """
    first, head, b, h = _query_tile(Q_LEN, HEADS, BLOCK_M)
    k_ptr += b * k_strides[0] + h // GROUP * k_strides[2]
    v_ptr += b * v_strides[0] + h // GROUP * v_strides[2]
    row = b * mask_b + h * mask_h + first // BLOCK

    m = first + tl.arange(0, BLOCK_M)
    q = _rows(q_ptr + b * q_strides[0] + h * q_strides[2], m, q_strides[1], Q_LEN, D, BLOCK_D)
    top = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        # As behind a key of the sink's score with a value of zeros.
        top = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + h) * LOG2E
        total += 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for i in tl.range(0, tl.load(count_ptr + row) * STEPS):
        entry, tile, start, n = _key_step(
            entry_ptr, tile_ptr, row * LISTED, i, STEPS, BLOCK_N, FORM
        )
        k = _rows(k_ptr, n, k_strides[1], KV_LEN, D, BLOCK_D)
        s = product(q, k, bend, SOFTCAP)
        allowed = _allowed(
            m[:, None], n[None, :], start, Q_LEN, KV_LEN, entry, tile, words_ptr, lo, hi, FORM, WIDE
        )
        s = tl.where(allowed, s, NOTHING)
        p, top, total, shrink = softmax_step(s, top, total, factor)
        v = _rows(v_ptr, n, v_strides[1], KV_LEN, DV, BLOCK_DV)
        acc = tl.dot(through(p, v, ROUND), v, acc * shrink[:, None], input_precision="ieee")

    out, lse = softmax_end(acc, top, total)
    first_out = out_ptr + (b * Q_LEN * HEADS + h) * DV
    _put_rows(first_out, out, m, tl.cast(HEADS, tl.int64) * DV, Q_LEN, DV, BLOCK_DV)
    tl.store(lse_ptr + head.to(tl.int64) * Q_LEN + m, lse, mask=m < Q_LEN)


@triton.jit(do_not_specialize=["HEADS", "Q_LEN"])
def delta_kernel(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    out_strides,
    dout_strides,
    HEADS,
    Q_LEN,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta [B, Hq, Sq] fp32, dlse the same shape or None: both contiguous.

    A row of out that is zeros has delta -dlse, whatever NaN and Inf are in dO.
    """
    first, head, b, h = _query_tile(Q_LEN, HEADS, BLOCK_M)
    m = first + tl.arange(0, BLOCK_M)
    out_ptr += b * out_strides[0] + h * out_strides[2]
    dout_ptr += b * dout_strides[0] + h * dout_strides[2]
    out = _rows(out_ptr, m, out_strides[1], Q_LEN, DV, BLOCK_DV).to(tl.float32)
    dout = _rows(dout_ptr, m, dout_strides[1], Q_LEN, DV, BLOCK_DV).to(tl.float32)
    delta = tl.sum(out * dout, axis=1)
    # A row without keys, where dO may hold anything: 0 NaN = NaN.
    zeros = tl.sum((out != 0.0).to(tl.int32), axis=1) == 0
    delta = tl.where(zeros & (delta != delta), 0.0, delta)
    place = head.to(tl.int64) * Q_LEN + m
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + place, mask=m < Q_LEN, other=0.0)
    tl.store(delta_ptr + place, delta, mask=m < Q_LEN)


@triton.jit(do_not_specialize=["Q_BLOCKS", "COLUMNS", "LISTED"])
def writers_kernel(
    offset_ptr,
    entry_ptr,
    rank_ptr,
    tile_ptr,
    writer_ptr,
    writer_tile_ptr,
    Q_BLOCKS,
    COLUMNS,
    LISTED,
    LANES: tl.constexpr,
    FORM: tl.constexpr,
):
    """writer[s, m, rank] = 2 n + is_partial of each visit of query block m in list (s, n)."""
    which = tl.program_id(0)
    n = which % COLUMNS
    row = (which // COLUMNS).to(tl.int64) * Q_BLOCKS
    end = tl.load(offset_ptr + which + 1)
    for start in tl.range(tl.load(offset_ptr + which), end, LANES):
        e = start + tl.arange(0, LANES)
        inside = e < end
        entry = tl.load(entry_ptr + e, mask=inside, other=0)
        rank = tl.load(rank_ptr + e, mask=inside, other=0)
        place = (row + (entry >> 1)) * LISTED + rank
        tl.store(writer_ptr + place, 2 * n + (entry & 1), mask=inside)
        if FORM == "bits":
            tile = tl.load(tile_ptr + e, mask=inside, other=-1)
            tl.store(writer_tile_ptr + place, tile, mask=inside)


@triton.jit(do_not_specialize=[*_SIZES[:-1], "COLUMNS", "lo", "hi", "scale", "factor", "bend"])
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    ticket_ptr,
    list_ptr,
    offset_ptr,
    entry_ptr,
    tile_ptr,
    words_ptr,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    HEADS,
    GROUP,
    Q_LEN,
    KV_LEN,
    COLUMNS,
    lo,
    hi,
    scale,
    factor,
    bend,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    LISTS: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
):
    """BLOCK_N rows of dK [B, Sk, Hkv, D] and dV [B, Sk, Hkv, DV], contiguous, for one ticket.

    A KV head's query heads share one list (LISTS = 1, INNER = group) or have one each (LISTS =
    group, INNER = 1); then the ticket of the first head does the work of all.
    """
    ticket = tl.program_id(0) // PARTS
    lists = tl.load(ticket_ptr + 4 * ticket)
    column = tl.load(ticket_ptr + 4 * ticket + 1)
    if lists % LISTS != 0:
        return
    start = column * BLOCK + tl.program_id(0) % PARTS * BLOCK_N
    n = start + tl.arange(0, BLOCK_N)
    b = (lists * INNER // HEADS).to(tl.int64)
    first_head = lists * INNER % HEADS
    kv_head = (first_head // GROUP).to(tl.int64)
    k = _rows(
        k_ptr + b * k_strides[0] + kv_head * k_strides[2], n, k_strides[1], KV_LEN, D, BLOCK_D
    )
    v = _rows(
        v_ptr + b * v_strides[0] + kv_head * v_strides[2], n, v_strides[1], KV_LEN, DV, BLOCK_DV
    )
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    for own in tl.range(0, LISTS):
        which = tl.load(list_ptr + lists + own) * COLUMNS + column
        begin = tl.load(offset_ptr + which)
        visits = tl.load(offset_ptr + which + 1) - begin
        for i in tl.range(0, visits * (INNER * STEPS)):
            e = begin + i // (INNER * STEPS)
            entry = tl.load(entry_ptr + e)
            tile = _tile_of(tile_ptr, e, FORM)
            h = (first_head + own + i // STEPS % INNER).to(tl.int64)
            start_m = (entry >> 1) * BLOCK + i % STEPS * BLOCK_M
            m = start_m + tl.arange(0, BLOCK_M)
            q = _rows(
                q_ptr + b * q_strides[0] + h * q_strides[2], m, q_strides[1], Q_LEN, D, BLOCK_D
            )
            dout_start = dout_ptr + b * dout_strides[0] + h * dout_strides[2]
            dout = _rows(dout_start, m, dout_strides[1], Q_LEN, DV, BLOCK_DV)
            place = (b * HEADS + h) * Q_LEN + m
            lse = tl.load(lse_ptr + place, mask=m < Q_LEN, other=0.0)
            delta = tl.load(delta_ptr + place, mask=m < Q_LEN, other=0.0)
            # Transposed tiles: keys are rows, queries are columns.
            s = product(k, q, bend, SOFTCAP)
            allowed = _allowed(
                m[None, :], n[:, None], start, Q_LEN, KV_LEN, entry, tile, words_ptr, lo, hi,
                FORM, WIDE,
            )  # fmt: skip
            p = tl.where(allowed, tl.exp2(tl.fma(s, factor, -(lse * LOG2E)[None, :])), 0.0)
            dv = tl.dot(through(p, dout, ROUND), dout, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
            ds = _score_gradient(p, dp, s, delta[None, :], allowed, SOFTCAP)
            dk = tl.dot(through(ds, q, ROUND), q, dk, input_precision="ieee")

    kv_heads = HEADS // GROUP
    place = b * KV_LEN * kv_heads + kv_head
    stride = tl.cast(kv_heads, tl.int64)
    _put_rows(dk_ptr + place * D, dk * scale, n, stride * D, KV_LEN, D, BLOCK_D)
    _put_rows(dv_ptr + place * DV, dv, n, stride * DV, KV_LEN, DV, BLOCK_DV)


@triton.jit(do_not_specialize=[*_SIZES, *_MASK, "Q_BLOCKS", "scale", "factor", "bend"])
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    count_ptr,
    list_ptr,
    writer_ptr,
    writer_tile_ptr,
    words_ptr,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    HEADS,
    GROUP,
    Q_LEN,
    KV_LEN,
    LISTED,
    mask_b,
    mask_h,
    lo,
    hi,
    Q_BLOCKS,
    scale,
    factor,
    bend,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
):
    """BLOCK_M rows of dQ [B, Sq, Hq, D], contiguous; key blocks in ``writers_kernel``'s order."""
    first, head, b, h = _query_tile(Q_LEN, HEADS, BLOCK_M)
    k_ptr += b * k_strides[0] + h // GROUP * k_strides[2]
    v_ptr += b * v_strides[0] + h // GROUP * v_strides[2]
    block = first // BLOCK
    writers = (tl.load(list_ptr + head // INNER).to(tl.int64) * Q_BLOCKS + block) * LISTED
    visits = tl.load(count_ptr + b * mask_b + h * mask_h + block)

    m = first + tl.arange(0, BLOCK_M)
    q = _rows(q_ptr + b * q_strides[0] + h * q_strides[2], m, q_strides[1], Q_LEN, D, BLOCK_D)
    dout_start = dout_ptr + b * dout_strides[0] + h * dout_strides[2]
    dout = _rows(dout_start, m, dout_strides[1], Q_LEN, DV, BLOCK_DV)
    place = head.to(tl.int64) * Q_LEN + m
    lse = tl.load(lse_ptr + place, mask=m < Q_LEN, other=0.0)
    delta = tl.load(delta_ptr + place, mask=m < Q_LEN, other=0.0)
    shift = -(lse * LOG2E)[:, None]
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for i in tl.range(0, visits * STEPS):
        entry, tile, start, n = _key_step(
            writer_ptr, writer_tile_ptr, writers, i, STEPS, BLOCK_N, FORM
        )
        k = _rows(k_ptr, n, k_strides[1], KV_LEN, D, BLOCK_D)
        v = _rows(v_ptr, n, v_strides[1], KV_LEN, DV, BLOCK_DV)
        s = product(q, k, bend, SOFTCAP)
        allowed = _allowed(
            m[:, None], n[None, :], start, Q_LEN, KV_LEN, entry, tile, words_ptr, lo, hi, FORM, WIDE
        )
        p = tl.where(allowed, tl.exp2(tl.fma(s, factor, shift)), 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        ds = _score_gradient(p, dp, s, delta[:, None], allowed, SOFTCAP)
        dq = tl.dot(through(ds, k, ROUND), k, dq, input_precision="ieee")

    first_dq = dq_ptr + (b * Q_LEN * HEADS + h) * D
    _put_rows(first_dq, dq * scale, m, tl.cast(HEADS, tl.int64) * D, Q_LEN, D, BLOCK_D)
