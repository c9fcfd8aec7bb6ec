"""Masks on a diagonal, made of their lists, against the exact mask of the same elements."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.schedulers.masks import diagonal as made
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.masks.rules import Band, tensor_bytes
from tests.anchors import replaced

BLOCK = (16, 16)
#: Causal, windows narrower and wider than a block, one token, both sides.
BANDS = [(None, 0), (-5, 0), (-40, 0), (0, 0), (-20, 30)]


def parts_of(lengths: list[int], band: Band) -> tuple[list[tuple[int, made.Lists]], int]:
    """(parts, rows in all): each from a multiple of a block on, with the rows behind it."""
    begins = np.cumsum([0, *(-(-n // BLOCK[0]) * BLOCK[0] for n in lengths[:-1])])
    end = int(begins[-1] + lengths[-1])
    sizes = np.diff(begins, append=end).tolist()
    masks = [BlockMask.from_rule(band, n, n, block_size=BLOCK, device="cpu") for n in sizes]
    firsts = (begins // BLOCK[0]).tolist()
    return list(zip(firsts, map(made.lists_of, masks), strict=True)), end


def dense_of(lengths: list[int], band: Band) -> torch.Tensor:
    """A band in each sequence's own blocks."""
    parts, end = parts_of(lengths, band)
    ends = [first * BLOCK[0] for first, _ in parts[1:]] + [end]
    row = torch.arange(end)
    own = torch.searchsorted(torch.tensor(ends), row, right=True)
    distance = row - row[:, None]
    allowed = own == own[:, None]
    if band.lo is not None:
        allowed &= distance >= band.lo
    return allowed & (distance <= band.hi)


def check(lengths: list[int], band: Band) -> None:
    """The elements, and lists that are exact: those of the same mask made by looking at it."""
    parts, end = parts_of(lengths, band)
    out, want = made.diagonal(parts, end, BLOCK, band), dense_of(lengths, band)
    assert torch.equal(out.to_dense()[0, 0], want)
    exact = BlockMask.from_dense(want, block_size=BLOCK)
    assert out.block_hash() == exact.block_hash()
    for actual, theirs in zip(out.lists("q"), exact.lists("q"), strict=True):
        assert torch.equal(actual, theirs)
    # The rule alone says it too: other blocks are cut from it.
    assert torch.equal(out.reblock(32).to_dense()[0, 0], want)


@settings(deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.sampled_from(BANDS))
def test_elements_and_lists(lengths, band):
    check(lengths, Band(*band))


MUTANTS = {
    "blocks_not_moved": ("index + first[:, None]", "index"),
    "places_behind_a_count": (
        "np.where(listed, index + first[:, None], 0)",
        "index + first[:, None]",
    ),
    "sides_exchanged": ("lists[side]", "lists[1 - side]"),
    "no_pattern": ("all_of(mask_bits.pattern(grid, (1, 1), *listed), rule)", "rule"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name):
    source = Path(made.__file__).read_text()
    old, new = MUTANTS[name]
    mutant = dict(vars(made))
    exec(compile(replaced({"": source}, old, new)[""], made.__file__, "exec"), mutant)
    with mock.patch.object(made, "diagonal", mutant["diagonal"]), pytest.raises(AssertionError):
        check([20, 5, 40], Band(-40, 0))


def test_one_element_of_any_stride_has_a_digest():
    """A tensor of one element is contiguous whatever its stride, and then no view of bytes."""
    wide = torch.tensor([[7, 8], [9, 10]], dtype=torch.int32)[:1, 0]
    assert wide.stride() == (2,) and wide.is_contiguous()
    assert tensor_bytes(wide) == tensor_bytes(torch.tensor([7], dtype=torch.int32))
