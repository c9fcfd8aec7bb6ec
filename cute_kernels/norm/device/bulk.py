"""Ring of rows in flight in shared memory, by bulk copies of TMA: one copy a row.

One thread of a row issues the copies of the whole row, its statistics included, and an mbarrier
counts their arrival; with `CpAsyncRing` each thread copies its own elements.  A stage may be filled
again once all threads of the row have read it.  They have after the row's sums, which contain a
barrier; rows of one warp have no barrier there, and are refused.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.memory import SmemAllocator

from ..config import UNIT
from . import rows
from .rows import WARP, Group, Row

#: Arrivals at a stage's mbarrier: one for the bytes of the row, one for the copies of its scalars.
_ARRIVALS = 2


@dataclass(frozen=True)
class TmaBuffers:
    """Ring of one group of threads in shared memory.

    sRows:    [element, tensor, stage].
    sScalars: fp32 [scalar, stage].
    full:     mbarriers [stage].
    """

    sRows: cute.Tensor
    sScalars: cute.Tensor
    full: cute.Pointer


@dataclass(frozen=True)
class TmaRing:
    """Rings of one kernel, one for each group of threads of a CTA.

    group:   threads of a row.
    dtype:   element type of the matrices.
    tensors: number of matrices of which a row is read.
    scalars: number of fp32 vectors of which a row's element is read.
    stages:  capacity in rows.
    groups:  groups of threads of a CTA.
    """

    group: Group
    dtype: type[cutlass.Numeric]
    tensors: int
    scalars: int
    stages: int
    groups: int

    def __post_init__(self):
        if self.group.threads <= WARP:
            raise ValueError(
                f"threads: expected more than {WARP} a row (a barrier), got {self.group.threads}"
            )

    @cute.jit
    def allocate(
        self,
        allocator: SmemAllocator,
        group: cutlass.Int32,
        lane: cutlass.Int32,
        columns: cutlass.Int32,
    ) -> TmaBuffers:
        """Allocate the rings and return that of ``group``; by all threads of a CTA.

        Elements after a row's columns are set to 0 here; no copy overwrites them.
        """
        size = self.group.threads * self.group.size
        shape = (size, self.tensors, self.stages, self.groups)
        layout = cute.make_ordered_layout(shape, order=(0, 1, 2, 3))
        sRows = allocator.allocate_tensor(self.dtype, layout, byte_alignment=128)
        layout = cute.make_ordered_layout((self.scalars, self.stages, self.groups), order=(0, 1, 2))
        sScalars = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        full = allocator.allocate_array(cutlass.Int64, self.stages * self.groups)
        tidx, _, _ = cute.arch.thread_idx()
        if tidx == 0:
            for i in cutlass.range_constexpr(self.stages * self.groups):
                cute.arch.mbarrier_init(full + i, _ARRIVALS)
        cute.arch.mbarrier_init_fence()
        sGroupRows, sGroupScalars = sRows[None, None, None, group], sScalars[None, None, group]
        self.clear(sGroupRows, lane, columns)
        cute.arch.sync_threads()
        return TmaBuffers(sGroupRows, sGroupScalars, full + group * self.stages)

    @cute.jit
    def clear(self, sRows: cute.Tensor, lane: cutlass.Int32, columns: cutlass.Int32):
        """sRows[c] = 0 for the columns c >= ``columns`` of a thread's vectors, in every stage."""
        zero = cute.make_rmem_tensor(cute.make_layout(UNIT), self.dtype)
        zero.fill(0.0)
        for v in cutlass.range_constexpr(self.group.vectors):
            if self.group.column(v, lane) >= columns:
                for stage in cutlass.range(self.stages, unroll=1):
                    for i in cutlass.range_constexpr(self.tensors):
                        self.vector(sRows[None, i, stage], v, lane).store(zero.load())

    @cute.jit
    def fetch(
        self,
        ring: TmaBuffers,
        stage: cutlass.Int32,
        tensors: list[cute.Tensor],
        scalars: list[cute.Tensor],
        row: Row,
    ):
        """Copy a row into a stage, from a thread of its first warp; not an invalid row."""
        sRows, sScalars, full = ring.sRows, ring.sScalars, ring.full
        if row.valid & (cute.arch.make_warp_uniform(row.lane // WARP) == 0):
            with cute.arch.elect_one():
                size = tensors[0].shape[1] * (self.dtype.width // 8)
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size * self.tensors)
                for i, tensor in enumerate(tensors):
                    start = self.group.address(tensor, row.index, 0)
                    _copy_row(sRows[None, i, stage].iterator, start, size, full + stage)
                for i, tensor in enumerate(scalars):
                    start = tensor.iterator.toint() + cutlass.Int64(row.index) * 4
                    _copy_scalar(sScalars.iterator + (stage * self.scalars + i), start)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)

    @cute.jit
    def read(
        self, ring: TmaBuffers, stage: cutlass.Int32, phase: cutlass.Int32, row: Row
    ) -> tuple[list[cute.Tensor], list[cutlass.Float32]]:
        """Wait for a row; return a thread's elements of each tensor, unconverted, and the scalars.

        All are 0 for an invalid row.
        """
        sRows, sScalars, full = ring.sRows, ring.sScalars, ring.full
        layout = cute.make_layout(self.group.size)
        raws = [cute.make_rmem_tensor(layout, self.dtype) for _ in range(self.tensors)]
        rScalars = cute.make_rmem_tensor(cute.make_layout(self.scalars), cutlass.Float32)
        if row.valid:
            cute.arch.mbarrier_wait(full + stage, phase)
            for i, raw in enumerate(raws):
                for v in cutlass.range_constexpr(self.group.vectors):
                    sVector = self.vector(sRows[None, i, stage], v, row.lane)
                    rows.piece(raw, v * UNIT, UNIT).store(sVector.load())
            for i in cutlass.range_constexpr(self.scalars):
                rScalars[i] = sScalars[i, stage]
        else:
            for raw in raws:
                raw.fill(0.0)
            rScalars.fill(0.0)
        return raws, [rScalars[i] for i in range(self.scalars)]

    @cute.jit
    def vector(
        self, sRow: cute.Tensor, vector: cutlass.Constexpr[int], lane: cutlass.Int32
    ) -> cute.Tensor:
        """View of a thread's vector of a row in shared memory."""
        pointer = sRow.iterator + self.group.column(vector, lane)
        return cute.make_tensor(pointer.align(rows.ACCESS), cute.make_layout(UNIT))


@cute.jit
def _copy_row(
    target: cute.Pointer, source: cutlass.Int64, size: cutlass.Int32, barrier: cute.Pointer
):
    """Copy ``size`` bytes, a multiple of 16, from global memory; ``barrier`` counts them."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target.toint(), source, size, barrier.toint()],
    )


@cute.jit
def _copy_scalar(target: cute.Pointer, source: cutlass.Int64):
    """Copy 4 bytes from an address in global memory, a multiple of 4."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[target.toint(), source]
    )
