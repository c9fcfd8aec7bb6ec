"""Work table of grouped products: the units of all experts, and the expert of a unit."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ..config import MAX_EXPERTS
from .experts import clamped

WARP = 32
#: Threads that count, each SHARE neighbouring experts.
COUNTERS = 128
SHARE = MAX_EXPERTS // COUNTERS


@dataclass(frozen=True)
class WorkTable:
    """Units of all experts.

    mOffsets: rows of each expert, [E + 1].  sEnds: units of experts 0 to e, [MAX_EXPERTS].
    """

    mOffsets: cute.Tensor
    sEnds: cute.Tensor

    @property
    def experts(self) -> cutlass.Int32:
        """Number of experts."""
        return self.mOffsets.shape[0] - 1

    @property
    def count(self) -> cutlass.Int32:
        """Number of units."""
        return self.sEnds[self.experts - 1]


@cute.jit
def count_units(
    table: WorkTable,
    sWarps: cute.Tensor,
    total: cutlass.Int32,
    columns: cutlass.Int32,
    tile_rows: cutlass.Constexpr[int],
):
    """sEnds[e] = Σ ceil(rows of i / tile_rows) columns over i <= e; by all threads of the CTA.

    The caller synchronises them before it reads the table.
    One load of the offsets and one scan, whatever the number of experts: a walk of hundreds of
    experts would take as long as the weights of the few that a token has.  ``total``: rows of all
    experts.  sWarps: [COUNTERS / WARP].
    """
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % WARP, tidx // WARP
    first = tidx * SHARE
    rOffsets = cute.make_rmem_tensor(SHARE + 1, cutlass.Int32)
    rEnds = cute.make_rmem_tensor(SHARE, cutlass.Int32)
    count, scan = cutlass.Int32(0), cutlass.Int32(0)
    if tidx < COUNTERS:
        # Beyond the last expert offsets repeat: none has rows there.
        for i in cutlass.range_constexpr(SHARE + 1):
            rOffsets[i] = table.mOffsets[cutlass.min(first + i, table.experts)]
        for i in cutlass.range_constexpr(SHARE):
            row0 = clamped(rOffsets[i], 0, total)
            rows = clamped(rOffsets[i + 1], row0, total) - row0
            count += cute.ceil_div(rows, tile_rows) * columns
            rEnds[i] = count
        # scan = Σ count over the lanes up to this one
        scan = count
        for power in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(scan, 1 << power)
            if lane >= 1 << power:
                scan += below
        if lane == WARP - 1:
            sWarps[warp] = scan
    cute.arch.sync_threads()
    if tidx < COUNTERS:
        before = scan - count
        for other in cutlass.range_constexpr(COUNTERS // WARP - 1):
            if other < warp:
                before += sWarps[other]
        for i in cutlass.range_constexpr(SHARE):
            table.sEnds[first + i] = rEnds[i] + before


@cute.jit
def expert_of(table: WorkTable, index: cutlass.Int32) -> tuple[cutlass.Int32, cutlass.Int32]:
    """(expert of unit ``index``, number of that unit within it)."""
    # low <= the first expert with sEnds[e] > index <= high
    low, high = cutlass.Int32(0), table.experts - 1
    while low < high:
        middle = (low + high) // 2
        above = table.sEnds[middle] > index
        low = low if above else middle + 1
        high = middle if above else high
    before = cutlass.Int32(0)
    if low > 0:
        before = table.sEnds[low - 1]
    return low, index - before
