"""Gradient of a tile of logits, in place in its registers."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl.product import Arguments, Registers
from ..config import LN2, MIN_POWER
from .vectors import QUAD, ROWS


@dataclass(frozen=True)
class GradientArguments(Arguments):
    """What the gradient of logits needs besides H and W: of tokens [T], and of the head.

    mBias:     [V'] or None.
    mTarget:   Int64, vocabulary index of the target, negative without one.
    mScale:    log2(e) / τ.
    mLse2:     log2 Σ_v 2^y.
    mDlogp:    dlogp / τ.
    mDentropy: dentropy / τ, and
    mEntropy:  the entropy; None where the entropy has no gradient.
    start:     vocabulary index of the head's first row.
    vocab:     size of the vocabulary.
    counts:    clusters of tiles along T and V'.
    """

    mBias: cute.Tensor | None
    mTarget: cute.Tensor
    mScale: cute.Tensor
    mLse2: cute.Tensor
    mDlogp: cute.Tensor
    mDentropy: cute.Tensor | None
    mEntropy: cute.Tensor | None
    start: cutlass.Int32
    vocab: cutlass.Int32
    softcap: cutlass.Float32
    counts: cute.Shape


@dataclass(frozen=True)
class TokenRegisters(Registers):
    """Inputs of the two rows of a thread.

    target: Int32, column of the target in this head, or a column outside it.
    masked: Int32, 1 without a target.
    """

    target: cute.Tensor
    masked: cute.Tensor
    scale: cute.Tensor
    lse2: cute.Tensor
    d_logp: cute.Tensor
    d_entropy: cute.Tensor | None
    entropy: cute.Tensor | None


def make_registers(count: int, entropy: bool) -> TokenRegisters:
    """Allocate the registers of ``count`` rows."""
    integers = [cute.make_rmem_tensor(count, cutlass.Int32) for _ in range(2)]
    floats = [cute.make_rmem_tensor(count, cutlass.Float32) for _ in range(5)]
    return TokenRegisters(*integers, *(floats if entropy else (*floats[:3], None, None)))


@cute.jit
def load(
    rows: TokenRegisters,
    args: GradientArguments,
    row0: cutlass.Int32,
    cLogits: cute.Tensor,
):
    """Load the rows of this thread; rows beyond the last token read it, and are not stored."""
    for half in cutlass.range_constexpr(ROWS):
        row = cutlass.min(row0 + cLogits[2 * half][0], args.mTarget.shape[0] - 1)
        target = args.mTarget[row].to(cutlass.Int32)
        rows.masked[half] = cutlass.Int32(1) if target < 0 else cutlass.Int32(0)
        rows.target[half] = target - args.start
        rows.scale[half], rows.lse2[half] = args.mScale[row], args.mLse2[row]
        rows.d_logp[half] = args.mDlogp[row]
        if cutlass.const_expr(rows.d_entropy is not None):
            rows.d_entropy[half] = args.mDentropy[row]
            rows.entropy[half] = args.mEntropy[row]


@cute.jit
def from_logits(
    acc: cute.Tensor,
    rows: TokenRegisters,
    cLogits: cute.Tensor,
    column0: cutlass.Int32,
    softcap: cutlass.Float32,
    capped: cutlass.Constexpr[bool],
):
    """Replace the logits z by their gradient.

    p = 2^(z scale - lse2)
    acc = ((1[v = target] - p) a - p (ln p + H) b) (1 - (z / softcap)²)

    with a = ``d_logp``, b = ``d_entropy``, H the entropy; the last factor only under a cap.
    """
    columns = cute.size(acc) // (2 * ROWS) * 2 * QUAD
    inverse = cutlass.Float32(1.0)
    if cutlass.const_expr(capped):
        inverse = cutlass.Float32(1.0) / softcap
    for half in cutlass.range_constexpr(ROWS):
        scale, shift, d_logp = rows.scale[half], -rows.lse2[half], rows.d_logp[half]
        target = rows.target[half] - column0
        in_tile = (target >= 0) & (target < columns)
        for i in cutlass.range_constexpr(cute.size(acc) // 4):
            for side in cutlass.range_constexpr(2):
                index = 4 * i + 2 * half + side
                z = acc[index]
                power = cute.math.fma(z, scale, shift)
                p = cute.math.exp2(power, fastmath=True)
                is_target = in_tile & (cLogits[index][1] == target)
                one = cutlass.Float32(1.0) if is_target else cutlass.Float32(0.0)
                d_z = (one - p) * d_logp
                if cutlass.const_expr(rows.d_entropy is not None):
                    finite = cute.arch.fmax(power, cutlass.Float32(MIN_POWER))
                    ln_p_plus_h = cute.math.fma(finite, cutlass.Float32(LN2), rows.entropy[half])
                    d_z = cute.math.fma(-p * rows.d_entropy[half], ln_p_plus_h, d_z)
                if cutlass.const_expr(capped):
                    ratio = z * inverse
                    d_z *= cute.math.fma(-ratio, ratio, cutlass.Float32(1.0))
                acc[index] = d_z


@cute.jit
def mask(
    acc: cute.Tensor,
    rows: TokenRegisters,
    cLogits: cute.Tensor,
    column0: cutlass.Int32,
    valid: cutlass.Int32,
):
    """acc = 0 in rows without a target, and in columns that are not of the vocabulary."""
    columns = cute.size(acc) // (2 * ROWS) * 2 * QUAD
    for half in cutlass.range_constexpr(ROWS):
        if (rows.masked[half] == 1) | (column0 + columns > valid):
            for i in cutlass.range_constexpr(cute.size(acc) // 4):
                for side in cutlass.range_constexpr(2):
                    index = 4 * i + 2 * half + side
                    if (rows.masked[half] == 1) | (column0 + cLogits[index][1] >= valid):
                        acc[index] = cutlass.Float32(0.0)
