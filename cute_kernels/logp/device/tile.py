"""Tile of logits in registers: operations before its sums."""

import cutlass
from cutlass import cute

from ...dsl import copy, softmax
from ..config import LOG2E
from .vectors import QUAD, ROWS, bits


@cute.jit
def keep(
    acc: cute.Tensor,
    mSums: cute.Tensor,
    cLogits: cute.Tensor,
    row0: cutlass.Int32,
    column0: cutlass.Int32,
):
    """Store the accumulator in ``mSums``, where it has these rows and columns: pairs of columns."""
    rPair = cute.make_rmem_tensor(2, cutlass.Float32)
    for half in cutlass.range_constexpr(ROWS):
        row = row0 + cLogits[2 * half][0]
        if row < mSums.shape[0]:
            # Computed by hand: offsets need 64 bits, and a pair of columns has one instruction.
            first = cutlass.Int64(row) * mSums.stride[0] + column0
            for i in cutlass.range_constexpr(cute.size(acc) // 4):
                if column0 + cLogits[4 * i][1] < mSums.shape[1]:
                    rPair[0], rPair[1] = acc[4 * i + 2 * half], acc[4 * i + 2 * half + 1]
                    copy.aligned(mSums, first + cLogits[4 * i][1], 2).store(rPair.load())


@cute.jit
def cap(tCrC: cute.Tensor, softcap: cutlass.Float32):
    """tCrC = softcap tanh(tCrC / softcap)."""
    softmax.cap(tCrC, cutlass.Float32(2.0 * LOG2E) / softcap)
    for i in cutlass.range_constexpr(cute.size(tCrC) // 4):
        for j in cutlass.range_constexpr(4 * i, 4 * i + 4):
            tCrC[j] = tCrC[j] * softcap


@cute.jit
def choose(
    acc: cute.Tensor,
    cLogits: cute.Tensor,
    target: cute.Tensor,
    column0: cutlass.Int32,
    chosen: cute.Tensor,
):
    """chosen = bits of the target's logit, on the lane that has it."""
    columns = cute.size(acc) // (2 * ROWS) * 2 * QUAD
    for half in cutlass.range_constexpr(ROWS):
        column = target[half] - column0
        if (column >= 0) & (column < columns):
            for i in cutlass.range_constexpr(cute.size(acc) // 4):
                for side in cutlass.range_constexpr(2):
                    index = 4 * i + 2 * half + side
                    if cLogits[index][1] == column:
                        chosen[half] = bits(acc[index])


@cute.jit
def mask(acc: cute.Tensor, cLogits: cute.Tensor, column0: cutlass.Int32, valid: cutlass.Int32):
    """acc = -inf in columns from ``valid`` on, which are not of the vocabulary."""
    columns = cute.size(acc) // (2 * ROWS) * 2 * QUAD
    if column0 + columns > valid:
        for i in cutlass.range_constexpr(cute.size(acc) // 4):
            for j in cutlass.range_constexpr(4 * i, 4 * i + 4):
                if column0 + cLogits[j][1] >= valid:
                    acc[j] = -cutlass.Float32.inf


@cute.jit
def row_of(mX: cute.Tensor, run: cutlass.Int32, row: cutlass.Int32) -> cute.Tensor:
    """View of the last mode of ``mX`` [runs, rows, any]."""
    # Computed by hand: offsets need 64 bits, as the tensor may have more than 2^31 elements.
    offset = cutlass.Int64(run) * mX.stride[0] + cutlass.Int64(row) * mX.stride[1]
    return cute.make_tensor(mX.iterator + offset, cute.make_layout(mX.shape[2]))
