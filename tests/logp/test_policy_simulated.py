"""linear_policy_loss on SM90 in the simulator: SM90's products, Triton's kernels of kept logits."""

from __future__ import annotations

import contextlib
import importlib
from unittest import mock

import pytest

from cute_kernels import arch
from cute_kernels.logp import policy_sweep
from cute_kernels.runtime import dispatch
from cute_kernels.runtime.plan_cache import Plan
from ptxsim.skips import requires_core
from tests.contract import same_bytes
from tests.logp import policy_cases as cases
from tests.logp import simulated as logp

pytestmark = [pytest.mark.sim, pytest.mark.nightly, requires_core]


@contextlib.contextmanager
def sm90():
    """Each launcher of a device of SM90, in the simulator."""
    pytest.importorskip("triton")
    from tests.logp.triton_engine import RUNNER as TRITON

    gemm = importlib.import_module("tests.gemm.simulated")

    def where(op):
        return arch.CUTE_SM90 if arch.CUTE_SM90 in dispatch._TABLE[op] else arch.TRITON

    def launcher(op, device, dtype):
        return dispatch._function(dispatch._TABLE[op][where(op)].launcher)

    def plan(op, device, dtype, *operands):
        planner = dispatch._TABLE[op][where(op)].planner
        if planner and where(op) == arch.CUTE_SM90:
            return dispatch._function(planner)(*operands)
        return Plan(launcher(op, device, dtype), fresh=False)

    with (
        mock.patch.object(dispatch, "launcher", launcher),
        mock.patch.object(dispatch, "plan", plan),
        mock.patch.object(dispatch, "backend", lambda *asked: arch.CUTE_SM90),
        mock.patch.object(policy_sweep, "chained", lambda t: True),
        TRITON.running("sm_90"),
        gemm.simulated(tile=None),
        logp.simulated(),
    ):
        yield


CASES = {
    "chunks": (16, {}),
    "one chunk": (1 << 20, {}),
    "tree": (16, {"order": "tree"}),
    "entropy": (16, {"entropy_weight": 0.1}),
    "softcap": (16, {"softcap": 3.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_of_linear_logp(case, monkeypatch):
    tokens, options = CASES[case]
    x = cases.problem("grpo", "some", sizes=(2, 20, 32, 272))
    options = cases.options_of("grpo", **options)
    cases.budget(monkeypatch, tokens, x)
    with sm90():
        got = cases.fused("grpo", x, **options)
        want = cases.composed("grpo", x, **options)
    assert got.weight.any() and got.hidden.any()
    for name, a, b in zip(got._fields[1:], got[1:], want[1:], strict=True):
        assert (a is None) == (b is None) and (a is None or same_bytes(a, b)), name
