"""Soft caps of scores and of logits in reports, with forwards that are attributes of a module."""

from __future__ import annotations

import types

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.model.patch import pretrained, state
from cute_kernels.model.patch.report import Kind
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.ops import Watch
from tests.model.patch.wrappers import AROUND, closed_over

LOGITS = "Gemma2ForCausalLM: soft cap 30 of logits"
LOSS = "Gemma2ForCausalLM: loss"
SCORES = "soft cap 50 of scores"
OURS = "attn_implementation='cute_kernels'"
ATTENTION = "model.layers.0.self_attn"


def replaced(report) -> set[tuple[str, str, str]]:
    return {(r.name, r.part, r.by) for r in report.replaced if "soft cap" in r.part}


def left(report) -> dict[tuple[str, str], object]:
    """What is left, beside a model that does not run."""
    known = [one for one in report.left if one.kind is not Kind.NOT_OBSERVED]
    return {(one.name, one.part): one for one in known}


def caps_of_scores(layers=(0, 1)) -> set[tuple[str, str, str]]:
    return {(f"model.layers.{i}.self_attn", SCORES, OURS) for i in layers}


def torchs_ops(net: torch.nn.Module) -> set[str]:
    tokens = families.ids()
    with Watch() as watch:
        families.logits(net, tokens)
    return watch.found


# ---- forwards of other libraries ----------------------------------------------------------------


def fused(self, input_ids, labels=None, **kwargs):
    """As Liger's: hidden states, and a loss of its own."""
    hidden = self.model(input_ids, use_cache=False).last_hidden_state
    return types.SimpleNamespace(logits=self.lm_head(hidden), loss=None)


def of_another(module):
    """A forward around another module's, which says nothing of this one's."""
    others = families.model("gemma2").modules()
    other = next(m for m in others if type(m) is type(module)).forward
    return lambda *args, **kwargs: other(*args, **kwargs)


INSTEAD = {
    "bound": lambda module: types.MethodType(fused, module),
    "another's": of_another,
    "built in": lambda module: print,
}


# ---- nothing is in the way ----------------------------------------------------------------------


def test_what_is_replaced_is_said():
    report = ck.patch(families.model("gemma2"), strict=True)
    by = "ck.tanh, and in the loss ck.linear_logp(softcap=)"
    assert replaced(report) == {("", LOGITS, by)} | caps_of_scores() and not report.left
    assert ("", LOSS, "ck.linear_logp") in {(r.name, r.part, r.by) for r in report.replaced}
    assert f"1 x {LOGITS} -> {by}  (the model)" in str(report)
    report = ck.patch(families.model("gemma2"), logits="linear")
    assert ("", LOGITS, "ck.tanh") in replaced(report) and list(left(report)) == [("", LOSS)]


def test_a_cap_that_is_not_applied_is_not_named():
    """None and 0; of Gemma 3's modules, whose forward does not hand theirs on."""
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert not replaced(ck.patch(families.model("gemma2", **none), strict=True))
    assert not replaced(ck.patch(families.model("llama"), strict=True))
    net = families.model("gemma3", attn_logit_softcapping=50.0)
    assert net.model.layers[0].self_attn.attn_logit_softcapping == 50.0
    found = replaced(ck.patch(net, strict=True))
    assert {part for _, part, _ in found} == {"Gemma3ForCausalLM: soft cap 20 of logits"}


def test_a_base_model_has_those_of_scores():
    report = ck.patch(families.model("gemma2").model, strict=True)
    assert replaced(report) == {(f"layers.{i}.self_attn", SCORES, OURS) for i in (0, 1)}


# ---- a forward around the author's --------------------------------------------------------------


@pytest.mark.parametrize("way", AROUND)
def test_a_causal_lm_with_a_forward_around_its_own(way):
    """Its tanh is torch's, and the report says so; the rest of the model is ours."""
    net = families.model("gemma2")
    net.forward = AROUND[way](net)
    report = ck.patch(net)
    assert set(left(report)) == {("", LOSS), ("", LOGITS), ("", "Gemma2ForCausalLM")}
    assert any(one.known.startswith("tanh (modeling_gemma2.py:") for one in report.left)
    cap = left(report)["", LOGITS]
    assert cap.moves and "torch's tanh, in the author's forward" in cap.known
    assert replaced(report) == caps_of_scores()
    assert LOGITS in str(report).partition("left, and moves bits:")[2]
    assert torchs_ops(net) == {"tanh"}


def test_on_a_gpu_its_tanh_moves_nothing(monkeypatch):
    monkeypatch.setattr(state, "devices_of", lambda model: {"cuda"})
    net = families.model("gemma2")
    net.forward = closed_over(net)
    moves = {part: one.moves for (_, part), one in left(ck.patch(net)).items()}
    assert moves == {LOSS: False, LOGITS: False}


def test_strict_refuses_it_and_changes_nothing():
    net = families.model("gemma2")
    net.forward = closed_over(net)
    with pytest.raises(PatchError, match=rf"(?s)got 3.*{LOGITS}"):
        ck.patch(net, strict=True)
    assert type(net.lm_head) is torch.nn.Linear and net.config._attn_implementation == "eager"


def test_a_forward_around_ours_keeps_ours():
    net = families.model("gemma2")
    ck.patch(net)
    want = families.logits(net, families.ids())
    net.forward = closed_over(net)
    report = ck.patch(net, strict=True)
    assert ("", LOGITS) in {(name, part) for name, part, _ in replaced(report)}
    assert same_bytes(families.logits(net, families.ids()), want) and not torchs_ops(net)


@pytest.mark.parametrize("way", AROUND)
def test_an_attention_with_a_forward_around_its_own(way):
    """It asks its config, which names ours: replaced, as before."""
    net = families.model("gemma2")
    module = net.get_submodule(ATTENTION)
    module.forward = AROUND[way](module)
    assert caps_of_scores() <= replaced(ck.patch(net, strict=True))
    assert not torchs_ops(net)


def test_what_a_wrapper_runs_is_said():
    net = families.model("gemma2")
    module = net.get_submodule(ATTENTION)
    inner = module.forward

    def forward(*args, **kwargs):
        found, weights = inner(*args, **kwargs)
        return found * found.softmax(-1).sum(-1, keepdim=True), weights

    module.forward = forward
    names = [one.known.split(" (")[0] for one in ck.patch(net).left if one.name == ATTENTION]
    assert {"_softmax", "sum"} <= set(names)


def test_a_way_through_a_wrapper_that_does_not_run_is_said():
    net = families.model("gemma2")
    module = net.get_submodule("model.layers.0.mlp")
    inner = module.forward

    def forward(x, summed=False):
        return inner(x).cumsum(1) if summed else inner(x)

    module.forward = forward
    (one,) = [one for one in ck.patch(net).moving if one.name == "model.layers.0.mlp"]
    assert one.known.startswith("cumsum: ") and one.kind is Kind.WRAPPED


# ---- a forward in place of the author's ---------------------------------------------------------


@pytest.mark.parametrize("way", INSTEAD)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_causal_lm_with_another_forward(way, device, monkeypatch):
    """Whether and how it caps is not known, on any device."""
    monkeypatch.setattr(state, "devices_of", lambda model: {device})
    net = families.model("gemma2")
    net.forward = INSTEAD[way](net)
    report = ck.patch(net)
    assert set(left(report)) == {("", LOSS), ("", LOGITS), ("", "Gemma2ForCausalLM")}
    cap = left(report)["", LOGITS]
    assert cap.moves and "whether it caps, and by what, is not known" in cap.known
    assert replaced(report) == caps_of_scores()


@pytest.mark.parametrize("way", INSTEAD)
def test_an_attention_with_another_forward(way):
    net = families.model("gemma2")
    module = net.get_submodule(ATTENTION)
    module.forward = INSTEAD[way](module)
    report = ck.patch(net)
    known = {(ATTENTION, "Gemma2Attention"), (ATTENTION, SCORES)}
    said = [one for one in report.moving if "what it computes" in one.known or one.part == SCORES]
    assert {(one.name, one.part) for one in said} == known
    # The other model's runs with its own attention alone.
    if way != "another's":
        assert set(left(report)) == known and caps_of_scores(layers=(1,)) < replaced(report)
    with pytest.raises(PatchError, match=SCORES):
        ck.patch(net, strict=True)


@pytest.mark.parametrize("name", ["model", "model.layers.1", "model.layers.1.mlp"])
def test_any_module_with_another_forward_is_left(name):
    """The classes of a family were gone through; a forward of somebody else was not."""
    net = families.model("gemma2")
    module = net.get_submodule(name)
    module.forward = types.MethodType(lambda self, *args, **kwargs: args[0], module)
    ((where, one),) = left(ck.patch(net)).items()
    assert where == (name, type(module).__name__) and one.moves
    module.forward = closed_over(families.model("llama"))
    assert len(left(ck.patch(net))) == 1
    del module.forward
    assert ck.patch(net, strict=True).complete


# ---- attention and logits that are left ---------------------------------------------------------


@pytest.mark.parametrize("why", ["fp32", "head size", "attention=False"])
def test_scores_of_an_attention_that_is_left(why):
    net = families.model("gemma2", **({"head_dim": 32} if why == "head size" else {}))
    net = net.float() if why == "fp32" else net
    report = ck.patch(net, attention=why != "attention=False")
    for i in (0, 1):
        one = left(report)[f"model.layers.{i}.self_attn", SCORES]
        assert one.moves and "the attention, which is left" in one.known
    assert {part for _, part, _ in replaced(report)} == {LOGITS}
    assert "tanh" in torchs_ops(net)


def test_logits_behind_a_setting_that_nobody_knows():
    """The author's forward runs, and caps."""
    net = families.model("gemma2", logit_bias_of_mine=2.0)
    report = ck.patch(net)
    assert set(left(report)) == {("", LOSS), ("", LOGITS)} and torchs_ops(net) == {"tanh"}
    assert "torch's tanh" in left(report)["", LOGITS].known
    assert "config.logit_bias_of_mine" in left(report)["", LOSS].known


# ---- mutants ------------------------------------------------------------------------------------


def test_a_cap_that_is_not_said_is_noticed(monkeypatch):
    """The mutant: as it was before, the loss alone is named."""
    monkeypatch.setattr(pretrained, "cap_left", lambda *args: [])
    with pytest.raises(AssertionError):
        test_a_causal_lm_with_a_forward_around_its_own("closure")


def test_a_forward_that_is_not_looked_at_is_noticed(monkeypatch):
    """The mutant: whatever hides the author's forward is taken for one around it."""
    monkeypatch.setattr(pretrained, "wrapping_forwards", lambda module, cls: [])
    with pytest.raises(AssertionError):
        test_an_attention_with_another_forward("bound")


def test_another_modules_method_is_noticed(monkeypatch):
    """The mutant: any method of the author's function counts, whosever it is."""
    held = pretrained._contents

    def careless(one, module):
        return [one.__func__] if isinstance(one, types.MethodType) else held(one, module)

    monkeypatch.setattr(pretrained, "_contents", careless)
    with pytest.raises(AssertionError):
        test_an_attention_with_another_forward("another's")
