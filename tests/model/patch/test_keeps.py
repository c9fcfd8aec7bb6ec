"""What a patch leaves as it was: an earlier one, hooks, files, frozen and tied parameters."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn

import cute_kernels as ck
from cute_kernels.model.patch import state
from tests.contract import same_bytes
from tests.model.patch import families

TOKENS = families.ids(2, 17)


def test_twice_is_once():
    net = families.model("gemma2")
    before = net.config._attn_implementation
    ck.patch(net)
    want, classes = families.logits(net, TOKENS), [type(m) for m in net.modules()]
    again = ck.patch(net)
    assert again.complete and [type(m) for m in net.modules()] == classes
    assert same_bytes(families.logits(net, TOKENS), want)
    ck.unpatch(net)
    assert net.config._attn_implementation == before != "cute_kernels"
    ck.unpatch(net)  # which is nothing
    assert type(net.lm_head) is nn.Linear


def test_the_last_patch_counts():
    net = families.model("llama")
    ck.patch(net.model.layers[0])
    assert state.kind_of(net.model.layers[0].mlp.up_proj) == "linear"
    ck.patch(net, linear=False)
    assert type(net.model.layers[0].mlp.up_proj) is nn.Linear
    ck.patch(net)
    ck.unpatch(net.model.layers[1])
    assert type(net.model.layers[1].mlp.up_proj) is nn.Linear
    assert state.kind_of(net.model.layers[0].mlp.up_proj) == "linear"


def test_hooks_fire():
    """Those from before the patch and from after it, before and behind the forward."""
    net, seen = families.model("llama"), []
    norm = net.model.norm
    norm.register_forward_pre_hook(lambda m, args: seen.append("before"))
    ck.patch(net)
    norm.register_forward_hook(lambda m, args, out: seen.append(out))
    net.lm_head.register_full_backward_hook(lambda m, gi, go: seen.append("head"))
    net.train()(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert [s if isinstance(s, str) else "behind" for s in seen] == ["before", "behind", "head"]
    ck.unpatch(net)
    families.logits(net, TOKENS)
    assert len(seen) == 5


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_save_and_load(name, tmp_path):
    """The files are those of the unpatched model; loaded and patched, its bits are the patched."""
    plain = families.model(name)
    plain.save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    ck.patch(plain)
    plain.save_pretrained(tmp_path / "patched")
    for file in ("model.safetensors", "config.json"):
        contents = [(tmp_path / which / file).read_bytes() for which in ("plain", "patched")]
        assert contents[0] == contents[1]
    said = json.loads((tmp_path / "patched" / "config.json").read_text())
    assert said["architectures"] == [type(families.model(name)).__name__]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "patched").eval()
    assert state.kind_of(again.lm_head) is None
    ck.patch(again)
    assert same_bytes(families.logits(again, TOKENS), families.logits(plain, TOKENS))


def test_frozen_parameters_get_no_gradient():
    net = families.model("llama").train()
    frozen = [n for n, p in net.named_parameters() if "self_attn" in n or "norm" in n]
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    ck.patch(net)
    net(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert [n for n, p in net.named_parameters() if p.grad is None] == frozen


@pytest.mark.parametrize(("name", "kind"), [("llama", "dynamic"), ("gemma3", "static")])
def test_generate(name, kind):
    """Greedy tokens and their logits: in a batch with padding on the left, and alone."""
    net = families.model(name)
    ck.patch(net)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "cache_implementation": kind}
    options |= {"disable_compile": True}
    short = TOKENS[:1, 5:]
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    batch = net.generate(TOKENS * mask, attention_mask=mask, **options)
    alone = net.generate(short, attention_mask=torch.ones_like(short), **options)
    assert same_bytes(batch.sequences[:1, 17:], alone.sequences[:, 12:])
    for one, other in zip(batch.logits, alone.logits, strict=True):
        assert same_bytes(one[:1], other)


def test_a_tied_head():
    """One parameter, a look-up and a product: its gradient is the sum of theirs."""
    net = families.model("llama", tie_word_embeddings=True).train()
    assert net.lm_head.weight is net.model.embed_tokens.weight
    ck.patch(net)
    assert net.lm_head.weight is net.model.embed_tokens.weight
    exact = families.exact(families.model("llama", tie_word_embeddings=True)).train()
    for one in (net, exact):
        one(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    for mine, other in zip(net.parameters(), exact.parameters(), strict=True):
        assert (mine.grad.double() - other.grad).norm() < 0.05 * other.grad.norm()
