"""``select`` for masks by head: the same choice however it is found, in bounded memory."""

from __future__ import annotations

import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.model import candidates, lockstep, selection
from cute_kernels.schedulers.model.candidates import Case
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.selection import select
from cute_kernels.schedulers.order.ranks import block_grid

SEEDS = range(24)
MORE = [*SEEDS[:16], *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(16, 400))]


def drawn(seed: int) -> tuple[np.ndarray, dict]:
    """Blocks [G, M, N] and options of a selection: masks by head, one or two heads in flight."""
    random = np.random.default_rng(seed)
    shape = (int(random.integers(2, 9)), *random.integers(4, 20, 2))
    if seed % 2:
        shape = (int(random.integers(12, 20)), *random.integers(24, 33, 2))
    density = 0.25 if seed % 2 else random.choice([0.2, 0.4, 0.8])
    blocks = (random.random(shape) < density) * random.integers(1, 3, shape)
    if seed % 3 == 0:
        blocks = np.where(blocks > 0, 1 + seed % 2, 0)
    if seed % 4 == 0:
        blocks = blocks * np.tri(*shape[1:], dtype=np.int64)
    name = ("cute_sm90_d128", "cute_sm90_d192", "h200_d128")[seed % 3]
    if seed % 2:
        name = ("cute_sm90_d192", "h200_d128")[seed % 4 // 2]
    flight = 1 if seed % 2 else 1 + seed % 7 // 6
    facts = {"slots": int(random.integers(8, 16)), "max_heads_in_flight": flight}
    heads = shape[0] * (1 if seed % 2 else int(random.integers(1, 3)))
    return blocks.astype(np.uint8), {"heads": heads, "machine": machine(name, l2_rows=0, **facts)}


def chosen(seed: int) -> tuple[str, int]:
    blocks, options = drawn(seed)
    selection._cache.clear()
    selected = select(blocks, **options)
    return selected.schedule.hash, selected.predicted_ns


@contextmanager
def many_visits():
    """Plans are too many visits to be timed side by side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "_BATCH", 1)
        yield patch


def differing(patch_one, seeds=SEEDS) -> int:
    """Number of drawn selections that ``patch_one(patch)`` changes."""
    with many_visits() as patch:
        want = [chosen(seed) for seed in seeds]
        patch_one(patch)
        return sum(a != b for a, b in zip(want, map(chosen, seeds), strict=True))


def named_first(patch):
    patch.setattr(selection, "_turns_alone", lambda best, plans: False)


@pytest.mark.parametrize("seed", MORE)
def test_the_choice_is_that_of_all_trials(seed):
    with many_visits() as patch:
        fast = chosen(seed)
        named_first(patch)
        assert chosen(seed) == fast


def test_turns_are_tried_first_where_they_win():
    taken = []

    def spied(best, plans, tried=selection._turns_alone):
        taken.append(tried(best, plans))
        return taken[-1]

    with many_visits() as patch:
        patch.setattr(selection, "_turns_alone", spied)
        for seed in SEEDS:
            chosen(seed)
    assert sum(taken) >= 5 and not all(taken)


def always_outrun(patch):
    patch.setattr(Case, "outrun", lambda *_: True)


def test_a_wrong_choice_is_seen():
    assert differing(always_outrun) > 0


def test_visits_of_a_walk_are_made_once_for_all_launch_orders(monkeypatch):
    """Those by rank follow the launch, and are made for each."""
    blocks, options = drawn(1)
    grid, made = block_grid(blocks, options["heads"]), []
    plans = candidates.named_plans(grid, selection.WALKS, shortest=True)
    rows_of = candidates.Plan.rows_of
    monkeypatch.setattr(
        candidates.Plan, "rows_of", lambda plan, masks: made.append(plan) or rows_of(plan, masks)
    )
    case = Case(grid, options["machine"], 1, 1)
    together = case.planned(plans, np.arange(len(plans)), np.arange(2))
    by_rank = sum(plan.walk == "by_rank" for plan in plans)
    assert len(made) == 2 + by_rank < len(plans)
    for index in range(len(plans)):
        alone = case.planned(plans, np.array([index]), np.arange(2))
        picked = together.pick(np.array([index, len(plans) + index]))
        assert all((getattr(picked, n) == getattr(alone, n)).all() for n in ("row", "cost"))


def test_no_section_of_named_plans_is_timed_twice():
    """Where turns win, the clock that let them be tried first goes on."""
    timed, wins, section, tried = [], 0, lockstep.Clock.section, selection._turns_alone

    def spied(clock, lists, heads, delay=None):
        if delay is None:
            timed.append((len(clock.free), lists.row.tobytes()))
        return section(clock, lists, heads, delay)

    def counted(best, plans):
        nonlocal wins
        timed.clear()
        won = tried(best, plans)
        if won:
            wins += 1
            assert len(set(timed)) == len(timed) > 1
        return won

    with many_visits() as patch:
        patch.setattr(lockstep.Clock, "section", spied)
        patch.setattr(selection, "_turns_alone", counted)
        for seed in SEEDS:
            chosen(seed)
    assert wins >= 5


def test_lists_are_built_for_a_section_at_a_time():
    """16 masks of 64 x 64 blocks hold less than twice what one of them does, and their visits."""
    random = np.random.default_rng(1)
    blocks = ((random.random((16, 64, 64)) < 0.25) * 2).astype(np.uint8)
    told = machine("cute_sm90_d128", max_heads_in_flight=1)

    def held(count: int) -> int:
        selection._cache.clear()
        tracemalloc.start()
        try:
            select(blocks[:count], machine=told)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    held(1)
    assert held(16) < 2 * held(1) + 8 * blocks[1:].size * 4


def documents(length: int, count: int) -> BlockMask:
    """Causal documents of drawn lengths."""
    random = np.random.default_rng(7)
    cuts = np.sort(random.choice(np.arange(1, length), count - 1, replace=False))
    offsets = torch.tensor([0, *cuts.tolist(), length])
    return BlockMask.from_cu_seqlens(offsets, causal=True)


def test_rows_touched_are_counted_over_launches_of_columns():
    random = np.random.default_rng(3)
    blocks = ((random.random((2, 9, 11)) < 0.3) * 2).astype(np.uint8)
    case = Case(block_grid(blocks, 4), machine(slots=6), 1, 1)
    for flight in (1, 2, 3):
        width, most = -(-6 // flight), 0.0
        by_length = np.argsort((blocks != 0).sum(1), axis=1, kind="stable")
        for order in (np.tile(np.arange(11), (2, 1)), by_length):
            rows = [
                blocks[mask][:, order[mask, first : first + width]].any(axis=1).sum()
                for mask in range(2)
                for first in range(0, 11, width)
            ]
            most = max(most, np.mean(rows) * 64 * flight)
        assert case.rows_touched(flight) == pytest.approx(most)


def test_documents_have_more_heads_in_flight_than_their_rows_allow():
    """As long as resident tickets touch few rows; masks that touch all rows have no more."""
    told, block = machine("cute_sm90_d128"), (128, 128)
    mask = documents(16384, 16)
    most = told.most_heads(mask.num_q_blocks, block)
    selected = select(mask, heads=16, machine=told)
    flight = selected.schedule.heads_in_flight
    assert flight > most
    case = Case(block_grid(mask, 16), *told.for_blocks(block), flight)
    assert case.rows_touched(flight) <= selection.ROWS * told.l2_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_wider", lambda *_: ())
        selection._cache.clear()
        before = select(mask, heads=16, machine=told)
    assert before.schedule.heads_in_flight == most
    assert selected.predicted_ns < selection.GAIN * before.predicted_ns
    for whole in (BlockMask.full(16384, 16384), BlockMask.causal(16384, 16384)):
        assert select(whole, heads=8, machine=told).schedule.heads_in_flight == most
    selection._cache.clear()
