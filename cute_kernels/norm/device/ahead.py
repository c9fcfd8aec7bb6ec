"""Rows under way: a ring in shared memory that every thread fills and reads for itself.

A thread's units of a row, and the row's statistics, come into its own slots by ``cp.async``: what
is under way takes no registers, and no thread waits for another one.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...dsl import copy
from ...dsl.ring import Slots
from ..config import UNIT
from . import rows
from .rows import ACCESS, WARP, Group


@dataclass(frozen=True)
class Ahead:
    """The ring of one kernel.

    tensors: that a row is read of, of ``dtype``.  scalars: fp32 numbers of a row.  stages: rows
    that there is room for, of which all but one are under way while one is used.
    """

    group: Group
    dtype: type
    tensors: int
    scalars: int
    stages: int

    @property
    def accesses(self) -> int:
        """Of a unit."""
        return UNIT * self.dtype.width // (8 * ACCESS)

    @property
    def slots(self) -> Slots:
        """Of a thread and a stage."""
        of_rows = self.tensors * self.group.units * self.accesses
        return Slots((ACCESS,) * of_rows + (4,) * self.scalars)

    @cute.jit
    def allocate(self, allocator, threads: cutlass.Constexpr, warp) -> cute.Tensor:
        """A warp's stages, of a CTA of ``threads``."""
        shape = (self.stages, self.slots.size, threads // WARP)
        layout = cute.make_ordered_layout(shape, order=(1, 0, 2))
        rings = allocator.allocate_tensor(cutlass.Uint8, layout, byte_alignment=ACCESS)
        return rings[None, None, warp]

    @cute.jit
    def fetch(self, ring: cute.Tensor, stage, read: list, scalars: list, at: tuple):
        """A row into a stage; zeros where there is none, and behind its columns.

        at: (the row, whether it is there, the thread's number in the row).
        """
        row, there, lane = at
        target = ring[stage, None].iterator
        # An address behind the columns may be outside the tensor: nothing is read from there.
        row = row if there else cutlass.Int32(0)
        columns, piece = read[0].shape[1], 0
        for tensor in read:
            start = self.group.address(tensor, row, lane)
            for v in cutlass.range_constexpr(self.group.units):
                inside = there & (self.group.column(v, lane) < columns)
                unit = start + self.group.distance(v, self.dtype)
                for source in rows.accesses(self.dtype, unit):
                    self.slots.fetch(target, piece, source, inside)
                    piece += 1
        for tensor in scalars:
            source = copy.aligned(tensor, cutlass.Int64(row), 1)
            self.slots.fetch(target, piece, source, there)
            piece += 1
        cute.arch.cp_async_commit_group()

    @cute.jit
    def wait(self):
        """Until the oldest row under way has come, the newest having just been asked for."""
        cute.arch.cp_async_wait_group(self.stages - 1)

    @cute.jit
    def taken(self, ring: cute.Tensor, stage, tensor: cutlass.Constexpr) -> cute.Tensor:
        """A thread's elements of a row that has come; raw."""
        raw = cute.make_rmem_tensor(cute.make_layout(self.group.size), self.dtype)
        source = ring[stage, None].iterator
        step = UNIT // self.accesses
        for i in cutlass.range_constexpr(self.group.units * self.accesses):
            part = rows.piece(raw, i * step, step)
            self.slots.read(source, tensor * self.group.units * self.accesses + i, part)
        return raw

    @cute.jit
    def scalar(self, ring: cute.Tensor, stage, number: cutlass.Constexpr):
        """One of a row's numbers, likewise."""
        value = cute.make_rmem_tensor(cute.make_layout(1), cutlass.Float32)
        piece = self.tensors * self.group.units * self.accesses + number
        self.slots.read(ring[stage, None].iterator, piece, value)
        return value[0]

    @cute.jit
    def behind(self, stage, distance: cutlass.Constexpr):
        """The stage so many behind another."""
        stage = stage + distance
        return stage - self.stages if stage >= self.stages else stage
