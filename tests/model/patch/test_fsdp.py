"""FSDP2 and DDP: two real processes against one, byte for byte (fsdp_rank.py)."""

from __future__ import annotations

import pytest

from tests.model.patch import fsdp_rank
from tests.ranks import run

ORDERS = ["patch first", "fully_shard first"]


@pytest.fixture(scope="module")
def ran():
    return run(fsdp_rank.RANKS, fsdp_rank.report)


@pytest.mark.parametrize("at", range(2), ids=ORDERS)
def test_bytes_of_one_process(ran, at):
    """Logits, loss, and the gradients of both ranks' halves."""
    for of_rank in ran:
        report = of_rank[at]
        assert report["order"] == ORDERS[at]
        assert report["logits"] and report["loss"] and report["differing"] == []


@pytest.mark.parametrize("at", range(2), ids=ORDERS)
def test_classes(ran, at):
    """FSDP2's class stays outermost, and unpatch takes ours out below it."""
    for of_rank in ran:
        report = of_rank[at]
        assert report["kinds"] == ["linear", "head"] and report["classes"] == [True, True]
        assert report["name"] == "FSDPLinear" and report["after"] == [None, True]


def test_ddp(ran):
    for of_rank in ran:
        report = of_rank[2]
        assert report["logits"] and report["loss"] and report["differing"] == []
