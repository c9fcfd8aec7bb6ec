"""mhc in Triton, for ROCm and for CUDA without SM90: the kernels that read the streams.

    project_kernel            sums over chunks of channels of x psiᵀ and x²
    project_backward_kernel   one pass over x: dx, and dpsi of a chunk of tokens
    combine_kernel            y_j = (f + bias) post_j + Σ_i x_i res[i, j], out = Σ_i y_i pre_i
    reduce_kernel             one pass over x and what comes for it: df, dx, dpre, dpost, dres and
                              parts of dbias

Layouts.  A row of x has its n streams of C channels as the layout says (CN: k = c n + i, else
k = i C + c).  A program holds streams one by one, [tokens, channels] each: with CN neighbours are
loaded together and split, so that both layouts are loaded in whole lines, and are one arithmetic.

Order of sums.  Over the streams of a channel: one chain, ascending.  Over the channels of a token
(project_kernel's squares, reduce_kernel): a lane of the tile adds its own channels, block after
block, ascending; then lanes are added, each half onto half.  A half onto a half is `tl.sum` over an
axis of two, which has one result whoever adds it: no bit depends on how the compiler hands a tile
to threads, which follows what it knows of alignment.  Products (`tl.dot`, IEEE fp32 on upcast
operands): a chain from zero over the elements of a chunk, in steps of the plan, ascending; in the
layout "nc" stream after stream.  Over the tokens of a part: each half onto half; of dpsi: a chain
over a chunk.  Parts, then chunks, are added ascending.  What lies outside is zero by the load's
mask.  No row meets another but in sums over tokens; nothing follows M.

Nothing is fused but `tl.fma` and what a product is made of; divisions and roots are IEEE's, e^x is
`tl.exp2`.  Nothing is atomic, nothing is autotuned, M is not specialised on.  Offsets are 64 bits.

Tests run this source in Triton's interpreter and its sm_90 code in ptxsim, where neither tile
sizes and warps that are free nor addresses show in a bit; they compile it for sm_80, sm_90, gfx942
and gfx950 and read that code.  It ran on an H200 (2026-11-23, tests/mhc/test_gpu.py); not timed:
sizes are guesses that no measurement has tuned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.triton_sums import halves, over_columns, rows_of
from .. import config
from .sums import stack, zeros

TOKENS = tl.constexpr(config.TOKENS)


@triton.jit
def _column(ptr, rows, stride, index, in_m):
    """[ROWS, 1] of one column of coefficients [M, ...]."""
    return tl.load(ptr + (rows[:, None] * stride + index), mask=in_m, other=0.0)


@triton.jit
def _load_streams(
    ptr,
    rows,
    in_m,
    first,
    C,
    N: tl.constexpr,
    CN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """N tiles [ROWS, BLOCK] in fp32 of channels ``first`` and on of rows [..., N C]."""
    row_ptrs = ptr + rows[:, None] * C * N
    made = ()
    if CN:
        k = first * N + tl.arange(0, BLOCK * N)[None, :]
        v = tl.load(row_ptrs + k.to(tl.int64), mask=in_m & (k < C * N), other=0.0).to(tl.float32)
        if N == 2:
            made = tl.split(tl.reshape(v, [ROWS, BLOCK, 2]))
        else:
            # The last axis is the low bit of a stream.
            even, odd = tl.split(tl.reshape(v, [ROWS, BLOCK, 2, 2]))
            x0, x2 = tl.split(even)
            x1, x3 = tl.split(odd)
            made = (x0, x1, x2, x3)
    else:
        c = first + tl.arange(0, BLOCK)[None, :]
        for i in tl.static_range(N):
            k = tl.cast(C, tl.int64) * i + c
            v = tl.load(row_ptrs + k, mask=in_m & (c < C), other=0.0)
            made = made + (v.to(tl.float32),)
    return made


@triton.jit
def _store_streams(
    ptr,
    tiles,
    rows,
    in_m,
    first,
    C,
    N: tl.constexpr,
    CN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The inverse of `_load_streams`, with the one rounding."""
    row_ptrs = ptr + rows[:, None] * C * N
    if CN:
        k = first * N + tl.arange(0, BLOCK * N)[None, :]
        v = tl.reshape(stack(tiles, N), [ROWS, BLOCK * N])
        tl.store(row_ptrs + k.to(tl.int64), v.to(ptr.dtype.element_ty), mask=in_m & (k < C * N))
    else:
        c = first + tl.arange(0, BLOCK)[None, :]
        for i in tl.static_range(N):
            k = tl.cast(C, tl.int64) * i + c
            tl.store(row_ptrs + k, tiles[i].to(ptr.dtype.element_ty), mask=in_m & (c < C))


@triton.jit
def _load_channels(ptr, rows, in_m, first, C, BLOCK: tl.constexpr):
    """[ROWS, BLOCK] in fp32 of rows [M, C]."""
    c = (first + tl.arange(0, BLOCK)[None, :]).to(tl.int64)
    return tl.load(ptr + rows[:, None] * C + c, mask=in_m & (c < C), other=0.0).to(tl.float32)


@triton.jit
def _store_channels(ptr, v, rows, in_m, first, C, BLOCK: tl.constexpr):
    """The inverse of `_load_channels`, with the one rounding."""
    c = (first + tl.arange(0, BLOCK)[None, :]).to(tl.int64)
    ptrs = ptr + rows[:, None] * C + c
    tl.store(ptrs, v.to(ptr.dtype.element_ty), mask=in_m & (c < C))


@triton.jit
def _passed(
    dy, d_out, res_ptr, pre_ptr, rows, res_m, pre_m, in_m, i: tl.constexpr, N: tl.constexpr
):
    """Σ_j dy_j res[i, j] + d_out pre_i of stream i; dy_i itself without a res."""
    if res_ptr is not None:
        total = dy[0] * _column(res_ptr, rows, res_m, i * N, in_m)
        for j in tl.static_range(1, N):
            total = tl.fma(dy[j], _column(res_ptr, rows, res_m, i * N + j, in_m), total)
        if pre_ptr is not None:
            total = tl.fma(d_out, _column(pre_ptr, rows, pre_m, i, in_m), total)
    elif len(dy) > 0:
        total = dy[i]
        if pre_ptr is not None:
            total = tl.fma(d_out, _column(pre_ptr, rows, pre_m, i, in_m), total)
    else:
        total = d_out * _column(pre_ptr, rows, pre_m, i, in_m)
    return total


@triton.jit
def _store_sums(
    ptr, lanes, rows, in_m, COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums over the channels of COUNT tiles, as [M, COUNT]."""
    sums = halves(stack(lanes, COUNT), ROWS, BLOCK, COUNT)
    tl.store(ptr + rows[:, None] * COUNT + tl.arange(0, COUNT)[None, :].to(tl.int64), sums, in_m)


@triton.jit(do_not_specialize=["M"])
def project_kernel(
    x_ptr,
    phi_ptr,
    weight_ptr,
    sums_ptr,
    squares_ptr,
    M,
    C,
    chunks,
    N: tl.constexpr,
    CN: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """sums [chunks, M, COLUMNS] and squares [chunks, M]; a program: BLOCK_M tokens of a chunk.

    A chunk of the layout "cn" is one run of neighbours, of "nc" one of each stream.
    """
    chunk = tl.program_id(0) % chunks
    rows = rows_of(tl.program_id(0) // chunks, BLOCK_M)
    in_m = (rows < M)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    in_n = columns < COLUMNS
    ks = tl.arange(0, BLOCK_K)
    first = chunk * CHUNK
    channels = tl.minimum(C - first, CHUNK)
    begin, length, runs = first, channels, N
    if CN:
        begin, length, runs = first * N, channels * N, 1
    K = tl.cast(C, tl.int64) * N
    row_ptrs = x_ptr + rows[:, None] * K
    phi_ptrs = phi_ptr + columns.to(tl.int64) * K
    steps = (length - 1) // BLOCK_K + 1

    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for step in tl.range(0, steps * runs):
        inside = step % steps * BLOCK_K + ks
        k = tl.cast(C, tl.int64) * (step // steps) + begin + inside
        in_k = inside < length
        x = tl.load(row_ptrs + k[None, :], mask=in_m & in_k[None, :], other=0.0).to(tl.float32)
        psi = tl.load(phi_ptrs + k[:, None], mask=in_k[:, None] & in_n, other=0.0)
        if weight_ptr is not None:
            psi = psi * tl.load(weight_ptr + k, mask=in_k, other=0.0)[:, None]
        acc = tl.dot(x, psi, acc, input_precision=INPUT_PRECISION)
        squares = tl.fma(x, x, squares)
    out = tl.cast(chunk, tl.int64) * M + rows
    tl.store(sums_ptr + out[:, None] * COLUMNS + columns.to(tl.int64), acc, mask=in_m & in_n)
    tl.store(squares_ptr + out, over_columns(squares, BLOCK_M, BLOCK_K), mask=rows < M)


@triton.jit(do_not_specialize=["M"])
def project_backward_kernel(
    x_ptr,
    d_h_ptr,
    d_ms_ptr,
    phi_ptr,
    weight_ptr,
    dy_ptr,
    d_out_ptr,
    res_ptr,
    pre_ptr,
    dx_ptr,
    d_psi_ptr,
    M,
    C,
    h_m,
    res_m,
    pre_m,
    of_ms,
    N: tl.constexpr,
    CN: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """dx = dH psi + of_ms dms x + `_passed`; d_psi [T, COLUMNS, K] = dHᵀ x over TOKENS tokens.

    A program: BLOCK_C channels of all streams, and the tokens of a chunk, ascending.  psi and the
    sums of dpsi stay in registers.
    """
    blocks = (C - 1) // BLOCK_C + 1
    chunk = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK_C
    columns = tl.arange(0, WIDTH)
    in_n = (columns < COLUMNS)[:, None]
    wide = columns.to(tl.int64)
    if dx_ptr is not None:
        psi = _load_streams(phi_ptr, wide, in_n, first, C, N, CN, WIDTH, BLOCK_C)
        if weight_ptr is not None:
            one = tl.zeros([1], tl.int64)
            weight = _load_streams(
                weight_ptr, one, (one == 0)[:, None], first, C, N, CN, 1, BLOCK_C
            )
            made = ()
            for i in tl.static_range(N):
                made = made + (psi[i] * weight[i],)
            psi = made
    if d_psi_ptr is not None:
        sums = zeros(N, WIDTH, BLOCK_C)

    start = tl.cast(chunk, tl.int64) * TOKENS
    count = tl.minimum(M - start, TOKENS)
    for step in tl.range(0, (count - 1) // BLOCK_M + 1):
        rows = start + step * BLOCK_M + tl.arange(0, BLOCK_M)
        in_m = (rows < M)[:, None]
        x = _load_streams(x_ptr, rows, in_m, first, C, N, CN, BLOCK_M, BLOCK_C)
        h_ptrs = d_h_ptr + rows[:, None] * h_m + wide[None, :]
        d_h = tl.load(h_ptrs, mask=in_m & (columns < COLUMNS)[None, :], other=0.0)
        if dx_ptr is not None:
            scale = tl.load(d_ms_ptr + rows[:, None], mask=in_m, other=0.0) * of_ms
            dy = ()
            d_out = None
            if dy_ptr is not None:
                dy = _load_streams(dy_ptr, rows, in_m, first, C, N, CN, BLOCK_M, BLOCK_C)
            if d_out_ptr is not None:
                d_out = _load_channels(d_out_ptr, rows, in_m, first, C, BLOCK_C)
            dx = ()
            for i in tl.static_range(N):
                total = tl.dot(d_h, psi[i], input_precision=INPUT_PRECISION)
                total = tl.fma(x[i], scale, total)
                if dy_ptr is not None or d_out_ptr is not None:
                    total += _passed(dy, d_out, res_ptr, pre_ptr, rows, res_m, pre_m, in_m, i, N)
                dx = dx + (total,)
            _store_streams(dx_ptr, dx, rows, in_m, first, C, N, CN, BLOCK_M, BLOCK_C)
        if d_psi_ptr is not None:
            made = ()
            for i in tl.static_range(N):
                more = tl.dot(tl.trans(d_h), x[i], sums[i], input_precision=INPUT_PRECISION)
                made = made + (more,)
            sums = made
    if d_psi_ptr is not None:
        out = tl.cast(chunk, tl.int64) * COLUMNS + wide
        _store_streams(d_psi_ptr, sums, out, in_n, first, C, N, CN, WIDTH, BLOCK_C)


@triton.jit(do_not_specialize=["M"])
def combine_kernel(
    x_ptr,
    f_ptr,
    bias_ptr,
    post_ptr,
    res_ptr,
    pre_ptr,
    y_ptr,
    out_ptr,
    M,
    C,
    post_m,
    res_m,
    pre_m,
    N: tl.constexpr,
    CN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y_j = (f + bias) post_j + Σ_i x_i res[i, j] with an f; out = Σ_i y_i pre_i with a pre.

    y is collapsed as it is stored: rounded.  Without an f, x is.
    """
    blocks = (C - 1) // BLOCK + 1
    rows = rows_of(tl.program_id(0) // blocks, ROWS)
    first = tl.program_id(0) % blocks * BLOCK
    in_m = (rows < M)[:, None]
    streams = _load_streams(x_ptr, rows, in_m, first, C, N, CN, ROWS, BLOCK)
    if f_ptr is not None:
        f = _load_channels(f_ptr, rows, in_m, first, C, BLOCK)
        if bias_ptr is not None:
            f += _load_bias(bias_ptr, first, C, BLOCK)
        made = ()
        for j in tl.static_range(N):
            total = f * _column(post_ptr, rows, post_m, j, in_m)
            for i in tl.static_range(N):
                total = tl.fma(streams[i], _column(res_ptr, rows, res_m, i * N + j, in_m), total)
            made = made + (total.to(y_ptr.dtype.element_ty).to(tl.float32),)
        streams = made
        _store_streams(y_ptr, streams, rows, in_m, first, C, N, CN, ROWS, BLOCK)
    if pre_ptr is not None:
        out = streams[0] * _column(pre_ptr, rows, pre_m, 0, in_m)
        for i in tl.static_range(1, N):
            out = tl.fma(streams[i], _column(pre_ptr, rows, pre_m, i, in_m), out)
        _store_channels(out_ptr, out, rows, in_m, first, C, BLOCK)


@triton.jit
def _load_bias(ptr, first, C, BLOCK: tl.constexpr):
    c = (first + tl.arange(0, BLOCK)[None, :]).to(tl.int64)
    return tl.load(ptr + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def reduce_kernel(
    x_ptr,
    dy_ptr,
    d_out_ptr,
    f_ptr,
    bias_ptr,
    post_ptr,
    res_ptr,
    pre_ptr,
    df_ptr,
    dx_ptr,
    d_pre_ptr,
    d_post_ptr,
    d_res_ptr,
    d_bias_ptr,
    M,
    C,
    post_m,
    res_m,
    pre_m,
    N: tl.constexpr,
    CN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whatever has a pointer, of ROWS tokens and all of their channels.

    df = Σ_j dy_j post_j;  d_bias [programs, C]: its sum over the tokens;  dx: `_passed`
    d_post_j = Σ_c dy_j (f + bias);  d_res_ij = Σ_c x_i dy_j;  d_pre_i = Σ_c x_i d_out
    """
    rows = rows_of(tl.program_id(0), ROWS)
    in_m = (rows < M)[:, None]
    of_post = zeros(N, ROWS, BLOCK)
    of_pre = zeros(N, ROWS, BLOCK)
    of_res = zeros(N * N, ROWS, BLOCK)
    for block in tl.range(0, (C - 1) // BLOCK + 1):
        first = block * BLOCK
        dy = ()
        d_out = None
        if dy_ptr is not None:
            dy = _load_streams(dy_ptr, rows, in_m, first, C, N, CN, ROWS, BLOCK)
        if d_out_ptr is not None:
            d_out = _load_channels(d_out_ptr, rows, in_m, first, C, BLOCK)
        if f_ptr is not None:
            d_f = dy[0] * _column(post_ptr, rows, post_m, 0, in_m)
            for j in tl.static_range(1, N):
                d_f = tl.fma(dy[j], _column(post_ptr, rows, post_m, j, in_m), d_f)
            _store_channels(df_ptr, d_f, rows, in_m, first, C, BLOCK)
            f = _load_channels(f_ptr, rows, in_m, first, C, BLOCK)
            if bias_ptr is not None:
                f += _load_bias(bias_ptr, first, C, BLOCK)
                program = tl.program_id(0) + tl.zeros([1], tl.int64)
                part = halves(d_f, 1, ROWS, BLOCK)
                _store_channels(d_bias_ptr, part, program, (program >= 0)[:, None], first, C, BLOCK)
            made = ()
            for j in tl.static_range(N):
                made = made + (tl.fma(dy[j], f, of_post[j]),)
            of_post = made
        if d_pre_ptr is not None or d_res_ptr is not None:
            x = _load_streams(x_ptr, rows, in_m, first, C, N, CN, ROWS, BLOCK)
        if d_pre_ptr is not None:
            made = ()
            for i in tl.static_range(N):
                made = made + (tl.fma(x[i], d_out, of_pre[i]),)
            of_pre = made
        if d_res_ptr is not None:
            made = ()
            for i in tl.static_range(N):
                for j in tl.static_range(N):
                    made = made + (tl.fma(x[i], dy[j], of_res[i * N + j]),)
            of_res = made
        if dx_ptr is not None:
            dx = ()
            for i in tl.static_range(N):
                dx = dx + (_passed(dy, d_out, res_ptr, pre_ptr, rows, res_m, pre_m, in_m, i, N),)
            _store_streams(dx_ptr, dx, rows, in_m, first, C, N, CN, ROWS, BLOCK)
    if f_ptr is not None:
        _store_sums(d_post_ptr, of_post, rows, in_m, N, ROWS, BLOCK)
    if d_pre_ptr is not None:
        _store_sums(d_pre_ptr, of_pre, rows, in_m, N, ROWS, BLOCK)
    if d_res_ptr is not None:
        _store_sums(d_res_ptr, of_res, rows, in_m, N * N, ROWS, BLOCK)
