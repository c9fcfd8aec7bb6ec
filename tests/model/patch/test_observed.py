"""The observation of a model: what it says of each module, and what it leaves as it was."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError
from cute_kernels.model.observe import runs as observed
from cute_kernels.model.patch import state
from cute_kernels.model.patch.forwards import modes
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms, families
from tests.model.patch.families import PLACE, After, changed, granite, llama


def test_the_report_says_which_ops_ran():
    """Ours, by module; a head that is passed over is not among them."""
    net = all_causal_lms.build("granite")
    ran = set(ck.patch(net, strict=True).ran)
    assert {("lm_head", "linear"), ("model.norm", "norm")} < ran
    assert ("model.embed_tokens", "embedding") in ran
    tokens = all_causal_lms.ids(2)
    assert net.train()(tokens, labels=tokens).loss.isfinite()
    base = changed(llama, lambda y: y).model
    assert not any(name == "lm_head" for name, _ in ck.patch(base).ran)


def test_layers_that_are_passed_over_are_said():
    """The second observation runs two of a kind; what they run is said of each."""
    net = llama(3)
    for layer in net.model.layers:
        layer.mlp = After(layer.mlp, lambda y: y * y.square().mean(-1, keepdim=True))
    report = ck.patch(net, strict=True)
    names = {one.name for one in report.replaced if one.part == "After"}
    assert names == {f"model.layers.{i}.mlp" for i in range(3)}
    ran = {name for name, op in report.ran if name.endswith("q_proj") and op == "linear"}
    assert ran == {f"model.layers.{i}.self_attn.q_proj" for i in range(3)}


def test_an_observation_leaves_the_model_alone(monkeypatch):
    """And generators, those of GPUs too, which the observation does not restore."""
    net, calls, seeds = changed(llama, lambda y: y * 1), [], []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    net.model.norm.register_forward_hook(lambda *_: calls.append(1))
    before = {name: p.clone() for name, p in net.named_parameters()}
    random = torch.get_rng_state()
    ck.patch(net, strict=True)
    assert calls == seeds == [] and same_bytes(torch.get_rng_state(), random)
    for name, parameter in net.named_parameters():
        assert parameter.grad is None and parameter.requires_grad
        assert same_bytes(parameter, before[name])
    net(families.ids())
    assert calls == [1]


def test_weights_take_no_memory():
    """A model on meta is observed, in a copy whose weights are a part in a thousand of its own."""
    with torch.device("meta"):
        config = transformers.GraniteConfig(
            hidden_size=1 << 12, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
            vocab_size=1 << 14, intermediate_size=1 << 14, num_hidden_layers=1,
        )  # fmt: skip
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    copied = observed.replica(net).parameters()
    held = sum(p.untyped_storage().nbytes() for p in copied)
    assert 0 < 1000 * held < sum(p.nbytes for p in net.parameters())
    report = ck.patch(net)
    assert report.complete, str(report)


def test_forwards_keep_their_signatures():
    net = changed(granite, lambda y: y + y.mean(-1, keepdim=True))
    before = {name: inspect.signature(m.forward) for name, m in net.named_modules()}
    ck.patch(net, strict=True)
    invariant = [n for n, m in net.named_modules() if state.kind_of(m) == "invariant"]
    assert PLACE in invariant
    for name in invariant:
        assert inspect.signature(net.get_submodule(name).forward) == before[name]


# ---- attention that modules spell out, and mixtures ---------------------------------------------


def spelled(net: torch.nn.Module) -> list[str]:
    return [name for name, m in net.named_modules() if state.kind_of(m) == "scores"]


def runs(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Logits, of a padded batch but for experts; gradients of embeddings, routers and experts."""
    routed = all_causal_lms.is_moe(net)
    tokens = all_causal_lms.ids(2, seed=1 if routed else 3)  # without ties of a router
    mask = torch.ones_like(tokens)
    mask[0, : 0 if routed else 6] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = all_causal_lms.logits(net, tokens, attention_mask=mask, position_ids=positions)
    out = {"logits": logits[mask.bool()], "embeddings": all_causal_lms.gradient(net, tokens)}
    gradients = {n: p.grad for n, p in net.named_parameters() if ".gate" in n or ".experts." in n}
    return out | {n: g for n, g in gradients.items() if g is not None}


#: A rotary embedding in fp32 and one before it; BERT's; keys of one head; mixtures of experts.
KINDS = ["gptj", "rembert", "falcon", "deepseek_v3", "gpt_oss"]
#: `@` and a dtype.
BY_NIGHT = ("codegen", "megatron-bert", "roformer")
KINDS += [pytest.param(kind, marks=pytest.mark.nightly) for kind in BY_NIGHT]


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_against_float64(kind):
    """No farther from the eager model in float64 than the eager model in bf16, but for a half."""
    exact, eager, patched = (all_causal_lms.build(kind) for _ in range(3))
    routed = all_causal_lms.is_moe(exact)
    for net in (exact, eager):
        net.set_attn_implementation("eager")
        if routed:
            net.set_experts_implementation("eager")
    assert ck.patch(patched, strict=True).complete
    assert len(spelled(patched)) == (0 if routed else 2)
    want, torchs, ours = runs(exact.double()), runs(eager), runs(patched)
    assert len(want) == len(ours) and (len(want) > 2) == routed
    for name, value in want.items():
        error, bound = ((t[name].double() - value).norm() for t in (ours, torchs))
        assert error <= 1.5 * bound + 1e-3 * value.norm(), name


def test_rows_of_spelled_attention_and_the_way_back():
    net, tokens = all_causal_lms.build("gptj"), all_causal_lms.ids(2)
    before = all_causal_lms.whole(net, tokens)
    ck.patch(net, strict=True)
    ck.patch(net, strict=True)
    assert len(spelled(net)) == 2 and all_causal_lms.differing(net) == []
    assert net(tokens, output_attentions=True).attentions in (None, (None, None))
    ck.unpatch(net)
    assert spelled(net) == [] and same_bytes(all_causal_lms.whole(net, tokens), before)


def test_steps_of_other_formulas_are_refused():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 64, generator=generator).bfloat16() for _ in range(3))
    mask = torch.zeros(2, 1, 5, 4, dtype=torch.int32)

    def made():
        with modes.Attention():
            return torch.matmul(q, k.transpose(2, 3))

    assert isinstance(made(), modes.Scores) and made().size() == (2, 2, 5, 5)
    refused = {
        "a sum with another tensor": lambda: made() + torch.zeros(5, 5),
        "a product without softmax": lambda: torch.matmul(made() + mask, v),
        "softmax or mask": lambda: torch.softmax(made(), dim=-1) @ v,
        "softmax": lambda: torch.softmax(made() + mask, dim=1),
        "no positive number": lambda: made() * torch.ones(2),
        "dropout": lambda: torch.nn.functional.dropout(torch.softmax(made(), -1), 0.1),
        "exp": lambda: torch.exp(made()),
        "where": lambda: torch.where(torch.ones(5, 5).bool(), made(), q),
    }
    for match, run in refused.items():
        with pytest.raises(ArgumentValueError, match=match):
            run()
