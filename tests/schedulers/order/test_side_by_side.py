"""side_by_side: every part keeps its visits and ranks, and the whole passes the gate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers import check, left_to_right, lpt, shift, spt
from cute_kernels.schedulers.order.kinds import permutation
from cute_kernels.schedulers.order.side_by_side import side_by_side

KINDS = (left_to_right, lpt, spt, shift)
TRIANGLE = np.tri(3, dtype=np.uint8)


def drawn(seed: int, heads: int = 3):
    """(parts, blocks): squares on the diagonal, some with gaps behind them, in any order."""
    g = np.random.default_rng(seed)
    parts, squares, begin = [], [], 0
    for _ in range(int(g.integers(1, 5))):
        n = int(g.integers(1, 6))
        own = g.integers(0, 3, (n, n)).astype(np.uint8) if seed % 3 else np.tri(n, dtype=np.uint8)
        if g.integers(0, 2):
            orders = np.stack([g.permutation(n) for _ in range(heads)])
            made = permutation(own, order=orders, heads=heads)
        else:
            made = KINDS[int(g.integers(0, len(KINDS)))](own, heads=heads)
        parts.append((begin, made))
        squares.append((begin, own))
        begin += n + int(g.integers(0, 3))
    whole = np.zeros((begin, begin), np.uint8)
    for index, own in squares:
        whole[index : index + len(own), index : index + len(own)] = own
    return [parts[i] for i in g.permutation(len(parts))], whole


def lists_of(schedule, begin: int = 0):
    """{(head, column): entries} of a schedule that lies at a block."""
    return {
        (head, column + begin): [(row + begin, partial, rank) for row, partial, rank in entries]
        for head, column, entries in schedule.tickets()
        if entries
    }


@pytest.mark.parametrize("seed", range(40))
def test_parts_keep_their_visits_ranks_and_tickets(seed):
    parts, blocks = drawn(seed)
    out = side_by_side(parts, blocks)
    want = {}
    for begin, part in parts:
        want |= lists_of(part, begin)
    assert lists_of(out) == want
    assert check(out, blocks).residents == max(check(part).residents for _, part in parts)
    first = 0
    for begin, part in parts:
        mine = out.order[first : first + part.num_tickets] - np.array([0, begin])
        assert (mine == part.order).all()
        first += part.num_tickets
    begin, part = parts[0]
    wrong = replace(part, rank=part.rank + np.int32(1))
    if len(part.rank):
        with pytest.raises(ScheduleError, match="rank"):
            check(side_by_side([(begin, wrong), *parts[1:]], blocks), blocks)


def test_heads_share_lists_where_their_parts_and_masks_do():
    whole = np.zeros((6, 6), np.uint8)
    whole[:3, :3] = whole[3:, 3:] = TRIANGLE
    shared = spt(TRIANGLE, heads=4)
    orders = np.array([[0, 1, 2], [2, 1, 0], [0, 1, 2], [2, 1, 0]])
    two = permutation(TRIANGLE, order=orders, heads=4)
    assert side_by_side([(0, shared), (3, shared)], whole).num_lists == shared.num_lists == 1
    assert side_by_side([(0, shared), (3, two)], whole).num_lists == two.num_lists
    blocks = np.stack([np.full((2, 2), 1, np.uint8), np.full((2, 2), 2, np.uint8)])
    out = side_by_side([(0, left_to_right(blocks[0], heads=2))], blocks)
    check(out, blocks)
    assert out.num_lists == 2  # partial blocks differ


@pytest.mark.parametrize(
    ("begins", "heads", "blocks", "words"),
    [
        ((0, 2), (1, 1), 6, "at least 3"),
        ((0, 3), (1, 2), 6, "1 heads"),
        ((0, 3), (1, 1), 5, "5 x 5 blocks"),
        ((-1, 3), (1, 1), 6, "at least 0"),
    ],
)
def test_bad_parts(begins, heads, blocks, words):
    parts = [(at, spt(TRIANGLE, heads=n)) for at, n in zip(begins, heads, strict=True)]
    with pytest.raises(ScheduleError, match=words):
        side_by_side(parts, np.zeros((blocks, blocks), np.uint8))
