"""Schedules as data: tickets, hash, files, kernel tensors; the kinds; FA4's write order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.order import kinds, ranks
from cute_kernels.schedulers.order.safety import check
from cute_kernels.schedulers.order.schedule import Schedule
from tests.schedulers.order.mutants import put
from tests.watchers import Seen


def drawn(seed: int, masks: int = 1, size: tuple[int, int] | None = None) -> np.ndarray:
    """uint8 [masks, M, N] of 0, 1 and 2."""
    random = np.random.default_rng(seed)
    rows, columns = size or random.integers(1, 12, 2)
    present = random.random((masks, rows, columns)) < random.choice([0.2, 0.5, 0.9])
    return (present * random.integers(1, 3, present.shape)).astype(np.uint8)


WALKS = {
    "ascending": lambda visit, mask, column: visit[0],
    "descending": lambda visit, mask, column: -visit[0],
    "by_rank": lambda visit, mask, column: visit[2],
    "cyclic": lambda visit, mask, column: (
        (visit[0] - column * len(mask) // len(mask[0])) % len(mask)
    ),
    # As FA4 stores them, which ranks by ascending key blocks, or descending with spt.
    "partial_then_full": lambda visit, mask, column: (not visit[1], visit[0]),
}


def by_loops(blocks, order, write, walk, heads_in_flight):
    """The tickets by plain loops.  blocks: a list per head; order, write: columns for each head."""
    out = []
    for first in range(0, len(blocks), heads_in_flight):
        section = range(first, min(len(blocks), first + heads_in_flight))
        for position in range(len(blocks[0][0]) if len(blocks[0]) else 0):
            for head in section:
                column, mask = order[head][position], blocks[head]
                visits = []
                for row in range(len(mask)):
                    if mask[row][column]:
                        writers = [n for n in write[head] if mask[row][n]]
                        visits.append((row, mask[row][column] == 1, writers.index(column)))
                visits.sort(key=lambda visit: walk(visit, mask, column))
                out.append((head, column, visits))
    return out


@pytest.mark.parametrize("walk", kinds.WALKS)
@pytest.mark.parametrize("seed", range(6))
def test_tickets_are_what_plain_loops_say(walk, seed):
    random = np.random.default_rng(seed)
    masks = int(random.integers(1, 4))
    blocks = drawn(seed, masks)
    heads, flight = masks * int(random.integers(1, 4)), int(random.integers(1, 6))
    columns = blocks.shape[2]
    order = random.permuted(np.tile(np.arange(columns), (heads, 1)), axis=1)
    write = random.permuted(order, axis=1) if seed % 2 else order
    options = {"heads": heads, "heads_in_flight": flight, "walk": walk}
    schedule = kinds.permutation(
        blocks, order=order, write_order=write if seed % 2 else None, **options
    )
    of_head = [blocks[head % masks].tolist() for head in range(heads)]
    want = by_loops(of_head, order.tolist(), write.tolist(), WALKS[walk], min(flight, heads))
    assert list(schedule.tickets()) == want
    for kind in ("left_to_right", "spt", "lpt"):
        order = np.tile(np.arange(columns), (heads, 1))
        if kind == "spt":
            order = order[:, ::-1]
        if kind == "lpt":
            length = (blocks > 0).sum(1)
            order = [np.argsort(-length[head % masks], kind="stable") for head in range(heads)]
        order = [list(map(int, each)) for each in order]
        schedule = kinds.KINDS[kind](blocks, **options)
        assert list(schedule.tickets()) == by_loops(of_head, order, order, WALKS[walk], flight)
        assert schedule.name == kind and check(schedule, blocks).any_residency
        assert schedule.heads_in_flight == min(flight, heads)


def test_a_walk_by_keys_and_a_block_mask_for_its_blocks():
    keys = np.array([[2, 0, 1], [0, 5, 1]])
    schedule = kinds.left_to_right(np.full((3, 2), 2, np.uint8), walk=keys)
    rows = [[row for row, _, _ in visits] for _, _, visits in schedule.tickets()]
    assert rows == [[1, 2, 0], [0, 2, 1]]
    mask = BlockMask.sliding_window(1000, 1000, left=200, right=0, block_size=(64, 128))
    one, other = (kinds.spt(m, heads=5) for m in (mask, mask.dense_blocks()[0, 0]))
    assert one.hash == other.hash and one.block_size == (64, 128) and other.block_size is None


@pytest.mark.parametrize(
    ("shape", "heads", "of_head"),
    [
        ((1, 1), 4, [0, 0, 0, 0]),
        ((2, 1), 6, [0, 0, 0, 1, 1, 1]),
        ((1, 3), 6, [0, 1, 2, 0, 1, 2]),
        ((2, 3), 6, [0, 1, 2, 3, 4, 5]),
        ((2, 3), None, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_which_mask_a_head_uses(shape, heads, of_head):
    """Head index b * H + h: masks of one batch or one head are broadcast."""
    grid = ranks.block_grid(np.ones((*shape, 3, 3), np.uint8), heads)
    assert grid.mask_of.tolist() == of_head

    blocks = drawn(5, masks=2, size=(4, 4))
    schedule = kinds.spt(blocks, heads=6, heads_in_flight=3)
    assert schedule.num_lists == 2 and schedule.list_of_head.tolist() == [0, 1, 0, 1, 0, 1]
    order = [[0, 1, 2, 3]] * 3 + [[3, 2, 1, 0]] * 3
    assert kinds.permutation(blocks[:1], order=order, heads=6).num_lists == 2


def example() -> Schedule:
    return kinds.lpt(drawn(9, masks=2, size=(7, 6)), heads=4, heads_in_flight=2)


def test_hash_covers_launch_visits_ranks_and_masking_and_nothing_else():
    schedule = example()
    order, q_block = (schedule.order.copy(), schedule.q_block.copy())
    order[[0, 1]] = order[[1, 0]]
    q_block[[0, 1]] = q_block[[1, 0]]
    changed = [
        replace(schedule, order=order),
        replace(schedule, q_block=q_block),
        put(schedule, "rank", 0, schedule.rank[0] + 1),
        put(schedule, "partial", 0, ~schedule.partial[0]),
        replace(schedule, num_q_blocks=schedule.num_q_blocks + 1),
    ]
    assert len({schedule.hash, *(each.hash for each in changed)}) == 6
    assert replace(schedule, name="x", block_size=(3, 4), heads_in_flight=1).hash == schedule.hash
    assert example().hash == schedule.hash


@pytest.mark.parametrize("blocks", [drawn(9, masks=2, size=(7, 6)), np.zeros((3, 0), np.uint8)])
def test_a_file_brings_back_the_same_schedule(tmp_path, blocks):
    schedule = replace(kinds.lpt(blocks, heads=4, heads_in_flight=2), block_size=(64, 128))
    schedule.save(tmp_path / "schedule.npz")
    other = Schedule.load(tmp_path / "schedule.npz")
    assert other.hash == schedule.hash
    assert list(other.tickets()) == list(schedule.tickets())
    assert (other.block_size, other.heads_in_flight, other.name) == ((64, 128), 2, "lpt")


@pytest.mark.parametrize("field", ["order", "q_block", "rank", "partial", "offset"])
def test_a_changed_file_is_refused(field, tmp_path):
    path = tmp_path / "schedule.npz"
    example().save(path)
    with np.load(path) as file:
        words = dict(file)
    values = words[field]
    values[-2] = 1 - values[-2] if values.dtype == bool else values[-2] + 1
    np.savez(path, **words)
    with pytest.raises(ScheduleError):
        Schedule.load(path)


def told_schedules() -> list[Schedule]:
    """Shared lists and lists per mask and order, empty columns, no entries, no blocks."""
    out = [example()]
    for seed in range(20):
        blocks = drawn(seed, masks=(1, 2, 3)[seed % 3])
        blocks[:, :, ::3] *= seed % 2
        columns, heads = blocks.shape[2], 6
        orders = np.random.default_rng(seed).permuted(
            np.tile(np.arange(columns), (heads if seed % 5 == 0 else 1, 1)), axis=1
        )
        out.append(kinds.permutation(blocks, order=orders, heads=heads, walk="descending"))
    sizes = (1, 4, 3), (2, 3, 0), (1, 0, 3)
    return out + [kinds.spt(np.zeros(size, np.uint8), heads=2) for size in sizes]


def masks_of(schedule: Schedule) -> tuple[int, ...]:
    """A mask for each set of lists, none the set's own number."""
    return tuple(3 * (schedule.num_lists - s) for s in range(schedule.num_lists))


def assert_told(schedule: Schedule, told) -> None:
    """Check number by number, by loops, that the tensors hold what the arrays hold."""
    *parts, place = told
    parts += [] if place is None else [place]
    ticket, list_of_head, offset, entry, rank = (t.tolist() for t in parts[:5])
    columns, rows = schedule.num_kv_blocks, schedule.num_q_blocks
    assert list_of_head == schedule.list_of_head.tolist() and offset == schedule.offset.tolist()
    assert entry == [
        2 * m + 1 if part else 2 * m
        for m, part in zip(schedule.q_block.tolist(), schedule.partial.tolist(), strict=True)
    ]
    assert rank == schedule.rank.tolist()
    assert len(ticket) == schedule.heads * columns
    for got, (head, n) in zip(ticket, schedule.order.tolist(), strict=True):
        which = list_of_head[head] * columns + n
        assert got == [head, n, offset[which], offset[which + 1]]
    if place is not None:
        want = [
            (masks_of(schedule)[which // columns] * rows + entry[e] // 2) * columns
            + which % columns
            for which in range(len(offset) - 1)
            for e in range(offset[which], offset[which + 1])
        ]
        assert place.tolist() == want
    # Parts of one allocation that kernels load 16 bytes at a time.
    assert len({t.untyped_storage().data_ptr() for t in parts}) == 1
    assert all(t.storage_offset() * t.element_size() % 16 == 0 for t in parts)
    assert told.ticket.data_ptr() % 16 == 0 and told.ticket.shape == (len(ticket), 4)
    assert all(t.is_contiguous() for t in parts)
    assert all(t.dtype == torch.int32 for t in told[:5])


def test_tensors_tell_kernels_the_tickets():
    schedules = told_schedules()
    assert {1, 2, 3} < {s.num_lists for s in schedules}
    assert any((np.diff(s.offset) == 0).any() and len(s.rank) for s in schedules)
    assert any(len(s.order) and not len(s.rank) for s in schedules)
    for schedule in schedules:
        with_places = schedule.tensors("cpu", masks_of(schedule))
        without = schedule.tensors("cpu")
        assert_told(schedule, with_places)
        assert_told(schedule, without)
        assert with_places.place is not None and without.place is None


#: What is replaced in schedule.py, by what.
WRONG = {
    "every head reads the first head's lists": ("_flat_index", lambda pairs, columns: pairs >> 32),
    "the list of the ticket before": (
        "_flat_index",
        lambda pairs, columns: np.roll(pairs % 2**32 * columns + (pairs >> 32), 1),
    ),
    "parts without gaps": ("_PIECE", 1),
    "places in another table": ("Schedule.num_q_blocks", property(lambda s: len(s.offset) + 1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_tell_otherwise_are_seen(monkeypatch, name):
    chosen = [s for s in told_schedules() if s.num_lists > 1 and s.num_q_blocks > 1 and len(s.rank)]
    fresh = [replace(s) for s in chosen]
    where, what = WRONG[name]
    with monkeypatch.context() as patch:
        patch.setattr(f"cute_kernels.schedulers.order.schedule.{where}", what, raising=False)
        tensors = [s.tensors("cpu", masks_of(s) if "places" in name else None) for s in fresh]
    seen = 0
    for schedule, one in zip(chosen, tensors, strict=True):
        try:
            assert_told(schedule, one)
        except AssertionError:
            seen += 1
    assert seen > len(chosen) / 2


def test_tensors_are_one_copy_and_nothing_is_read_back():
    """On the meta device an element that is asked for raises."""
    schedule = example()
    for masks in (None, masks_of(schedule)):
        with Seen() as seen:
            tensors = schedule.tensors("meta", masks)
        assert sum("copy" in name for name in seen.names) == 1
        assert all(t is None or t.is_meta for t in tensors)
        assert [t.shape for t in tensors[:5]] == [t.shape for t in schedule.tensors("cpu")[:5]]


def test_ranks_are_built_where_the_blocks_are():
    """On the meta device nothing can be read back: no element leaves the device."""
    blocks = torch.empty(2, 5, 4, dtype=torch.uint8, device="meta")
    out = ranks.ranks(blocks, torch.arange(4, device="meta")[None])
    assert out.device.type == "meta" and out.shape == (2, 5, 4) and out.dtype == torch.int32


def test_tensors_are_the_callers():
    """Writing to them changes neither the schedule nor what it tells next; no mode does."""
    schedule = example()
    with torch.device("meta"):
        assert_told(schedule, schedule.tensors("cpu"))
    for tensor in schedule.tensors("cpu", masks_of(schedule)):
        tensor += 7
    assert_told(schedule, schedule.tensors("cpu", masks_of(schedule)))
