"""Lower bounds of a schedule's time, which hold for every schedule of the model in ``simulate``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from ..order.ranks import BlockGrid, block_grid, integer
from .machines import Machine, resolve

# Blocks of a mask whose bounds are computed at once.
_AT_ONCE = 1 << 18
# Longer than any time, in ns.
_NONE = 2**62


@dataclass(frozen=True)
class Bound:
    """Times in ns that no schedule can beat.

    work_ns      all tickets' times, never waiting, over the slots
    packing_ns   as work_ns, with whole tickets: some slot gets k + 1 of the k * slots + 1 longest
    longest_ns   the longest ticket
    chain_ns     the longest row: its writers one after another
    launch_ns    for ranks that follow the launch: the row that the first ticket visits last
    """

    work_ns: int
    packing_ns: int
    longest_ns: int
    chain_ns: int
    launch_ns: int

    @property
    def any_order_ns(self) -> int:
        """Greatest bound that holds for every schedule."""
        return max(self.work_ns, self.packing_ns, self.longest_ns, self.chain_ns)

    @property
    def lower_ns(self) -> int:
        """Greatest bound for schedules that progress with any residency."""
        return max(self.any_order_ns, self.launch_ns)

    def binding(self) -> str:
        """Name of the bound that ``lower_ns`` is."""
        return next(name for name, time in asdict(self).items() if time == self.lower_ns)


def bound(
    block_mask,
    *,
    heads: int | None = None,
    machine: Machine | str = "h200_d128",
    group: int = 1,
) -> Bound:
    """Compute lower bounds; arguments as for ``select``.

    Example:
        >>> mask = ck.BlockMask.causal(1024, 1024)
        >>> type(ck.schedulers.bound(mask, heads=2)).__name__
        'Bound'
    """
    grid = block_grid(block_mask, heads)
    machine, tiles = resolve(machine).for_blocks(grid.block_size)
    return lower_bound(grid, machine, tiles, integer("group", group))


def lower_bound(grid: BlockGrid, machine: Machine, tiles: int, group: int = 1) -> Bound:
    """Compute the bounds of a mask on a machine whose costs are those of the grid's tiles.

    The chain and the launch are those of the last query head's rows: every writer comes to them
    after its visits for the heads before.
    """
    blocks = grid.host
    step = max(1, _AT_ONCE // max(1, blocks[:1].size))
    parts = [
        _bounds_of(blocks[first : first + step], machine, tiles, group)
        for first in range(0, len(blocks), step)
    ]
    alone = np.concatenate([part[0] for part in parts])
    chain = max(part[1] for part in parts)
    launch = max(part[2] for part in parts)
    each = np.bincount(grid.mask_of, minlength=len(blocks))
    durations = np.sort(np.repeat(alone, each, axis=0).reshape(-1))[::-1]
    return Bound(
        math.ceil(int(durations.sum()) / machine.slots),
        _packing(durations, machine.slots),
        int(durations.max(initial=0)),
        chain,
        launch,
    )


def _bounds_of(
    blocks: np.ndarray, machine: Machine, tiles: int, group: int
) -> tuple[np.ndarray, int, int]:
    """Return (each ticket's time without waits int64 [G, N], longest chain, latest launch)."""
    reduce = machine.reduce_ns
    tile = np.array([0, machine.partial_ns, machine.full_ns])[blocks]
    present = blocks > 0
    writers = np.count_nonzero(present, axis=2)
    fixed = machine.tile_start_ns + machine.tile_end_ns
    of_head = tile.sum(axis=1) * tiles
    busy = of_head * group
    alone = np.where(busy > 0, busy + reduce, 0) + fixed
    link = reduce + machine.handoff_ns
    if group > 1:
        tile += (of_head * (group - 1))[:, None]
    least = np.where(present, tile, _NONE).min(axis=2, initial=_NONE)
    chains = np.where(writers > 0, least + writers * link - machine.handoff_ns + fixed, 0)
    after = np.where(present, writers[:, :, None], 2**31).min(axis=1, initial=2**31)
    launch = np.where(busy > 0, alone + (after - 1) * link, _NONE).min(axis=1, initial=_NONE)
    return alone, int(chains.max(initial=0)), int(launch[launch < _NONE].max(initial=0))


def _packing(durations: np.ndarray, slots: int) -> int:
    """Packing bound of durations int64, longest first."""
    total = np.concatenate(([0], np.cumsum(durations)))
    waves = np.arange(1, (len(durations) - 1) // slots + 1)
    last = waves * slots + 1
    return int((total[last] - total[last - waves - 1]).max(initial=0))
