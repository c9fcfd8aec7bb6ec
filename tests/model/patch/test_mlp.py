"""The activation of an MLP and its product in one launch: which, and the bytes of two steps."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import cute_kernels as ck
from cute_kernels.model.patch import plan
from cute_kernels.model.patch.forwards import layers
from cute_kernels.model.patch.scan import mlp
from cute_kernels.rowwise import op as rowwise_op
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.ops import Watch

FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2")
TOKENS = families.ids(2, 17)
OP = layers.OPS["mlp"]


def fused(report) -> int:
    return sum(part.by == OP for part in report.replaced)


def launches(net: torch.nn.Module) -> bool:
    with Watch() as watch:
        families.logits(net, TOKENS)
    return "gated" in watch.ours


def pair(monkeypatch, name: str, **options) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model with fused MLPs, and one without."""
    net, other = (families.model(name, num_hidden_layers=1) for _ in range(2))
    assert fused(ck.patch(net, strict=True, **options)) == 1
    with monkeypatch.context() as patched:
        patched.setattr(plan, "_mlps", lambda *args: [])
        assert fused(ck.patch(other, strict=True, **options)) == 0
    assert launches(net) and not launches(other)
    return net, other


def step(net: torch.nn.Module) -> list[torch.Tensor]:
    net.zero_grad()
    loss = net(TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("name", FUSED)
def test_the_bytes_are_those_of_two_steps(monkeypatch, name):
    net, other = pair(monkeypatch, name)
    assert all(map(same_bytes, step(net), step(other)))


def test_one_rounding_changes_bytes(monkeypatch):
    net, other = pair(monkeypatch, "llama")
    want = step(other)
    gated = rowwise_op.gated
    monkeypatch.setattr(rowwise_op, "gated", lambda *args: gated(*args[:3], False))
    assert not all(map(same_bytes, step(net), want))


def test_a_hook_of_the_activation_sees_its_result(monkeypatch):
    net, other = pair(monkeypatch, "llama")
    seen = []
    act = net.model.layers[0].mlp.act_fn
    handle = act.register_forward_hook(lambda module, args, out: seen.append(out))
    assert not launches(net) and len(seen) == 1
    assert all(map(same_bytes, step(net), step(other)))
    handle.remove()
    assert launches(net)


def test_copies_pickles_and_unpatch():
    net = families.model("llama", num_hidden_layers=1)
    ck.patch(net, strict=True)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert launches(other)
    ck.unpatch(net)
    assert not launches(net)


@pytest.mark.parametrize("options", [{"norm": False}, {}], ids=str)
def test_others_keep_their_forward(options):
    """An activation that is torch's, and MLPs of another form."""
    name = "llama" if options else "phi3"
    net = families.model(name, num_hidden_layers=1)
    assert fused(ck.patch(net, **options)) == 0 and not launches(net)


def test_a_forward_that_differs_is_not_known():
    class Doubled(torch.nn.Module):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2

    class Alike(torch.nn.Module):
        def forward(self, h):
            out = self.down_proj(self.act_fn(self.gate_proj(h)) * self.up_proj(h))
            return out

    assert mlp.is_gated(Alike) and not mlp.is_gated(Doubled)
