"""Base models without a mask: attention is told that nothing is packed, with the bytes of spans."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, PatchError
from cute_kernels.integrations import transformers as integration
from cute_kernels.model.patch.forwards import authors
from cute_kernels.sparse_attn import api
from tests.contract import same_bytes
from tests.model.patch import families

TOKENS = families.ids(2, 40)
#: The positions that a model makes; given, they are looked at for packs, and spans are made.
POSITIONS = {"position_ids": torch.arange(40)[None]}


@pytest.fixture
def calls(monkeypatch):
    """Names of what attends, in order."""
    names = []
    for name in ("causal_attention", "sequence_attention"):
        true = getattr(api, name)

        def counted(*args, name=name, true=true, **options):
            names.append(name)
            return true(*args, **options)

        monkeypatch.setattr(api, name, counted)
    return names


def stepped(net, **inputs) -> dict[str, torch.Tensor]:
    net.zero_grad()
    out = net(TOKENS, labels=TOKENS, use_cache=False, **inputs)
    out.loss.backward()
    return {"loss": out.loss.detach()} | {n: p.grad for n, p in net.named_parameters()}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_bytes_of_spans(name, calls):
    """Loss and gradients of every family, sliding windows included."""
    net = families.model(name).train()
    ck.patch(net, strict=True)
    got = stepped(net)
    assert set(calls) == {"causal_attention"}
    calls.clear()
    want = stepped(net, **POSITIONS)
    assert set(calls) == {"sequence_attention"}
    assert [n for n in want if not same_bytes(got[n], want[n])] == []


@pytest.mark.parametrize(
    "inputs",
    [
        {"position_ids": torch.cat((torch.arange(17), torch.arange(23)))[None]},
        {"attention_mask": torch.ones(2, 40, dtype=torch.int64)},
    ],
    ids=["packs", "padding"],
)
def test_calls_that_say_more(inputs, calls):
    net = families.model("llama")
    ck.patch(net, strict=True)
    with torch.no_grad():
        net(TOKENS, **({"use_cache": False} | inputs))
    assert set(calls) == {"sequence_attention"}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@torch.no_grad()
def test_a_cache_that_the_model_makes(name, calls):
    """The prompt, and a token behind it, which has spans."""
    net = families.model(name)
    ck.patch(net, strict=True)
    found = []
    for given in ({}, POSITIONS):
        prompt = net(TOKENS, use_cache=True, **given)
        token = net(TOKENS[:, :1], use_cache=True, past_key_values=prompt.past_key_values)
        found.append((prompt.logits, token.logits))
    layers = net.config.num_hidden_layers
    assert calls == ["causal_attention"] * layers + ["sequence_attention"] * 3 * layers
    assert all(map(same_bytes, *found))


def test_gradient_checkpointing_keeps_it(calls):
    """There transformers leaves its cache out, and would look for packs."""
    net = families.model("llama").train()
    ck.patch(net, strict=True)
    want = stepped(net)
    net.gradient_checkpointing_enable()
    calls.clear()
    net.zero_grad()
    loss = net(TOKENS, labels=TOKENS).loss
    loss.backward()
    assert set(calls) == {"causal_attention"}
    got = {"loss": loss.detach()} | {n: p.grad for n, p in net.named_parameters()}
    assert [n for n in want if not same_bytes(got[n], want[n])] == []


def test_keys_of_a_cache_are_refused():
    q, k = torch.zeros(1, 2, 3, 64).bfloat16(), torch.zeros(1, 2, 5, 64).bfloat16()
    with pytest.raises(ArgumentValueError, match="attention_mask"):
        integration.attention(torch.nn.Module(), q, k, k, integration.whole_sequences())


def test_other_attention_is_told_nothing():
    net = families.model("mistral")
    ck.patch(net, strict=True)
    assert authors._masks(net.model, {}) is not None
    net.set_attn_implementation("eager")
    assert authors._masks(net.model, {}) is None
    with pytest.raises(PatchError, match="attn_implementation"):
        families.logits(net, TOKENS, **POSITIONS)


def test_a_window_that_is_lost_is_seen(monkeypatch):
    net = families.model("mistral")
    ck.patch(net, strict=True)
    want = families.logits(net, TOKENS, **POSITIONS)
    true = integration.whole_sequences
    monkeypatch.setattr(integration, "whole_sequences", lambda window=0: true())
    assert not same_bytes(families.logits(net, TOKENS), want)
