"""FSDP2 and DDP: two real processes against one, byte for byte (rank.py)."""

from __future__ import annotations

import pytest

from tests.model.patch import rank
from tests.ranks import run


@pytest.mark.nightly
def test_a_hybrid():
    assert run(rank.RANKS, rank.of_hybrid) == [[]] * rank.RANKS


def test_bytes_of_one_process():
    """Logits, loss, and the gradients of both ranks' halves; classes; patched before or after."""
    want = {way: [] for way in (*rank.ORDERS, "ddp")}
    assert run(rank.RANKS, rank.report, False) == [want] * rank.RANKS
