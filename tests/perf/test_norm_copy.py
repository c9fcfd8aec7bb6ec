"""The copy that norms are measured beside: as many bytes as the case moves, and no result."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from perf.norm import cases
from perf.norm.rivals import RIVALS

SMALL = cases.cases(list(cases.OPS), [(24, 64)])


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.product)
def test_a_copy_moves_the_bytes_of_its_case(case):
    call = RIVALS["copy"].start[case.product](case)
    moved, copy_ = [], torch.Tensor.copy_

    def counted(to, source):
        moved.append(to.nbytes + source.nbytes)
        return copy_(to, source)

    with mock.patch.object(torch.Tensor, "copy_", counted):
        assert call(case.inputs(0, "cpu")) == call(case.inputs(1, "cpu")) == ()
    assert moved == [pytest.approx(case.work.bytes, abs=4)] * 2
