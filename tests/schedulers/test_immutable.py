"""Masks and schedules hold what they were made from: nothing that a caller can write to later."""

from __future__ import annotations

import copy
import pickle
import tempfile
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import rules
from cute_kernels.schedulers.model.selection import select
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.order import schedule as module
from cute_kernels.schedulers.order.schedule import ARRAYS, Schedule

S = 96
SIZE = {"block_size": 32}


def given() -> dict[str, torch.Tensor]:
    """Tensors that a caller keeps and writes to: of the dtypes that need no conversion too."""
    generator = torch.Generator().manual_seed(3)
    chosen = torch.tensor([[[[0, 1, 0], [0, 2, 0], [1, 2, 0]]]], dtype=torch.int32)
    dense = torch.rand(S, S, generator=generator) < 0.5
    dense[:32, :32] = True
    return {
        "prefix": torch.tensor([40, 7], dtype=torch.int32),
        "ids": torch.randint(0, 4, (2, S), generator=generator, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 50, S], dtype=torch.int32),
        "dense": dense,
        "count": torch.tensor([[[2, 2, 2]]], dtype=torch.int32),
        "index": chosen,
    }


def ours(t: dict[str, torch.Tensor]) -> BlockMask:
    """The plain constructor, of a caller's copies of another mask's lists."""
    mask = BlockMask.prefix_lm(S, S, prefix=t["prefix"], **SIZE)
    names = [
        field.name for field in fields(mask) if isinstance(vars(mask)[field.name], torch.Tensor)
    ]
    t |= {name: getattr(mask, name).clone() for name in names}
    return replace(mask, **{name: t[name] for name in names}, rule=rules.Prefix(t["prefix"]))


def causal() -> BlockMask:
    return BlockMask.causal(S, S, **SIZE)


MAKERS = {
    "prefix_lm": lambda t: BlockMask.prefix_lm(S, S, prefix=t["prefix"], **SIZE),
    "prefix_lm of a NumPy array": lambda t: BlockMask.prefix_lm(
        S, S, prefix=torch.from_numpy(t["prefix"].numpy()), **SIZE
    ),
    "document": lambda t: BlockMask.document(t["ids"], **SIZE),
    "document of one batch": lambda t: BlockMask.document(t["ids"][0], **SIZE),
    "cu_seqlens": lambda t: BlockMask.document(cu_seqlens=t["cu_seqlens"], **SIZE),
    "from_dense": lambda t: BlockMask.from_dense(t["dense"], **SIZE),
    "from_dense in one block": lambda t: BlockMask.from_dense(t["dense"], block_size=128),
    "from_blocks": lambda t: BlockMask.from_blocks(t["count"], t["index"], S, S, **SIZE),
    "from_blocks with a rule": lambda t: BlockMask.from_blocks(
        t["count"], t["index"], S, S, rule=rules.Prefix(t["prefix"]), **SIZE
    ),
    "from_rule": lambda t: BlockMask.from_rule(rules.Prefix(t["prefix"]), S, S, **SIZE),
    "and": lambda t: MAKERS["prefix_lm"](t) & BlockMask.document(t["ids"], **SIZE),
    "or": lambda t: BlockMask.document(t["ids"], **SIZE) | causal(),
    "reblock": lambda t: BlockMask.from_dense(t["dense"], **SIZE).reblock(16),
    "BlockMask": ours,
}


def parts(mask: BlockMask) -> list[torch.Tensor]:
    return [*mask.lists("kv"), *mask.lists("q"), *mask.rule.tensors()]


def keeps_its_elements(name):
    """The elements and the hash, of today's tensors and not the one kept, stay."""
    tensors = given()
    mask = MAKERS[name](tensors)
    dense, hash_before = mask.to_dense(), mask.hash()
    assert hash_before == MAKERS[name](given()).hash() and 0 < int(dense.sum()) < dense.numel()
    for tensor in tensors.values():
        tensor.copy_(tensor.logical_not() if tensor.dtype == torch.bool else tensor * 0 + 1)
    again = replace(mask)
    assert again.hash() == mask.hash() == hash_before and "_digests" in vars(mask)
    assert torch.equal(again.to_dense(), dense)
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert not memory & {tensor.untyped_storage().data_ptr() for tensor in parts(mask)}


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_mask_was_made_from_may_change_afterwards(monkeypatch, name):
    keeps_its_elements(name)
    if name in ("prefix_lm", "from_blocks with a rule", "BlockMask"):
        monkeypatch.setattr(BlockMask, "_copy_tensors", lambda self: None)
        with pytest.raises((AssertionError, ValueError)):
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
    "copied in a selection": lambda schedule: (
        copy.deepcopy(replace(select(BLOCKS), schedule=schedule)).schedule
    ),
    "from a file": from_a_file,
}


@pytest.mark.parametrize("name", COPIES)
def test_no_array_of_a_schedule_can_be_written_to(name):
    schedule = made()
    hash_before = schedule.hash
    schedule.tensors("cpu")
    other = COPIES[name](schedule)
    tensors = other.tensors("cpu")
    shared = kinds.spt(BLOCKS).list_of_ticket  # one set of lists: the list of a ticket is a column
    for array in (*(getattr(other, array) for array in ARRAYS), other.list_of_ticket, shared):
        while isinstance(array, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
            with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
                array.setflags(write=True)
            array = array.base
        assert isinstance(array, bytes)
    assert replace(other).hash == other.hash == hash_before
    assert [t.tolist() for t in tensors[:5]] == [t.tolist() for t in made().tensors("cpu")[:5]]


def read_only(ranks: np.ndarray) -> np.ndarray:
    view = ranks[:]
    view.setflags(write=False)
    return view


#: Ways to keep a hand on ranks: what is given, of what can be written to.
VIEWS = {
    "written": lambda ranks: ranks,
    "read-only": read_only,
    "strided": lambda ranks: ranks[: len(made().rank) * 2 : 2],
    "from torch": lambda ranks: torch.from_numpy(ranks).numpy(),
    "memory of a buffer": lambda ranks: np.frombuffer(memoryview(ranks), np.int32),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_a_schedule_was_made_from_may_change_afterwards(name):
    whole = np.repeat(made().rank, 2) if name == "strided" else made().rank.copy()
    view = VIEWS[name](whole)
    schedule = replace(made(), rank=view)
    assert schedule.hash == made().hash
    whole += 5
    assert view[0] != made().rank[0]
    assert replace(schedule).hash == made().hash


@pytest.mark.parametrize("mutant", [lambda array: array, read_only])
def test_a_schedule_that_keeps_the_callers_array_is_seen(monkeypatch, mutant):
    monkeypatch.setattr(module, "frozen", mutant)
    with pytest.raises(AssertionError):
        test_what_a_schedule_was_made_from_may_change_afterwards("written")
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_no_array_of_a_schedule_can_be_written_to("pickled")


def test_a_changed_pickle_is_looked_at():
    """Unpickling makes a schedule as the constructor does."""
    class_, values = made().__reduce__()
    wrong = [value.astype(np.int64) if isinstance(value, np.ndarray) else value for value in values]
    with pytest.raises(ValueError, match="order: expected a int32 array"):
        class_(*wrong)
