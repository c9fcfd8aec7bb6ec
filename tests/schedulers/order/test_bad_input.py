"""Refusals of bad calls: one exception that names the argument, before anything is built."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.errors import ScheduleError
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.model.machines import machine
from cute_kernels.schedulers.model.selection import select
from cute_kernels.schedulers.model.simulation import simulate
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order.schedule import Schedule

BLOCKS = np.array([[2, 0, 1], [2, 2, 0], [1, 2, 2], [0, 1, 2]], np.uint8)
MASK = BlockMask.causal(512, 512, block_size=128)


def made() -> Schedule:
    return kinds.spt(BLOCKS, heads=2)


def permuted(order, **more):
    return lambda: kinds.permutation(BLOCKS, order=order, **more)


def changed(**fields):
    return lambda: replace(made(), **fields)


def stored(**words):
    """A schedule's file with other words, or other arrays."""

    def load():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "schedule.npz"
            made().save(path)
            with np.load(path) as file:
                arrays = dict(file)
            header = json.loads(str(arrays["words"]))
            header |= {name: value for name, value in words.items() if name not in arrays}
            arrays["words"] = np.array(json.dumps(header))
            arrays |= {name: np.array(value) for name, value in words.items() if name in arrays}
            np.savez(path, **arrays)
            return Schedule.load(path)

    return load


CASES = {
    # Permutations
    "order with a repeat": (permuted([0, 1, 1]), r"order \(head 0\): .*got column 1 twice"),
    "order out of range": (permuted([0, 1, 3]), r"order \(head 0\): .* of 0\.\.2, got 3"),
    "order too short": (permuted([0, 1]), r"order: expected shape \[3\] or \[1, 3\], got \[2\]"),
    "order of floats": (permuted([0.0, 1.0, 2.0]), r"order: expected integers, got float64"),
    "order a ragged list": (permuted([[0, 1, 2], [0]], heads=2), r"order: .*a ragged list"),
    "order for other heads": (
        permuted([[0, 1, 2]] * 2, heads=3),
        r"order: expected 1 or 3 heads, got 2 rows",
    ),
    "order with a repeat in one head": (
        permuted([[0, 1, 2], [2, 2, 0]], heads=2),
        r"order \(head 1\): .*got column 2 twice",
    ),
    "write order not a permutation": (
        permuted([0, 1, 2], write_order=[0, 0, 2]),
        r"write_order \(head 0\): .*got column 0 twice",
    ),
    # Heads
    "no heads": (lambda: kinds.spt(BLOCKS, heads=0), r"heads: expected an int >= 1, got 0"),
    "heads not a multiple of the masks": (
        lambda: kinds.spt(np.stack([BLOCKS] * 3), heads=4),
        r"heads: expected a multiple of the mask's 1 x 3",
    ),
    "heads unlike batch x heads of the mask": (
        lambda: kinds.spt(np.stack([BLOCKS] * 4).reshape(2, 2, 4, 3), heads=8),
        r"heads: expected 4, one for each of the mask's 2 x 2 pairs, got 8",
    ),
    "no heads in flight": (
        lambda: kinds.spt(BLOCKS, heads=2, heads_in_flight=0),
        r"heads_in_flight: expected an int >= 1, got 0",
    ),
    # Masks
    "blocks of a wrong dtype": (
        lambda: kinds.spt(BLOCKS.astype(np.int64)),
        r"block_mask: expected a BlockMask or uint8 blocks, got int64",
    ),
    "blocks a list": (lambda: kinds.spt(BLOCKS.tolist()), r"block_mask: .*got list"),
    "blocks above 2": (lambda: kinds.spt(BLOCKS * 2), r"block_mask: .*of 0, 1 or 2, got 4"),
    "blocks of one dimension": (lambda: kinds.spt(BLOCKS[0]), r"block_mask: .*got \[3\]"),
    "a group of none": (
        lambda: select(BLOCKS, heads=2, group=0),
        r"group: expected an int >= 1, got 0",
    ),
    # Walks
    "walk unknown": (lambda: kinds.spt(BLOCKS, walk="sideways"), r"walk: expected one of 'asc"),
    "walk keys of a wrong shape": (
        lambda: kinds.spt(BLOCKS, walk=np.zeros((4, 3), int)),
        r"walk: expected keys of shape \[4\] or \[3, 4\], got \[4, 3\]",
    ),
    # Machines
    "no slots": (lambda: machine(slots=0), r"machine.slots: expected an int >= 1, got 0"),
    "a negative time": (
        lambda: machine(handoff_ns=-1),
        r"machine.handoff_ns: expected an int >= 0, got -1",
    ),
    "compute of no time": (lambda: machine(full_ns=0), r"machine.full_ns: expected an int >= 1"),
    "an unknown machine": (lambda: machine("b300"), r"machine: expected one of 'h200_d128'"),
    "an unknown constant": (lambda: machine(latency=3), r"machine constant: expected one of"),
    "a tile of nothing": (lambda: machine(tile=(0, 128)), r"machine.tile: expected"),
    "not a machine": (lambda: simulate(made(), 132), r"machine: expected a Machine or a name"),
    "fewer slots than needed": (
        lambda: simulate(kinds.shift(np.full((3, 3), 2, np.uint8)), machine(slots=2)),
        r"machine.slots: expected at least 3, which schedule 'shift' needs, got 2",
    ),
    # Schedules given as data
    "order of int64": (changed(order=made().order.astype(np.int64)), r"order: expected a int32"),
    "rank a list": (changed(rank=[0, 1]), r"rank: expected a int32 array of 1 dim.*got list"),
    "ranks too few": (changed(rank=made().rank[1:]), r"rank: expected shape \[9\] like q_block"),
    "order of three": (
        changed(order=np.zeros((6, 3), np.int32)),
        r"order: expected shape \[tickets, 2\], got \[6, 3\]",
    ),
    "heads unlike the lists": (changed(heads=3), r"list_of_head: expected shape \[3\], got \[2\]"),
    "list out of range": (
        changed(list_of_head=np.array([0, 1], np.int32)),
        r"list_of_head: expected values in \[0, 1\)",
    ),
    "offsets falling": (
        changed(offset=np.array([0, 5, 3, 9], np.int32)),
        r"offset: expected \[S \* 3 \+ 1\] values rising from 0 to 9",
    ),
    "columns below zero": (changed(num_kv_blocks=-3), r"num_kv_blocks: expected an int >= 0"),
    "words of something else": (stored(words="[1, 2]"), r"expected a schedule"),
    "a format of another time": (stored(format="x 9"), r"expected a schedule in format"),
    "a rank that is no number": (stored(rank=["x"] * 9), r"rank: expected int32 values"),
    "a rank beyond 32 bits": (stored(rank=[2**40] * 9), r"expected hash"),
    "a hash of something else": (stored(hash="0" * 64), r"expected hash 0000"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named(name):
    call, message = CASES[name]
    with pytest.raises(ScheduleError, match=message):
        call()


def test_a_file_that_is_not_a_schedule(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, rank=np.arange(3))
    with pytest.raises(ScheduleError, match=r"path: expected a schedule's \.npz file"):
        Schedule.load(path)
    made().save(path)
    whole = path.read_bytes()
    for damaged in (b"not a file of arrays", whole[:-40], whole[:200] + b"\0" * 40 + whole[240:]):
        path.write_bytes(damaged)
        with pytest.raises(ScheduleError, match=r"path: expected a schedule's \.npz file"):
            Schedule.load(path)
