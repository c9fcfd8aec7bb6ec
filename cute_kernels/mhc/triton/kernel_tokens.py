"""mhc in Triton: what is small beside the streams, and sums of parts.

    add_chunks_kernel         H and ms of the projection's chunks
    gate_kernel               pre, post and the logits of res
    sinkhorn_kernel           res
    gate_backward_kernel      dH, dms, parts of dalpha and dbeta
    sinkhorn_backward_kernel  the gradient of logits
    weights_kernel            dphi and dnorm_weight += chunks
    add_parts_kernel          a vector += parts

Orders, arithmetic and what ran: kernel.py.  Sums over the columns of H or over the tokens of a
part: each half onto half; over a line of a matrix: neighbours first.
"""

import triton
import triton.language as tl

from ...runtime.triton_sums import halves, over_columns, rows_of

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["M", "chunks"])
def add_chunks_kernel(
    sums_ptr,
    squares_ptr,
    h_ptr,
    ms_ptr,
    M,
    chunks,
    size,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """H [M, WIDTH], zeros behind COLUMNS, and ms [M]: chunks ascending, Σ x² / size."""
    rows = rows_of(tl.program_id(0), ROWS)
    in_m = rows < M
    columns = tl.arange(0, WIDTH)[None, :].to(tl.int64)
    inside = in_m[:, None] & (columns < COLUMNS)
    ptrs = sums_ptr + rows[:, None] * COLUMNS + columns
    h = tl.load(ptrs, mask=inside, other=0.0)
    squares = tl.load(squares_ptr + rows, mask=in_m, other=0.0)
    for chunk in tl.range(1, chunks):
        behind = tl.cast(chunk, tl.int64) * M
        h += tl.load(ptrs + behind * COLUMNS, mask=inside, other=0.0)
        squares += tl.load(squares_ptr + behind + rows, mask=in_m, other=0.0)
    tl.store(h_ptr + rows[:, None] * WIDTH + columns, h, mask=in_m[:, None])
    tl.store(ms_ptr + rows, tl.div_rn(squares, size), mask=in_m)


@triton.jit(do_not_specialize=["chunks"])
def weights_kernel(
    parts_ptr,
    phi_ptr,
    weight_ptr,
    into_phi_ptr,
    into_weight_ptr,
    chunks,
    K,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """into_phi [COLUMNS, K] += dpsi ⊙ w and into_weight [K] += Σ_j dpsi_j phi_j, chunk by chunk."""
    rows = tl.arange(0, WIDTH).to(tl.int64)[:, None]
    k = rows_of(tl.program_id(0), BLOCK)[None, :]
    inside = (rows < COLUMNS) & (k < K)
    place = rows * K + k
    total = tl.load(into_phi_ptr + place, mask=inside, other=0.0)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + k, mask=k < K, other=0.0)
    if into_weight_ptr is not None:
        phi = tl.load(phi_ptr + place, mask=inside, other=0.0)
        of_weight = tl.load(into_weight_ptr + k, mask=k < K, other=0.0)
    for chunk in tl.range(0, chunks):
        part = parts_ptr + tl.cast(chunk, tl.int64) * COLUMNS * K
        d_psi = tl.load(part + place, mask=inside, other=0.0)
        if weight_ptr is not None:
            total += d_psi * weight
        else:
            total += d_psi
        if into_weight_ptr is not None:
            of_weight += halves(d_psi * phi, 1, WIDTH, BLOCK)
    tl.store(into_phi_ptr + place, total, mask=inside)
    if into_weight_ptr is not None:
        tl.store(into_weight_ptr + k, of_weight, mask=k < K)


@triton.jit(do_not_specialize=["count"])
def add_parts_kernel(
    parts_ptr,
    out_ptr,
    count,
    L,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [T, L] = (+= with ACCUMULATE) Σ of count parts each of parts [T count, L], ascending."""
    blocks = (L - 1) // BLOCK + 1
    t = tl.cast(tl.program_id(0) // blocks, tl.int64)
    columns = rows_of(tl.program_id(0) % blocks, BLOCK)
    inside = columns < L
    ptrs = parts_ptr + t * count * L + columns
    out_ptrs = out_ptr + t * L + columns
    if ACCUMULATE:
        total = tl.load(out_ptrs, mask=inside, other=0.0)
        total += tl.load(ptrs, mask=inside, other=0.0)
    else:
        total = tl.load(ptrs, mask=inside, other=0.0)
    for part in tl.range(1, count):
        total += tl.load(ptrs + tl.cast(part, tl.int64) * L, mask=inside, other=0.0)
    tl.store(out_ptrs, total, mask=inside)


# ---- gates ---------------------------------------------------------------------------------------


@triton.jit
def _sigmoid(z):
    """1 / (1 + e^-z)."""
    return tl.div_rn(1.0, 1.0 + tl.exp2(z * -LOG2E))


@triton.jit
def _gates(
    h_ptr,
    ms_ptr,
    alpha_ptr,
    beta_ptr,
    rows,
    M,
    h_m,
    eps,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(H, r², r, alpha, z) with z = alpha H / r + beta, r² = ms + eps."""
    columns = tl.arange(0, WIDTH)
    in_n = columns < COLUMNS
    wide = columns.to(tl.int64)
    h_ptrs = h_ptr + rows[:, None] * h_m + wide[None, :]
    h = tl.load(h_ptrs, mask=(rows < M)[:, None] & in_n[None, :], other=0.0)
    block = tl.where(columns < N, 0, tl.where(columns < 2 * N, 1, 2)).to(tl.int64)
    alpha = tl.load(alpha_ptr + block, mask=in_n, other=0.0)[None, :]
    beta = tl.load(beta_ptr + wide, mask=in_n, other=0.0)[None, :]
    square = tl.load(ms_ptr + rows, mask=rows < M, other=1.0)[:, None] + eps
    r = tl.sqrt_rn(square)
    return h, square, r, alpha, tl.div_rn(alpha * h, r) + beta


@triton.jit(do_not_specialize=["M"])
def gate_kernel(
    h_ptr,
    ms_ptr,
    alpha_ptr,
    beta_ptr,
    pre_ptr,
    post_ptr,
    res_ptr,
    M,
    h_m,
    eps,
    pre_eps,
    post_scale,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """pre = σ(z) + pre_eps, post = post_scale σ(z), res = z."""
    rows = rows_of(tl.program_id(0), ROWS)
    in_m = (rows < M)[:, None]
    _, _, _, _, z = _gates(h_ptr, ms_ptr, alpha_ptr, beta_ptr, rows, M, h_m, eps, N, COLUMNS, WIDTH)
    sigmoid = _sigmoid(z)
    c = tl.arange(0, WIDTH)[None, :].to(tl.int64)
    row = rows[:, None]
    is_pre, is_post = c < N, (c >= N) & (c < 2 * N)
    is_res = (c >= 2 * N) & (c < COLUMNS)
    tl.store(pre_ptr + row * N + c, sigmoid + pre_eps, mask=in_m & is_pre)
    tl.store(post_ptr + (row * N + c - N), sigmoid * post_scale, mask=in_m & is_post)
    tl.store(res_ptr + (row * (N * N) + c - 2 * N), z, mask=in_m & is_res)


@triton.jit(do_not_specialize=["M"])
def gate_backward_kernel(
    h_ptr,
    ms_ptr,
    alpha_ptr,
    beta_ptr,
    d_pre_ptr,
    d_post_ptr,
    d_res_ptr,
    d_h_ptr,
    d_ms_ptr,
    parts_ptr,
    M,
    h_m,
    pre_m,
    post_m,
    res_m,
    eps,
    post_scale,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dH = alpha g / r, dms = -½ r⁻³ Σ_j g_j alpha_j H_j; parts: Σ g H / r of a block, and Σ g.

    g: dpre p (1 - p), post_scale dpost p (1 - p), dres.
    """
    rows = rows_of(tl.program_id(0), ROWS)
    in_m = (rows < M)[:, None]
    h, square, r, alpha, z = _gates(
        h_ptr, ms_ptr, alpha_ptr, beta_ptr, rows, M, h_m, eps, N, COLUMNS, WIDTH
    )
    c = tl.arange(0, WIDTH)[None, :].to(tl.int64)
    row = rows[:, None]
    is_pre, is_post = c < N, (c >= N) & (c < 2 * N)
    is_res = (c >= 2 * N) & (c < COLUMNS)
    d_pre = tl.load(d_pre_ptr + row * pre_m + c, mask=in_m & is_pre, other=0.0)
    d_post = tl.load(d_post_ptr + (row * post_m + c - N), mask=in_m & is_post, other=0.0)
    d_res = tl.load(d_res_ptr + (row * res_m + c - 2 * N), mask=in_m & is_res, other=0.0)
    # 1 - p is the gate of -z: a difference from 1 would lose what is left of it.
    slope = _sigmoid(z) * _sigmoid(-z)
    g = tl.where(is_pre, d_pre * slope, tl.where(is_post, d_post * (post_scale * slope), d_res))
    # Of rows and columns that are none: 0 times an infinite weight would be NaN.
    g = tl.where(in_m & (c < COLUMNS), g, 0.0)

    tl.store(d_h_ptr + row * WIDTH + c, tl.div_rn(alpha * g, r), mask=in_m)
    of_row = tl.reshape(over_columns(g * alpha * h, ROWS, WIDTH), [ROWS, 1])
    d_ms = of_row * tl.div_rn(-0.5, r * square)
    tl.store(d_ms_ptr + row, d_ms, mask=in_m)

    part = parts_ptr + tl.cast(tl.program_id(0), tl.int64) * (3 + COLUMNS)
    of_beta = halves(g, 1, ROWS, WIDTH)
    of_alpha = halves(tl.div_rn(g * h, r), 1, ROWS, WIDTH)
    tl.store(part + (c + 3), of_beta, mask=c < COLUMNS)
    one = tl.arange(0, 1).to(tl.int64)
    tl.store(part + one, over_columns(tl.where(is_pre, of_alpha, 0.0), 1, WIDTH))
    tl.store(part + (one + 1), over_columns(tl.where(is_post, of_alpha, 0.0), 1, WIDTH))
    tl.store(part + (one + 2), over_columns(tl.where(is_res, of_alpha, 0.0), 1, WIDTH))


# ---- sinkhorn ------------------------------------------------------------------------------------


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _line_sum(y, AXIS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    """Σ over the rows' (2) or columns' (1) elements of [ROWS, N, N], neighbours first."""
    if N == 4:
        if AXIS == 2:
            y = tl.sum(tl.reshape(y, [ROWS, 4, 2, 2]), axis=3)
        else:
            y = tl.sum(tl.reshape(y, [ROWS, 2, 2, 4]), axis=2)
    return tl.expand_dims(tl.sum(y, axis=AXIS), AXIS)


@triton.jit
def _first(z, eps, EPSILON: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    """The first iteration, from logits: (rows, columns, S / Q).

    S = softmax over j; E_ij = S_ij / max_i S_ij, or Q = S + eps, over its sum over i.  No row or
    column of finite logits is lost.
    """
    d = z - tl.expand_dims(tl.max(z, axis=2), 2)
    e = _exp(d)
    row = _line_sum(e, 2, ROWS, N)
    s = tl.div_rn(e, row)
    if EPSILON:
        q = s + eps
        y = tl.div_rn(q, _line_sum(q, 1, ROWS, N) + eps)
        factor = tl.div_rn(s, q)
    else:
        e = tl.div_rn(_exp(d - tl.expand_dims(tl.max(d, axis=1), 1)), row)
        y = tl.div_rn(e, _line_sum(e, 1, ROWS, N))
        factor = s
    return s, y, factor


@triton.jit
def _iteration(y, eps, ROWS: tl.constexpr, N: tl.constexpr):
    """(rows, columns): y over its rows' sums, and that over its columns'; eps is 0 without one."""
    rows = tl.div_rn(y, _line_sum(y, 2, ROWS, N) + eps)
    return rows, tl.div_rn(rows, _line_sum(rows, 1, ROWS, N) + eps)


@triton.jit
def _matrices(rows, N: tl.constexpr):
    """Offsets [1, N, N] of a row-major matrix, and rows as [ROWS, 1, 1]."""
    i = tl.arange(0, N)
    place = (i[:, None] * N + i[None, :]).to(tl.int64)
    return tl.expand_dims(place, 0), tl.expand_dims(rows[:, None], 2)


@triton.jit(do_not_specialize=["M", "iterations"])
def sinkhorn_kernel(
    z_ptr,
    out_ptr,
    M,
    z_m,
    iterations,
    eps,
    EPSILON: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """P [M, N²] of logits."""
    place, row = _matrices(rows_of(tl.program_id(0), ROWS), N)
    z = tl.load(z_ptr + (row * z_m + place), mask=row < M, other=0.0)
    _, y, _ = _first(z, eps, EPSILON, ROWS, N)
    for _ in tl.range(1, iterations):
        _, y = _iteration(y, eps, ROWS, N)
    tl.store(out_ptr + (row * (N * N) + place), y, mask=row < M)


@triton.jit(do_not_specialize=["M", "iterations"])
def sinkhorn_backward_kernel(
    z_ptr,
    d_p_ptr,
    out_ptr,
    M,
    z_m,
    p_m,
    iterations,
    eps,
    EPSILON: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """dz: L = dP ⊙ P through every normalisation, last to first: L - y Σ L.

    Matrices are made again, with the forward's bits: those of an iteration from the first of its
    segment, and that one from the logits.  Nothing is kept in memory.
    """
    place, row = _matrices(rows_of(tl.program_id(0), ROWS), N)
    z = tl.load(z_ptr + (row * z_m + place), mask=row < M, other=0.0)
    gradient = tl.load(d_p_ptr + (row * p_m + place), mask=row < M, other=0.0)
    s, first, factor = _first(z, eps, EPSILON, ROWS, N)
    # Iterations behind the first.
    others = iterations - 1
    y = first
    for _ in tl.range(0, others):
        _, y = _iteration(y, eps, ROWS, N)
    gradient = gradient * y
    segments = (others + SEGMENT - 1) // SEGMENT
    for back in tl.range(0, segments):
        begin = (segments - 1 - back) * SEGMENT
        base = first
        for _ in tl.range(0, begin):
            _, base = _iteration(base, eps, ROWS, N)
        length = tl.minimum(others - begin, SEGMENT)
        for step in tl.range(0, length):
            y = base
            for _ in tl.range(0, length - 1 - step):
                _, y = _iteration(y, eps, ROWS, N)
            rows, columns = _iteration(y, eps, ROWS, N)
            gradient = gradient - columns * _line_sum(gradient, 1, ROWS, N)
            gradient = gradient - rows * _line_sum(gradient, 2, ROWS, N)
    gradient = gradient - first * _line_sum(gradient, 1, ROWS, N)
    if EPSILON:
        # dS of dlog Q: Q = S + eps.
        gradient = gradient * factor
    gradient = gradient - s * _line_sum(gradient, 2, ROWS, N)
    tl.store(out_ptr + (row * (N * N) + place), gradient, mask=row < M)
