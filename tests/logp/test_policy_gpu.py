"""linear_policy_loss on a GPU beside test_policy_bytes: graphs and memory."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.logp import policy_sweep
from tests.contract import same_bytes
from tests.logp import policy_cases as cases
from tests.logp.policy_cases import BF16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_graph_replays():
    x, options = cases.problem("ppo", "some", device="cuda"), cases.options_of("ppo")
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
