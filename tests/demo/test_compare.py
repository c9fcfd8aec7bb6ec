"""Tests of compare.py, which counts bits, not values."""

from __future__ import annotations

import math

import pytest
import torch

from cute_kernels.demo.compare import Tally, tally
from cute_kernels.errors import ShapeError


def test_the_sign_of_zero_and_the_last_bit_count():
    left = torch.tensor([0.0, 1.0, 2.0])
    right = torch.tensor([-0.0, 1.0, 2.0 + 2.0**-22])
    assert tally([left], [right]) == Tally(3, 2, 12, 2, 2.0**-22)


def test_equal_nans_are_equal_and_others_are_not():
    nan = torch.tensor([math.nan, 1.0], dtype=torch.bfloat16)
    assert tally([nan], [nan.clone()]) == Tally(2, 0, 4, 0, 0.0)
    assert tally([nan], [nan.flip(0)]).largest == math.inf


def test_tallies_add_up():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    both = tally([a, a], [b, a])
    assert both == tally([a], [b]) + tally([a], [a])
    assert (both.numbers, both.differing, both.largest) == (4, 1, 2.0)


def test_shapes_and_dtypes_must_agree():
    with pytest.raises(ShapeError, match=r"right: expected torch\.float32"):
        tally([torch.zeros(4)], [torch.zeros(1)])
    with pytest.raises(ShapeError, match="bfloat16"):
        tally([torch.zeros(4)], [torch.zeros(4, dtype=torch.bfloat16)])
    with pytest.raises(ValueError):
        tally([torch.zeros(4)], [])
