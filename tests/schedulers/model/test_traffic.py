"""Tests of the traffic estimate against what was measured.

Hashes of what is selected by it: tests/schedulers/test_version.py.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.model import candidates, selection
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.simulation import simulate
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.ranks import block_grid
from cute_kernels.schedulers.order.safety import check

OURS = machine("cute_sm90_d128")


def plan_of(grid, kind: str, walk: str) -> tuple[list, int]:
    plans = candidates.named_plans(grid, selection.WALKS, shortest=True)
    return plans, next(i for i, plan in enumerate(plans) if (plan.kind, plan.walk) == (kind, walk))


# Causal, D = 128, 4 query heads to each KV head, one H200: tokens, KV heads, kind, walk, heads in
# flight, measured ordered us less what the kernels before and after take (docs/notes).
MEASURED = [
    (4096, 64, "spt", "ascending", 1, 5352),
    (4096, 64, "spt", "ascending", 8, 7195),
    (4096, 64, "spt", "descending", 1, 5419),
    (4096, 64, "spt", "descending", 8, 6640),
    (4096, 64, "left_to_right", "descending", 1, 8035),
    (4096, 64, "left_to_right", "descending", 8, 6273),
    (8192, 16, "spt", "ascending", 1, 5394),
    (8192, 16, "spt", "ascending", 8, 7381),
    (8192, 16, "spt", "descending", 1, 5544),
    (8192, 16, "spt", "descending", 8, 7319),
    (8192, 16, "left_to_right", "descending", 1, 7764),
    (8192, 16, "left_to_right", "descending", 8, 5460),
]


def predicted_us(tokens: int, heads: int, kind: str, walk: str, flight: int) -> float:
    """Time and memory; ``simulate`` says the same time."""
    mask = BlockMask.causal(tokens, tokens)
    grid = block_grid(mask, heads)
    case = candidates.Case(grid, *OURS.for_blocks(grid.block_size), flight, 4)
    schedule = kinds.KINDS[kind](mask, heads=heads, heads_in_flight=flight, walk=walk)
    time = simulate(schedule, OURS, group=4).makespan_ns
    return (time + case.memory_ns(*plan_of(grid, kind, walk), time)) / 1e3


def test_time_and_memory_rank_as_what_was_measured():
    """The wait for a tile is between that of causal and of random masks, so causal rows that miss
    L2 in part are put too high; what is found best is, within 2%."""
    told = {row: predicted_us(*row[:5]) for row in MEASURED}
    for row, us in told.items():
        assert 0.93 * row[-1] < us < 1.26 * row[-1], row
    for tokens in (4096, 8192):
        rows = [row for row in MEASURED if row[0] == tokens]
        best = min(row[-1] for row in rows)
        assert min(rows, key=told.get)[-1] <= 1.02 * best < max(rows, key=told.get)[-1]


def documents(lengths: list[int]) -> BlockMask:
    return BlockMask.document(
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    )


def grouped(mask, heads: int, told) -> selection.Selection:
    selection._cache.clear()
    return selection.select(mask, heads=heads, machine=told, group=4)


@pytest.mark.parametrize("name", [f"cute_sm90_d{d}" for d in (64, 128, 192, 256)])
def test_documents_with_a_group_wait_for_no_longer_column(name):
    """A block that two documents share has the longest column.  One head after another, those of
    its documents that come later in the order wait for it in every head; so it comes last.
    More heads in flight would hide it."""
    mask = documents([1500, 900, 1700, 1100, 1300, 1644])
    gpu = machine(name, max_heads_in_flight=2)
    selection = grouped(mask, 16, gpu)
    result = simulate(selection.schedule, gpu, group=4)
    assert check(selection.schedule, mask).any_residency
    assert result.makespan_ns == selection.predicted_ns >= selection.bound.lower_ns
    assert selection.schedule.name.startswith("shortest_first") and result.ratio < 1.1
    for kind in ("spt", "left_to_right", "lpt"):
        for walk in ("ascending", "descending"):
            other = kinds.KINDS[kind](mask, heads=16, heads_in_flight=2, walk=walk)
            assert simulate(other, gpu, group=4).ratio > result.ratio + 0.05, (kind, walk)


def test_the_choice_is_no_worse_than_any_plan_without_a_tail():
    selection = grouped(BlockMask.causal(2048, 2048), 24, OURS)
    told = [trial for trial in selection.trials if trial.memory_ns is not None]
    best = min(told, key=lambda trial: trial.predicted_ns + trial.memory_ns)
    flight, name = selection.schedule.heads_in_flight, selection.schedule.name
    # "kind, last n kind (walk, walk)": without its tail, if it has one.
    kind, walk = name.split(" (")[0].split(",")[0], name.split(" (")[1].split(",")[0].strip(")")
    (own,) = (t for t in told if (t.kind, t.walk, t.heads_in_flight) == (kind, walk, flight))
    assert selection.predicted_ns + own.memory_ns <= best.predicted_ns + best.memory_ns
    assert len({trial.heads_in_flight for trial in selection.trials}) > 1
    assert " memory" in str(selection) and "<-" in str(selection)
    assert grouped(BlockMask.causal(2048, 2048), 24, OURS).schedule.hash == selection.schedule.hash
