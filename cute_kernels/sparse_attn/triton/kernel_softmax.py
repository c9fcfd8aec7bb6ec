"""Scores and the online softmax of attention in Triton, for the dense and the paged kernels."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def product(x, y, bend, SOFTCAP: tl.constexpr):
    """s = x yᵀ, or tanh(bend s / (2 log2 e)): scores but for a factor above 0."""
    s = tl.dot(x, tl.trans(y), input_precision="ieee")
    if SOFTCAP:
        # 2 / (exp2(...) + 1) runs from 2 to 0 and never to NaN.
        s = 1.0 - 2.0 / (tl.exp2(s * bend) + 1.0)
    return s


@triton.jit
def through(x, like, ROUND: tl.constexpr):
    """x in the dtype of ``like``, rounded to the input dtype.

    ROUND is None, or, for Triton's interpreter, the dtype whose values fp32 operands hold: it
    truncates when it makes bf16.
    """
    if ROUND == "bf16":
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    if ROUND == "fp16":
        x = x.to(tl.float16)
    return x.to(like.dtype)


@triton.jit
def softmax_step(s, top, total, factor):
    """(P, the new maximum and sum, what earlier sums shrink by) of one more tile of scores.

    top, total: the maximum, in base 2, and the sum of each row so far.
    """
    above = tl.maximum(top, tl.max(s, axis=1) * factor)
    # Of a row that has seen nothing yet, the maximum is -inf: any finite number will do.
    base = tl.where(above == NOTHING, 0.0, above)
    p = tl.exp2(tl.fma(s, factor, -base[:, None]))
    shrink = tl.exp2(top - base)
    return p, above, total * shrink + tl.sum(p, axis=1), shrink


@triton.jit
def softmax_end(acc, top, total):
    """(out, lse) of the sums over all keys."""
    # Neither the zeros of steps that a row took no part in nor a division by 0 may show.
    out = tl.where(acc == 0.0, 0.0, acc / total[:, None])
    return out, (top + tl.log2(total)) * LN2
