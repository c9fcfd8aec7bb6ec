"""P and dS of a backward, on accumulators with keys as rows and query rows as columns.

A thread holds two keys of an accumulator of ``wgmma.m64nNk16``: value ``4 i + 2 half + side`` is
key ``16 warp + lane / 4 + 8 half``, query row ``8 i + 2 (lane mod 4) + side`` of the tile.
lse2 and delta hold that row's value at [(side, i mod 2), i / 2]: ``BackwardTiles.statistics``.
"""

import cutlass
from cutlass import cute

from ...dsl import softmax
from .backward_state import Scalars


@cute.jit
def exponents(scores: cute.Tensor, lse2: cute.Tensor, c: cutlass.Float32):
    """s = s c - lse2[q], fused."""
    for i in cutlass.range_constexpr(cute.size(scores) // 4):
        for side in cutlass.range_constexpr(2):
            shift = -lse2[(side, i % 2), i // 2]
            for half in cutlass.range_constexpr(2):
                at = 4 * i + 2 * half + side
                scores[at] = cute.math.fma(scores[at], c, shift)


def scaled_exponents(scores: cute.Tensor, lse2: cute.Tensor, scalars: Scalars, softcap: bool):
    """Make of scores the exponents of P, which `exponents` are, capped if asked for."""
    if softcap:
        softmax.cap(scores, scalars.inner)
    exponents(scores, lse2, scalars.c)


def round_weights(scores: cute.Tensor, rounded: cute.Tensor):
    """P = exp2 of exponents, in their place, and P rounded."""
    scores.store(cute.math.exp2(scores.load(), fastmath=True))
    rounded.store(scores.load().to(rounded.element_type))


def score_slopes(
    grads: cute.Tensor,
    p: cute.Tensor,
    delta: cute.Tensor,
    lse2: cute.Tensor,
    scalars: Scalars,
    softcap: bool,
):
    """Make dS of dP: `slopes`, or `capped_slopes` if asked for."""
    if softcap:
        capped_slopes(grads, p, delta, lse2, scalars.c)
    else:
        slopes(grads, p, delta)


@cute.jit
def slopes(grads: cute.Tensor, p: cute.Tensor, delta: cute.Tensor):
    """g = p (g - delta[q])."""
    for i in cutlass.range_constexpr(cute.size(grads) // 4):
        for side in cutlass.range_constexpr(2):
            mean = delta[(side, i % 2), i // 2]
            for half in cutlass.range_constexpr(2):
                at = 4 * i + 2 * half + side
                grads[at] = p[at] * (grads[at] - mean)


@cute.jit
def capped_slopes(
    grads: cute.Tensor, p: cute.Tensor, delta: cute.Tensor, lse2: cute.Tensor, c: cutlass.Float32
):
    """g = p (g - delta[q]) (1 - t²); t = (log2 p + lse2[q]) / c, the capped score; p = 0 gives 0.

    t is made again from p, as exact as the exponent was: keeping it would cost registers.
    """
    inverse = cute.arch.rcp_approx(c)
    for i in cutlass.range_constexpr(cute.size(grads) // 4):
        for side in cutlass.range_constexpr(2):
            mean, level = delta[(side, i % 2), i // 2], lse2[(side, i % 2), i // 2]
            for half in cutlass.range_constexpr(2):
                at = 4 * i + 2 * half + side
                t = (cute.math.log2(p[at], fastmath=True) + level) * inverse
                bend = cute.math.fma(-t, t, cutlass.Float32(1.0))
                grad = p[at] * (grads[at] - mean) * bend
                grads[at] = grad if p[at] > 0.0 else cutlass.Float32(0.0)
