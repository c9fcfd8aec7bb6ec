"""DeepSpeed's ZeRO-3: two real processes against one, byte for byte (zero_rank.py)."""

from __future__ import annotations

import pytest

from tests.ranks import run

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def ran():
    from tests.model.patch import zero_rank

    return run(zero_rank.RANKS, zero_rank.report)


@pytest.mark.parametrize("at", range(2), ids=["patch first", "engine first"])
def test_bytes_of_one_process(ran, at):
    """Loss, and the gradients of both ranks' halves; every parameter in parts in between."""
    for of_rank in ran:
        report = of_rank[at]
        assert report["kinds"] == ["head", "rms_norm"]
        assert report["loss"] and report["differing"] == [] and report["learnt"]
        assert report["between"] == []
