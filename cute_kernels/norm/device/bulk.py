"""Rows under way: a ring in shared memory that the copy engine fills, a row at a time.

One thread of a row asks for all of it, its statistics too, and a barrier in shared memory says when
all has come; the other threads, which with `Ahead` copy their own elements, issue nothing.  Whoever
asks has to know that all threads of the row have taken what the stage had before.  They have behind
the row's sums, where they meet at a barrier: a row of one warp has none, and is refused.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ..config import UNIT
from . import rows
from .rows import WARP, Group

#: What comes to a stage's barrier: the request for the row's bytes, and the copies of its numbers.
_ARRIVALS = 2


@dataclass(frozen=True)
class Bulk:
    """The rings of one kernel, one for each of the ``groups`` rows that a CTA has at once.

    tensors: that a row is read of, of ``dtype``.  scalars: fp32 numbers of a row.  stages: rows
    that there is room for.
    """

    group: Group
    dtype: type
    tensors: int
    scalars: int
    stages: int
    groups: int

    def __post_init__(self):
        if self.group.threads <= WARP:
            raise ValueError(
                f"bulk: {self.group.threads} threads of a row do not meet at a barrier"
            )

    @cute.jit
    def allocate(self, allocator, group, lane, columns) -> tuple:
        """(rows, their numbers, barriers) of a group's ring; by all threads of a CTA.

        What is behind a row's columns is 0, for good.
        """
        size = self.group.threads * self.group.size
        shape = (size, self.tensors, self.stages, self.groups)
        layout = cute.make_ordered_layout(shape, order=(0, 1, 2, 3))
        sRows = allocator.allocate_tensor(self.dtype, layout, byte_alignment=128)
        layout = cute.make_ordered_layout((self.scalars, self.stages, self.groups), order=(0, 1, 2))
        sNumbers = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        full = allocator.allocate_array(cutlass.Int64, self.stages * self.groups)
        tidx, _, _ = cute.arch.thread_idx()
        if tidx == 0:
            for i in cutlass.range_constexpr(self.stages * self.groups):
                cute.arch.mbarrier_init(full + i, _ARRIVALS)
        cute.arch.mbarrier_init_fence()
        ring = sRows[None, None, None, group], sNumbers[None, None, group]
        self.clear(ring[0], lane, columns)
        cute.arch.sync_threads()
        return *ring, full + group * self.stages

    @cute.jit
    def clear(self, sRows: cute.Tensor, lane, columns):
        """Each thread's units behind the columns, in every stage."""
        zero = cute.make_rmem_tensor(cute.make_layout(UNIT), self.dtype)
        zero.fill(0.0)
        for v in cutlass.range_constexpr(self.group.units):
            if self.group.column(v, lane) >= columns:
                for stage in cutlass.range(self.stages, unroll=1):
                    for i in cutlass.range_constexpr(self.tensors):
                        self.unit(sRows[None, i, stage], v, lane).store(zero.load())

    @cute.jit
    def fetch(self, ring: tuple, stage, read: list, scalars: list, at: tuple):
        """A row into a stage, by a thread of its first warp; nothing of one that is not there.

        at: (the row, whether it is there, the thread's number in it).
        """
        sRows, sNumbers, full = ring
        row, there, lane = at
        if there & (cute.arch.make_warp_uniform(lane // WARP) == 0):
            with cute.arch.elect_one():
                size = read[0].shape[1] * (self.dtype.width // 8)
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size * self.tensors)
                for i, tensor in enumerate(read):
                    start = self.group.address(tensor, row, 0)
                    _copy_row(sRows[None, i, stage].iterator, start, size, full + stage)
                for i, tensor in enumerate(scalars):
                    start = tensor.iterator.toint() + cutlass.Int64(row) * 4
                    _copy_number(sNumbers.iterator + (stage * self.scalars + i), start)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)

    @cute.jit
    def taken(self, ring: tuple, stage, phase, there, lane) -> tuple:
        """(a thread's elements, raw, for each tensor; the numbers) of a row, when it has come.

        Zeros of a row that is not there.
        """
        sRows, sNumbers, full = ring
        layout = cute.make_layout(self.group.size)
        raws = [cute.make_rmem_tensor(layout, self.dtype) for _ in range(self.tensors)]
        numbers = cute.make_rmem_tensor(cute.make_layout(self.scalars), cutlass.Float32)
        if there:
            cute.arch.mbarrier_wait(full + stage, phase)
            for i, raw in enumerate(raws):
                for v in cutlass.range_constexpr(self.group.units):
                    unit = self.unit(sRows[None, i, stage], v, lane)
                    rows.piece(raw, v * UNIT, UNIT).store(unit.load())
            for i in cutlass.range_constexpr(self.scalars):
                numbers[i] = sNumbers[i, stage]
        else:
            for raw in raws:
                raw.fill(0.0)
            numbers.fill(0.0)
        return raws, [numbers[i] for i in range(self.scalars)]

    @cute.jit
    def unit(self, sRow: cute.Tensor, unit: cutlass.Constexpr, lane) -> cute.Tensor:
        """A thread's unit of a row in shared memory."""
        pointer = sRow.iterator + self.group.column(unit, lane)
        return cute.make_tensor(pointer.align(rows.ACCESS), cute.make_layout(UNIT))


@cute.jit
def _copy_row(target: cute.Pointer, source, size, barrier: cute.Pointer):
    """So many bytes, a multiple of 16, from an address in global memory; a barrier counts them."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target.toint(), source, size, barrier.toint()],
    )


@cute.jit
def _copy_number(target: cute.Pointer, source):
    """4 bytes from an address in global memory; they need not lie at a multiple of 16."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[target.toint(), source]
    )
