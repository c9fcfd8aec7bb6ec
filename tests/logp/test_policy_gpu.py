"""linear_policy_loss on a GPU: the bytes of linear_logp, budgets, memory.  `make gpu-test`."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.logp import policy_sweep
from cute_kernels.logp.policy_losses import LOSSES
from cute_kernels.runtime import plan_cache
from tests.contract import same_bytes
from tests.logp import policy_cases as cases
from tests.logp.policy_cases import BF16, FP32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def fresh_plans():
    """Cached plans have the launches of a budget, which tests change."""
    yield
    plan_cache.clear()


def problem(name: str, mask: str = "some", **options) -> cases.Problem:
    x = cases.problem(name, mask, sizes=(4, 75, 96, 1040), **options)
    tensors = {key: t.cuda() for key, t in x.tensors.items()}
    moved = [None if t is None else t.cuda() for t in x[:5]]
    return cases.Problem(*moved, tensors)


def composed(name: str, x: cases.Problem, dtype, **options) -> cases.Results:
    """The composed form; fp32 runs on Triton, whose dweight is that of a main_grad of zeros."""
    if dtype != FP32:
        return cases.composed(name, x, **options)
    state = torch.zeros(x.weight.shape, device="cuda")
    return cases.composed(name, x, main_grad=state, **options)._replace(weight=state)


def require_same(got: cases.Results, want: cases.Results) -> None:
    for name, a, b in zip(got._fields[1:], got[1:], want[1:], strict=True):
        assert (a is None) == (b is None) and (a is None or same_bytes(a, b)), name


@pytest.mark.parametrize("name", LOSSES)
def test_the_bytes_of_the_composed_form(name):
    x, options = problem(name, "empty sequence"), cases.options_of(name)
    require_same(cases.fused(name, x, **options), cases.composed(name, x, **options))


OPTIONS = {
    "tree": {"order": "tree"},
    "softcap": {"softcap": 3.0},
    "entropy": {"entropy_weight": 0.1},
    "bias": {},
    "temperature": {"temperature": 0.7},
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
@pytest.mark.parametrize("case", OPTIONS)
def test_options_at_any_budget(case, dtype, monkeypatch):
    x = problem("grpo", dtype=dtype, bias=case == "bias")
    options = cases.options_of("grpo", **OPTIONS[case])
    want = composed("grpo", x, dtype, **options)
    for tokens in (16, 128, 1 << 20):
        cases.budget(monkeypatch, tokens, x)
        require_same(cases.fused("grpo", x, **options), want)


def test_against_float64():
    x, options = problem("dapo", dtype=FP32), cases.options_of("dapo", entropy_weight=0.1)
    got, want = cases.fused("dapo", x, **options), cases.exact("dapo", x, **options)
    for a, b in zip(got, want, strict=True):
        if a is not None:
            assert (a.double() - b).abs().max() <= 2.0**-14 * b.abs().max()


def test_a_graph_replays():
    x, options = problem("ppo"), cases.options_of("ppo")
    want = cases.fused("ppo", x, **options)
    leaves = cases.leaves_of(x)

    def step():
        out = ck.linear_policy_loss(
            leaves[0], leaves[1], x.target, loss="ppo", mask=x.mask, **x.tensors, **options
        )
        return torch.autograd.grad(out.loss, leaves[:2])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = step()
    graph.replay()
    assert same_bytes(gradients[0], want.hidden) and same_bytes(gradients[1], want.weight)


def test_memory_is_that_of_the_budget(monkeypatch):
    """8192 tokens by 32768 entries are 1 GiB of fp32 logits; 64 MiB of them are kept at a time."""
    for name in ("LOGITS_BYTES", "UNCUT_BYTES"):
        monkeypatch.setattr(policy_sweep, name, {"cuda": 1 << 26})
    hidden = torch.randn(8192, 256, device="cuda", dtype=BF16, requires_grad=True)
    head = torch.randn(32768, 256, device="cuda", dtype=BF16, requires_grad=True)
    target = torch.arange(8192, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ck.linear_policy_loss(hidden, head, target, loss="cross_entropy").loss.backward()
    assert torch.cuda.max_memory_allocated() - before < (1 << 29)
