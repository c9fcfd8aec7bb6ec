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

from ...dsl import reduce
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
    def address(self, tensor: cute.Tensor, row, lane):
        """Of a thread's first unit of a row of a [M, D]; the others are `distance` away."""
        # In 64 bits before the product: a tensor may have more than 2^31 elements.
        offset = cutlass.Int64(row) * tensor.stride[0] + lane * UNIT
        return tensor.iterator.toint() + offset * (tensor.element_type.width // 8)

    def distance(self, unit: int, dtype: type) -> int:
        """Bytes from a thread's first unit to another one."""
        return unit * self.threads * UNIT * dtype.width // 8

    @cute.jit
    def load(self, tensor: cute.Tensor, row, lane, there) -> cute.Tensor:
        """A thread's elements of a row of a [M, D]; raw.

        ``there``: whether there is such a row; zeros otherwise.
        """
        return self.loaded(tensor, self.address(tensor, row, lane), lane, there)

    @cute.jit
    def load_vector(self, tensor: cute.Tensor, lane) -> cute.Tensor:
        """The same of a [D]."""
        size = UNIT * tensor.element_type.width // 8
        start = tensor.iterator.toint() + cutlass.Int64(lane * size)
        return self.loaded(tensor, start, lane, True)

    @cute.jit
    def loaded(self, tensor: cute.Tensor, start, lane, there) -> cute.Tensor:
        """A thread's elements whose first unit is at ``start``."""
        dtype = tensor.element_type
        raw = cute.make_rmem_tensor(cute.make_layout(self.size), dtype)
        raw.fill(0.0)
        columns = tensor.shape[cute.rank(tensor) - 1]
        for v in cutlass.range_constexpr(self.units):
            if there & (self.column(v, lane) < columns):
                unit = start + self.distance(v, dtype)
                for i, source in enumerate(accesses(dtype, unit)):
                    count = cute.size(source)
                    piece(raw, v * UNIT + i * count, count).store(source.load())
        return raw

    @cute.jit
    def store(self, raw: cute.Tensor, tensor: cute.Tensor, row, lane, there):
        """A thread's elements of a row, in the row's dtype."""
        dtype, start = tensor.element_type, self.address(tensor, row, lane)
        for v in cutlass.range_constexpr(self.units):
            if there & (self.column(v, lane) < tensor.shape[1]):
                for i, target in enumerate(accesses(dtype, start + self.distance(v, dtype))):
                    count = cute.size(target)
                    target.store(piece(raw, v * UNIT + i * count, count).load())

    @cute.jit
    def without_tail(self, values: cute.Tensor, lane, width):
        """0 behind a row's last element of ``width``."""
        for v in cutlass.range_constexpr(self.units):
            c = self.column(v, lane)
            if c + UNIT > width:
                for e in cutlass.range_constexpr(UNIT):
                    i = v * UNIT + e
                    values[i] = values[i] if c + e < width else cutlass.Float32(0.0)

    @cute.jit
    def sum(self, value, sPartials: cute.Tensor, slot, group, lane):
        """Σ over a row's threads: a butterfly in a warp, then warps ascending.

        ``slot``: of [slots, groups, warps], another one than the sum before had.  All threads of
        the row come here, and meet at a barrier of their own.
        """
        return self.sums([value], sPartials, slot, group, lane)[0]

    @cute.jit
    def sums(self, values: list, sPartials: cute.Tensor, slot, group, lane) -> list:
        """`sum` of one number or two in one trip, in as many slots from ``slot`` on."""
        if cutlass.const_expr(self.threads <= WARP):
            return [reduce.over_threads(value, self.threads) for value in values]
        total = over_warp(values)
        if lane % WARP < len(values):
            sPartials[slot + lane % WARP, group, lane // WARP] = total
        cute.arch.barrier(barrier_id=group + 1, number_of_threads=self.threads)
        return [self.of_warps(sPartials, slot + i, group) for i in range(len(values))]

    @cute.jit
    def of_warps(self, sPartials: cute.Tensor, slot, group):
        """Σ over a row's warps, ascending."""
        total = sPartials[slot, group, 0]
        for w in cutlass.range_constexpr(1, self.warps):
            total = total + sPartials[slot, group, w]
        return total


@cute.jit
def over_warp(values: list):
    """Σ over a warp of one number, or of two in the shuffles of one: even lanes have the first.

    A butterfly, nearest first, as `reduce.over_threads`.
    """
    if cutlass.const_expr(len(values) == 1):
        return reduce.over_threads(values[0], WARP)
    # Each of two neighbours keeps the number that it will have the sum of.
    even = cute.arch.lane_idx() % 2 == 0
    total = values[0] if even else values[1]
    other = values[1] if even else values[0]
    total += cute.arch.shuffle_sync_bfly(other, offset=1)
    for step in (2, 4, 8, 16):
        total += cute.arch.shuffle_sync_bfly(total, offset=step)
    return total


def accesses(dtype: type, unit) -> list[cute.Tensor]:
    """A unit at an address in global memory, by the widest accesses."""
    count = min(UNIT, ACCESS * 8 // dtype.width)
    size = count * dtype.width // 8
    tensors = []
    for i in range(UNIT // count):
        pointer = cute.make_ptr(dtype, unit + i * size, cute.AddressSpace.gmem, assumed_align=size)
        tensors.append(cute.make_tensor(pointer, cute.make_layout(count)))
    return tensors


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
