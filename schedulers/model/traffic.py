"""Memory traffic of a launch: query tiles that have left L2 between two of their writers.

A visit reads Q and dO of its tile and adds to its dQ, so it finds them in L2 if the tile's previous
writer was there not long ago.  How long is long enough follows from how fast new tiles come in.
"""

from __future__ import annotations

import numpy as np

from .machines import Machine

# Number of gaps that are sampled.
_SAMPLE = 1 << 15


class Gaps:
    """Gaps in ticks between writers of a tile, of all visits; used in place of a ``Tape``."""

    def __init__(self):
        self.gaps: list[np.ndarray] = []
        self.turn = np.zeros((0, 0))

    def read(self, turn: np.ndarray) -> None:
        """Record the turns that the next tickets wait for, [visits, ..]; 0 for the first writer."""
        self.turn = turn.reshape(len(turn), -1).copy()

    def write(self, clock, begin, end, times, visits: np.ndarray, lanes: int) -> None:
        before, after = self.turn, times[1].reshape(self.turn.shape)
        gap = np.where(before == 0, np.iinfo(after.dtype).max, after - before)[:, :lanes]
        count = np.broadcast_to(visits, before.shape[1:])[:lanes]
        self.gaps.append(gap[np.arange(len(gap))[:, None] < count])

    def sort(self, clock) -> None:
        clock.free.sort(axis=1)

    def fetched(self, tiles: int, ticks: float) -> float:
        """Return the share of visits whose tile has left a cache of the ``tiles`` latest ones.

        ticks: what all visits took.  A visit brings min(gap, T) / ``ticks`` tiles to those of the
        last T ticks; T is where they fill the cache (Che's approximation of LRU).
        """
        gap = np.concatenate([*self.gaps, np.zeros(0)])
        step = len(gap) // _SAMPLE + 1
        gap = np.sort(gap[::step])
        if not len(gap):
            return 0.0
        later = np.arange(len(gap), 0, -1)
        alive = (np.cumsum(gap) - gap + later * gap) * (step / max(1, ticks))
        return 1 - int(np.searchsorted(alive, tiles, side="right")) / len(gap)


def memory_ns(machine: Machine, fetched: int, makespan_ns: int) -> int:
    """Time that ``fetched`` tiles add to a makespan: each a little, together no less than memory
    takes for them."""
    return max(machine.fetch_wait_ns * fetched, machine.fetch_ns * fetched - makespan_ns)
