"""Grouped products in Triton, for ROCm and CUDA; see routing kernels in kernel_routing.py.

    grouped_gemm   out[t, n] = round(Σ_k a[t, k] b[e, n, k] + bias[e, n])     e: the expert of row t
    grouped_dw     out[e, m, n] = round(Σ_t a[t, m] b[t, n]) over the rows t of expert e, or
                   acc[e, m, n] = acc[e, m, n] + the same                      (fp32, in place)
    grouped_sum    out[e, n] = round(Σ_t rows[t, n]) over the rows t of expert e
    grouped_leaves sums[l, t, n] = Σ_k a[t, k] b[e, n, k] over leaf l of K, or the order tree:
                   out[t, n] = round(((sums[0] + sums[1]) + sums[2]) + ... + bias[e, n])

Expert e has the rows offsets[e] to offsets[e + 1], clamped to [0, T] and to ascend: whatever
offsets hold, nothing outside is read or written.

Order.  That of gemm's kernels in Triton: the same tile, the same ``tl.dot`` of the same K, from the
first k of the sum, ascending, masked at its end.  A row has the bytes of ``ck.linear``, as no bit
there follows a row's place in its tile; so has dW, as a sum begins at the expert's first row.
grouped_leaves is gemm's leaves_kernel likewise, in the one tile of gemm's order ``tree``.

Work.  Persistent: program p computes units p, p + programs, ... of grouped_gemm, a unit being one
tile of one expert; each program finds a unit's expert by the running sum of tiles, which it makes
from the offsets.  So no host reads them.  A tile never holds rows of two experts.

Limits.  Where a is contiguous along its rows, loads are scalar: rows of an expert begin anywhere.
Not run on a GPU: tests run the sm_90 code in ptxsim and the source in Triton's interpreter,
and compare bytes with gemm's.
"""

import triton
import triton.language as tl

from ...runtime.triton_tiles import column_sums, dot_chain, leaf_chain, raster


@triton.jit
def _rows_of(offsets_ptr, expert, T):
    """(first row, number of rows) of an expert, within T rows whatever the offsets are."""
    first = tl.minimum(tl.maximum(tl.load(offsets_ptr + expert), 0), T)
    end = tl.minimum(tl.maximum(tl.load(offsets_ptr + expert + 1), first), T)
    return first, end - first


@triton.jit
def _ends_of(offsets_ptr, T, E, tiles_n, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """ends[e]: the units of experts up to e, [EXPERTS]."""
    experts = tl.arange(0, EXPERTS)
    first = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    end = tl.load(offsets_ptr + experts + 1, mask=experts < E, other=0)
    first = tl.minimum(tl.maximum(first, 0), T)
    rows_of_each = tl.minimum(tl.maximum(end, first), T) - first
    heights = rows_of_each // BLOCK_M + (rows_of_each % BLOCK_M > 0).to(tl.int32)
    return tl.cumsum(heights, 0) * tiles_n


@triton.jit
def _unit_of(
    unit,
    ends,
    offsets_ptr,
    T,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """(expert, its first row, its number of rows, rows and columns of the tile) of a unit.

    Rows are counted from the expert's first one.
    """
    before = ends <= unit
    expert = tl.sum(before.to(tl.int32), 0)
    local = unit - tl.max(tl.where(before, ends, 0), 0)
    row0, count = _rows_of(offsets_ptr, expert, T)
    tile_m, tile_n = raster(local, (count - 1) // BLOCK_M + 1, tiles_n, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    return expert, row0, count, rows, tile_n * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit(do_not_specialize=["T", "E", "N", "K"])
def grouped_gemm_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    offsets_ptr,
    T,
    E,
    N,
    K,
    a_m,
    a_k,
    b_e,
    b_n,
    b_k,
    bias_e,
    bias_n,
    ALIGN_N: tl.constexpr,
    ALIGN_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Units program_id, program_id + programs, ... of all experts' tiles.

    EXPERTS: a power of two, not below E.
    """
    N = N // ALIGN_N * ALIGN_N
    K = K // ALIGN_K * ALIGN_K
    tiles_n = (N - 1) // BLOCK_N + 1
    ks = tl.arange(0, BLOCK_K).to(tl.int64)

    ends = _ends_of(offsets_ptr, T, E, tiles_n, EXPERTS, BLOCK_M)
    for unit in tl.range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, row0, count, rows, columns = _unit_of(
            unit, ends, offsets_ptr, T, tiles_n, BLOCK_M, BLOCK_N, GROUP_M
        )
        in_m = (rows < count)[:, None]
        in_n = (columns < N)[None, :]
        row_offsets = (tl.cast(row0, tl.int64) + rows)[:, None]
        column_offsets = columns.to(tl.int64)[None, :]
        b_expert = b_ptr + tl.cast(expert, tl.int64) * b_e
        a_ptrs = a_ptr + row_offsets * a_m + ks[None, :] * a_k
        b_ptrs = b_expert + column_offsets * b_n + ks[:, None] * b_k

        acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        acc = dot_chain(
            a_ptrs, b_ptrs, a_k, b_k, in_m, in_n, K, acc, BLOCK_K, INPUT_PRECISION, UPCAST
        )
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + tl.cast(expert, tl.int64) * bias_e
            bias_ptrs += columns.to(tl.int64) * bias_n
            bias = tl.load(bias_ptrs, mask=columns < N, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        out_ptrs = out_ptr + row_offsets * N + column_offsets
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_m & in_n)


@triton.jit(do_not_specialize=["T", "E", "N", "K", "leaves"])
def grouped_leaves_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    offsets_ptr,
    T,
    E,
    N,
    K,
    length,
    leaves,
    a_m,
    a_k,
    b_e,
    b_n,
    b_k,
    bias_e,
    bias_n,
    ALIGN_N: tl.constexpr,
    ALIGN_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Units of `grouped_gemm_kernel`, K leaf by leaf.

    STAGE "tree": the sum of all leaves, bias, rounding; out [T, N].  "leaves": each leaf to out
    [leaves, T, N].
    """
    N = N // ALIGN_N * ALIGN_N
    K = K // ALIGN_K * ALIGN_K
    tiles_n = (N - 1) // BLOCK_N + 1
    ks = tl.arange(0, BLOCK_K).to(tl.int64)

    ends = _ends_of(offsets_ptr, T, E, tiles_n, EXPERTS, BLOCK_M)
    for unit in tl.range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, row0, count, rows, columns = _unit_of(
            unit, ends, offsets_ptr, T, tiles_n, BLOCK_M, BLOCK_N, GROUP_M
        )
        # Weight rows are the rows of the product, as in gemm's leaves.
        in_m = (rows < count)[None, :]
        in_n = (columns < N)[:, None]
        row_offsets = (tl.cast(row0, tl.int64) + rows)[None, :]
        column_offsets = columns.to(tl.int64)[:, None]
        b_expert = b_ptr + tl.cast(expert, tl.int64) * b_e
        a_ptrs = a_ptr + row_offsets * a_m + ks[:, None] * a_k
        b_ptrs = b_expert + column_offsets * b_n + ks[None, :] * b_k
        out_ptrs = out_ptr + row_offsets * N + column_offsets

        zero = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
        total = zero
        for leaf in tl.range(0, leaves):
            acc = leaf_chain(
                leaf, length, b_ptrs, a_ptrs, b_k, a_k, in_n, in_m, K, zero,
                BLOCK_K, INPUT_PRECISION, UPCAST,
            )  # fmt: skip
            if STAGE == "leaves":
                tl.store(out_ptrs + tl.cast(leaf, tl.int64) * T * N, acc, mask=in_n & in_m)
            else:
                # A sum from +0 would lose the sign of a leaf of -0.
                total = tl.where(leaf == 0, acc, total + acc)
        if STAGE == "tree":
            if bias_ptr is not None:
                bias_ptrs = bias_ptr + tl.cast(expert, tl.int64) * bias_e
                bias_ptrs += column_offsets * bias_n
                total += tl.load(bias_ptrs, mask=in_n, other=0.0).to(tl.float32)
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=in_n & in_m)


@triton.jit(do_not_specialize=["T", "E", "M", "N"])
def grouped_dw_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    offsets_ptr,
    T,
    E,
    M,
    N,
    a_t,
    a_m,
    b_t,
    b_n,
    out_e,
    out_m,
    out_n,
    ALIGN_M: tl.constexpr,
    ALIGN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Units program_id, program_id + programs, ...: tile by tile of [M, N], expert by expert.

    With ACCUMULATE, an expert without rows is neither read nor written.
    """
    M = M // ALIGN_M * ALIGN_M
    N = N // ALIGN_N * ALIGN_N
    tiles_m = (M - 1) // BLOCK_M + 1
    tiles = tiles_m * ((N - 1) // BLOCK_N + 1)

    for unit in tl.range(tl.program_id(0), E * tiles, tl.num_programs(0)):
        expert = unit // tiles
        row0, count = _rows_of(offsets_ptr, expert, T)
        tile_m = unit % tiles % tiles_m
        tile_n = unit % tiles // tiles_m
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        in_m = (rows < M)[:, None]
        in_n = (columns < N)[None, :]
        row_offsets = rows.to(tl.int64)[:, None]
        column_offsets = columns.to(tl.int64)[None, :]
        tokens = tl.cast(row0, tl.int64) + tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + row_offsets * a_m + tokens[None, :] * a_t
        b_ptrs = b_ptr + column_offsets * b_n + tokens[:, None] * b_t
        out_ptrs = out_ptr + tl.cast(expert, tl.int64) * out_e
        out_ptrs += row_offsets * out_m + column_offsets * out_n
        stored = in_m & in_n

        if ACCUMULATE:
            stored = stored & (count > 0)
            acc = tl.load(out_ptrs, mask=stored, other=0.0)
        else:
            acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        acc = dot_chain(
            a_ptrs, b_ptrs, a_t, b_t, in_m, in_n, count, acc, BLOCK_K, INPUT_PRECISION, UPCAST
        )
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["T", "N"])
def grouped_sum_kernel(
    rows_ptr,
    out_ptr,
    offsets_ptr,
    T,
    N,
    rows_t,
    rows_n,
    ALIGN_N: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """out[e, n] for COLUMNS columns of an expert's rows, in the order of `column_sums`."""
    N = N // ALIGN_N * ALIGN_N
    tiles = (N - 1) // COLUMNS + 1
    expert = tl.program_id(0) // tiles
    row0, count = _rows_of(offsets_ptr, expert, T)
    columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    tokens = tl.cast(row0, tl.int64) + tl.arange(0, LANES)
    ptrs = rows_ptr + tokens[:, None] * rows_t + columns.to(tl.int64)[None, :] * rows_n
    total = column_sums(ptrs, rows_t, (columns < N)[None, :], count, LANES, COLUMNS, UNROLL)
    out_ptrs = out_ptr + tl.cast(expert, tl.int64) * N + columns
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=columns < N)
