"""Ring of rows in flight in shared memory, by ``cp.async``: each thread reads what it copied.

A thread copies its vectors of a row, and the row's statistics, into its own slots: rows in flight
take no registers, and no thread waits for another one.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.memory import SmemAllocator

from ...dsl import copy
from ...dsl.ring import Slots
from ..config import UNIT
from . import rows
from .rows import ACCESS, WARP, Group, Row


@dataclass(frozen=True)
class CpAsyncRing:
    """Ring of one kernel.

    group:   threads of a row.
    dtype:   element type of the matrices.
    tensors: number of matrices of which a row is read.
    scalars: number of fp32 vectors of which a row's element is read.
    stages:  capacity in rows; all but one are in flight while one is used.
    """

    group: Group
    dtype: type[cutlass.Numeric]
    tensors: int
    scalars: int
    stages: int

    @property
    def accesses(self) -> int:
        """Number of accesses to a vector of 8 elements."""
        return UNIT * self.dtype.width // (8 * ACCESS)

    @property
    def slots(self) -> Slots:
        """Layout of a warp's stage."""
        row_pieces = self.tensors * self.group.vectors * self.accesses
        return Slots((ACCESS,) * row_pieces + (4,) * self.scalars)

    @cute.jit
    def allocate(
        self, allocator: SmemAllocator, threads: cutlass.Constexpr[int], warp: cutlass.Int32
    ) -> cute.Tensor:
        """sRing [stage, byte] of a warp, of a CTA of ``threads``."""
        shape = (self.stages, self.slots.size, threads // WARP)
        layout = cute.make_ordered_layout(shape, order=(1, 0, 2))
        sRings = allocator.allocate_tensor(cutlass.Uint8, layout, byte_alignment=ACCESS)
        return sRings[None, None, warp]

    @cute.jit
    def fetch(
        self,
        sRing: cute.Tensor,
        stage: cutlass.Int32,
        tensors: list[cute.Tensor],
        scalars: list[cute.Tensor],
        row: Row,
    ):
        """Copy a row into a stage; zeros for an invalid row, and after its last column."""
        valid, lane = row.valid, row.lane
        target = sRing[stage, None].iterator
        # An address after the columns may be outside the tensor: it is not read.
        index = row.index if valid else cutlass.Int32(0)
        columns, piece = tensors[0].shape[1], 0
        for tensor in tensors:
            start = self.group.address(tensor, index, lane)
            for v in cutlass.range_constexpr(self.group.vectors):
                inside = valid & (self.group.column(v, lane) < columns)
                vector = start + self.group.distance(v, self.dtype)
                for source in rows.accesses(self.dtype, vector):
                    self.slots.fetch(target, piece, source, inside)
                    piece += 1
        for tensor in scalars:
            source = copy.aligned(tensor, cutlass.Int64(index), 1)
            self.slots.fetch(target, piece, source, valid)
            piece += 1
        cute.arch.cp_async_commit_group()

    @cute.jit
    def wait(self):
        """Wait until the oldest row in flight has arrived; call it after ``fetch``."""
        cute.arch.cp_async_wait_group(self.stages - 1)

    @cute.jit
    def read(
        self, sRing: cute.Tensor, stage: cutlass.Int32, tensor: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """Load a thread's elements of a row that has arrived, unconverted."""
        raw = cute.make_rmem_tensor(cute.make_layout(self.group.size), self.dtype)
        source = sRing[stage, None].iterator
        step = UNIT // self.accesses
        for i in cutlass.range_constexpr(self.group.vectors * self.accesses):
            target = rows.piece(raw, i * step, step)
            self.slots.read(source, tensor * self.group.vectors * self.accesses + i, target)
        return raw

    @cute.jit
    def read_scalar(
        self, sRing: cute.Tensor, stage: cutlass.Int32, number: cutlass.Constexpr[int]
    ) -> cutlass.Float32:
        """Load a scalar of a row that has arrived."""
        value = cute.make_rmem_tensor(cute.make_layout(1), cutlass.Float32)
        piece = self.tensors * self.group.vectors * self.accesses + number
        self.slots.read(sRing[stage, None].iterator, piece, value)
        return value[0]

    @cute.jit
    def advanced(self, stage: cutlass.Int32, distance: cutlass.Constexpr[int]) -> cutlass.Int32:
        """Index of the stage ``distance`` stages on."""
        stage = stage + distance
        return stage - self.stages if stage >= self.stages else stage
