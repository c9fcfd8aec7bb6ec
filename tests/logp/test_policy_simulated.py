"""linear_policy_loss on SM90 in the simulator: SM90's products, Triton's kernels of kept logits."""

from __future__ import annotations

import pytest

from cute_kernels.logp import policy_sweep
from ptxsim.skips import requires_core
from tests.contract import same_bytes
from tests.logp import policy_cases as cases
from tests.option_table import backends

pytestmark = [pytest.mark.sim, pytest.mark.nightly, requires_core]


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
    monkeypatch.setattr(policy_sweep, "chained", lambda t: True)
    with backends.sm90("logp"):
        got = cases.fused("grpo", x, **options)
        want = cases.composed("grpo", x, **options)
    assert got.weight.any() and got.hidden.any()
    for name, a, b in zip(got._fields[1:], got[1:], want[1:], strict=True):
        assert (a is None) == (b is None) and (a is None or same_bytes(a, b)), name
