"""Tests of ``check``: refusals in its words, broken schedules, the gate before a launch."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.simulation import simulate
from cute_kernels.schedulers.order import kinds, safety
from cute_kernels.schedulers.order.safety import Safety, admit, check
from tests.schedulers.order import mutants
from tests.schedulers.order.brute_force import stuck
from tests.schedulers.usual import full


def mask() -> np.ndarray:
    """uint8 [6, 5] with both kinds of block, and the last block present."""
    random = np.random.default_rng(3)
    blocks = (random.random((6, 5)) < 0.7) * random.integers(1, 3, (6, 5))
    blocks[-1, :] = 2
    return blocks.astype(np.uint8)


@pytest.mark.parametrize("name", mutants.SCHEDULES)
@pytest.mark.parametrize("kind", ["left_to_right", "spt"])
@pytest.mark.parametrize("heads", [1, 3])
def test_broken_schedules_are_refused_or_known_to_need_residents(name, kind, heads):
    blocks, index = mask(), list(mutants.SCHEDULES).index(name)
    schedule = kinds.KINDS[kind](blocks, heads=heads, heads_in_flight=2)
    assert check(schedule, blocks).any_residency
    broken = mutants.SCHEDULES[name](schedule)
    if index < 2:
        safety = check(broken, blocks)
        assert safety.residents > 1
        assert stuck(broken, safety.residents - 1) and not stuck(broken, safety.residents)
        with pytest.raises(ScheduleError, match="allow_residency"):
            admit(broken)
        return
    with pytest.raises(ScheduleError):
        check(broken, blocks)
    if index < 4:  # a forgotten last writer leaves no gap in its row's ranks
        assert kind == "spt" or check(broken).any_residency
        return
    with pytest.raises(ScheduleError):
        check(broken)


@pytest.mark.parametrize("seed", range(60))
def test_the_lists_of_every_head_are_compared_with_its_mask(seed):
    """Drawn masks, and heads that use drawn sets of lists: taken if the visits of every head are
    the blocks of its mask; else the error names a head, a row and a column that differ."""
    random = np.random.default_rng(seed)
    masks, rows, columns = (int(n) for n in random.integers((1, 1, 1), (4, 4, 4)))
    heads = masks * int(random.integers(1, 4))
    blocks = random.integers(0, 3, (masks, rows, columns)).astype(np.uint8)
    blocks[-1] = blocks[random.integers(0, masks)]
    out = kinds.spt(blocks, heads=heads, heads_in_flight=2)
    lists = out.list_of_head.copy()
    strays = random.random(heads) < random.choice([0, 0.2])
    lists[strays] = random.integers(0, out.num_lists, strays.sum())
    schedule = replace(out, list_of_head=lists)
    visited = np.zeros((heads, rows, columns), np.uint8)
    for head, column, visits in schedule.tickets():
        for row, partial, _ in visits:
            visited[head, row, column] = 1 if partial else 2
    differs = visited != blocks[np.arange(heads) % masks]
    if not differs.any():
        assert check(schedule, blocks).any_residency
        return
    with pytest.raises(ScheduleError, match="as in the mask") as caught:
        check(schedule, blocks)
    row, head, column = map(int, re.findall(r"(?:row|head|kv block) (\d+)", str(caught.value))[:3])
    assert differs[head, row, column]


def tied() -> object:
    """Two columns that wait for each other: each is first on the row that it visits last."""
    q_block, rank = (np.array(each, np.int32) for each in ([0, 1, 1, 0], [1, 0, 1, 0]))
    return replace(kinds.left_to_right(full(2, 2)), q_block=q_block, rank=rank)


def broken(name: str):
    return lambda: check(mutants.SCHEDULES[name](kinds.left_to_right(mask(), heads=2)))


def against_the_mask(change) -> object:
    return lambda: check(change(kinds.left_to_right(mask())), mask())


def with_one_more(schedule):
    more = mask()
    more[tuple(np.argwhere(more == 0)[0])] = 1
    return kinds.left_to_right(more)


def gate(promise, blocks=2):
    return lambda: admit(kinds.shift(full(blocks, blocks)), allow_residency=promise)


RANK = r"rank of row \d, head 0 kv block \d \(ticket \d\): expected in \[0, \d\), "
COUNT = "expected an int >= 1"
#: The message names head, row, rank and tickets.
REFUSED = {
    "ticket twice": (
        broken("ticket_taken_twice"),
        r"every \(head, kv block\) in one ticket, got head 0 kv block 0 in tickets \[0, 9\]",
    ),
    "no ticket": (
        broken("ticket_forgotten"),
        r"every \(head, kv block\) in one ticket, got head 1 kv block 4 in none",
    ),
    "column": (
        broken("column_past_the_last"),
        r"ticket 9: expected head in \[0, 2\) and kv block in \[0, 5\), got \[1, 5\]",
    ),
    "row": (
        broken("row_past_the_last"),
        r"q_block: expected rows in \[0, 6\), got row 6, head 0 kv block 4 \(ticket 4\)",
    ),
    "row twice": (
        broken("row_visited_twice"),
        r"expected each row once in a ticket, got row \d twice, head 0 kv block 0 \(ticket 0\)",
    ),
    "rank twice": (
        broken("rank_given_twice"),
        r"ranks of row \d: expected unique, got rank \d twice: head 0 kv block \d \(ticket \d\) "
        r"and head 0 kv block \d \(ticket \d\)",
    ),
    "rank below": (broken("rank_below_zero"), RANK + r"as that many visit .*, got -1"),
    "rank above": (broken("last_rank_one_too_high"), RANK + r".* got 5"),
    "gap": (broken("contributor_never_visits"), RANK + r".* got \d"),
    "last": (
        against_the_mask(mutants.last_block_forgotten),
        r"row 5, .*contributor that never visits",
    ),
    "partial": (
        against_the_mask(mutants.SCHEDULES["mask_not_applied"]),
        r"expected partial as in the mask, got full",
    ),
    "more": (against_the_mask(with_one_more), r"expected empty as in the mask, got partial"),
    "cycle": (
        lambda: check(tied()),
        r"without a cycle, got head 0: .*row 0 rank 1 \(ticket 0\).*row 1 rank 1 \(ticket 1\)",
    ),
    "size": (
        lambda: check(kinds.spt(full(5, 4)), full(5, 5)),
        r"\(5, 5\) blocks like the mask, got \(5, 4\)",
    ),
    "dict": (lambda: check({}), "schedule: expected a Schedule, got dict"),
    "group": (lambda: check(tied(), group=2.0), rf"group: {COUNT}"),
    "group bool": (lambda: check(tied(), group=True), rf"group: {COUNT}"),
    "promise 0": (gate(0), rf"allow_residency: {COUNT}"),
    "promise text": (gate("132"), rf"allow_residency: {COUNT}"),
    "promise bool": (gate(True), rf"allow_residency: {COUNT}"),
    "no promise": (gate(None, 6), r"at least 6, which schedule 'shift' needs"),
    "too few": (gate(5, 6), r"at least 6, which schedule 'shift' needs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ScheduleError, match=message):
        call()


def test_the_gate_takes_the_promise_that_the_schedule_needs():
    assert gate(6, 6)().residents == gate(132, 6)().residents == 6 and stuck(tied(), 2)


CAUSAL = np.tril(full(16, 16))


@pytest.mark.parametrize(
    ("schedule", "residents"),
    [
        (kinds.left_to_right(full(4, 4)), 1),
        (kinds.left_to_right(full(4, 4), walk="descending", heads=3, heads_in_flight=2), 1),
        (kinds.spt(full(7, 3), walk="cyclic"), 1),
        (kinds.shift(full(8, 4)), 4),
        # Interleaved heads wait side by side; one head at a time waits alone.
        (kinds.shift(full(4, 4), heads=3, heads_in_flight=1), 4),
        (kinds.shift(full(4, 4), heads=3, heads_in_flight=3), 10),
        (kinds.symmetric_shift(CAUSAL), 8),
        (kinds.permutation(full(4, 4), order=[0, 1, 2, 3], write_order=[3, 2, 1, 0]), 4),
        (kinds.permutation(full(4, 4), order=[0, 1, 3, 2], write_order=[0, 1, 2, 3]), 2),
        (kinds.left_to_right(np.zeros((3, 4), np.uint8)), 1),
        (kinds.left_to_right(np.zeros((0, 4), np.uint8)), 1),
        (kinds.left_to_right(np.zeros((4, 0), np.uint8)), 1),
    ],
)
def test_known_verdicts(schedule, residents):
    safety = check(schedule)
    assert safety == Safety(residents)
    assert str(safety) == ("any_residency" if residents == 1 else f"needs({residents})")
    assert not stuck(schedule, residents)
    assert residents == 1 or stuck(schedule, residents - 1)


def test_query_heads_that_share_a_ticket_may_need_more_residents():
    """Column 2 waits for column 0 in row 1, which waits for column 2 in row 0, a query head on."""
    blocks = np.array([[0, 2, 2], [2, 0, 2]], np.uint8)
    schedule = kinds.permutation(blocks, order=[1, 2, 0], write_order=[0, 2, 1])
    for group, needs in ((1, 2), (2, 3), (3, 3), (64, 3)):
        assert check(schedule, group=group) == Safety(needs)
        assert stuck(schedule, needs - 1, group=group)
        assert not stuck(schedule, needs, group=group)
        assert admit(schedule, group=group, allow_residency=needs).residents == needs
        with pytest.raises(ScheduleError, match=rf"at least {needs}, which schedule"):
            admit(schedule, group=group, allow_residency=needs - 1)
        with pytest.raises(ScheduleError, match=rf"machine.slots: expected at least {needs}"):
            simulate(schedule, machine(slots=needs - 1), group=group)
        assert simulate(schedule, machine(slots=needs), group=group).safety.residents == needs


def test_the_least_repeat_is_seen_with_flags_and_by_sorting():
    random = np.random.default_rng(5)
    for count, size in ((0, 0), (1, 1), (40, 60), (40, 9999), (40, 32 * 40), (40, 32 * 40 + 1)):
        for seed in range(50):
            values = random.permutation(size)[:count]
            values[: seed % 3] = values[-1:]
            out, times = np.unique(values, return_counts=True)
            want = int(out[times > 1][0]) if (times > 1).any() else None
            assert safety._repeated(values, size) == want
