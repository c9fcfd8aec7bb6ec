"""Vectors of 16 vocabulary entries in an accumulator [vocabulary, tokens]: operands swapped.

A thread's value ``4 i + 2 half + side`` is entry ``16 warp + lane / 4 + 8 half``, token
``8 i + 2 (lane mod 4) + side``.  The 16 entries of a warp are one vector: a thread has two of them
for each of its tokens, and lanes 4, 8 and 16 apart have the others.  All eight lanes that share
tokens compute the vectors of those tokens; of eight tokens each lane keeps the state of one.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from . import exact, vectors

#: Lanes that share tokens, and the distances between them.
SHARERS = 8
DISTANCES = (4, 8, 16)


@dataclass(frozen=True)
class Targets:
    """Targets of the tokens.

    mTarget: Int64 [T], vocabulary index of each token's target.
    rRow:    Int32 [slots], row of the head of the target of each of this lane's states.
    start:   vocabulary index of the head's first row.
    """

    mTarget: cute.Tensor
    rRow: cute.Tensor
    start: cutlass.Int32


def slots(tokens: int) -> int:
    """Number of tokens whose states a thread keeps."""
    return max(1, tokens // 4 // SHARERS)


@cute.jit
def token_of(slot: cutlass.Constexpr[int]) -> cutlass.Int32:
    """Token of one of this lane's states."""
    lane = cute.arch.lane_idx()
    sharer = lane // 4
    return 32 * slot + 8 * (sharer // 2) + 2 * (lane % 4) + sharer % 2


@cute.jit
def load_targets(state: exact.State, mTarget: cute.Tensor, start: cutlass.Int32) -> cute.Tensor:
    """Rows of the head of the targets of this lane's states."""
    count = cute.size(state.top)
    rRow = cute.make_rmem_tensor(count, cutlass.Int32)
    for slot in cutlass.range_constexpr(count):
        token = cutlass.min(token_of(slot), mTarget.shape[0] - 1)
        rRow[slot] = mTarget[token].to(cutlass.Int32) - start
    return rRow


@cute.jit
def add_bias(acc: cute.Tensor, mBias: cute.Tensor, cLogits: cute.Tensor, row0: cutlass.Int32):
    """acc[v, t] += bias[v], in fp32; rows beyond the head read the last."""
    for half in cutlass.range_constexpr(2):
        row = cutlass.min(row0 + cLogits[2 * half][0], mBias.shape[0] - 1)
        bias = mBias[row].to(cutlass.Float32)
        for i in cutlass.range_constexpr(cute.size(acc) // 4):
            for side in cutlass.range_constexpr(2):
                acc[4 * i + 2 * half + side] += bias


@cute.jit
def choose(
    acc: cute.Tensor,
    state: exact.State,
    targets: Targets,
    cLogits: cute.Tensor,
    row0: cutlass.Int32,
):
    """Add the bits of the targets' logits to the states, of targets among these 64 rows."""
    # Rarely taken: the target of a token is in one warp's rows of one tile.
    present = cutlass.Int32(0)
    for slot in cutlass.range_constexpr(cute.size(targets.rRow)):
        row = targets.rRow[slot] - row0
        present = cutlass.Int32(1) if (row >= 0) & (row < 64) else present
    if cute.arch.warp_reduction_max(present) > 0:
        for slot in cutlass.range_constexpr(cute.size(targets.rRow)):
            logits = [cutlass.Int32(0)] * SHARERS
            for sharer in cutlass.range_constexpr(min(SHARERS, cute.size(acc) // 2)):
                i, side = (SHARERS * slot + sharer) // 2, sharer % 2
                token = cutlass.min(cLogits[4 * i + side][1], targets.mTarget.shape[0] - 1)
                target = targets.mTarget[token].to(cutlass.Int32) - targets.start - row0
                logit = cutlass.Int32(0)
                for half in cutlass.range_constexpr(2):
                    index = 4 * i + 2 * half + side
                    logit = vectors.bits(acc[index]) if cLogits[index][0] == target else logit
                for distance in DISTANCES:
                    logit += cute.arch.shuffle_sync_bfly(logit, offset=distance)
                logits[sharer] = logit
            state.chosen[slot] += _of_lane(logits)


@cute.jit
def mask(acc: cute.Tensor, cLogits: cute.Tensor, row0: cutlass.Int32, valid: cutlass.Int32):
    """acc = -inf in rows from ``valid`` on, which are not of the vocabulary."""
    if row0 + 64 > valid:
        for half in cutlass.range_constexpr(2):
            if row0 + cLogits[2 * half][0] >= valid:
                for i in cutlass.range_constexpr(cute.size(acc) // 4):
                    for side in cutlass.range_constexpr(2):
                        acc[4 * i + 2 * half + side] = -cutlass.Float32.inf


@cute.jit
def add_tile(acc: cute.Tensor, state: exact.State, sScale: cute.Tensor):
    """Add the warp's vector of every token to the tokens' states.

    M = round(max y)      s = Σ 2^(y - M)      weighted: Σ 2^(y - M) (y - M)      y = z scale
    """
    lane = cute.arch.lane_idx()
    for slot in cutlass.range_constexpr(cute.size(state.top)):
        exponents = [cutlass.Int32(0)] * SHARERS
        sums = [cutlass.Float32(0.0)] * SHARERS
        weighted = [cutlass.Float32(0.0)] * SHARERS
        for sharer in cutlass.range_constexpr(min(SHARERS, cute.size(acc) // 2)):
            i, side = (SHARERS * slot + sharer) // 2, sharer % 2
            scale = sScale[8 * i + 2 * (lane % 4) + side]
            low, high = acc[4 * i + side], acc[4 * i + 2 + side]
            total = _total(low, high, scale, state.weighted is not None)
            exponents[sharer], sums[sharer], weighted[sharer] = total
        weighted_total = cutlass.Float32(0.0)
        if cutlass.const_expr(state.weighted is not None):
            weighted_total = _of_lane(weighted)
        exact.add(state, slot, _of_lane(exponents), _of_lane(sums), weighted_total)


@cute.jit
def _total(
    low: cutlass.Float32,
    high: cutlass.Float32,
    scale: cutlass.Float32,
    entropy: cutlass.Constexpr[bool],
) -> tuple[cutlass.Int32, cutlass.Float32, cutlass.Float32]:
    """(M, s, weighted sum) of a token's vector, on all lanes that share the token."""
    top = cute.arch.fmax(low, high)
    for distance in DISTANCES:
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=distance))
    exponent, shift = vectors.exponent_of(top, scale)
    powers = [cute.math.fma(z, scale, shift) for z in (low, high)]
    values = [cute.math.exp2(power, fastmath=True) for power in powers]
    total = values[0] + values[1]
    weighted = cutlass.Float32(0.0)
    if cutlass.const_expr(entropy):
        weighted = vectors.weigh(values[0], powers[0]) + vectors.weigh(values[1], powers[1])
    for distance in DISTANCES:
        total += cute.arch.shuffle_sync_bfly(total, offset=distance)
        if cutlass.const_expr(entropy):
            weighted += cute.arch.shuffle_sync_bfly(weighted, offset=distance)
    return exponent, total, weighted


@cute.jit
def store_warp(
    state: exact.State,
    states: cute.Pointer,
    tokens: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
):
    """Store the states of this warp to shared memory: ``states`` is [warp, token, column]."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    for slot in cutlass.range_constexpr(cute.size(state.top)):
        token = token_of(slot)
        if token < tokens:
            offset = (warp * tokens + token) * columns
            sState = cute.make_tensor(states + offset, cute.make_layout(columns))
            exact.store(state, slot, sState)


def _of_lane(values: list[cutlass.Numeric]) -> cutlass.Numeric:
    """values[lane div 4]."""
    sharer = cute.arch.lane_idx() // 4
    selected = values[0]
    for i in range(1, SHARERS):
        selected = _select(sharer == i, values[i], selected)
    return selected


@cute.jit
def _select(
    condition: cutlass.Boolean, yes: cutlass.Numeric, no: cutlass.Numeric
) -> cutlass.Numeric:
    return yes if condition else no
