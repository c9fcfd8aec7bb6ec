"""``check`` against step-by-step execution on drawn schedules: to 64 x 64 blocks, 200 slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.safety import check
from cute_kernels.schedulers.order.schedule import Schedule
from tests.schedulers.order.brute_force import stuck

KINDS = (*kinds.KINDS, "permutation", "given write order", "given ranks", "given ranks")
VERDICTS = ("any residency", "hangs", "needs", "cycle")


def drawn(random: np.random.Generator, kind: str, least: int, most: int):
    """(blocks, schedule) of a kind."""
    masks, rows, columns = int(random.choice((1, 1, 2))), *random.integers(least, most + 1, 2)
    present = random.random((masks, rows, columns)) < random.choice((0.1, 0.3, 0.6, 1.0))
    blocks = (present * random.integers(1, 3, present.shape)).astype(np.uint8)
    heads = masks * int(random.integers(1, 4))
    options = {"heads": heads, "heads_in_flight": int(random.integers(1, 7))}
    if "shift" in kind:
        return blocks, kinds.KINDS[kind](blocks, **options)
    if kind != "given ranks":
        options["walk"] = str(random.choice(kinds.WALKS))
    if kind in kinds.KINDS:
        return blocks, kinds.KINDS[kind](blocks, **options)
    order = random.permuted(np.tile(np.arange(columns), (heads, 1)), axis=1)
    order = order[0] if kind == "given ranks" or random.integers(2) else order
    write = random.permutation(columns) if kind == "given write order" else None
    schedule = kinds.permutation(blocks, order=order, write_order=write, **options)
    return blocks, given_ranks(schedule, random) if kind == "given ranks" else schedule


def given_ranks(made: Schedule, random: np.random.Generator) -> Schedule:
    """Drawn ranks for each row and drawn visits for each list: often a cycle."""
    lists = np.repeat(np.arange(len(made.offset) - 1), np.diff(made.offset))
    row = lists // max(1, made.num_kv_blocks) * made.num_q_blocks + made.q_block
    by_row = np.lexsort((random.random(len(row)), row))
    rank = np.empty(len(row), np.int32)
    first = np.searchsorted(row[by_row], row[by_row])
    rank[by_row] = np.arange(len(row)) - first
    visits = np.lexsort((random.random(len(row)), lists))
    return replace(
        made, q_block=made.q_block[visits], partial=made.partial[visits], rank=rank[visits]
    )


def holds(seed: int, least: int, most: int, groups: tuple[int, ...]) -> str:
    """Checks one case; says which verdict it was."""
    random = np.random.default_rng(seed)
    kind, group = KINDS[seed % len(KINDS)], int(random.choice(groups))
    blocks, schedule = drawn(random, kind, least, most)
    slots = int(2 ** random.uniform(0, 7.65))
    try:
        needs = check(schedule, blocks, group=group).residents
    except ScheduleError as error:
        assert kind == "given ranks" and "without a cycle" in str(error)
        assert stuck(schedule, schedule.num_tickets)
        return "cycle"
    assert needs == 1 or kind not in ("left_to_right", "spt", "lpt", "permutation")
    assert bool(stuck(schedule, slots, seed, group)) == (slots < needs)
    assert not stuck(schedule, needs, group=group)
    alone = needs if group == 1 else check(schedule).residents
    assert (alone == 1) == (needs == 1)
    if needs == 1:
        return "any residency"
    assert stuck(schedule, needs - 1, group=group)
    if alone < needs:
        return "needs more for a group"
    return "hangs" if slots < needs else "needs"


@pytest.mark.parametrize(
    ("least", "most", "groups", "examples"),
    [
        (1, 9, (1, 1, 2, 3), 600),
        (4, 64, (1,), 100),
        pytest.param(1, 9, (1, 1, 2, 3), 80_000, marks=pytest.mark.nightly),
        pytest.param(4, 64, (1, 1, 2, 3), 20_000, marks=pytest.mark.nightly),
    ],
)
def test_drawn_schedules(least, most, groups, examples):
    out = Counter(holds(seed, least, most, groups) for seed in range(examples))
    assert min(out[name] for name in VERDICTS) > examples // 100, out
    assert groups == (1,) or out["needs more for a group"] > 1, out
