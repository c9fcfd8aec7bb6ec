"""The battery: bits of a token do not depend on the others, nor sums on the cuts of the stream."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.mhc.config import TOKENS
from tests import contract
from tests.mhc import calls
from tests.mhc.cases import BF16, FP32, Case

SEED = 23
VARIANTS = {"fp32": calls.case_of(FP32, 4, "cn"), "bf16": calls.case_of(BF16, 2, "nc")}
OTHERS = {
    f"{n} {layout} {dtype}": calls.case_of(dtype, n, layout, 40)
    for n in (2, 4)
    for layout in ("cn", "nc")
    for dtype in (FP32, BF16)
}


def each_in_one_variant():
    """Every row op in one of the variants, in turn; in the others by night."""
    for index, name in enumerate(calls.CALLS):
        for number, variant in enumerate(VARIANTS):
            often = index % len(VARIANTS) == number
            yield pytest.param(name, variant, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize(("name", "variant"), list(each_in_one_variant()))
def test_rows(name, variant):
    """Results and gradients of a token, in any surroundings and any strides."""
    assert contract.check_rows(calls.row_op(name, VARIANTS[variant]), 40, SEED) > 50


@pytest.mark.nightly
@pytest.mark.parametrize("variant", OTHERS)
@pytest.mark.parametrize("name", calls.CALLS)
def test_rows_of_every_kind(name, variant):
    contract.check_rows(calls.row_op(name, OTHERS[variant]), 140, SEED + 1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", calls.CALLS)
def test_any_number_of_rows(name):
    """Around the chunk of the sums over tokens, too."""
    op = calls.row_op(name, calls.case_of(FP32, c=4))
    sizes = [*range(1, 130), 255, 257, TOKENS - 1, TOKENS, TOKENS + 1, 2 * TOKENS + 3]
    contract.check_population(op, 2 * TOKENS + 3, SEED, sizes)


@pytest.mark.parametrize("name", calls.CALLS)
def test_wide_rows(name):
    """More than one chunk of channels."""
    op = calls.row_op(name, calls.case_of(BF16, c=600))
    contract.check_population(op, 20, SEED, (1, 2, 3, 7, 16, 17))


def test_a_team_of_threads():
    """The other tests of this folder have one thread (conftest.py); a row's bits hold for any."""
    torch.set_num_threads(2)
    try:
        op = calls.row_op("post_pre", calls.case_of(FP32, c=300))
        contract.check_population(op, 60, SEED, (1, 2, 17, 59))
    finally:
        torch.set_num_threads(1)


SHORT = 3 * TOKENS + 137


def stream(dtype: torch.dtype, tokens: int = SHORT, n: int = 2, layout: str = "cn") -> Case:
    return calls.case_of(dtype, n, layout, 3)._replace(m=tokens)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", calls.WEIGHED)
def test_splits(name, dtype):
    """phi, norm_weight, alpha, beta and bias into main_grads, cut at multiples of 1024 tokens."""
    assert contract.check_splits(calls.sum_op(name, stream(dtype)), SEED) >= 6


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["cn", "nc"])
@pytest.mark.parametrize("name", calls.WEIGHED)
def test_splits_of_long_streams(name, layout):
    case = stream(FP32, 9 * TOKENS + 1, 4, layout)
    contract.check_splits(calls.sum_op(name, case), SEED)


@pytest.mark.parametrize("name", calls.WEIGHED)
def test_a_cut_elsewhere_shows(name):
    """The control: cuts that are no multiples of 1024 are outside the promise, and differ."""
    op = calls.sum_op(name, stream(FP32, TOKENS + 40))
    want = op.run(op.start, [slice(0, op.tokens)])
    got = op.run(op.start, [slice(0, 700), slice(700, op.tokens)])
    assert not contract.same_bytes(got, want)
    assert (got - want).abs().max() < 1e-3 * want.abs().max()
