"""Local search, for masks where no named kind comes near the bound.

A candidate is a launch order of the columns and a delay for each visit: a ticket takes its rows as
their turns come, each as if it came that much later.  Children of the best candidates move or swap
columns, or change delays; of candidates with one launch order only the best stays, which keeps the
search from settling on one too soon.  A search that finds nothing better for long starts again
with other draws.  Deterministic: the generator's seed is fixed, and the rounds depend on sizes and
results only, never on a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .lockstep import SCALE, Clock, Programs
from .machines import Machine

ELITE = 96
SEED = 9
# Rounds without an improvement after which the search starts again, and how often it starts.
PATIENCE, STARTS = 24, 3
# Which children change their launch order; which of all change a second, and a third, delay.
_LAUNCH, _MORE = 0.6, (0.5, 0.25)


@dataclass(frozen=True)
class Search:
    """Inputs of a search.  table: one program by column, ascending; sections: heads of each."""

    table: Programs
    sections: list[int]
    machine: Machine
    children: int
    goal_ns: int


@dataclass(frozen=True)
class SearchResult:
    """Best launch order int64 [N] with delays int64 [N, blocks]; trials: candidates timed."""

    makespan_ns: int
    order: np.ndarray
    delay: np.ndarray
    trials: int


def local_search(
    search: Search, orders: list[np.ndarray], load: np.ndarray, rounds: int
) -> SearchResult:
    """Return the best candidate after ``rounds``, or the first that reaches the goal.

    It starts from the launch orders [N], each with rows ascending, descending, and by rising and
    falling load (int64 [query blocks], the writers of each).
    """
    random = np.random.default_rng(SEED)
    start = _first(search, orders, load)
    trials = len(start[0])
    start = elite = best = _best(*start, _times(search, *start))
    idle, starts = 0, 1
    for _ in range(rounds):
        if best[2][0, 0] <= search.goal_ns or (idle > PATIENCE and starts == STARTS):
            break
        if idle > PATIENCE:
            elite, idle, starts = start, 0, starts + 1
        orders, delay, times = elite
        parent = (len(times) * random.random(search.children) ** 2).astype(np.int64)
        children, later = orders[parent], delay[parent]
        _change(search, children, later, random)
        both = (np.concatenate((orders, children)), np.concatenate((delay, later)))
        elite = _best(*both, np.concatenate((times, _times(search, children, later))))
        trials += search.children
        idle = 0 if elite[2][0, 0] < times[0, 0] else idle + 1
        best = elite if elite[2][0, 0] < best[2][0, 0] else best
    orders, delay, times = best
    return SearchResult(int(times[0, 0]), orders[0], delay[0], trials)


def _first(search: Search, orders, load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(len(load))
    rising = np.argsort(np.argsort(load, kind="stable"), kind="stable")
    ranks = np.stack((rows, rows[::-1], rising, len(load) - 1 - rising, 0 * rows))
    # In ticks for small masks: a slight preference; for large ones a tie-break only.
    ranks = (ranks * SCALE) // max(1, len(load) // 8)
    table = search.table
    listed = table.blocks(table.row)[..., 0]
    delay = ranks[:, np.minimum(listed, len(load) - 1)]
    return np.repeat(orders, len(ranks), axis=0), np.tile(delay, (len(orders), 1, 1))


def _times(search: Search, orders: np.ndarray, delay: np.ndarray) -> np.ndarray:
    """Return int64 [K, 2]: makespan, and the sum of squared slot ends as a tie-break."""
    each = np.arange(len(orders))
    lists = search.table.relaunch(orders, np.zeros(len(orders), np.int64))
    clock = Clock(search.machine, len(orders), lists.cost.dtype)
    delay = delay[each[:, None], orders].transpose(1, 2, 0)
    for heads in search.sections:
        clock.section(lists, heads, delay)
    ends = clock.free // (1 + int(clock.free.max(initial=0)) // (1 << 24))
    return np.stack((clock.makespan_ns(), (ends.astype(np.int64) ** 2).sum(axis=1)), axis=1)


def _best(orders, delay, times) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Select the ``ELITE`` best without repeats, with at most ELITE / orders of one launch order,
    earlier ones first among equals."""
    name, full = _names(orders), _names(orders, delay)
    ranked = np.lexsort((times[:, 1], times[:, 0]))
    ranked = ranked[np.sort(np.unique(full[ranked], return_index=True)[1])]
    _, group = np.unique(name[ranked], return_inverse=True)
    by_group = np.argsort(group, kind="stable")
    count = np.bincount(group)
    place = np.empty(len(group), np.int64)
    place[by_group] = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    survivors = ranked[place < max(1, ELITE // len(count))][:ELITE]
    return orders[survivors], delay[survivors], times[survivors]


def _names(*arrays: np.ndarray) -> np.ndarray:
    """Return a fixed hash, uint64 [K], of each candidate's arrays [K, ..]."""
    random = np.random.default_rng(SEED)
    name = np.zeros(len(arrays[0]), np.uint64)
    for array in arrays:
        flat = array.reshape(len(array), -1).astype(np.uint64)
        name += flat @ random.integers(0, 2**64, flat.shape[1], np.uint64)
    return name


def _change(search: Search, orders: np.ndarray, delay: np.ndarray, random) -> None:
    """Move or swap a column, or changes a delay, in place; then some delays more."""
    table = search.table
    blocks = table.num_rows // table.steps
    column, visit = np.nonzero(table.blocks(table.row)[..., 0] < blocks)
    children, half = len(orders), int(table.cost.max(initial=2)) // 2
    launch = random.random(children) < _LAUNCH
    orders[launch] = _moved(orders[launch], random)
    for selected in (~launch, *(random.random(children) < share for share in _MORE)):
        changed = np.flatnonzero(selected)
        entry = random.integers(0, max(1, len(column)), len(changed))
        step = random.integers(-6, 7, len(changed))
        far, none = random.random((2, len(changed)))
        step = np.where(far < 0.3, random.integers(0, 2 * delay.shape[2] + 1, len(changed)), step)
        step = np.where(none < 0.2, 0, step) * half
        if len(column):
            delay[changed, column[entry], visit[entry]] = step * SCALE


def _moved(values: np.ndarray, random) -> np.ndarray:
    """Move one element of each row of permutations [K, N], or swap two."""
    count, length = values.shape
    each = np.arange(count)
    source, target = random.integers(0, length, (2, count))
    key = np.broadcast_to(2 * np.arange(length), values.shape).copy()
    swap = random.random(count) < 0.5
    key[each, source] = 2 * target + np.where(swap, 0, np.where(target >= source, 1, -1))
    key[each[swap], target[swap]] = 2 * source[swap]
    return np.take_along_axis(values, np.argsort(key, axis=1, kind="stable"), axis=1)
