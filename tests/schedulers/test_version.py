"""``VERSION`` goes up whenever some mask gets another schedule; the stored hashes say when."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels import schedulers
from cute_kernels.schedulers.model import selection
from cute_kernels.schedulers.order import kinds
from cute_kernels.schedulers.version import VERSION
from tests.schedulers.usual import usual_masks

STORED = Path(__file__).parents[1] / "golden" / "schedules.json"
BLOCK = (128, 128)
#: (length, heads, machine, query heads to each): the attention's machines, short and long launches.
LAUNCHES = (
    (1024, 4, "cute_sm90_d64", 1),
    (2048, 16, "cute_sm90_d128", 1),
    (2048, 3, "cute_sm90_d64", 4),
    (4096, 32, "cute_sm90_d128", 1),
    (4096, 8, "cute_sm90_d128", 4),
    (2048, 16, "cute_sm90_d192", 1),
    (2048, 8, "cute_sm90_d256", 4),
)


def schedules() -> Iterator[tuple[str, str]]:
    """Case and hash, of what is selected and of every kind."""
    selection._cache.clear()
    for name, mask in usual_masks(1024, BLOCK).items():
        for kind, make in kinds.KINDS.items():
            yield f"{kind} {name}", make(mask, heads=3).hash
    for length, heads, machine, group in LAUNCHES:
        for name, mask in usual_masks(length, BLOCK).items():
            schedule = selection.select(mask, heads=heads, machine=machine, group=group).schedule
            yield f"select {name}, {length} x {heads} x {group}, {machine}", schedule.hash


def changed() -> Iterator[str]:
    """Missing cases, new ones, and those whose schedule is not the stored one of this version."""
    stored = json.loads(STORED.read_text())
    assert stored["version"] == VERSION, f"store the hashes again: python -m {__name__}"
    left = dict(stored["schedules"])
    for case, digest in schedules():
        if digest != left.pop(case, None):
            yield case
    yield from left


def test_schedules_are_those_of_the_version():
    assert list(changed()) == [], f"raise VERSION, then store the hashes: python -m {__name__}"


#: (what is replaced, its name, by what).
MUTANTS = {
    "another kind": (kinds.KINDS, "lpt", kinds.KINDS["spt"]),
    "other tails": (selection, "NEAR", 1.1),
    "a wider choice": (selection, "CLOSE", 1.5),
    "a walk less": (selection, "WALKS", selection.WALKS[:2]),
}


@pytest.mark.parametrize(
    "name",
    [*list(MUTANTS)[:2], *(pytest.param(m, marks=pytest.mark.nightly) for m in list(MUTANTS)[2:])],
)
def test_a_selection_that_changed_is_seen(monkeypatch, name):
    owner, key, value = MUTANTS[name]
    (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, key, value)
    assert any(changed())


def test_public_names_are_what_they_say():
    """And no submodule has the name of one, else its import would put it in the other's place."""
    for name, home in schedulers.HOMES.items():
        module = importlib.import_module(f"cute_kernels.schedulers.{home}")
        assert getattr(schedulers, name) is getattr(module, name), name
    files = {path.stem for path in Path(schedulers.__file__).parent.glob("*.py")}
    assert not files & set(schedulers.__all__)


if __name__ == "__main__":
    words = {"version": VERSION, "schedules": dict(schedules())}
    STORED.write_text(json.dumps(words, indent=1) + "\n")
