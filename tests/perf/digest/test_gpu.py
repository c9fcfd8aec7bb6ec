"""Tests on the card: the recorded digests, and the same ones on the grid of a smaller card."""

from __future__ import annotations

import pytest
import torch

from perf.core import record
from perf.digest import run
from perf.digest.cases import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

#: SMs of an H100 PCIe; an H100 SXM and an H200 have 132.
FEWER_SMS = 114


@pytest.fixture(scope="module")
def known() -> list[dict]:
    return record.read_all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_card_gives_the_recorded_digests(case, known):
    verdict = run.against(run.body(case, "cuda"), known)
    if verdict.word == run.NO_RECORD:
        pytest.skip(verdict.text)
    assert verdict.word == run.EQUAL, verdict.text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fewer_sms_give_the_same_digests(case, monkeypatch):
    local_body = run.body(case, "cuda")
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", str(FEWER_SMS))
    assert run.body(case, "cuda") == local_body
