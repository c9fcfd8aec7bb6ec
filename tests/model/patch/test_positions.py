"""main_grad of learned positions that the model looks up once for all sequences of a batch."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import cute_kernels as ck
from cute_kernels.model.patch.forwards import authors
from tests.contract import same_bytes
from tests.model.patch import families

SIZES = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
GPT = SIZES | {"n_embd": 128, "n_head": 2, "n_layer": 1, "n_positions": 512, "n_inner": 96}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
WIDE = SIZES | {"hidden_size": 128, "max_position_embeddings": 512, "intermediate_size": 96}
NEO = WIDE | {"num_heads": 2, "num_layers": 1, "attention_types": [[["global"], 1]]}
BERT = WIDE | {"num_attention_heads": 2, "num_hidden_layers": 1}
#: Class of the model -> (settings of its config, the parameter).
MODELS = {
    "GPT2LMHeadModel": (GPT, "transformer.wpe.weight"),
    "GPTBigCodeForCausalLM": (GPT, "transformer.wpe.weight"),
    "GPTNeoForCausalLM": (NEO, "transformer.wpe.weight"),
    "BertModel": (BERT, "embeddings.position_embeddings.weight"),
}
#: Of a part of norms and of k16 groups: micro-batches are cut at multiples of it.
LENGTH, BATCH = 32, 4
TOKENS = families.ids(BATCH, LENGTH)


def model(name: str) -> tuple[nn.Module, str]:
    settings, parameter = MODELS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**settings)).to(torch.bfloat16).eval(), parameter


def backward(net: nn.Module, rows: slice, **inputs: torch.Tensor) -> None:
    """Sends numbers of each token's own back from the model's first output."""
    out = net(TOKENS[rows], use_cache=False, **inputs)[0]
    generator = torch.Generator().manual_seed(11)
    dy = torch.randn((BATCH, *out.shape[1:]), generator=generator, dtype=torch.float32)
    out.backward(dy[rows].to(out.dtype))


def main_grad(net: nn.Module, parameter: str, parts: int, **inputs: torch.Tensor) -> torch.Tensor:
    """The main_grad after a batch in that many micro-batches."""
    target = net.get_parameter(parameter)
    target.main_grad = torch.zeros(target.shape, dtype=torch.float32)
    step = BATCH // parts
    for first in range(0, BATCH, step):
        backward(net, slice(first, first + step), **inputs)
    assert target.grad is None
    return target.main_grad


@pytest.mark.parametrize("name", MODELS)
def test_every_split_leaves_the_same_bytes(name):
    net, parameter = model(name)
    report = ck.patch(net, main_grad=True)
    assert parameter not in (*report.main_grad_left, *report.main_grad_broadcast)
    want = main_grad(net, parameter, 1)
    assert want.any()
    for parts in (2, 4):
        assert same_bytes(main_grad(net, parameter, parts), want)
    rows = torch.arange(LENGTH)[None]
    assert same_bytes(main_grad(net, parameter, 2, position_ids=rows), want)
    assert same_bytes(main_grad(net, parameter, 2, position_ids=rows.expand(2, -1)), want)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_the_models(name):
    """The forward's bytes are those without main_grad; the gradient is near torch's in float64."""
    net, parameter = model(name)
    ck.patch(net)
    with torch.no_grad():
        want = net(TOKENS, use_cache=False)[0]
    ck.patch(net, main_grad=True)
    assert same_bytes(net(TOKENS, use_cache=False)[0], want)
    got = main_grad(net, parameter, 1).double()
    exact = model(name)[0].double()
    exact.set_attn_implementation("eager")
    backward(exact, slice(0, BATCH))
    gap = (got - exact.get_parameter(parameter).grad).norm()
    assert gap < 0.05 * got.norm()
    ck.unpatch(net)
    assert [type(m) for m in net.modules()] == [type(m) for m in exact.modules()]


def test_embeddings_instead_of_ids_and_a_cache():
    net, _ = model("GPT2LMHeadModel")
    ck.patch(net, main_grad=True)
    embedded = net.transformer.wte(TOKENS).detach()
    want = net(TOKENS, use_cache=False).logits
    assert same_bytes(net(inputs_embeds=embedded, use_cache=False).logits, want)
    first = net(TOKENS[:, :20], use_cache=True)
    second = net(TOKENS[:, 20:], past_key_values=first.past_key_values, use_cache=True)
    assert same_bytes(torch.cat((first.logits, second.logits), dim=1), want)


class Positions(nn.Module):
    """Nobody's model, which broadcasts what it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 64)
        self.pos_embed = nn.Embedding(LENGTH, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) + self.pos_embed(torch.arange(ids.shape[1]))


def test_other_models_are_named():
    """In the report and in the audit, where it is information, as long as it is not covered."""
    torch.manual_seed(0)
    net = Positions().to(torch.bfloat16)
    report = ck.patch(net, main_grad=True)
    assert report.main_grad_broadcast == ("pos_embed.weight",) and "pos_embed" in str(report)
    families.give_main_grads(net)
    audit = ck.audit(net, families.ids(5, 16), transforms=["micro_batches"])
    assert audit.ok and {one.tensor for one in audit.information} == {"pos_embed.weight.main_grad"}
    assert ck.patch(net).main_grad_broadcast == ()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertModel"])
def test_positions_that_are_looked_up_once_are_noticed(name, monkeypatch):
    """The mutant: the model's own position_ids."""
    true = authors._for_each_sequence
    monkeypatch.setattr(authors, "_for_each_sequence", lambda of: of.get("position_ids"))
    net, parameter = model(name)
    ck.patch(net, main_grad=True)
    want = main_grad(net, parameter, 1)
    assert not same_bytes(main_grad(net, parameter, 2), want)
    monkeypatch.setattr(authors, "_for_each_sequence", true)
    assert not same_bytes(main_grad(net, parameter, 1), want)
