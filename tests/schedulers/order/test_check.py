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


def mask(rows: int = 6, columns: int = 5, seed: int = 3, density: float = 0.7) -> np.ndarray:
    """uint8 [rows, columns] with both kinds of block, and the last block present."""
    random = np.random.default_rng(seed)
    blocks = (random.random((rows, columns)) < density) * random.integers(1, 3, (rows, columns))
    blocks[-1, :] = 2
    return blocks.astype(np.uint8)


def full(rows: int, columns: int) -> np.ndarray:
    return np.full((rows, columns), 2, np.uint8)


@pytest.mark.parametrize("name", mutants.SCHEDULES)
@pytest.mark.parametrize("kind", ["left_to_right", "spt"])
@pytest.mark.parametrize("heads", [1, 3])
def test_broken_schedules_are_refused_or_known_to_need_residents(name, kind, heads):
    blocks = mask()
    schedule = kinds.KINDS[kind](blocks, heads=heads, heads_in_flight=2)
    assert check(schedule, blocks).any_residency
    broken = mutants.SCHEDULES[name](schedule)
    if name in ("launched_against_its_ranks", "spt_flag_ignored"):
        safety = check(broken, blocks)
        assert safety.residents > 1
        assert stuck(broken, safety.residents - 1) and not stuck(broken, safety.residents)
        with pytest.raises(ScheduleError, match="allow_residency"):
            admit(broken)
        return
    with pytest.raises(ScheduleError):
        check(broken, blocks)


@pytest.mark.parametrize(
    "name",
    [
        "contributor_never_visits",
        "last_rank_one_too_high",
        "rank_given_twice",
        "rank_below_zero",
        "ticket_taken_twice",
        "ticket_forgotten",
        "row_visited_twice",
        "row_past_the_last",
        "column_past_the_last",
    ],
)
def test_broken_schedules_are_refused_without_the_mask_too(name):
    schedule = kinds.spt(mask(), heads=2)
    with pytest.raises(ScheduleError):
        check(mutants.SCHEDULES[name](schedule))


@pytest.mark.parametrize("last", [True, False])
def test_a_forgotten_last_writer_is_told_from_the_mask(last):
    """The last writer of a row leaves no gap in its ranks: only the mask can tell."""
    blocks = mask()
    schedule = kinds.left_to_right(blocks)
    broken = mutants.last_block_forgotten(schedule)
    if last:
        assert check(broken).any_residency
    with pytest.raises(ScheduleError, match=r"row 5, .*contributor that never visits"):
        check(broken, blocks)


def test_a_partial_block_taken_as_full_is_told_from_the_mask():
    blocks = mask()
    schedule = kinds.left_to_right(blocks)
    with pytest.raises(ScheduleError, match=r"expected partial as in the mask, got full"):
        check(mutants.mask_not_applied(schedule), blocks)


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


def test_a_visit_that_the_mask_does_not_have():
    blocks = mask()
    schedule = kinds.left_to_right(blocks)
    row, column = np.argwhere(blocks == 0)[0]
    blocks[row, column] = 1
    more = kinds.left_to_right(blocks)
    blocks[row, column] = 0
    with pytest.raises(ScheduleError, match=r"expected empty as in the mask, got partial"):
        check(more, blocks)
    assert check(schedule, blocks).any_residency


MESSAGES = {
    "ticket_taken_twice": r"every \(head, kv block\) in one ticket, got head 0 kv block 0 in "
    r"tickets \[0, 9\]",
    "ticket_forgotten": r"every \(head, kv block\) in one ticket, got head 1 kv block 4 in none",
    "column_past_the_last": r"ticket 9: expected head in \[0, 2\) and kv block in \[0, 5\), got "
    r"\[1, 5\]",
    "row_past_the_last": r"q_block: expected rows in \[0, 6\), got row 6, head 0 kv block 4 "
    r"\(ticket 4\)",
    "row_visited_twice": r"q_block: expected each row once in a ticket, got row \d twice, "
    r"head 0 kv block 0 \(ticket 0\)",
    "rank_given_twice": r"ranks of row \d: expected unique, got rank \d twice: head 0 kv block \d "
    r"\(ticket \d\) and head 0 kv block \d \(ticket \d\)",
    "rank_below_zero": r"rank of row \d, head 0 kv block 0 \(ticket 0\): expected in \[0, \d\), "
    r"as that many visit \(is a contributor missing\?\), got -1",
    "last_rank_one_too_high": r"rank of row 5, head 0 kv block 4 \(ticket 4\): expected in "
    r"\[0, 5\), .* got 5",
    "contributor_never_visits": r"rank of row \d, head 0 kv block \d \(ticket \d\): expected in "
    r"\[0, \d\), .* got \d",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_message_names_head_row_rank_and_tickets(name):
    broken = mutants.SCHEDULES[name](kinds.left_to_right(mask(), heads=2))
    with pytest.raises(ScheduleError, match=MESSAGES[name]):
        check(broken)


def tied() -> object:
    """Two columns that wait for each other: each is first on the row that it visits last."""
    schedule = kinds.left_to_right(full(2, 2))
    return replace(
        schedule,
        q_block=np.array([0, 1, 1, 0], np.int32),
        rank=np.array([1, 0, 1, 0], np.int32),
    )


def test_a_cycle_is_named():
    want = r"without a cycle, got head 0: .*row 0 rank 1 \(ticket 0\).*row 1 rank 1 \(ticket 1\)"
    with pytest.raises(ScheduleError, match=want) as caught:
        check(tied())
    assert len(re.findall("rank", str(caught.value))) == 4
    assert stuck(tied(), 2)


@pytest.mark.parametrize(
    ("schedule", "residents"),
    [
        (kinds.left_to_right(full(4, 4)), 1),
        (kinds.left_to_right(full(4, 4), walk="descending", heads=3, heads_in_flight=2), 1),
        (kinds.spt(full(7, 3), walk="cyclic"), 1),
        (kinds.shift(full(4, 4)), 4),
        (kinds.shift(full(8, 4)), 4),
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


@pytest.mark.parametrize("size", [4, 8, 16])
def test_symmetric_shift_needs_half_the_columns_on_a_causal_mask(size):
    causal = np.tril(full(size, size))
    assert check(kinds.symmetric_shift(causal)).residents == size // 2


def test_the_waiting_tickets_of_heads_in_flight_add_up():
    """Interleaved heads wait side by side; one head at a time waits alone."""
    blocks, heads = full(4, 4), 3
    apart = check(kinds.shift(blocks, heads=heads, heads_in_flight=1)).residents
    together = check(kinds.shift(blocks, heads=heads, heads_in_flight=3)).residents
    assert (apart, together) == (4, 10)


def test_the_gate_wants_the_promise_that_the_schedule_needs():
    shift = kinds.shift(full(6, 6))
    assert admit(shift, allow_residency=6).residents == 6
    assert admit(shift, full(6, 6), allow_residency=132).residents == 6
    for promise in (None, 1, 5):
        with pytest.raises(ScheduleError, match=r"at least 6, which schedule 'shift' needs"):
            admit(shift, allow_residency=promise)
    assert admit(kinds.spt(full(6, 6))).any_residency


def shared() -> object:
    """Column 2 waits for column 0 in row 1, which waits for column 2 in row 0, a query head on."""
    blocks = np.array([[0, 2, 2], [2, 0, 2]], np.uint8)
    return kinds.permutation(blocks, order=[1, 2, 0], write_order=[0, 2, 1])


def test_query_heads_that_share_a_ticket_may_need_more_residents():
    schedule = shared()
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


@pytest.mark.parametrize("group", [0, True, 2.0])
def test_a_group_that_is_not_a_count(group):
    with pytest.raises(ScheduleError, match=r"group: expected an int >= 1"):
        check(shared(), group=group)


@pytest.mark.parametrize("promise", [0, -1, 1.5, "132", True])
def test_a_promise_that_is_not_a_count(promise):
    with pytest.raises(ScheduleError, match=r"allow_residency: expected an int >= 1"):
        admit(kinds.spt(full(2, 2)), allow_residency=promise)


def test_a_mask_of_another_size():
    with pytest.raises(ScheduleError, match=r"\(5, 5\) blocks like the mask, got \(5, 4\)"):
        check(kinds.spt(full(5, 4)), full(5, 5))


def test_not_a_schedule():
    with pytest.raises(ScheduleError, match="schedule: expected a Schedule, got dict"):
        check({})


def test_the_least_repeat_is_seen_with_flags_and_by_sorting():
    random = np.random.default_rng(5)
    for count, size in ((0, 0), (1, 1), (40, 60), (40, 9999), (40, 32 * 40), (40, 32 * 40 + 1)):
        for seed in range(50):
            values = random.permutation(size)[:count]
            values[: seed % 3] = values[-1:]
            found, times = np.unique(values, return_counts=True)
            want = int(found[times > 1][0]) if (times > 1).any() else None
            assert safety._repeated(values, size) == want
