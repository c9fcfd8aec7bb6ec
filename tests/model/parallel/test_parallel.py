"""Whole models cut over 1, 2, 4 and 8 ranks: the bytes of one, in training and in generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.model.parallel import cases, rank
from tests.ranks import Pool, run

#: What every rank imports, once, before the ranks are forked.
IMPORTED = "tests.model.parallel.imported"
PARTS = [
    pytest.param(when, world, part, marks=[pytest.mark.nightly] * (when != "every commit"))
    for when, groups in rank.STARTS.items()
    for world, parts in groups.items()
    for part in parts
]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    """Groups of ranks by size; one is forked at its first call."""
    groups = {world: Pool(world, IMPORTED) for world in cases.WORLDS}
    yield groups
    for group in groups.values():
        group.close()


@pytest.mark.parametrize(
    ("when", "world", "part"), PARTS, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_every_rank_is_right(pools: dict[int, Pool], when: str, world: int, part: Callable):
    """See the docstring of each part."""
    if when == "by transformers":  # by names in the environment: processes of its own
        pytest.importorskip("accelerate", reason="transformers cuts models by accelerate")
        wrong = run(world, cases.call, part)
    else:
        wrong = pools[world].run(cases.call, part)
    assert wrong == [[]] * world
