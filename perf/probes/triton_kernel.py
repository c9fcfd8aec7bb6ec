"""Products and 2^x as Triton's kernels have them, to be compared with those of CuTe's."""

from __future__ import annotations

import triton
import triton.language as tl

_EXP2_BLOCK = 1024


@triton.jit
def chain_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """D = C + A B^T, dense; M, N, K multiples of the blocks; one `tl.dot` per BLOCK_K of K."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.load(c_ptr + m[:, None] * N + n[None, :])
    for first in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * K + first + k[None, :])
        b = tl.load(b_ptr + n[None, :] * K + first + k[:, None])
        acc = tl.dot(a, b, acc)
    tl.store(d_ptr + m[:, None] * N + n[None, :], acc)


@triton.jit
def exp2_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """y = 2^x."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.exp2(tl.load(x_ptr + i, mask=i < N)), mask=i < N)


def chain(a, b, d, c, *, block_m: int, block_n: int, block_k: int) -> None:
    """Write D [M, N] fp32 from a [M, K], b [N, K] bf16 and C."""
    (m, k), n = a.shape, b.shape[0]
    chain_kernel[(m // block_m, n // block_n)](
        a, b, c, d, m, n, k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4
    )


def exp2(x, y) -> None:
    """Write 2^x of an fp32 vector."""
    grid = (triton.cdiv(x.numel(), _EXP2_BLOCK),)
    exp2_kernel[grid](x, y, x.numel(), BLOCK=_EXP2_BLOCK, enable_fp_fusion=False)
