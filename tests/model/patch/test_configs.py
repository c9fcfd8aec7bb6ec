"""Models that share a config object: a patch changes the patched one alone, and comes undone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import transformers
from torch import nn

import cute_kernels as ck
from tests.contract import same_bytes
from tests.model.patch import families

TOKENS = families.ids(2, 13)
NAME = "cute_kernels"


def of_config(config, dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return type(families.model("llama"))(config).to(dtype).eval()


def siblings(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A policy in bf16, and a critic or reference that holds the same config object."""
    config = families.model("llama").config
    pair = of_config(config, torch.bfloat16, 3), of_config(config, dtype, 4)
    assert pair[0].config is pair[1].config
    return pair


def composite() -> nn.Module:
    """Gemma 3 with its vision tower: a config with two configs inside."""
    text = {**families._SIZES, "sliding_window": 9, "query_pre_attn_scalar": 64}
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    ids = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids
    )
    net = transformers.Gemma3ForConditionalGeneration(config)
    return net.to(torch.bfloat16).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 1])
def test_siblings(dtype, first):
    """Each keeps its bytes and config while the other is patched, and after either is unpatched."""
    pair = siblings(dtype)
    one, other = pair[first], pair[1 - first]
    config, said = other.config, other.config.to_dict()
    plain = [families.logits(net, TOKENS) for net in (one, other)]
    ck.patch(one)
    assert other.config is config and config.to_dict() == said
    assert config._attn_implementation == "sdpa"
    ours = [families.logits(net, TOKENS) for net in (one, other)]
    assert not same_bytes(ours[0], plain[0]) and same_bytes(ours[1], plain[1])
    ck.patch(other)
    assert same_bytes(families.logits(one, TOKENS), ours[0])
    ours[1] = families.logits(other, TOKENS)
    ck.unpatch(one)
    assert same_bytes(families.logits(one, TOKENS), plain[0])
    assert same_bytes(families.logits(other, TOKENS), ours[1])
    ck.unpatch(other)
    assert all(getattr(m, "config", config) is config for net in pair for m in net.modules())
    assert same_bytes(families.logits(other, TOKENS), plain[1])


@pytest.mark.parametrize("first", [0, 1])
def test_siblings_inside_of_one_module(first):
    """A bf16 policy attends by our op, its fp32 critic by torch's, whichever comes first."""
    pair = siblings(torch.float32)
    both = nn.ModuleList([pair[first], pair[1 - first]])
    want = families.logits(pair[1], TOKENS)
    (left,) = (x for x in ck.patch(both).left if x.part.startswith("attention"))
    assert left.name == str(1 - first)
    assert [net.config._attn_implementation for net in pair] == [NAME, "sdpa"]
    got = families.logits(pair[1], TOKENS)
    assert (got - want).abs().max() < 1e-3
    ck.unpatch(both)
    assert pair[0].config is pair[1].config
    assert same_bytes(families.logits(pair[1], TOKENS), want)


def test_a_critic_on_the_backbone_of_a_policy():
    policy = of_config(families.model("llama").config, torch.bfloat16, 3)
    critic = transformers.LlamaForTokenClassification(policy.config).to(torch.bfloat16).eval()
    critic.model = policy.model
    config, want = policy.config, families.logits(critic, TOKENS)
    ck.patch(nn.ModuleList([policy, critic]))
    assert policy.model.config._attn_implementation == NAME == critic.config._attn_implementation
    assert not same_bytes(families.logits(critic, TOKENS), want)
    ck.unpatch(nn.ModuleList([policy, critic]))
    assert policy.config is critic.config is policy.model.config is config
    assert same_bytes(families.logits(critic, TOKENS), want)


def test_configs_inside_of_a_config():
    """The nested objects stay those that the parts hold; masks and layers agree."""
    net = composite()
    other = type(net)(net.config).to(torch.bfloat16).eval()
    config, text = net.config, net.config.text_config
    want, beside = families.logits(net, TOKENS), families.logits(other, TOKENS)
    ck.patch(net)
    assert net.config.text_config is net.model.language_model.config is not text
    assert net.config.vision_config is net.model.vision_tower.config
    assert net.model.language_model.config._attn_implementation == NAME
    assert not same_bytes(families.logits(net, TOKENS), want)
    assert same_bytes(families.logits(other, TOKENS), beside)
    tokens = net.generate(TOKENS, max_new_tokens=4, do_sample=False)
    static = {"cache_implementation": "static", "disable_compile": True}
    again = net.generate(TOKENS, max_new_tokens=4, do_sample=False, **static)
    assert same_bytes(tokens, again)
    ck.unpatch(net)
    assert net.config is config and net.model.language_model.config is text
    assert text._attn_implementation == "sdpa" and same_bytes(families.logits(net, TOKENS), want)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_have_a_config_to_go_back_to(way):
    net, other = siblings(torch.bfloat16)
    want = families.logits(net, TOKENS)
    ck.patch(net)
    patched, file = families.logits(net, TOKENS), io.BytesIO()
    if way == "torch.save":
        torch.save(net, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(net) if way == "deepcopy" else pickle.loads(pickle.dumps(net))
    assert [type(m) for m in twin.modules()] == [type(m) for m in net.modules()]
    assert same_bytes(families.logits(twin, TOKENS), patched)
    ck.unpatch(twin)
    assert same_bytes(families.logits(twin, TOKENS), want) and type(twin.lm_head) is nn.Linear
    assert twin.config is not other.config and twin.model.config is twin.config
    assert same_bytes(families.logits(net, TOKENS), patched)


def test_what_was_changed_since_is_kept():
    """Settings of the patched model go into the object that unpatch puts back; no others do."""
    net, other = siblings(torch.bfloat16)
    ck.patch(net)
    net.config.use_cache = False
    net.config.of_mine = [1, 2]
    other.config.pad_token_id = 5
    net.resize_token_embeddings(101)
    ck.unpatch(net)
    assert net.config is other.config and net.config._attn_implementation == "sdpa"
    assert (net.config.use_cache, net.config.vocab_size) == (False, 101)
    assert (net.config.of_mine, net.config.pad_token_id) == ([1, 2], 5)


def test_a_config_that_replaced_ours_stays_and_a_base_model_is_unpatched_by_itself():
    """Its causal LM then makes masks for the attention that its layers have."""
    net = families.model("llama", num_hidden_layers=1)
    before = net.model(TOKENS).last_hidden_state
    ck.patch(net)
    ck.unpatch(net.model)
    assert same_bytes(net.model(TOKENS).last_hidden_state, before)
    assert net.config._attn_implementation == "sdpa"
    ck.unpatch(net)
    assert net.config is net.model.config
    ck.patch(net)
    net.config = mine = copy.deepcopy(net.config)
    ck.unpatch(net)
    assert net.config is mine and net.model.config._attn_implementation == "sdpa"
