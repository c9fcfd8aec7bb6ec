"""The gradient of a tile of logits, in the registers of the logits."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ..config import LN2, MIN_POWER
from .units import QUAD, ROWS


@dataclass(frozen=True)
class TokenRows:
    """What the two rows of a thread have besides logits, in registers; fp32 but for the target.

    target: the column in this head, or anything outside it.  masked: 1 without a target.
    of_entropy, entropy: None where the entropy has no gradient.
    """

    target: cute.Tensor
    masked: cute.Tensor
    scale: cute.Tensor
    lse2: cute.Tensor
    of_logp: cute.Tensor
    of_entropy: cute.Tensor | None
    entropy: cute.Tensor | None


def rows(count: int, entropy: bool) -> TokenRows:
    """Registers for ``count`` rows."""
    whole = [cute.make_rmem_tensor(count, cutlass.Int32) for _ in range(2)]
    parts = [cute.make_rmem_tensor(count, cutlass.Float32) for _ in range(5)]
    return TokenRows(*whole, *(parts if entropy else (*parts[:3], None, None)))


@cute.jit
def load(own: TokenRows, tokens, row0, at, start):
    """The rows of this thread; one beyond the last token reads the last, and nobody stores it."""
    mTarget, mScale, mLse2, mOfLogp, mOfEntropy, mEntropy = tokens
    for half in cutlass.range_constexpr(ROWS):
        row = cutlass.min(row0 + at[2 * half][0], mTarget.shape[0] - 1)
        target = mTarget[row].to(cutlass.Int32)
        own.masked[half] = cutlass.Int32(1) if target < 0 else cutlass.Int32(0)
        own.target[half] = target - start
        own.scale[half], own.lse2[half] = mScale[row], mLse2[row]
        own.of_logp[half] = mOfLogp[row]
        if cutlass.const_expr(own.of_entropy is not None):
            own.of_entropy[half], own.entropy[half] = mOfEntropy[row], mEntropy[row]


@cute.jit
def of_logits(acc, own: TokenRows, at, column0, softcap, capped: cutlass.Constexpr):
    """acc = (1[v = target] - p) a - p (ln p + H) b, times 1 - (z / softcap)^2 under a cap."""
    columns = cute.size(acc) // (2 * ROWS) * 2 * QUAD
    inverse = cutlass.Float32(1.0)
    if cutlass.const_expr(capped):
        inverse = cutlass.Float32(1.0) / softcap
    for half in cutlass.range_constexpr(ROWS):
        scale, shift, of_logp = own.scale[half], -own.lse2[half], own.of_logp[half]
        column = own.target[half] - column0
        here = (column >= 0) & (column < columns)
        for i in cutlass.range_constexpr(cute.size(acc) // 4):
            for side in cutlass.range_constexpr(2):
                value = 4 * i + 2 * half + side
                z = acc[value]
                power = cute.math.fma(z, scale, shift)
                p = cute.math.exp2(power, fastmath=True)
                hit = here & (at[value][1] == column)
                one = cutlass.Float32(1.0) if hit else cutlass.Float32(0.0)
                result = (one - p) * of_logp
                if cutlass.const_expr(own.of_entropy is not None):
                    finite = cute.arch.fmax(power, cutlass.Float32(MIN_POWER))
                    log_p = cute.math.fma(finite, cutlass.Float32(LN2), own.entropy[half])
                    result = cute.math.fma(-p * own.of_entropy[half], log_p, result)
                if cutlass.const_expr(capped):
                    ratio = z * inverse
                    result *= cute.math.fma(-ratio, ratio, cutlass.Float32(1.0))
                acc[value] = result


@cute.jit
def mask(acc, own: TokenRows, at, column0, valid):
    """acc = 0 in rows without a target, and in columns that are not of the vocabulary."""
    columns = cute.size(acc) // (2 * ROWS) * 2 * QUAD
    for half in cutlass.range_constexpr(ROWS):
        if (own.masked[half] == 1) | (column0 + columns > valid):
            for i in cutlass.range_constexpr(cute.size(acc) // 4):
                for side in cutlass.range_constexpr(2):
                    value = 4 * i + 2 * half + side
                    if (own.masked[half] == 1) | (column0 + at[value][1] >= valid):
                        acc[value] = cutlass.Float32(0.0)
