"""Units of 16 vocabulary entries in an accumulator of vocabulary by tokens: operands swapped.

A thread's value ``4 i + 2 half + side`` is entry ``16 warp + lane / 4 + 8 half``, token
``8 i + 2 (lane mod 4) + side``: a warp's 16 entries are one unit, of which a thread has two of a
token's, and lanes 4, 8 and 16 apart the others.  Every lane comes to have the unit of all its
tokens; of eight tokens that eight lanes share, each lane keeps the state of one.
"""

import cutlass
from cutlass import cute

from ...dsl import softmax
from ..config import LOG2E
from . import exact, units

#: Lanes that have the same tokens, and the distances between them.
SHARERS = 8
DISTANCES = (4, 8, 16)


def slots(tokens: int) -> int:
    """Tokens of a thread, whose state it keeps."""
    return max(1, tokens // 4 // SHARERS)


@cute.jit
def token_of(slot: cutlass.Constexpr):
    """The token of one of this lane's states."""
    lane = cute.arch.lane_idx()
    sharer = lane // 4
    return 32 * slot + 8 * (sharer // 2) + 2 * (lane % 4) + sharer % 2


@cute.jit
def targets(own: exact.State, mTarget, start):
    """The targets of this lane's states, counted from the head's first row."""
    count = cute.size(own.top)
    found = cute.make_rmem_tensor(count, cutlass.Int32)
    for slot in cutlass.range_constexpr(count):
        token = cutlass.min(token_of(slot), mTarget.shape[0] - 1)
        found[slot] = mTarget[token].to(cutlass.Int32) - start
    return found


@cute.jit
def finish_logits(acc, mBias, at, row0, softcap, capped: cutlass.Constexpr):
    """acc = softcap tanh((acc + bias) / softcap); without either, as it is."""
    if cutlass.const_expr(mBias is not None):
        for half in cutlass.range_constexpr(2):
            row = cutlass.min(row0 + at[2 * half][0], mBias.shape[0] - 1)
            bias = mBias[row].to(cutlass.Float32)
            for i in cutlass.range_constexpr(cute.size(acc) // 4):
                for side in cutlass.range_constexpr(2):
                    acc[4 * i + 2 * half + side] += bias
    if cutlass.const_expr(capped):
        softmax.cap(acc, cutlass.Float32(2.0 * LOG2E) / softcap)
        for i in cutlass.range_constexpr(cute.size(acc) // 4):
            for j in cutlass.range_constexpr(4 * i, 4 * i + 4):
                acc[j] = acc[j] * softcap


@cute.jit
def choose(acc, own: exact.State, mine, where, at, row0):
    """Adds the bits of the targets' logits to the states, where a target is among these 64 rows."""
    mTarget, start = where
    # Rarely: a token's target is in one warp's rows of one tile.
    here = cutlass.Int32(0)
    for slot in cutlass.range_constexpr(cute.size(mine)):
        row = mine[slot] - row0
        here = cutlass.Int32(1) if (row >= 0) & (row < 64) else here
    if cute.arch.warp_reduction_max(here) > 0:
        for slot in cutlass.range_constexpr(cute.size(mine)):
            found = [cutlass.Int32(0)] * SHARERS
            for sharer in cutlass.range_constexpr(min(SHARERS, cute.size(acc) // 2)):
                i, side = (SHARERS * slot + sharer) // 2, sharer % 2
                token = cutlass.min(at[4 * i + side][1], mTarget.shape[0] - 1)
                target = mTarget[token].to(cutlass.Int32) - start - row0
                part = cutlass.Int32(0)
                for half in cutlass.range_constexpr(2):
                    value = 4 * i + 2 * half + side
                    part = units.bits(acc[value]) if at[value][0] == target else part
                for distance in DISTANCES:
                    part += cute.arch.shuffle_sync_bfly(part, offset=distance)
                found[sharer] = part
            own.chosen[slot] += _of_lane(found)


@cute.jit
def mask(acc, at, row0, valid):
    """acc = -inf in rows that are not of the vocabulary."""
    if row0 + 64 > valid:
        for half in cutlass.range_constexpr(2):
            if row0 + at[2 * half][0] >= valid:
                for i in cutlass.range_constexpr(cute.size(acc) // 4):
                    for side in cutlass.range_constexpr(2):
                        acc[4 * i + 2 * half + side] = -cutlass.Float32.inf


@cute.jit
def absorb(acc, own: exact.State, scale):
    """The warp's unit of every token into the tokens' states."""
    lane = cute.arch.lane_idx()
    for slot in cutlass.range_constexpr(cute.size(own.top)):
        exponents = [cutlass.Int32(0)] * SHARERS
        sums = [cutlass.Float32(0.0)] * SHARERS
        weighted = [cutlass.Float32(0.0)] * SHARERS
        for sharer in cutlass.range_constexpr(min(SHARERS, cute.size(acc) // 2)):
            i, side = (SHARERS * slot + sharer) // 2, sharer % 2
            of_token = scale[8 * i + 2 * (lane % 4) + side]
            low, high = acc[4 * i + side], acc[4 * i + 2 + side]
            unit = _unit(low, high, of_token, own.weighted is not None)
            exponents[sharer], sums[sharer], weighted[sharer] = unit
        moved = _of_lane(weighted) if own.weighted is not None else cutlass.Float32(0.0)
        exact.add(own, slot, _of_lane(exponents), _of_lane(sums), moved)


@cute.jit
def _unit(low, high, scale, entropy: cutlass.Constexpr):
    """(M, s, the weighted sum) of a token's unit, on all lanes that share the token."""
    top = cute.arch.fmax(low, high)
    for distance in DISTANCES:
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=distance))
    exponent, shift = units.exponent_of(top, scale)
    powers = [cute.math.fma(z, scale, shift) for z in (low, high)]
    values = [cute.math.exp2(power, fastmath=True) for power in powers]
    total = values[0] + values[1]
    weighted = cutlass.Float32(0.0)
    if cutlass.const_expr(entropy):
        weighted = units.weigh(values[0], powers[0]) + units.weigh(values[1], powers[1])
    for distance in DISTANCES:
        total += cute.arch.shuffle_sync_bfly(total, offset=distance)
        if cutlass.const_expr(entropy):
            weighted += cute.arch.shuffle_sync_bfly(weighted, offset=distance)
    return exponent, total, weighted


@cute.jit
def keep(own: exact.State, kept, tokens: cutlass.Constexpr, columns: cutlass.Constexpr):
    """The states of this warp to shared memory: [warp, token, column]."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    for slot in cutlass.range_constexpr(cute.size(own.top)):
        token = token_of(slot)
        if token < tokens:
            at = (warp * tokens + token) * columns
            exact.store(own, slot, cute.make_tensor(kept + at, cute.make_layout(columns)))


def _of_lane(values):
    """values[lane div 4]."""
    sharer = cute.arch.lane_idx() // 4
    result = values[0]
    for i in range(1, SHARERS):
        result = _select(sharer == i, values[i], result)
    return result


@cute.jit
def _select(condition, yes, no):
    return yes if condition else no
