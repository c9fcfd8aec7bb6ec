"""The lists, ranks and tickets of packs, as schedules: admitted by the host, and each one's "spt".

`pack_tables.oracle` says what the kernel makes (``test_pack_tables``; a card: ``gpu_pack_tables``);
the visits and ranks are the formulas of ``device/varlen``.
"""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import pytest

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.safety import admit
from cute_kernels.schedulers.order.schedule import Schedule
from tests.sparse_attn import pack_tables as known

_PARTIAL = 1


@functools.lru_cache(maxsize=20_000)
def alone(n: int, window: tuple[int | None, int | None]) -> tuple[np.ndarray, list]:
    """(blocks uint8 [M, M], tickets of its "spt") of a sequence's own mask."""
    left, right = window
    mask = BlockMask.sliding_window(n, n, left=left, right=right, device="cpu")
    out = {c: [(m, r) for m, _, r in visits] for _, c, visits in kinds.spt(mask).tickets()}
    return mask.dense_blocks()[0, 0].numpy(), out


def blocks_of(case: known.Case, made: known.Made) -> np.ndarray:
    """uint8 [M, M]: each sequence's own blocks on the diagonal; tokens of none have none."""
    used = len(made.tickets) // case.kv_heads
    whole = np.zeros((used, used), np.uint8)
    for first, n in made.sequences[:-1]:
        if n:
            own, _ = alone(n, case.window)
            index = slice(first, first + len(own))
            whole[index, index] = own
    return whole


def schedule_of(case: known.Case, made: known.Made, blocks: np.ndarray) -> Schedule:
    """What a backward of the pack walks."""
    column, q_block, rank = known.entries(case, made)
    order = np.argsort(column, kind="stable")
    column, q_block, rank = column[order], q_block[order], rank[order]
    count = np.bincount(column, minlength=len(blocks))
    return Schedule(
        num_q_blocks=len(blocks),
        num_kv_blocks=len(blocks),
        heads=case.kv_heads,
        order=made.tickets[:, :2].copy(),
        list_of_head=np.zeros(case.kv_heads, np.int32),
        offset=np.concatenate(([0], count.cumsum())).astype(np.int32),
        q_block=q_block,
        # A kernel looks at pairs where a band may hide one, and at lengths itself.
        partial=blocks[q_block, column] == _PARTIAL,
        rank=rank,
    )


def require(seed: int) -> None:
    case = known.drawn(seed)
    out = known.oracle(case)
    if not len(out.tickets):
        return
    blocks = blocks_of(case, out)
    schedule = schedule_of(case, out, blocks)
    assert admit(schedule, blocks, group=case.group).any_residency
    found = {c: [(m, r) for m, _, r in visits] for h, c, visits in schedule.tickets() if h == 0}
    for first, n in out.sequences[:-1]:
        for column, visits in (alone(n, case.window)[1] if n else {}).items():
            assert found.pop(first + column) == [(first + m, rank) for m, rank in visits], seed
    assert not any(found.values())
    lo, hi = case.band
    for m, n in zip(*np.nonzero(blocks == _PARTIAL), strict=True):
        away = (int(n) - int(m)) * known.BLOCK
        own = out.table[n]
        inside = own[1] >= (max(m, n) + 1) * known.BLOCK
        looked_at = away - 127 < lo or away + 127 > hi
        # Or its last rows and keys are none.
        assert looked_at or not inside, (seed, m, n)


NIGHT = [pytest.param(500 * i, 500, marks=pytest.mark.nightly) for i in range(20)]


@pytest.mark.parametrize(("first", "count"), [(0, 100), *NIGHT])
def test_drawn_packs(first, count):
    """10,000 by night."""
    for seed in range(first, first + count):
        require(seed)


# ---- mutants -------------------------------------------------------------------------------------


def changed(change):
    """Of what the kernel makes."""
    true = known.oracle
    return mock.patch.object(known, "oracle", lambda case: change(true(case)))


def shorter(made):
    made.tickets[:, 3] -= made.tickets[:, 3] > made.tickets[:, 2] + 1
    return made


def backwards(made):
    return made._replace(tickets=made.tickets[::-1].copy())


@pytest.mark.parametrize("change", [shorter, backwards])
def test_mutants_are_killed(change):
    killed = 0
    with changed(change):
        for seed in range(40):
            try:
                require(seed)
            except (AssertionError, ScheduleError):
                killed += 1
    assert killed > 10
