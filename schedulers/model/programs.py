"""Lists of tickets as arrays; times, in ticks of a machine, follow from them in ``lockstep``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .machines import Machine


def exact_for(machine: Machine) -> bool:
    """Whether the solved form of ``lockstep`` holds for this machine."""
    return machine.dq_stages == 1 or machine.reduce_ns <= min(machine.full_ns, machine.partial_ns)


@dataclass(frozen=True)
class Programs:
    """Lists of tickets: X lists of N places; L visits with at least one of padding.

    row        int64 [N, L, X]   rows in visiting order, ``num_rows`` in the padding
    cost       [N, L, X]         c_i in ticks, 0 in the padding
    visits     int64 [N, X]      how many are not padding
    num_rows   M * tiles * group
    tiles      visits that stay together: the query tiles of one block
    group      how often a ticket walks its list, each time on the rows of another query head
    uniform    the cost that all visits have, in ticks; None if they differ
    """

    row: np.ndarray
    cost: np.ndarray
    visits: np.ndarray
    num_rows: int
    tiles: int
    group: int
    uniform: int | None
    picked: dict[bytes, Programs] = field(default_factory=dict, repr=False, compare=False)

    @property
    def steps(self) -> int:
        """Number of visits of one block: its tiles, for each query head."""
        return self.tiles * self.group

    def pick(self, programs: np.ndarray) -> Programs:
        """Return the programs with these indices [X'], in that order; the last result is cached."""
        name = programs.tobytes()
        if name not in self.picked:
            names = ("row", "cost", "visits")
            parts = {name: getattr(self, name).take(programs, -1) for name in names}
            self.picked.clear()
            self.picked[name] = replace(self, **parts, picked={})
        return self.picked[name]

    def blocks(self, row: np.ndarray) -> np.ndarray:
        """Return the query blocks of rows like ``row``, int64 [N, L', X]; M past a list's end."""
        steps = row[:, : (row.shape[1] - 1) // self.group : self.tiles]
        steps = steps // self.tiles if self.tiles > 1 else steps
        return np.minimum(steps, self.num_rows // self.steps) if self.group > 1 else steps


def programs(
    rows: np.ndarray,
    full: np.ndarray,
    num_rows: int,
    machine: Machine,
    tiles: int,
    dtype: type,
    group: int = 1,
) -> Programs:
    """Make ``Programs`` from rows int [X, N, L] in launch and visiting order (-1 past the end) and
    full bool [X, N, L], with times of a ``dtype``.  ``tiles``: query tiles per block, visited
    upwards one by one; ``group``: query heads to a ticket, one after another."""
    count, places, length = rows.shape
    steps, num_rows = tiles * group, num_rows * tiles
    shape = (places, length * steps + 1, count)
    row, cost = np.full(shape, num_rows * group, np.int64), np.zeros(shape, dtype)
    rows, full = rows.transpose(1, 2, 0), full.transpose(1, 2, 0)
    real, tick = rows >= 0, machine.tick()
    blocks = real.sum(1)
    one, other = (ns // tick for ns in (machine.full_ns, machine.partial_ns))
    ns_of = np.where(full, dtype(one), dtype(other))
    for tile in range(tiles):
        part = slice(tile, length * tiles, tiles)
        np.copyto(row[:, part], rows * tiles + tile, where=real)
        np.copyto(cost[:, part], ns_of, where=real)
    if group > 1 and rows.size:
        step = np.arange(length * steps)[:, None]
        member, step = np.divmod(step, np.maximum(1, blocks * tiles)[:, None])
        past, listed = (member >= group) | (blocks == 0)[:, None], slice(length * steps)
        row[:, listed] = np.take_along_axis(row, step, 1) + member * num_rows
        cost[:, listed] = np.take_along_axis(cost, step, 1)
        np.copyto(row[:, listed], num_rows * group, where=past)
        np.copyto(cost[:, listed], 0, where=past)
    uniform = None
    if one == other or full[real].all():
        uniform = one
    elif not full[real].any():
        uniform = other
    return Programs(row, cost, blocks * steps, num_rows * group, tiles, group, uniform)


def time_dtype(places: int, length: int, machine: Machine, heads: int) -> type:
    """Return int32 if it holds the time of all visits in sequence, else int64."""
    step = machine.full_ns + machine.partial_ns + machine.reduce_ns + machine.handoff_ns
    fixed = machine.tile_start_ns + machine.tile_end_ns
    worst = heads * places * ((length + 1) * step + fixed) // machine.tick()
    return np.int32 if worst < 2**31 else np.int64
