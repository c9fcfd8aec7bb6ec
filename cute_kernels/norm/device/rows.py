"""Rows of up to 65536 elements, spread over the threads of a group: loads, sums, stores.

Vector v of thread t has the 8 neighbours from element 8 (v threads + t) on, whatever the dtype, so
that a row's sums have one reduction tree.  Rows have whole vectors, at multiples of 16 bytes: where
D is no multiple of 8, zeros follow its elements in memory.  Addresses are computed by hand: of a
row only the product with its stride needs 64 bits, and each vector is one aligned access.
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
class Row:
    """A row, for one of its threads.

    index: row of the matrix.
    valid: whether the matrix has such a row.
    lane:  number of the thread among the row's threads.
    """

    index: cutlass.Int32
    valid: cutlass.Boolean
    lane: cutlass.Int32


@dataclass(frozen=True)
class Exchange:
    """Shared memory through which the warps of a row exchange partial sums, for one thread.

    sPartials: fp32 [slots, groups, warps].
    group:     group of the row's threads in the CTA; it has a named barrier.
    lane:      number of the thread in the group.
    """

    sPartials: cute.Tensor
    group: cutlass.Int32
    lane: cutlass.Int32


@dataclass(frozen=True)
class Group:
    """Group of ``threads`` threads of a CTA that have one row, ``vectors`` of 8 elements each."""

    threads: int
    vectors: int

    @property
    def size(self) -> int:
        """Elements of a thread."""
        return self.vectors * UNIT

    @property
    def warps(self) -> int:
        """Warps of a row; 1 where rows share a warp."""
        return max(1, self.threads // WARP)

    @cute.jit
    def column(self, vector: cutlass.Constexpr[int], lane: cutlass.Int32) -> cutlass.Int32:
        """First column of a vector of thread ``lane``."""
        return (vector * self.threads + lane) * UNIT

    @cute.jit
    def address(
        self, tensor: cute.Tensor, row: cutlass.Int32, lane: cutlass.Int32
    ) -> cutlass.Int64:
        """Address of a thread's first vector of a row of a [M, D]; see ``distance``."""
        # In 64 bits before the product: a tensor may have more than 2^31 elements.
        offset = cutlass.Int64(row) * tensor.stride[0] + lane * UNIT
        return tensor.iterator.toint() + offset * (tensor.element_type.width // 8)

    def distance(self, vector: int, dtype: type[cutlass.Numeric]) -> int:
        """Bytes from a thread's first vector to another one."""
        return vector * self.threads * UNIT * dtype.width // 8

    @cute.jit
    def load(self, tensor: cute.Tensor, row: Row) -> cute.Tensor:
        """Load a thread's elements of a row of a [M, D], unconverted; zeros of an invalid row."""
        return self.load_from(
            tensor, self.address(tensor, row.index, row.lane), row.lane, row.valid
        )

    @cute.jit
    def load_vector(self, tensor: cute.Tensor, lane: cutlass.Int32) -> cute.Tensor:
        """Load a thread's elements of a [D], unconverted."""
        size = UNIT * tensor.element_type.width // 8
        start = tensor.iterator.toint() + cutlass.Int64(lane * size)
        return self.load_from(tensor, start, lane, True)

    @cute.jit
    def load_from(
        self,
        tensor: cute.Tensor,
        start: cutlass.Int64,
        lane: cutlass.Int32,
        valid: cutlass.Boolean,
    ) -> cute.Tensor:
        """Load a thread's elements whose first vector is at address ``start``."""
        dtype = tensor.element_type
        raw = cute.make_rmem_tensor(cute.make_layout(self.size), dtype)
        raw.fill(0.0)
        columns = tensor.shape[cute.rank(tensor) - 1]
        for v in cutlass.range_constexpr(self.vectors):
            if valid & (self.column(v, lane) < columns):
                vector = start + self.distance(v, dtype)
                for i, source in enumerate(accesses(dtype, vector)):
                    count = cute.size(source)
                    piece(raw, v * UNIT + i * count, count).store(source.load())
        return raw

    @cute.jit
    def store(self, raw: cute.Tensor, tensor: cute.Tensor, row: Row):
        """Store a thread's elements of a row of a [M, D], in the matrix's dtype."""
        dtype, start = tensor.element_type, self.address(tensor, row.index, row.lane)
        for v in cutlass.range_constexpr(self.vectors):
            if row.valid & (self.column(v, row.lane) < tensor.shape[1]):
                for i, target in enumerate(accesses(dtype, start + self.distance(v, dtype))):
                    count = cute.size(target)
                    target.store(piece(raw, v * UNIT + i * count, count).load())

    @cute.jit
    def without_tail(self, values: cute.Tensor, lane: cutlass.Int32, width: cutlass.Int32):
        """values[c] = 0 for the columns c >= ``width``."""
        for v in cutlass.range_constexpr(self.vectors):
            c = self.column(v, lane)
            if c + UNIT > width:
                for e in cutlass.range_constexpr(UNIT):
                    i = v * UNIT + e
                    values[i] = values[i] if c + e < width else cutlass.Float32(0.0)

    @cute.jit
    def sum(
        self, value: cutlass.Float32, exchange: Exchange, slot: cutlass.Int32
    ) -> cutlass.Float32:
        """Σ over a row's threads: a butterfly in a warp, then warps ascending.

        ``slot``: of the exchange, not that of the sum before.  All threads of the row call this,
        which has a barrier for them.
        """
        return self.sums([value], exchange, slot)[0]

    @cute.jit
    def sums(
        self, values: list[cutlass.Float32], exchange: Exchange, slot: cutlass.Int32
    ) -> list[cutlass.Float32]:
        """`sum` of one value or of two at once, in as many slots from ``slot`` on."""
        sPartials, group, lane = exchange.sPartials, exchange.group, exchange.lane
        if cutlass.const_expr(self.threads <= WARP):
            return [reduce.over_threads(value, self.threads) for value in values]
        total = over_warp(values)
        if lane % WARP < len(values):
            sPartials[slot + lane % WARP, group, lane // WARP] = total
        cute.arch.barrier(barrier_id=group + 1, number_of_threads=self.threads)
        return [self.over_warps(sPartials, slot + i, group) for i in range(len(values))]

    @cute.jit
    def over_warps(
        self, sPartials: cute.Tensor, slot: cutlass.Int32, group: cutlass.Int32
    ) -> cutlass.Float32:
        """sPartials[slot, group, 0] + sPartials[slot, group, 1] + ..., warps ascending."""
        total = sPartials[slot, group, 0]
        for w in cutlass.range_constexpr(1, self.warps):
            total = total + sPartials[slot, group, w]
        return total


@cute.jit
def over_warp(values: list[cutlass.Float32]) -> cutlass.Float32:
    """Σ over a warp of one value, or of two with the shuffles of one: even lanes get the first.

    A butterfly, nearest first, as in `reduce.over_threads`.
    """
    if cutlass.const_expr(len(values) == 1):
        return reduce.over_threads(values[0], WARP)
    # Each of two neighbouring lanes keeps the value whose sum it gets.
    even = cute.arch.lane_idx() % 2 == 0
    total = values[0] if even else values[1]
    other = values[1] if even else values[0]
    total += cute.arch.shuffle_sync_bfly(other, offset=1)
    for step in (2, 4, 8, 16):
        total += cute.arch.shuffle_sync_bfly(total, offset=step)
    return total


def accesses(dtype: type[cutlass.Numeric], vector: cutlass.Int64) -> list[cute.Tensor]:
    """Views of the 8 elements at an address in global memory, by the widest accesses."""
    count = min(UNIT, ACCESS * 8 // dtype.width)
    size = count * dtype.width // 8
    tensors = []
    for i in range(UNIT // count):
        pointer = cute.make_ptr(
            dtype, vector + i * size, cute.AddressSpace.gmem, assumed_align=size
        )
        tensors.append(cute.make_tensor(pointer, cute.make_layout(count)))
    return tensors


@cute.jit
def piece(
    raw: cute.Tensor, first: cutlass.Constexpr[int], size: cutlass.Constexpr[int]
) -> cute.Tensor:
    """View of ``size`` neighbouring registers from ``first`` on."""
    return cute.make_tensor(raw.iterator + first, cute.make_layout(size))


@cute.jit
def widened(raw: cute.Tensor) -> cute.Tensor:
    """Return a copy in fp32."""
    values = cute.make_rmem_tensor(cute.make_layout(cute.size(raw)), cutlass.Float32)
    if cutlass.const_expr(raw.element_type is cutlass.BFloat16):
        # One instruction an element: the compiler takes two for the upper half of a pair.
        pairs, bits = (cute.recast_tensor(t, cutlass.Uint32) for t in (raw, values))
        for i in cutlass.range_constexpr(cute.size(pairs)):
            bits[2 * i] = pairs[i] << 16
            bits[2 * i + 1] = pairs[i] & cutlass.Uint32(0xFFFF0000)
    else:
        values.store(raw.load().to(cutlass.Float32))
    return values


@cute.jit
def narrowed(values: cute.Tensor, dtype: cutlass.Constexpr[type[cutlass.Numeric]]) -> cute.Tensor:
    """Round fp32 values to ``dtype``."""
    if cutlass.const_expr(dtype is cutlass.Float32):
        return values
    raw = cute.make_rmem_tensor(cute.make_layout(cute.size(values)), dtype)
    raw.store(values.load().to(dtype))
    return raw


@cute.jit
def opaque_copy(raw: cute.Tensor) -> cute.Tensor:
    """Copy 16-bit registers: keeps the compiler from holding their fp32 values across a barrier.

    Values that are widened before and after the barrier are thus widened twice, and take half the
    registers in between.
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
