"""DeepSpeed's ZeRO-3: two real processes against one, byte for byte (rank.py)."""

from __future__ import annotations

import pytest

from tests.model.patch import rank
from tests.ranks import run

pytest.importorskip("deepspeed")


@pytest.mark.nightly
def test_bytes_of_one_process():
    """Loss, and the gradients of both ranks' halves; every parameter in parts in between."""
    want = {order: [] for order in rank.ORDERS}
    assert run(rank.RANKS, rank.report, True) == [want] * rank.RANKS
