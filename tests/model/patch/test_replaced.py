"""Modules that are put into a model after its patch: they are refused by name, or patched again."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.model.patch import state
from tests.contract import same_bytes
from tests.model.patch import families

TOKENS = families.ids(2, 11)
BF16 = {"dtype": torch.bfloat16}


def linear(n: int, k: int) -> nn.Linear:
    return nn.Linear(k, n, bias=False, **BF16)


def _head(net):
    net.lm_head = linear(97, 128)


def _head_after_deletion(net):
    del net.lm_head
    _head(net)


def _mlp(net):
    net.model.layers[1].mlp = modeling_llama.LlamaMLP(net.config).to(torch.bfloat16)


def _norm(net):
    net.model.layers[0].input_layernorm = nn.RMSNorm(128, **BF16)


def _layer(net):
    net.model.layers[1] = modeling_llama.LlamaDecoderLayer(net.config, 1).to(torch.bfloat16)


class Adapter(nn.Module):
    """As LoRA: the layer that was there, and two products beside it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.a, self.b = linear(4, base.in_features), linear(base.out_features, 4)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def _adapter(net):
    attention = net.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj)


class Products(nn.Module):
    """What no op of ours replaces, and what the report names."""

    def forward(self, x):
        return torch.matmul(x, x.mT).mean(-1, keepdim=True) + x


def _products(net):
    net.model.norm = Products()


#: What is done to a patched model -> where it is noticed.
REPLACED = {
    "resize": (lambda net: net.resize_token_embeddings(131), "lm_head"),
    "head": (_head, "lm_head"),
    "head, after del": (_head_after_deletion, "lm_head"),
    "head, by add_module": (lambda net: net.add_module("lm_head", linear(97, 128)), "lm_head"),
    "embedding": (
        lambda net: net.set_input_embeddings(nn.Embedding(97, 128, **BF16)),
        "embed_tokens",
    ),
    "mlp": (_mlp, "mlp.gate_proj"),
    "norm": (_norm, "input_layernorm"),
    "layer": (_layer, "1.input_layernorm"),
    "adapter": (_adapter, "q_proj.a"),
    "products": (_products, "norm"),
}


@pytest.mark.parametrize("case", REPLACED)
def test_a_new_module_is_refused_until_it_is_patched(case):
    change, where = REPLACED[case]
    net = families.model("llama")
    ck.patch(net)
    torch.manual_seed(0)
    change(net)
    with pytest.raises(PatchError, match=f"^{re.escape(where)}: expected"):
        families.logits(net, TOKENS)
    report = ck.patch(net)
    assert report.complete == (case != "products")
    tokens = TOKENS[1:]
    want = families.logits(net, tokens)
    assert not report.complete or same_bytes(families.logits(net, TOKENS)[1:], want)
    ck.unpatch(net)
    assert not same_bytes(families.logits(net, tokens), want)


def test_a_new_model_of_transformers_is_refused():
    """One without a head: its attention alone would be noticed by nobody else."""
    holder = nn.Module()
    holder.policy = families.model("llama").model
    ck.patch(holder, linear=False, norm=False, embedding=False)
    holder.policy = families.model("llama").model
    with pytest.raises(PatchError, match=r"^policy: expected"):
        holder.policy(TOKENS)


def test_unpatched_it_runs():
    net = families.model("llama")
    ck.patch(net)
    _head(net)
    ck.unpatch(net)
    assert families.logits(net, TOKENS).shape[-1] == 97 and not net.lm_head._forward_pre_hooks
    _mlp(net)
    families.logits(net, TOKENS)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_watch_as_well(way):
    net = families.model("llama")
    ck.patch(net)
    twin = copy.deepcopy(net) if way == "deepcopy" else pickle.loads(pickle.dumps(net))
    _head(twin)
    families.logits(net, TOKENS)
    with pytest.raises(PatchError, match="lm_head"):
        families.logits(twin, TOKENS)
    another = copy.deepcopy(twin)
    ck.patch(another)
    families.logits(another, TOKENS)
    with pytest.raises(PatchError, match="lm_head"):
        families.logits(twin, TOKENS)


def test_what_needs_no_patch_is_not_refused():
    """No ops of torch that move bits, modules that were inside, and what the options leave."""
    net = families.model("llama")
    ck.patch(net, linear=False)
    net.model.layers = nn.ModuleList([net.model.layers[1], net.model.layers[0]])
    net.model.layers[0].mlp.up_proj = linear(160, 128)
    families.logits(net, TOKENS)
    net.lm_head = nn.Identity()
    assert families.logits(net, TOKENS).shape[-1] == 128


def test_merging_gives_the_patched_layer_back():
    net = families.model("llama")
    ck.patch(net)
    want = families.logits(net, TOKENS)
    _adapter(net)
    ck.patch(net)
    attention = net.model.layers[0].self_attn
    assert state.kind_of(attention.q_proj.a) == "linear"
    attention.q_proj = attention.q_proj.base
    assert same_bytes(families.logits(net, TOKENS), want)


def test_a_patched_part_of_a_model():
    """Its parent is not patched; the module in whose place another one comes is."""
    net = families.model("llama")
    ck.patch(net.model.layers[0].mlp)
    _head(net)
    families.logits(net, TOKENS)
    net.model.layers[0].mlp = type(net.model.layers[0].mlp)(net.config).to(torch.bfloat16)
    assert state.kind_of(net.model.layers[0].mlp.up_proj) is None
    with pytest.raises(PatchError, match=r"mlp\.gate_proj"):
        families.logits(net, TOKENS)


def test_a_process_that_loads_a_pickle_watches(tmp_path):
    """It has patched nothing by itself."""
    net = nn.Sequential(nn.Linear(8, 8))
    ck.patch(net)
    torch.save(net, tmp_path / "net")
    code = f"""import torch
net = torch.load({str(tmp_path / "net")!r}, weights_only=False)
net(torch.zeros(1, 8))
net[0] = torch.nn.Linear(8, 8)
net(torch.zeros(1, 8))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PatchError: 0: expected" in done.stderr.splitlines()[-1]
