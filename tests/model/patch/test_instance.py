"""Forwards that are attributes of modules: around the author's or ours, or in their place.

The models are Gemma 2: what its forward does behind its head is a soft cap.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import types

import pytest
import torch
from torch import nn

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.model.patch import classes, decisions, pretrained, state
from cute_kernels.model.patch.report import Kind
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.families import TOKENS, Watch

# ---- forwards that other libraries put around a module's own ------------------------------------


class Around:
    """An object that is called, as accelerate's ConvertOutputsToFp32."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def method(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def closed_over(module):
    inner = module.forward
    return lambda *args, **kwargs: inner(*args, **kwargs)


def wrapped(module):
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args, **kwargs):
        return inner(*args, **kwargs)

    return functools.partial(forward)


def by_default(module):
    return lambda *args, inner=module.forward, **kwargs: inner(*args, **kwargs)


def bound(module):
    """As accelerate's prepare_model: the function, bound to the module again."""
    return types.MethodType(Around(module.forward.__func__), module)


def in_this_file(module):
    global kept
    kept = module.forward
    return lambda *args, **kwargs: kept(*args, **kwargs)


AROUND = {
    "closure": closed_over,
    "wraps and partial": wrapped,
    "default": by_default,
    "object": lambda module: Around(module.forward),
    "method": lambda module: Around(module.forward).method,
    "bound": bound,
    "global": in_this_file,
    "twice": lambda module: Around(closed_over(module)),
}


# ---- models -------------------------------------------------------------------------------------

#: Parts that hooks of accelerate lie around, besides the model itself.
PARTS = ("lm_head", "model.norm", "model.rotary_emb", "model.embed_tokens", "model.layers.0.mlp")
LOGITS = "Gemma2ForCausalLM: soft cap 30 of logits"
LOSS = "Gemma2ForCausalLM: loss"
SCORES = "soft cap 50 of scores"
OURS = "attn_implementation='cute_kernels'"
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


def gemma(layers: int = 1, **settings: object) -> nn.Module:
    return families.model("gemma2", num_hidden_layers=layers, **settings)


def patched(name: str = "gemma2") -> nn.Module:
    net = families.model(name, num_hidden_layers=1)
    ck.patch(net, strict=True)
    return net


def results(net: nn.Module) -> list[torch.Tensor]:
    """Logits, and the loss from labels."""
    with torch.no_grad():
        loss = net(TOKENS, labels=TOKENS, use_cache=False).loss
    return [families.logits(net, TOKENS), loss]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(same_bytes, one, other))


def caps(report) -> set[tuple[str, str, str]]:
    """Soft caps that are replaced."""
    return {(r.name, r.part, r.by) for r in report.replaced if "soft cap" in r.part}


def left(report) -> dict[tuple[str, str], object]:
    """What is left, beside a model that does not run."""
    known = [one for one in report.left if one.kind is not Kind.NOT_OBSERVED]
    return {(one.name, one.part): one for one in known}


def caps_of_scores(layers=(0,)) -> set[tuple[str, str, str]]:
    return {(f"model.layers.{i}.self_attn", SCORES, OURS) for i in layers}


def torchs_ops(net: nn.Module) -> set[str]:
    with Watch() as watch:
        families.logits(net, TOKENS)
    return watch.found


@pytest.fixture
def anew():
    """Classes made while the test lasts are not for the next."""
    classes.patched_class.cache_clear()
    yield
    classes.patched_class.cache_clear()


# ---- nothing is in the way ----------------------------------------------------------------------


def test_soft_caps_that_are_replaced_are_said():
    report = ck.patch(gemma(2), strict=True)
    by = "ck.tanh, and in the loss ck.linear_logp(softcap=)"
    assert caps(report) == {("", LOGITS, by)} | caps_of_scores((0, 1)) and not report.left
    assert ("", LOSS, "ck.linear_logp") in {(r.name, r.part, r.by) for r in report.replaced}
    assert f"1 x {LOGITS} -> {by}  (the model)" in str(report)
    report = ck.patch(gemma(), logits="linear")
    assert ("", LOGITS, "ck.tanh") in caps(report) and list(left(report)) == [("", LOSS)]
    report = ck.patch(gemma().model, strict=True)
    assert caps(report) == {("layers.0.self_attn", SCORES, OURS)}


def test_a_cap_that_is_not_applied_is_not_named():
    """None and 0; of Gemma 3's modules, whose forward does not hand theirs on."""
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert not caps(ck.patch(gemma(**none), strict=True))
    net = families.model("gemma3", attn_logit_softcapping=50.0)
    assert net.model.layers[0].self_attn.attn_logit_softcapping == 50.0
    capped = caps(ck.patch(net, strict=True))
    assert {part for _, part, _ in capped} == {"Gemma3ForCausalLM: soft cap 20 of logits"}


# ---- around ours --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", AROUND)
def test_unpatch_gives_back_what_was_wrapped(way):
    """The wrapper kept our forward; it is the author's once the model is not patched any more."""
    before, net = results(gemma()), patched()
    ours = results(net)
    parts = () if way == "global" else PARTS  # which is one name, for one module
    for module in (net, *map(net.get_submodule, parts)):
        module.forward = AROUND[way](module)
    assert same(results(net), ours) and not same(ours, before)
    assert ck.patch(net, strict=True).complete and not torchs_ops(net)
    ck.unpatch(net)
    assert same(results(net), before)
    assert not any(hasattr(module, "_cute_kernels") for module in net.modules())
    assert ck.patch(net, strict=True).complete and same(results(net), ours)


def test_what_ours_names_is_not_the_wrappers():
    """Our forward's own sums and functions, and the author's behind it, are no finding."""
    net = patched("llama")
    net.forward = closed_over(net)
    parts = [(one.name, one.part) for one in ck.patch(net, logits="linear").left]
    assert parts == [("", "LlamaForCausalLM: loss")]


def test_a_wrapped_part_outlives_a_pickle():
    """accelerate leaves the bound method behind when it takes a hook off."""
    net = patched()
    for module in (net, *map(net.get_submodule, PARTS)):
        module.forward = module.forward
    again = pickle.loads(pickle.dumps(net))
    assert same(results(again), results(net))
    ck.unpatch(again)
    assert same(results(again), results(gemma()))


def wrap(module: nn.Module) -> None:
    """As accelerate's prepare: around the function, which is bound to the module again."""
    inner = module.forward.__func__

    @functools.wraps(inner)
    def forward(self, *args, **kwargs):
        return inner(self, *args, **kwargs)

    module.forward = types.MethodType(forward, module)


def test_taking_a_wrapper_off_keeps_ours_and_the_authors_signature():
    """generate and trainers look there; accelerate's unwrap_model takes what is innermost."""
    plain, net = gemma(), patched()
    ours = results(net)
    for one in (net, type(net)):
        other = plain if one is net else type(plain)
        assert inspect.signature(one.forward) == inspect.signature(other.forward)
    wrap(net)
    assert inspect.signature(net.forward) == inspect.signature(plain.forward)
    forward = net.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    net.forward = types.MethodType(forward, net)
    assert same(results(net), ours) and ck.patch(net, strict=True).complete
    assert same(results(net), ours)


@pytest.mark.parametrize("part", ["", "lm_head", "model.norm"])
def test_a_forward_past_ours_is_said(part):
    """The module was patched, and somebody put the author's forward in the instance."""
    net = patched()
    module = net.get_submodule(part)
    module.forward = types.MethodType(state.user_class(module).forward, module)
    assert part in {one.name for one in ck.patch(net).moving}
    with pytest.raises(PatchError, match="an attribute of its own" if part else "soft cap"):
        ck.patch(net, strict=True)


# ---- around the author's ------------------------------------------------------------------------


@pytest.mark.parametrize("way", AROUND)
def test_a_causal_lm_with_a_forward_around_its_own(way):
    """Its tanh is torch's, and the report says so; the rest of the model is ours."""
    net = gemma()
    net.forward = AROUND[way](net)
    report = ck.patch(net)
    assert set(left(report)) == {("", LOSS), ("", LOGITS), ("", "Gemma2ForCausalLM")}
    assert any(one.known.startswith("tanh (modeling_gemma2.py:") for one in report.left)
    cap = left(report)["", LOGITS]
    assert cap.moves and "torch's tanh, in the author's forward" in cap.known
    assert caps(report) == caps_of_scores()
    assert LOGITS in str(report).partition("left, and moves bits:")[2]
    assert torchs_ops(net) == {"tanh"}


def test_strict_refuses_it_and_on_a_gpu_its_tanh_moves_nothing(monkeypatch):
    net = gemma()
    net.forward = closed_over(net)
    with pytest.raises(PatchError, match=rf"(?s)got 3.*{LOGITS}"):
        ck.patch(net, strict=True)
    assert type(net.lm_head) is nn.Linear and net.config._attn_implementation == "eager"
    monkeypatch.setattr(state, "devices_of", lambda model: {"cuda"})
    moves = {part: one.moves for (_, part), one in left(ck.patch(net)).items()}
    assert moves == {LOSS: False, LOGITS: False}


@pytest.mark.parametrize("way", ["closure", "bound"])
def test_an_attention_and_an_embedding_with_a_forward_around_their_own(way):
    """The one asks its config, which names ours; of the other ours is below the author's."""
    net, ours = gemma(), results(patched())
    for module in (net.get_submodule(ATTENTION), net.get_input_embeddings()):
        module.forward = AROUND[way](module)
    assert caps_of_scores() <= caps(ck.patch(net, strict=True))
    assert not torchs_ops(net) and same(results(net), ours)


def test_what_a_wrapper_runs_and_what_it_may_run_is_said():
    net = gemma()
    attention, mlp = net.get_submodule(ATTENTION), net.get_submodule(MLP)
    attend, multiply = attention.forward, mlp.forward

    def attending(*args, **kwargs):
        out, weights = attend(*args, **kwargs)
        return out * out.softmax(-1).sum(-1, keepdim=True), weights

    def multiplying(x, summed=False):
        return multiply(x).cumsum(1) if summed else multiply(x)

    attention.forward, mlp.forward = attending, multiplying
    report = ck.patch(net)
    names = {one.known.split(" (")[0] for one in report.left if one.name == ATTENTION}
    assert {"_softmax", "sum"} <= names
    (one,) = [one for one in report.moving if one.name == MLP]
    assert one.known.startswith("cumsum: ") and one.kind is Kind.WRAPPED


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_head_that_is_hidden_cannot_score(name):
    """The loss is torch's then, of its logits, and said to be."""
    net = families.model(name, num_hidden_layers=1)
    net.lm_head.forward = closed_over(net.lm_head)
    moves = {(one.name, one.part): one.moves for one in ck.patch(net).left}
    assert moves == {("lm_head", "Linear"): True, ("", f"{type(net).__name__}: loss"): False}
    out = net.train()(TOKENS, labels=TOKENS, use_cache=False)
    want = net.loss_function(out.logits, TOKENS, net.config.vocab_size)
    assert same_bytes(out.loss, want)


def fused_head(net: nn.Module, by_name: bool) -> None:
    """As TRL's fused head: another way through the model, taken by a keyword."""
    inner = net.forward

    @functools.wraps(type(net).forward)
    def by_getter(self, *args, fused=False, **kwargs):
        if not fused:
            return inner(*args, **kwargs)
        weight = self.get_output_embeddings().weight
        return self.base_model(*args, **kwargs).last_hidden_state @ weight.T

    @functools.wraps(type(net).forward)
    def of_lm_head(self, *args, fused=False, **kwargs):
        if not fused:
            return inner(*args, **kwargs)
        return self.base_model(*args, **kwargs).last_hidden_state @ self.lm_head.weight.T

    net.forward = types.MethodType(of_lm_head if by_name else by_getter, net)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_forward_that_reads_the_head_is_left(by_name):
    net = patched("llama")
    fused_head(net, by_name)
    report = ck.patch(net)
    assert not any(one.by == "ck.linear_logp" for one in report.replaced)
    known = {part.part: part.known for part in report.moving}
    assert f"{__name__}." in known["LlamaForCausalLM: loss"]
    with pytest.raises(PatchError, match="LlamaForCausalLM: loss"):
        ck.patch(net, strict=True)
    del net.forward
    assert ck.patch(net, strict=True).complete


# ---- in place of the author's -------------------------------------------------------------------


def fused(self, input_ids, labels=None, **kwargs):
    """As Liger's: hidden states, and a loss of its own."""
    hidden = self.model(input_ids, use_cache=False).last_hidden_state
    return types.SimpleNamespace(logits=self.lm_head(hidden), loss=None)


def of_another(module):
    """A forward around another module's, which says nothing of this one's."""
    other = next(m for m in gemma().modules() if type(m) is type(module)).forward
    return lambda *args, **kwargs: other(*args, **kwargs)


INSTEAD = {
    "bound": lambda module: types.MethodType(fused, module),
    "another's": of_another,
    "built in": lambda module: print,
}


@pytest.mark.parametrize("way", INSTEAD)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_causal_lm_with_another_forward(way, device, monkeypatch):
    """Whether and how it caps is not known, on any device."""
    monkeypatch.setattr(state, "devices_of", lambda model: {device})
    net = gemma()
    net.forward = INSTEAD[way](net)
    report = ck.patch(net)
    assert set(left(report)) == {("", LOSS), ("", LOGITS), ("", "Gemma2ForCausalLM")}
    cap = left(report)["", LOGITS]
    assert cap.moves and "whether it caps, and by what, is not known" in cap.known
    assert caps(report) == caps_of_scores()


@pytest.mark.parametrize("way", INSTEAD)
def test_an_attention_with_another_forward(way):
    net = gemma(2)
    module = net.get_submodule(ATTENTION)
    module.forward = INSTEAD[way](module)
    report = ck.patch(net)
    known = {(ATTENTION, "Gemma2Attention"), (ATTENTION, SCORES)}
    said = [one for one in report.moving if "what it computes" in one.known or one.part == SCORES]
    assert {(one.name, one.part) for one in said} == known
    # The other model's runs with its own attention alone.
    if way != "another's":
        assert set(left(report)) == known and caps_of_scores(layers=(1,)) < caps(report)
    with pytest.raises(PatchError, match=SCORES):
        ck.patch(net, strict=True)


@pytest.mark.parametrize("name", ["model", "model.layers.0", MLP])
def test_any_module_with_another_forward_is_left(name):
    """The classes of a family were gone through; a forward of somebody else was not."""
    net = gemma()
    module = net.get_submodule(name)
    module.forward = types.MethodType(lambda self, *args, **kwargs: args[0], module)
    ((where, one),) = left(ck.patch(net)).items()
    assert where == (name, type(module).__name__) and one.moves
    module.forward = closed_over(gemma().model)
    assert len(left(ck.patch(net))) == 1
    del module.forward
    assert ck.patch(net, strict=True).complete


# ---- caps of attention and logits that are left -------------------------------------------------


@pytest.mark.parametrize("why", ["fp32", "head size", "attention=False"])
def test_scores_of_an_attention_that_is_left(why):
    net = gemma(**({"head_dim": 32} if why == "head size" else {}))
    net = net.float() if why == "fp32" else net
    report = ck.patch(net, attention=why != "attention=False")
    one = left(report)[ATTENTION, SCORES]
    assert one.moves and "the attention, which is left" in one.known
    assert {part for _, part, _ in caps(report)} == {LOGITS} and "tanh" in torchs_ops(net)


def test_logits_behind_a_setting_that_nobody_knows():
    """The author's forward runs, and caps."""
    net = gemma(logit_bias_of_mine=2.0)
    report = ck.patch(net)
    assert set(left(report)) == {("", LOSS), ("", LOGITS)} and torchs_ops(net) == {"tanh"}
    assert "torch's tanh" in left(report)["", LOGITS].known
    assert "config.logit_bias_of_mine" in left(report)["", LOSS].known


# ---- mutants ------------------------------------------------------------------------------------


def way_past_ours(make):
    """Ours names the author's as what it wraps."""

    def wrapping(ours, author, described):
        forward = make(ours, author, described)
        forward.__wrapped__ = author
        return forward

    return wrapping


def any_method(held):
    """Any method of the author's function counts, whosever it is."""
    return lambda one, module: (
        [one.__func__] if isinstance(one, types.MethodType) else held(one, module)
    )


def trusting(true):
    """Whatever hides a patched module's forward is taken for one around ours."""
    return lambda module, kind: "forward" in vars(module) and state.kind_of(module) != kind


#: Mutant -> (where, name, what it becomes, the test that it fails, its arguments).
MUTANTS = {
    "it stays ours": (
        [classes],
        "_while_patched",
        lambda true: lambda ours, *_: ours,
        test_unpatch_gives_back_what_was_wrapped,
        ["closure"],
    ),
    "a way past ours": (
        [classes],
        "_while_patched",
        way_past_ours,
        test_taking_a_wrapper_off_keeps_ours_and_the_authors_signature,
        [],
    ),
    "trust in the class": (
        [pretrained, decisions],
        "hides",
        trusting,
        test_a_forward_past_ours_is_said,
        ["lm_head"],
    ),
    "a cap is not said": (
        [pretrained],
        "cap_left",
        lambda true: lambda *args: [],
        test_a_causal_lm_with_a_forward_around_its_own,
        ["closure"],
    ),
    "not looked at": (
        [pretrained],
        "wrapping_forwards",
        lambda true: lambda module, cls: [],
        test_an_attention_with_another_forward,
        ["bound"],
    ),
    "another's method": (
        [pretrained],
        "_contents",
        any_method,
        test_an_attention_with_another_forward,
        ["another's"],
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_killed(monkeypatch, anew, mutant):
    holders, name, change, test, arguments = MUTANTS[mutant]
    for holder in holders:
        monkeypatch.setattr(holder, name, change(getattr(holder, name)))
    with pytest.raises((AssertionError, AttributeError, PatchError, pytest.fail.Exception)):
        test(*arguments)
