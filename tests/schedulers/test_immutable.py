"""Masks and schedules hold what they were made from: nothing that a caller can write to later."""

from __future__ import annotations

import copy
import pickle
import tempfile
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from cute_kernels.schedulers.model.selection import select
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order import schedule as module
from cute_kernels.schedulers.order.schedule import ARRAYS, Schedule
from tests.schedulers.masks.made import MAKERS, given, keeps_its_elements


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_mask_was_made_from_may_change_afterwards(name):
    keeps_its_elements(name)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_a_copied_mask_is_another_with_the_same_hash(copied):
    mask = MAKERS["and"](given())
    hash_before = mask.hash()
    object.__setattr__(mask, "_lowered", "what a backend keeps")
    other = copied(mask)
    assert set(vars(other)) == {field.name for field in fields(mask)}
    assert other.hash() == hash_before and torch.equal(other.to_dense(), mask.to_dense())
    other.q_index.fill_(0)
    assert replace(mask).hash() == hash_before


# ---- schedules ----------------------------------------------------------------------------------

BLOCKS = np.array([[2, 0, 1], [2, 2, 0], [1, 2, 2], [0, 1, 2]], np.uint8)


def made() -> Schedule:
    return kinds.lpt(np.stack((BLOCKS, BLOCKS[::-1])), heads=4, heads_in_flight=2)


def from_a_file(schedule: Schedule) -> Schedule:
    with tempfile.TemporaryDirectory() as folder:
        schedule.save(f"{folder}/schedule.npz")
        return Schedule.load(f"{folder}/schedule.npz")


COPIES = {
    "made": lambda schedule: schedule,
    "pickled": lambda schedule: pickle.loads(pickle.dumps(schedule)),
    "pickled by protocol 2": lambda schedule: pickle.loads(pickle.dumps(schedule, 2)),
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "copied in a selection": lambda schedule: (
        copy.deepcopy(replace(select(BLOCKS), schedule=schedule)).schedule
    ),
    "replaced": replace,
    "from a file": from_a_file,
}


@pytest.mark.parametrize("name", COPIES)
def test_no_array_of_a_schedule_can_be_written_to(name):
    schedule = made()
    hash_before = schedule.hash
    schedule.tensors("cpu")
    other = COPIES[name](schedule)
    tensors = other.tensors("cpu")
    for array in (*(getattr(other, array) for array in ARRAYS), other.list_of_ticket):
        while isinstance(array, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
            with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
                array.setflags(write=True)
            array = array.base
        assert isinstance(array, bytes)
    assert replace(other).hash == other.hash == hash_before
    assert [t.tolist() for t in tensors[:5]] == [t.tolist() for t in made().tensors("cpu")[:5]]


def test_a_schedule_made_from_one_list_of_one_head_is_no_exception():
    """Where all heads share one set of lists, the list of a ticket is its column."""
    for schedule in (kinds.spt(BLOCKS), kinds.spt(np.zeros((3, 0), np.uint8))):
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            schedule.list_of_ticket.setflags(write=True)


def aliases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(what is given, what it is a view of) of ranks: each a way to keep a hand on them."""
    whole = {
        name: np.concatenate((made().rank, made().rank))
        for name in ("written", "read-only", "strided", "from torch", "memory of bytes")
    }
    count = len(made().rank)
    view = whole["read-only"][:count]
    view.setflags(write=False)
    spread = np.repeat(whole["strided"], 2)
    buffer = bytearray(made().rank.tobytes())
    tensor = torch.from_numpy(whole["from torch"])
    return {
        "written": (whole["written"][:count], whole["written"]),
        "read-only": (view, whole["read-only"]),
        "strided": (spread[: 2 * count : 2], spread),
        "from torch": (tensor.numpy()[:count], tensor.numpy()),
        "memory of bytes": (np.frombuffer(buffer, np.int32), np.frombuffer(buffer, np.int32)),
    }


@pytest.mark.parametrize("name", aliases())
def test_what_a_schedule_was_made_from_may_change_afterwards(name):
    view, whole = aliases()[name]
    schedule = replace(made(), rank=view)
    assert schedule.hash == made().hash
    whole += 5
    assert view[0] != made().rank[0]
    assert replace(schedule).hash == made().hash


def test_a_schedule_that_keeps_the_callers_array_is_seen(monkeypatch):
    """The mutants: arrays kept, and arrays that are only flagged."""

    def flagged(array):
        array = array.view()
        array.setflags(write=False)
        return array

    for mutant in (lambda array: array, flagged):
        monkeypatch.setattr(module, "frozen", mutant)
        with pytest.raises(AssertionError):
            test_what_a_schedule_was_made_from_may_change_afterwards("written")
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            test_no_array_of_a_schedule_can_be_written_to("pickled")


def test_a_mapped_file_may_change_afterwards(tmp_path):
    made().rank.tofile(tmp_path / "ranks")
    ranks = np.memmap(tmp_path / "ranks", np.int32, "r+")
    schedule = replace(made(), rank=ranks)
    ranks += 5
    assert replace(schedule).hash == made().hash


def test_a_changed_pickle_is_looked_at():
    """Unpickling makes a schedule as the constructor does."""
    class_, values = made().__reduce__()
    wrong = [value.astype(np.int64) if isinstance(value, np.ndarray) else value for value in values]
    with pytest.raises(ValueError, match="order: expected a int32 array"):
        class_(*wrong)
