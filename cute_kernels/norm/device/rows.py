"""Rows of up to 65536 elements, spread over the threads of a group: loads, sums, stores.

Unit v of thread t holds the 8 neighbours from element 8 (v threads + t) on, whatever the dtype, so
that a row's sums have one tree.  Rows have whole units, at multiples of 16 bytes: where D is no
multiple of 8, zeros follow its elements in memory.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ...dsl import copy, reduce
from ..config import UNIT

WARP = 32
#: Bytes of the widest access.
ACCESS = 16


@dataclass(frozen=True)
class Group:
    """The threads of one row: ``threads`` of a CTA's, with ``units`` each."""

    threads: int
    units: int

    @property
    def size(self) -> int:
        """Elements of a thread."""
        return self.units * UNIT

    @property
    def warps(self) -> int:
        """Warps of a row, if it has more than one."""
        return max(1, self.threads // WARP)

    @cute.jit
    def column(self, unit: cutlass.Constexpr, lane):
        """The first element of a unit."""
        return (unit * self.threads + lane) * UNIT

    @cute.jit
    def load(self, tensor: cute.Tensor, row, lane, there) -> cute.Tensor:
        """A thread's elements of a row of a [M, D]; raw.

        ``there``: whether there is such a row; zeros otherwise.
        """
        raw = cute.make_rmem_tensor(cute.make_layout(self.size), tensor.element_type)
        raw.fill(0.0)
        base = cutlass.Int64(row) * tensor.stride[0]
        for v in cutlass.range_constexpr(self.units):
            c = self.column(v, lane)
            if there & (c < tensor.shape[1]):
                loaded(tensor, base + c, raw, v * UNIT)
        return raw

    @cute.jit
    def load_vector(self, tensor: cute.Tensor, lane) -> cute.Tensor:
        """The same of a [D]."""
        raw = cute.make_rmem_tensor(cute.make_layout(self.size), tensor.element_type)
        raw.fill(0.0)
        for v in cutlass.range_constexpr(self.units):
            c = self.column(v, lane)
            if c < tensor.shape[0]:
                loaded(tensor, cutlass.Int64(c), raw, v * UNIT)
        return raw

    @cute.jit
    def store(self, raw: cute.Tensor, tensor: cute.Tensor, row, lane, there):
        """A thread's elements of a row, in the row's dtype."""
        base = cutlass.Int64(row) * tensor.stride[0]
        step = min(UNIT, ACCESS * 8 // tensor.element_type.width)
        for v in cutlass.range_constexpr(self.units):
            c = self.column(v, lane)
            if there & (c < tensor.shape[1]):
                for a in cutlass.range_constexpr(UNIT // step):
                    target = copy.aligned(tensor, base + c + a * step, step)
                    target.store(piece(raw, v * UNIT + a * step, step).load())

    @cute.jit
    def without_tail(self, values: cute.Tensor, lane, width):
        """0 behind a row's last element of ``width``."""
        for v in cutlass.range_constexpr(self.units):
            c = self.column(v, lane)
            if c + UNIT > width:
                for e in cutlass.range_constexpr(UNIT):
                    if c + e >= width:
                        values[v * UNIT + e] = cutlass.Float32(0.0)

    @cute.jit
    def sum(self, value, sPartials: cute.Tensor, slot, group, lane):
        """Σ over a row's threads: a butterfly in a warp, then warps ascending.

        ``slot``: of [slots, groups, warps], another one than the sum before had.  All threads of
        the row come here, and meet at a barrier of their own.
        """
        return self.sums([value], [sPartials[slot, None, None]], group, lane)[0]

    @cute.jit
    def sums(self, values: list, sSlots: list, group, lane) -> list:
        """`sum` of several numbers in one trip, each in a slot [groups, warps] of its own."""
        totals = [reduce.over_threads(value, min(self.threads, WARP)) for value in values]
        if cutlass.const_expr(self.threads > WARP):
            if lane % WARP == 0:
                for sSlot, value in zip(sSlots, totals, strict=True):
                    sSlot[group, lane // WARP] = value
            cute.arch.barrier(barrier_id=group + 1, number_of_threads=self.threads)
            totals = [self.of_warps(sSlot, group) for sSlot in sSlots]
        return totals

    @cute.jit
    def of_warps(self, sSlot: cute.Tensor, group):
        """Σ over a row's warps, ascending."""
        total = sSlot[group, 0]
        for w in cutlass.range_constexpr(1, self.warps):
            total = total + sSlot[group, w]
        return total


@cute.jit
def loaded(tensor: cute.Tensor, offset, raw: cute.Tensor, first: cutlass.Constexpr):
    """A unit from an aligned place, by the widest accesses."""
    step = min(UNIT, ACCESS * 8 // tensor.element_type.width)
    for a in cutlass.range_constexpr(UNIT // step):
        source = copy.aligned(tensor, offset + a * step, step)
        piece(raw, first + a * step, step).store(source.load())


@cute.jit
def piece(raw: cute.Tensor, first: cutlass.Constexpr, size: cutlass.Constexpr) -> cute.Tensor:
    """Some neighbours in registers."""
    return cute.make_tensor(raw.iterator + first, cute.make_layout(size))


@cute.jit
def widened(raw: cute.Tensor) -> cute.Tensor:
    """In fp32; a copy."""
    values = cute.make_rmem_tensor(cute.make_layout(cute.size(raw)), cutlass.Float32)
    if cutlass.const_expr(raw.element_type is cutlass.BFloat16):
        # One instruction each: the compiler takes two for the upper half of a pair.
        pairs, bits = (cute.recast_tensor(t, cutlass.Uint32) for t in (raw, values))
        for i in cutlass.range_constexpr(cute.size(pairs)):
            bits[2 * i] = pairs[i] << 16
            bits[2 * i + 1] = pairs[i] & cutlass.Uint32(0xFFFF0000)
    else:
        values.store(raw.load().to(cutlass.Float32))
    return values


@cute.jit
def narrowed(values: cute.Tensor, dtype: cutlass.Constexpr) -> cute.Tensor:
    """fp32, rounded to ``dtype``."""
    if cutlass.const_expr(dtype is cutlass.Float32):
        return values
    raw = cute.make_rmem_tensor(cute.make_layout(cute.size(values)), dtype)
    raw.store(values.load().to(dtype))
    return raw


@cute.jit
def unrelated(raw: cute.Tensor) -> cute.Tensor:
    """The same 16 bit elements, of which the compiler does not know that they are the same.

    What is widened before a barrier and after it is thus widened twice, and between the two takes
    half the registers.
    """
    copied = cute.make_rmem_tensor(cute.make_layout(cute.size(raw)), raw.element_type)
    pairs, source = (cute.recast_tensor(t, cutlass.Int32) for t in (copied, raw))
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = _opaque(source[i])
    return copied


@dsl_user_op
def _opaque(bits: cutlass.Int32, *, loc=None, ip=None) -> cutlass.Int32:
    same = llvm.inline_asm(
        T.i32(),
        [cutlass.Int32(bits).ir_value(loc=loc, ip=ip)],
        "mov.b32 $0, $1;",
        "=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return cutlass.Int32(same)
