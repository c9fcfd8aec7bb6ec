"""Whole models cut over 1, 2, 4 and 8 ranks: the bytes of one, in training and in generation."""

from __future__ import annotations

import functools

import pytest

from tests.model.parallel import cases, rank
from tests.ranks import pool, run

PARTS = [
    pytest.param(when, part, marks=[pytest.mark.nightly] * (when != "every commit"))
    for when, parts in rank.STARTS.items()
    for part in parts
]
ranks = pool(cases.WORLD)


@pytest.mark.parametrize(("when", "part"), PARTS, ids=lambda v: getattr(v, "__name__", ""))
def test_every_rank_is_right(ranks, when, part):
    """See the docstring of each part."""
    call = ranks.run
    if when == "by transformers":  # by names in the environment
        pytest.importorskip("accelerate", reason="transformers cuts models by accelerate")
        call = functools.partial(run, cases.WORLD)
    elif when == "eight":
        call = functools.partial(run, 8)
    wrong = call(cases.call, part)
    assert wrong == [[]] * len(wrong)
