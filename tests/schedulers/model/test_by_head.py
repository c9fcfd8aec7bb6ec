"""``select`` for masks by head: the same choice however it is found, in bounded memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.model import candidates, selection
from cute_kernels.schedulers.model.candidates import Case
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.selection import select
from cute_kernels.schedulers.order.ranks import block_grid

SEEDS = range(8)


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


@pytest.fixture
def many_visits(monkeypatch):
    """Plans are too many visits to be timed side by side."""
    monkeypatch.setattr(candidates, "_BATCH", 1)
    return monkeypatch


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(8, 400), marks=pytest.mark.nightly)])
def test_the_choice_is_that_of_all_trials(many_visits, seeds):
    """Turns are tried first where they win; to outrun a section too early is a wrong choice."""
    taken = []

    def spied(best, plans, tried=selection._turns_alone):
        taken.append(tried(best, plans))
        return taken[-1]

    with many_visits.context() as patch:
        patch.setattr(selection, "_turns_alone", spied)
        fast = [chosen(seed) for seed in seeds]
    assert sum(taken) >= 3 and not all(taken)
    with many_visits.context() as patch:
        patch.setattr(selection, "_turns_alone", lambda best, plans: False)
        assert [chosen(seed) for seed in seeds] == fast
    many_visits.setattr(Case, "outrun", lambda *_: True)
    assert [chosen(seed) for seed in seeds] != fast


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
