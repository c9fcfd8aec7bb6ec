"""gemm and column_sum in Triton, for ROCm and for CUDA without SM90.

    gemm         out[m, n] = round(Σ_k a[m, k] b[n, k] + bias[n])
                 acc[m, n] = acc[m, n] + Σ_k a[m, k] b[n, k]         (fp32, in place)
    column_sum   out[n] = round(Σ_m rows[m, n])
    leaves       sums[l, m, n] = Σ_k a[m, k] b[n, k] over leaf l of K, or the order tree as a whole
    root         out[m, n] = round(((sums[0] + sums[1]) + sums[2]) + ... + bias[m, n]), the leaves
                 of up to three tensors: of one rank, or of the ranks that exchange them

Summation order of gemm (``chain``).  One fp32 accumulator per output, ascending K, no split of K,
no atomics.  K advances by one `tl.dot` of block_k = 64 (fp32: 32).  The groups of a K tail are
filled with zeros by the load mask, so a tail takes the same instructions.  Every output row sees
the same chain whatever M is: the tile is one constant per dtype class, M is not specialised on, and
nothing is autotuned.  The grid (SM count or its cap) decides who computes a tile, never how.

With an accumulator, K advances by one `tl.dot` of 16, ceil(K/16) of them: state = f(state, group),
the same compiled f for each group.  The fp32 state that is stored is the state of the chain, so a
stream cut at multiples of 16 gives the bits of one shot.  A dot of 64 would not promise that: what
a compiler does inside one dot (the MFMA of gfx950 takes 32 k at once) is its own, and wholly zero
groups appended to a cut could turn -0 into +0.

Summation order of leaves and root (``tree``).  A leaf is a chain from zero by dots of block_k that
begin at its first k and are masked at its end, so it has its bits wherever it lies and whoever adds
it.  Zeros fill its last dot; where there are any, a leaf that underflowed to -0 is +0.  Leaves are
added in fp32, ascending, the first one as it is.  The weight is the first operand: a tile's tokens
are the width of the matrix instruction, and M may choose them.  What takes K is the same in every
tile, as a test reads:

    sm_90             wgmma m64nTk16, T at most the tile's tokens: 16, 32, 64, 128.  An H200 has
                      equal bits at every width (docs/numerics.md).  With tokens as the first
                      operand, tiles of 16 and 32 would be mma.sync
    sm_80, 86, 89     mma.sync m16n8k16
    gfx942, gfx950    mfma 16x16x16, mfma 16x16x32; in fp32 mfma 16x16x4
    other             not read, so one tile serves all rows (plan.py)

STAGE "unordered" adds leaves as they arrive, by atomics: for a caller that asks for it by name.

What one 16-bit dot of 16 becomes in the code that Triton 3.6 makes (a test reads it): sm_90 one
wgmma m64n128k16 per warp group; gfx942 and gfx950 one mfma 16x16x16 per subtile.  In fp32: sm_90
one fma per k, ascending; gfx942 and gfx950 four mfma 16x16x4 f32 per subtile, the same four for
every group.  Bits are promised per architecture.  No CUDA-only feature is used.

Limits.  Where no operand is contiguous in whole multiples of 16 (odd sizes), loads are scalar and
an address is kept per element: the same bits, much slower, with spills on some targets.

Run on an H200 (2026-11-20, commit d59b64c): the battery in fp32; bf16 forward at 424 to 443 TFLOP/s
(docs/status.md).  Not run on another GPU.  Tests run the sm_90 code in ptxsim and the source
in Triton's interpreter, and read the gfx942 and gfx950 code; stages, warps and raster are guesses
that no measurement has tuned.  leaves and root: not run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.triton_tiles import column_sums, dot_chain, leaf_chain, raster


@triton.jit(do_not_specialize=["M", "N", "K"])
def gemm_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    a_m,
    a_k,
    b_n,
    b_k,
    bias_n,
    out_m,
    out_n,
    ALIGN_M: tl.constexpr,
    ALIGN_N: tl.constexpr,
    ALIGN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Tiles program_id, program_id + programs, ... of a [M, K] · b [N, K]ᵀ."""
    # The host found these multiples; saying so lets loads along that axis be wide.
    M = M // ALIGN_M * ALIGN_M
    N = N // ALIGN_N * ALIGN_N
    K = K // ALIGN_K * ALIGN_K
    # (size - 1) // block + 1: size + block - 1 would overflow int32 at the largest sizes.
    tiles_m = (M - 1) // BLOCK_M + 1
    tiles_n = (N - 1) // BLOCK_N + 1
    ks = tl.arange(0, BLOCK_K).to(tl.int64)

    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = raster(tile, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        in_m = (rows < M)[:, None]
        in_n = (columns < N)[None, :]
        row_offsets = rows.to(tl.int64)[:, None]
        column_offsets = columns.to(tl.int64)[None, :]
        a_ptrs = a_ptr + row_offsets * a_m + ks[None, :] * a_k
        b_ptrs = b_ptr + column_offsets * b_n + ks[:, None] * b_k
        out_ptrs = out_ptr + row_offsets * out_m + column_offsets * out_n

        if ACCUMULATE:
            acc = tl.load(out_ptrs, mask=in_m & in_n, other=0.0)
        else:
            acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        acc = dot_chain(
            a_ptrs, b_ptrs, a_k, b_k, in_m, in_n, K, acc, BLOCK_K, INPUT_PRECISION, UPCAST
        )
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + columns.to(tl.int64) * bias_n, mask=columns < N, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_m & in_n)


@triton.jit(do_not_specialize=["M", "N"])
def column_sum_kernel(
    rows_ptr,
    out_ptr,
    M,
    N,
    rows_m,
    rows_n,
    ALIGN_N: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """out[n] for COLUMNS columns, in the order of `column_sums`."""
    N = N // ALIGN_N * ALIGN_N
    lanes = tl.arange(0, LANES).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_offsets = columns.to(tl.int64)[None, :] * rows_n
    ptrs = rows_ptr + lanes[:, None] * rows_m + column_offsets
    total = column_sums(ptrs, rows_m, (columns < N)[None, :], M, LANES, COLUMNS, UNROLL)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=columns < N)


@triton.jit(do_not_specialize=["M", "N", "K", "leaves", "share"])
def leaves_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    length,
    leaves,
    share,
    a_m,
    a_k,
    b_n,
    b_k,
    bias_m,
    bias_n,
    ALIGN_M: tl.constexpr,
    ALIGN_N: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_A: tl.constexpr,
    ALIGN_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Items program_id, program_id + programs, ...: a tile, and ``share`` consecutive leaves of it.

    STAGE "tree": every leaf, their sum, bias, rounding; out [M, N].  "leaves": each leaf to out
    [leaves, M, N].  "unordered": each leaf is added into out [M, N] by atomics.
    """
    M = M // ALIGN_M * ALIGN_M
    N = N // ALIGN_N * ALIGN_N
    K = K // ALIGN_K * ALIGN_K
    # Triton itself sees multiples of 16 only.
    a_m = a_m // ALIGN_A * ALIGN_A
    b_n = b_n // ALIGN_B * ALIGN_B
    tiles_m = (M - 1) // BLOCK_M + 1
    tiles_n = (N - 1) // BLOCK_N + 1
    shares = (leaves - 1) // share + 1
    ks = tl.arange(0, BLOCK_K).to(tl.int64)

    for item in tl.range(tl.program_id(0), tiles_m * tiles_n * shares, tl.num_programs(0)):
        first_leaf = item % shares * share
        tile_m, tile_n = raster(item // shares, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # Weight rows are the rows of the product: a matrix instruction has one height, any width.
        in_m = (rows < M)[None, :]
        in_n = (columns < N)[:, None]
        row_offsets = rows.to(tl.int64)[None, :]
        column_offsets = columns.to(tl.int64)[:, None]
        a_ptrs = a_ptr + row_offsets * a_m + ks[:, None] * a_k
        b_ptrs = b_ptr + column_offsets * b_n + ks[None, :] * b_k
        out_ptrs = out_ptr + row_offsets * N + column_offsets

        zero = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
        total = zero
        for leaf in tl.range(first_leaf, tl.minimum(first_leaf + share, leaves)):
            acc = leaf_chain(
                leaf, length, b_ptrs, a_ptrs, b_k, a_k, in_n, in_m, K, zero,
                BLOCK_K, INPUT_PRECISION, UPCAST,
            )  # fmt: skip
            if STAGE == "leaves":
                tl.store(out_ptrs + tl.cast(leaf, tl.int64) * M * N, acc, mask=in_n & in_m)
            elif STAGE == "unordered":
                tl.atomic_add(out_ptrs, acc, mask=in_n & in_m, sem="relaxed")
            else:
                # A sum from +0 would lose the sign of a leaf of -0.
                total = tl.where(leaf == first_leaf, acc, total + acc)
        if STAGE == "tree":
            if bias_ptr is not None:
                bias_ptrs = bias_ptr + row_offsets * bias_m + column_offsets * bias_n
                total += tl.load(bias_ptrs, mask=in_n & in_m, other=0.0).to(tl.float32)
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=in_n & in_m)


@triton.jit
def _add_leaves(
    total, sums_ptr, offsets, leaf_stride, in_n, ALIGN: tl.constexpr, LEAVES: tl.constexpr
):
    """total + the leaves of one more tensor, ascending."""
    if LEAVES > 0:
        size = tl.cast(leaf_stride, tl.int64) // ALIGN * ALIGN
        for leaf in tl.static_range(LEAVES):
            total += tl.load(sums_ptr + offsets + leaf * size, mask=in_n, other=0.0)
    return total


@triton.jit(do_not_specialize=["M", "N", "sums_l", "second_l", "third_l"])
def root_kernel(
    sums_ptr,
    second_ptr,
    third_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    sums_l,
    second_l,
    third_l,
    bias_m,
    bias_n,
    ALIGN: tl.constexpr,
    LEAVES: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[m, n] = round(((sums[0] + sums[1]) + sums[2]) + ... + bias), sums [LEAVES, M, N].

    The leaves of ``second`` [SECOND, M, N] and ``third`` [THIRD, M, N] come after those of
    ``sums``.  A leaf [M, N] is contiguous, and ``*_l`` is the distance between leaves.  ``out``
    may be the first leaf itself.
    """
    N = N // ALIGN * ALIGN
    tiles_n = (N - 1) // COLUMNS + 1
    row = tl.cast(tl.program_id(0) // tiles_n, tl.int64)
    columns = tl.cast(tl.program_id(0) % tiles_n, tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    in_n = columns < N
    offsets = row * N + columns
    sum_ptrs = sums_ptr + offsets
    size = tl.cast(sums_l, tl.int64) // ALIGN * ALIGN
    # The first leaf as it is: a sum from +0 would lose the sign of leaves of -0.
    total = tl.load(sum_ptrs, mask=in_n, other=0.0)
    for leaf in tl.static_range(1, LEAVES):
        total += tl.load(sum_ptrs + leaf * size, mask=in_n, other=0.0)
    total = _add_leaves(total, second_ptr, offsets, second_l, in_n, ALIGN, SECOND)
    total = _add_leaves(total, third_ptr, offsets, third_l, in_n, ALIGN, THIRD)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + row * bias_m + columns * bias_n
        total += tl.load(bias_ptrs, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=in_n)
