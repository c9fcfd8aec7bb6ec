"""Mixtures of experts under `ck.patch`: rows, ties, dense bytes, and a ratio of exactly 1."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers.models.qwen3_moe import modeling_qwen3_moe as author

import cute_kernels as ck
from cute_kernels.model.patch import state
from cute_kernels.moe import cpu, routing_op
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms

EXPERTS = "ck.moe.permute, ck.grouped_linear, ck.moe.combine"


def small(kind: str = "qwen3_moe", **settings: object) -> torch.nn.Module:
    """A random model of 8 experts, of which pairs have the same row of the router: exact ties."""
    config = all_causal_lms.config_of(kind).to_dict()
    config |= {"num_local_experts": 8, "num_experts_per_tok": 3, "eos_token_id": None}
    config |= {"num_hidden_layers": 1} | settings
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**config))
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight[1::2] = weight[::2]
    return net.bfloat16().eval()


def test_the_report_and_the_way_back():
    net = small()
    saved = {name: t.clone() for name, t in net.state_dict().items()}
    tokens = all_causal_lms.ids(2)
    before = all_causal_lms.whole(net, tokens)
    report = ck.patch(net, strict=True)
    assert [one.part for one in report.replaced if one.by == EXPERTS] == ["Qwen3MoeExperts"]
    ran = {"moe_select", "moe_sort", "grouped_linear", "moe_combine"}
    assert ran <= {op for _, op in report.ran}
    (left,) = [one for one in report.left if one.part.endswith("balancing loss")]
    assert not left.moves
    out = net(tokens, labels=tokens, output_router_logits=True)
    assert out.aux_loss.isfinite() and out.loss.isfinite()
    assert all(same_bytes(t, saved[name]) for name, t in net.state_dict().items())
    copied = copy.deepcopy(net)
    assert same_bytes(all_causal_lms.whole(copied, tokens), all_causal_lms.whole(net, tokens))
    ck.unpatch(net)
    assert {state.kind_of(m) for m in net.modules()} == {None}
    assert same_bytes(all_causal_lms.whole(net, tokens), before)


def test_the_name_of_the_experts_in_the_config_is_not_asked():
    logits = []
    for name in ("grouped_mm", "cute_kernels"):
        net = small()
        net.config._experts_implementation = name
        ck.patch(net, strict=True)
        logits.append(all_causal_lms.whole(net, all_causal_lms.ids(2)))
    assert same_bytes(*logits)


# ---- values -------------------------------------------------------------------------------------


def test_an_expert_has_the_bytes_of_a_dense_mlp():
    """Of the same weights: two roundings of the gate, and ck.linear's products."""
    net = small(num_hidden_layers=2, mlp_only_layers=[1], intermediate_size=64)
    ck.patch(net, strict=True)
    experts, dense = net.model.layers[0].mlp.experts, net.model.layers[1].mlp
    width = experts.intermediate_dim
    gate, up = experts.gate_up_proj[5].detach().split(width)
    dense.gate_proj.weight = torch.nn.Parameter(gate.clone())
    dense.up_proj.weight = torch.nn.Parameter(up.clone())
    dense.down_proj.weight = torch.nn.Parameter(experts.down_proj[5].detach().clone())
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(33, all_causal_lms.HIDDEN, generator=generator).bfloat16()
    index, weights = torch.full((33, 1), 5), torch.ones(33, 1)
    out = []
    for run in (lambda t: experts(t, index, weights), dense):
        out.append(run(x))
        out[-1].backward(torch.ones_like(out[-1]))
    assert same_bytes(*out)  # dx is one product over gate and up, there the sum of two
    assert same_bytes(experts.gate_up_proj.grad[5, :width], dense.gate_proj.weight.grad)
    assert same_bytes(experts.down_proj.grad[5], dense.down_proj.weight.grad)
    unpatched = author.Qwen3MoeExperts(net.config).bfloat16()
    unpatched.load_state_dict(experts.state_dict())
    unpatched.config._experts_implementation = "cute_kernels"
    assert same_bytes(unpatched(x, index, weights), out[0])


# ---- rollout and training -----------------------------------------------------------------------


def ratios(net: torch.nn.Module) -> torch.Tensor:
    """exp(training's log p - generation's) of each token that was drawn.

    Generation: prompts padded on the left, one token at a time from a cache, in a batch.  Training:
    one pass over the same sequences in another order, padded otherwise, beside another one.
    """
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, 96, (3, 9), generator=generator)
    mask = torch.ones_like(prompts)
    mask[0, :4], mask[2, :1] = 0, 0
    torch.manual_seed(7)
    options = {"do_sample": True, "max_new_tokens": 10, "output_logits": True, "pad_token_id": 0}
    with torch.no_grad():
        out = net.generate(
            prompts, attention_mask=mask, return_dict_in_generate=True, use_cache=True, **options
        )
        drawn = out.sequences[:, 9:]
        old = ck.log_probs(torch.stack(out.logits, dim=1).to(net.dtype), drawn)
        order = [2, 0, 1]
        beside = torch.randint(3, 96, (1, 24), generator=generator)
        ids = torch.cat([torch.nn.functional.pad(out.sequences[order], (5, 0)), beside])
        seen = torch.nn.functional.pad(mask[order], (5, 10), value=1)
        seen[:, :5] = 0
        seen = torch.cat([seen, torch.ones_like(beside)])
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        logits = net(ids, attention_mask=seen, position_ids=positions, use_cache=False).logits
        new = ck.log_probs(logits[:3, 13:-1], drawn[order])
    return (new - old[order]).exp()


def highest(scores, *choice):
    """Of equal scores the lowest index in every second row of the call, the highest in others."""
    out = cpu.select(scores, *choice)
    out[1::2] = (scores.shape[1] - 1 - cpu.select(scores.flip(1), *choice))[1::2]
    return out


def by_arrival(rows, weights, offsets, positions):
    """Σ as index_add has it: in the dtype of the rows, in another order in every second row."""
    slots = positions.long().sort(dim=1).indices
    slots[1::2] = slots[1::2].flip(1)
    out = torch.zeros(len(positions), rows.shape[1], dtype=rows.dtype)
    for slot in slots.unbind(1):
        place = positions.long().gather(1, slot[:, None])[:, 0]
        out += rows[place] * (1 if weights is None else weights.gather(1, slot[:, None]))
    return out


def test_the_ratio_of_grpo_is_one(monkeypatch):
    net = small()
    ck.patch(net, strict=True)
    one = ratios(net)
    assert same_bytes(one, torch.ones_like(one)) and one.shape == (3, 10)
    launch = routing_op._launch
    for entry, other in (("moe_select", highest), ("moe_combine", by_arrival)):

        def mutant(name, device, dtype, *operands, entry=entry, other=other):
            return other(*operands) if name == entry else launch(name, device, dtype, *operands)

        with monkeypatch.context() as patched:
            patched.setattr(routing_op, "_launch", mutant)
            assert not same_bytes(ratios(net), one), entry


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "mixtral"])
def test_the_ratio_of_other_mixtures_is_one(kind):
    net = all_causal_lms.build(kind)
    net.generation_config.eos_token_id = None
    ck.patch(net, strict=True)
    one = ratios(net)
    assert same_bytes(one, torch.ones_like(one))
