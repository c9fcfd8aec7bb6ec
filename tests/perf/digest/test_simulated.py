"""The recorded digests again without the card: the SM90 kernels in the simulator, nightly."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from cute_kernels import arch
from perf.core import record
from perf.digest import run
from perf.digest.cases import chosen
from ptxsim.skips import requires_sim
from tests.gemm.simulated import simulated

pytestmark = [pytest.mark.nightly, pytest.mark.sim, requires_sim]

H200 = arch.Device("cuda:0", "cuda", "sm_90a", 132)


@pytest.mark.parametrize("case", chosen("m15,m77"), ids=lambda case: case.name)
def test_the_simulator_gives_the_cards_digests(case, monkeypatch):
    """Forward, dx, dW and dbias through the public API, with the card's contract id."""
    monkeypatch.setattr(arch, "describe", lambda device: H200)
    with simulated(wgmma_math="hopper"):
        local_body = run.body(case, "cpu")
    with simulated(clusters=1, wgmma_math="hopper"):
        assert run.body(case, "cpu") == local_body
    assert local_body["contract_id"].startswith("linear/cute_sm90/sm_90a/")
    verdict = run.against(local_body, record.read_all())
    if verdict.word == run.NO_RECORD:
        pytest.skip(verdict.text)
    assert verdict.word == run.EQUAL, verdict.text
