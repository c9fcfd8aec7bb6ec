"""``check`` against brute force on every small mask, both ways: no false alarm, no missed hang."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers.order.kinds import Entries, build
from cute_kernels.schedulers.order.ranks import block_grid, ranks
from cute_kernels.schedulers.order.safety import check, reached, residents
from tests.schedulers.order import brute_force, mutants

CYCLE = 1 << 30
CHUNK = 1 << 13


@dataclass(frozen=True)
class Order:
    """launch: columns; writers: columns for each row; walk: rows for each column."""

    launch: list[int]
    writers: list[list[int]]
    walk: list[list[int]]

    def keys(self) -> np.ndarray:
        """[N, M]: visit keys of the walk."""
        return np.argsort(np.array(self.walk), axis=1)


def ordered(rows: int, columns: int, launch, writers=None, walk=None) -> Order:
    """Writers (the launch order if None) the same for all rows, walk the same for all columns."""
    writers = list(launch if writers is None else writers)
    walk = list(range(rows) if walk is None else walk)
    return Order(list(launch), [writers] * rows, [walk] * columns)


def drawn(rows: int, columns: int, seed: int, *, tangled: bool = False) -> Order:
    """A drawn launch order and walk, ranked by the launch, or by a drawn order for each row."""
    random = np.random.default_rng(seed)
    launch = random.permutation(columns).tolist()
    if not tangled:
        return ordered(rows, columns, launch, None, random.permutation(rows).tolist())
    writers = [random.permutation(columns).tolist() for _ in range(rows)]
    walk = [random.permutation(rows).tolist() for _ in range(columns)]
    return Order(launch, writers, walk)


def verdicts(masks: np.ndarray, order: Order, reach=reached) -> np.ndarray:
    """int64 [masks]: the residents that the checker asks for; ``CYCLE`` if no number will do."""
    out = []
    for start in range(0, len(masks), CHUNK):
        blocks = masks[start : start + CHUNK]
        writers = torch.tensor(order.writers)[None]
        rank_table = ranks(torch.from_numpy(blocks), writers).numpy()
        rows = Entries.of(blocks).visits(order.keys(), rank_table)
        by_column = np.take_along_axis(rank_table.transpose(0, 2, 1), np.maximum(rows, 0), axis=2)
        rank = np.where(rows >= 0, by_column, -1)
        last, acyclic = reach(rows[:, order.launch], rank[:, order.launch], blocks.shape[1])
        need = residents(np.broadcast_to(np.arange(last.shape[1]), last.shape), last)
        out.append(np.where(acyclic, need, CYCLE))
    return np.concatenate(out)


def agree(masks: np.ndarray, order: Order, slots: int = 5, reach=reached, group: int = 1) -> bool:
    """Whether the checker and brute force agree on all masks with 1 to ``slots`` slots."""
    facts = (*masks.shape[1:], order.launch, order.writers, order.walk)
    need = verdicts(masks, order, reach)
    return all(
        np.array_equal(need > count, brute_force.deadlocks(*facts, count, group))
        for count in range(1, slots + 1)
    )


# By day all masks of up to 12 blocks, with orders of every kind.
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        pytest.param(m, n, marks=pytest.mark.nightly if m * n > 12 else ())
        for m in range(1, 5)
        for n in range(1, 6)
    ],
)
def test_every_mask(rows, columns):
    masks, left = brute_force.all_masks(rows, columns), list(range(columns))
    orders = [ordered(rows, columns, left), ordered(rows, columns, left[::-1])]
    orders += [ordered(rows, columns, left[::-1], left), ordered(rows, columns, left, left[::-1])]
    orders += [drawn(rows, columns, seed) for seed in range(3)]
    orders += [drawn(rows, columns, seed, tangled=True) for seed in range(3)]
    for order in orders:
        assert agree(masks, order), order


def test_the_published_counts_of_hanging_masks():
    """Every 4 x 4 mask, launched one way and ranked the other: 1 to 4 slots."""
    left = list(range(4))
    order = ordered(4, 4, left, left[::-1])
    hangs = [
        brute_force.deadlocks(4, 4, order.launch, order.writers, order.walk, slots).sum()
        for slots in range(1, 5)
    ]
    assert hangs == [64_911, 57_642, 31_728, 0]
    need = verdicts(brute_force.all_masks(4, 4), order)
    assert [(need > slots).sum() for slots in range(1, 5)] == hangs


def tangled() -> list[Order]:
    """Orders of 3 x 4 blocks that are neither the launch's nor the same in every row."""
    orders = [ordered(3, 4, [0, 1, 2, 3], [3, 2, 1, 0])]
    return orders + [drawn(3, 4, seed, tangled=True) for seed in range(4)]


@pytest.mark.parametrize("group", [1, 2, 3])
def test_every_mask_with_query_heads_that_share_a_ticket(group):
    """And a checker that reckons with fewer of them, or more, is wrong on some mask."""
    masks = brute_force.all_masks(3, 4)
    for order in tangled():
        assert agree(masks, order, 4, partial(reached, group=group), group), order
    for order in (ordered(3, 4, [3, 2, 1, 0]), drawn(3, 4, 1), drawn(3, 4, 2)):
        # Ranked by the launch: progress anywhere.
        facts = (order.launch, order.writers, order.walk)
        assert not brute_force.deadlocks(3, 4, *facts, 1, group).any()
    for wrong in {1, 2, 3} - {group}:
        reach = partial(reached, group=wrong)
        assert not all(agree(masks, order, 4, reach, group) for order in tangled())


@pytest.mark.parametrize("checker", mutants.CHECKERS)
def test_broken_checkers_disagree_with_brute_force(checker):
    """The exhaustion has the power to tell: each broken checker is wrong on some 3 x 4 mask."""
    masks = brute_force.all_masks(3, 4)
    assert not all(agree(masks, order, 4, checker) for order in tangled())


@pytest.mark.parametrize("seed", range(20))
def test_check_says_of_a_schedule_what_the_exhaustion_says_of_its_mask(seed):
    random = np.random.default_rng(seed)
    rows, columns = random.integers(1, 5), random.integers(1, 6)
    order = drawn(rows, columns, seed, tangled=seed % 3 > 0)
    masks = brute_force.all_masks(int(rows), int(columns))
    masks = masks[random.integers(0, len(masks), 20)]
    for mask, need in zip(masks, verdicts(masks, order).tolist(), strict=True):
        launch = np.array(order.launch)[None]
        writers = np.array(order.writers)[None]
        schedule = build(block_grid(mask, 1), launch, writers, order.keys())
        if need == CYCLE:
            with pytest.raises(ScheduleError, match="without a cycle"):
                check(schedule)
        else:
            assert check(schedule, mask).residents == need
