"""The lists of mHC's bench: which cases are in them, and that ours runs each one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from perf.mhc import cases
from perf.mhc.rivals import RIVALS

ALL = list(dict.fromkeys(case for make in cases.LISTS.values() for case in make()))
#: The same cases at a size that a CPU runs.
TINY = list(dict.fromkeys(dataclasses.replace(case, tokens=5, channels=24) for case in ALL))


def test_a_case_has_one_name():
    """A record is found by its product and shape."""
    assert len({(case.product, case.label) for case in ALL}) == len(ALL)


def test_lists_have_what_they_are_for():
    kinds = cases.of_kinds()
    assert {case.n for case in kinds} == set(cases.STREAMS)
    assert {case.dtype for case in kinds} == set(cases.DTYPES)
    assert {case.layout for case in kinds} == set(cases.LAYOUTS)
    assert {case.op for case in kinds} == {*cases.OPS, *cases.MORE_OPS, *cases.FORWARD_OPS}
    assert {case.tokens for case in cases.of_few_tokens()} == set(cases.FEW_TOKENS)


@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.product} {case.label}")
def test_ours_runs_each_case(case):
    inputs = case.inputs(0, "cpu")
    results = RIVALS["ours"].start[case.product](case)(inputs)
    assert results and all(t.isfinite().all() for t in results if isinstance(t, torch.Tensor))
