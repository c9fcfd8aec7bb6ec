"""The exact sum over the vocabulary in registers: a row's state, units added, states met.

What is stated in ``logp/exact.py``, for one row at a time.  A unit's bin is M div 16; the highest
bin that a state has seen and the three below it are kept.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ..config import BIN, BINS, CHOSEN, EMPTY, FRACTION, LOST, SUMS, TOO_MUCH, TOP, WEIGHTED

#: The exponent field of an fp32 of 1, and its place.
_ONE, _EXPONENT = 127, 23


@dataclass(frozen=True)
class State:
    """Of ``rows`` rows of this lane, in registers.

    top: Int32 [rows].  sums: Int64 [BINS, rows].  weighted: the same with an entropy, else None.
    chosen: Int32 [rows], the bits of the target's logit, or 0.
    """

    top: cute.Tensor
    sums: cute.Tensor
    weighted: cute.Tensor | None
    chosen: cute.Tensor


def state(rows: int, entropy: bool) -> State:
    """Registers of a state; `clear` it before use."""
    return State(
        cute.make_rmem_tensor(rows, cutlass.Int32),
        cute.make_rmem_tensor((BINS, rows), cutlass.Int64),
        cute.make_rmem_tensor((BINS, rows), cutlass.Int64) if entropy else None,
        cute.make_rmem_tensor(rows, cutlass.Int32),
    )


@cute.jit
def clear(own: State):
    """No unit so far."""
    own.top.fill(EMPTY)
    own.chosen.fill(0)
    own.sums.fill(0)
    if cutlass.const_expr(own.weighted is not None):
        own.weighted.fill(0)


@cute.jit
def add(own: State, row: cutlass.Constexpr, exponent, total, weighted):
    """A unit: M, s, and Σ 2^(y - M) (y - M) where there is an entropy."""
    unit_bin = exponent >> 4
    place = exponent & (BIN - 1)
    alive = total > 0.0
    if alive & (unit_bin > own.top[row]):
        _lower(own, row, unit_bin - own.top[row])
        own.top[row] = unit_bin
    if not (total < TOO_MUCH):
        own.top[row] = cutlass.Int32(LOST)
    below = own.top[row] - unit_bin
    unit = _power_of_two(place + FRACTION)
    whole = _whole(total * unit)
    for j in cutlass.range_constexpr(BINS):
        own.sums[j, row] += whole if alive & (below == j) else cutlass.Int64(0)
    if cutlass.const_expr(own.weighted is not None):
        # y - 16 bin = (y - M) + place
        moved = cute.math.fma(total, place.to(cutlass.Float32), weighted)
        whole = _whole(moved * unit)
        for j in cutlass.range_constexpr(BINS):
            own.weighted[j, row] += whole if alive & (below == j) else cutlass.Int64(0)


@cute.jit
def meet(own: State, row: cutlass.Constexpr, distance: cutlass.Constexpr):
    """A row's state, and that of the lane ``distance`` away, become their sum, on both."""
    top = cute.arch.shuffle_sync_bfly(own.top[row], offset=distance)
    highest = cutlass.max(own.top[row], top)
    # The other lane lowers its own to the same highest bin.
    _lower(own, row, highest - own.top[row])
    own.top[row] = highest
    own.chosen[row] += cute.arch.shuffle_sync_bfly(own.chosen[row], offset=distance)
    for j in cutlass.range_constexpr(BINS):
        own.sums[j, row] += cute.arch.shuffle_sync_bfly(own.sums[j, row], offset=distance)
        if cutlass.const_expr(own.weighted is not None):
            part = cute.arch.shuffle_sync_bfly(own.weighted[j, row], offset=distance)
            own.weighted[j, row] += part


@cute.jit
def take(own: State, row: cutlass.Constexpr, other: cute.Tensor):
    """A state from memory is added to a row's."""
    top = other[TOP].to(cutlass.Int32)
    highest = cutlass.max(own.top[row], top)
    _lower(own, row, highest - own.top[row])
    own.top[row] = highest
    own.chosen[row] += other[CHOSEN].to(cutlass.Int32)
    for j in cutlass.range_constexpr(BINS):
        for step in cutlass.range_constexpr(j + 1):
            here = highest - top == step
            own.sums[j, row] += other[SUMS + j - step] if here else cutlass.Int64(0)
            if cutlass.const_expr(own.weighted is not None):
                own.weighted[j, row] += other[WEIGHTED + j - step] if here else cutlass.Int64(0)


@cute.jit
def store(own: State, row: cutlass.Constexpr, out: cute.Tensor):
    """A row's state to ``out`` [columns of a state]."""
    out[TOP] = own.top[row].to(cutlass.Int64)
    out[CHOSEN] = own.chosen[row].to(cutlass.Int64)
    for j in cutlass.range_constexpr(BINS):
        out[SUMS + j] = own.sums[j, row]
        if cutlass.const_expr(own.weighted is not None):
            out[WEIGHTED + j] = own.weighted[j, row]


@cute.jit
def _lower(own: State, row: cutlass.Constexpr, by):
    """Bins as seen from ``by`` >= 0 bins higher; what falls off adds nothing any more."""
    _shift(own.sums, row, by)
    if cutlass.const_expr(own.weighted is not None):
        _shift(own.weighted, row, by)


@cute.jit
def _shift(bins: cute.Tensor, row: cutlass.Constexpr, by):
    for j in cutlass.range_constexpr(BINS - 1, -1, -1):
        value = bins[j, row] if by == 0 else cutlass.Int64(0)
        for step in cutlass.range_constexpr(1, j + 1):
            value = bins[j - step, row] if by == step else value
        bins[j, row] = value


@dsl_user_op
def _power_of_two(exponent, *, loc=None, ip=None) -> cutlass.Float32:
    """2^exponent, from -126 to 127."""
    bits = (exponent + _ONE) << _EXPONENT
    return cutlass.Float32(llvm.bitcast(T.f32(), bits.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def _whole(value: cutlass.Float32, *, loc=None, ip=None) -> cutlass.Int64:
    """The nearest integer, ties to even."""
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
