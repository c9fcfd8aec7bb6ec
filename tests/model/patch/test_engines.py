"""FSDP2, DDP and ZeRO-3: two real processes against one, byte for byte (rank.py)."""

from __future__ import annotations

import pytest

from tests.model.patch import rank
from tests.ranks import run


@pytest.mark.nightly
def test_a_hybrid():
    assert run(rank.RANKS, rank.of_hybrid) == [[]] * rank.RANKS


@pytest.mark.parametrize("zero", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_bytes_of_one_process(zero):
    """Loss, and gradients of both ranks' halves; patched before or after; logits but of ZeRO-3."""
    if zero:
        pytest.importorskip("deepspeed")
    want = {way: [] for way in (*rank.ORDERS, *([] if zero else ["ddp"]))}
    assert run(rank.RANKS, rank.report, zero) == [want] * rank.RANKS
