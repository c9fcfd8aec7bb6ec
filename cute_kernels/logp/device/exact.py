"""Exact sum over the vocabulary: a token's state in registers, and its updates.

The device half of ``logp/exact.py``, one row of a state at a time.  The bin of a tile of 16 entries
is M div 16; a state keeps the highest bin that it has seen, and the three below it.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ..config import BIN, BINS, CHOSEN, EMPTY, FRACTION, LOST, SUMS, TOO_MUCH, TOP, WEIGHTED

#: Exponent field of an fp32 of 1, and its first bit.
_ONE, _EXPONENT = 127, 23


@dataclass(frozen=True)
class State:
    """Partial states of some rows (tokens) of this lane, in registers.

    top:      Int32 [rows], the highest bin.
    sums:     Int64 [BINS, rows], Σ 2^y of each bin.
    weighted: Int64 [BINS, rows], Σ 2^y (y - 16 bin) of each bin; None without an entropy.
    chosen:   Int32 [rows], bits of the target's logit, or 0.
    """

    top: cute.Tensor
    sums: cute.Tensor
    weighted: cute.Tensor | None
    chosen: cute.Tensor


def make_state(rows: int, entropy: bool) -> State:
    """Allocate the registers of a state; `clear` it before use."""
    return State(
        cute.make_rmem_tensor(rows, cutlass.Int32),
        cute.make_rmem_tensor((BINS, rows), cutlass.Int64),
        cute.make_rmem_tensor((BINS, rows), cutlass.Int64) if entropy else None,
        cute.make_rmem_tensor(rows, cutlass.Int32),
    )


@cute.jit
def clear(state: State):
    """Set all rows to the state of an empty vocabulary."""
    state.top.fill(EMPTY)
    state.chosen.fill(0)
    state.sums.fill(0)
    if cutlass.const_expr(state.weighted is not None):
        state.weighted.fill(0)


@cute.jit
def add(
    state: State,
    row: cutlass.Constexpr[int],
    exponent: cutlass.Int32,
    total: cutlass.Float32,
    weighted: cutlass.Float32,
):
    """Add 16 entries: M, s = Σ 2^(y - M), and Σ 2^(y - M) (y - M) where there is an entropy."""
    tile_bin = exponent >> 4
    shift = exponent & (BIN - 1)
    nonzero = total > 0.0
    if nonzero & (tile_bin > state.top[row]):
        _lower(state, row, tile_bin - state.top[row])
        state.top[row] = tile_bin
    if not (total < TOO_MUCH):
        state.top[row] = cutlass.Int32(LOST)
    below = state.top[row] - tile_bin
    # sums[bin] += round(s 2^(M - 16 bin) 2^FRACTION)
    unit = _power_of_two(shift + FRACTION)
    addend = _round(total * unit)
    for j in cutlass.range_constexpr(BINS):
        state.sums[j, row] += addend if nonzero & (below == j) else cutlass.Int64(0)
    if cutlass.const_expr(state.weighted is not None):
        # y - 16 bin = (y - M) + shift
        shifted = cute.math.fma(total, shift.to(cutlass.Float32), weighted)
        addend = _round(shifted * unit)
        for j in cutlass.range_constexpr(BINS):
            state.weighted[j, row] += addend if nonzero & (below == j) else cutlass.Int64(0)


@cute.jit
def add_lane(state: State, row: cutlass.Constexpr[int], distance: cutlass.Constexpr[int]):
    """Add the row's state of the lane ``distance`` away (butterfly): both lanes get the sum."""
    top = cute.arch.shuffle_sync_bfly(state.top[row], offset=distance)
    highest = cutlass.max(state.top[row], top)
    # The other lane lowers its state to the same highest bin.
    _lower(state, row, highest - state.top[row])
    state.top[row] = highest
    state.chosen[row] += cute.arch.shuffle_sync_bfly(state.chosen[row], offset=distance)
    for j in cutlass.range_constexpr(BINS):
        state.sums[j, row] += cute.arch.shuffle_sync_bfly(state.sums[j, row], offset=distance)
        if cutlass.const_expr(state.weighted is not None):
            weighted = cute.arch.shuffle_sync_bfly(state.weighted[j, row], offset=distance)
            state.weighted[j, row] += weighted


@cute.jit
def add_stored(state: State, row: cutlass.Constexpr[int], other: cute.Tensor):
    """Add a state in memory, ``other`` [columns of a state], to a row."""
    top = other[TOP].to(cutlass.Int32)
    highest = cutlass.max(state.top[row], top)
    _lower(state, row, highest - state.top[row])
    state.top[row] = highest
    state.chosen[row] += other[CHOSEN].to(cutlass.Int32)
    for j in cutlass.range_constexpr(BINS):
        for step in cutlass.range_constexpr(j + 1):
            is_step = highest - top == step
            state.sums[j, row] += other[SUMS + j - step] if is_step else cutlass.Int64(0)
            if cutlass.const_expr(state.weighted is not None):
                state.weighted[j, row] += (
                    other[WEIGHTED + j - step] if is_step else cutlass.Int64(0)
                )


@cute.jit
def store(state: State, row: cutlass.Constexpr[int], out: cute.Tensor):
    """Store a row's state to ``out`` [columns of a state]."""
    out[TOP] = state.top[row].to(cutlass.Int64)
    out[CHOSEN] = state.chosen[row].to(cutlass.Int64)
    for j in cutlass.range_constexpr(BINS):
        out[SUMS + j] = state.sums[j, row]
        if cutlass.const_expr(state.weighted is not None):
            out[WEIGHTED + j] = state.weighted[j, row]


@cute.jit
def _lower(state: State, row: cutlass.Constexpr[int], by: cutlass.Int32):
    """Shift a row's bins down by ``by`` >= 0 bins; the lowest ones are dropped."""
    _shift(state.sums, row, by)
    if cutlass.const_expr(state.weighted is not None):
        _shift(state.weighted, row, by)


@cute.jit
def _shift(bins: cute.Tensor, row: cutlass.Constexpr[int], by: cutlass.Int32):
    for j in cutlass.range_constexpr(BINS - 1, -1, -1):
        value = bins[j, row] if by == 0 else cutlass.Int64(0)
        for step in cutlass.range_constexpr(1, j + 1):
            value = bins[j - step, row] if by == step else value
        bins[j, row] = value


@dsl_user_op
def _power_of_two(exponent: cutlass.Int32, *, loc=None, ip=None) -> cutlass.Float32:
    """2^exponent, from -126 to 127."""
    bits = (exponent + _ONE) << _EXPONENT
    return cutlass.Float32(llvm.bitcast(T.f32(), bits.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def _round(value: cutlass.Float32, *, loc=None, ip=None) -> cutlass.Int64:
    """Nearest integer, ties to even."""
    return cutlass.Int64(
        llvm.inline_asm(
            T.i64(),
            [value.ir_value(loc=loc, ip=ip)],
            "cvt.rni.s64.f32 $0, $1;",
            "=l,f",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )
