"""Forwards that are attributes of modules: put around ours, taken off, and left by `ck.unpatch`."""

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
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.wrappers import AROUND, closed_over

TOKENS = families.ids(2, 17)
NAMES = pytest.mark.parametrize("name", ["llama", "gemma2"])
#: Parts that hooks of accelerate lie around, besides the model itself.
PARTS = ("lm_head", "model.norm", "model.rotary_emb", "model.embed_tokens", "model.layers.0.mlp")


def results(net: nn.Module) -> list[torch.Tensor]:
    """Logits, and the loss from labels."""
    with torch.no_grad():
        loss = net(TOKENS, labels=TOKENS, use_cache=False).loss
    return [families.logits(net, TOKENS), loss]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(same_bytes, one, other))


def patched(name: str) -> nn.Module:
    net = families.model(name)
    ck.patch(net, strict=True)
    return net


def wrap(module: nn.Module) -> None:
    """As accelerate's prepare: around the function, which is bound to the module again."""
    inner = module.forward.__func__

    @functools.wraps(inner)
    def forward(self, *args, **kwargs):
        return inner(self, *args, **kwargs)

    module.forward = types.MethodType(forward, module)


def unwrap(module: nn.Module) -> None:
    """As its unwrap_model(keep_fp32_wrapper=False): what is innermost."""
    forward = module.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    module.forward = types.MethodType(forward, module)


@pytest.fixture
def anew():
    """Classes made while the test lasts are not for the next."""
    classes.patched_class.cache_clear()
    yield
    classes.patched_class.cache_clear()


# ---- put around ours ----------------------------------------------------------------------------


@NAMES
@pytest.mark.parametrize("way", AROUND)
def test_unpatch_gives_back_what_was_wrapped(name, way):
    """The wrapper kept our forward; it is the author's once the model is not patched any more."""
    before, net = results(families.model(name)), patched(name)
    ours = results(net)
    parts = () if way == "global" else PARTS  # which is one name, for one module
    for module in (net, *map(net.get_submodule, parts)):
        module.forward = AROUND[way](module)
    assert same(results(net), ours) and not same(ours, before)
    ck.unpatch(net)
    assert same(results(net), before)
    assert not any(hasattr(module, "_cute_kernels") for module in net.modules())
    assert ck.patch(net, strict=True).complete
    assert same(results(net), ours)


def test_what_ours_names_is_not_the_wrappers():
    """Our forward's own sums and functions, and the author's behind it, are no finding."""
    net = patched("llama")
    net.forward = closed_over(net)
    parts = [(one.name, one.part) for one in ck.patch(net, logits="linear").left]
    assert parts == [("", "LlamaForCausalLM: loss")]


def test_a_wrapped_part_outlives_a_pickle():
    """accelerate leaves the bound method behind when it takes a hook off."""
    net = patched("gemma2")
    for module in (net, *map(net.get_submodule, PARTS)):
        module.forward = module.forward
    again = pickle.loads(pickle.dumps(net))
    assert same(results(again), results(net))
    ck.unpatch(again)
    assert same(results(again), results(families.model("gemma2")))


@NAMES
def test_the_signature_is_the_authors(name):
    """generate and trainers look there for the names of a model's inputs."""
    plain, net = families.model(name), patched(name)
    assert inspect.signature(net.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(net).forward) == inspect.signature(type(plain).forward)
    wrap(net)
    assert inspect.signature(net.forward) == inspect.signature(plain.forward)


# ---- taken off again ----------------------------------------------------------------------------


@NAMES
def test_taking_a_wrapper_off_keeps_ours(name):
    net = patched(name)
    ours = results(net)
    wrap(net)
    unwrap(net)
    assert same(results(net), ours) and ck.patch(net, strict=True).complete
    assert same(results(net), ours)


# ---- past ours ----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "lm_head", "model.norm"])
def test_a_forward_past_ours_is_said(part):
    """The module was patched, and somebody put the author's forward in the instance."""
    net = patched("gemma2")
    module = net.get_submodule(part)
    module.forward = types.MethodType(state.user_class(module).forward, module)
    assert part in {one.name for one in ck.patch(net).moving}
    with pytest.raises(PatchError, match="an attribute of its own" if part else "soft cap"):
        ck.patch(net, strict=True)


@NAMES
def test_a_head_that_is_hidden_cannot_score(name):
    """The loss is torch's then, of its logits, and said to be."""
    net = families.model(name)
    net.lm_head.forward = closed_over(net.lm_head)
    moves = {(one.name, one.part): one.moves for one in ck.patch(net).left}
    assert moves == {("lm_head", "Linear"): True, ("", f"{type(net).__name__}: loss"): False}
    out = net.train()(TOKENS, labels=TOKENS, use_cache=False)
    want = net.loss_function(out.logits, TOKENS, net.config.vocab_size)
    assert same_bytes(out.loss, want)


def test_an_embedding_that_scales_is_replaced_below():
    """Ours is below the author's forward, which the attribute ends in."""
    net, ours = families.model("gemma2"), results(patched("gemma2"))
    module = net.get_input_embeddings()
    module.forward = closed_over(module)
    assert ck.patch(net, strict=True).complete and same(results(net), ours)


# ---- mutants ------------------------------------------------------------------------------------


def test_a_forward_that_stays_ours_is_noticed(monkeypatch, anew):
    monkeypatch.setattr(classes, "_while_patched", lambda ours, *_: ours)
    with pytest.raises((AssertionError, AttributeError)):
        test_unpatch_gives_back_what_was_wrapped("llama", "closure")


def test_a_way_past_ours_is_noticed(monkeypatch, anew):
    """The mutant: ours names the author's as what it wraps."""
    made = classes._while_patched

    def wrapping(ours, author, described):
        forward = made(ours, author, described)
        forward.__wrapped__ = author
        return forward

    monkeypatch.setattr(classes, "_while_patched", wrapping)
    with pytest.raises(AssertionError):
        test_taking_a_wrapper_off_keeps_ours("gemma2")


def test_trust_in_the_class_is_noticed(monkeypatch):
    """The mutant: whatever hides a patched module's forward is taken for one around ours."""

    def trusting(module, kind):
        return "forward" in vars(module) and state.kind_of(module) != kind

    for module in (pretrained, decisions):
        monkeypatch.setattr(module, "hides", trusting)
    with pytest.raises(AssertionError):
        test_a_forward_past_ours_is_said("lm_head")


def fused(net: nn.Module, head: str) -> None:
    """As TRL's fused head: another way through the model, taken by a keyword."""
    inner = net.forward

    @functools.wraps(type(net).forward)
    def forward(self, *args, fused=False, **kwargs):
        if not fused:
            return inner(*args, **kwargs)
        weight = self.get_output_embeddings().weight
        return self.base_model(*args, **kwargs).last_hidden_state @ weight.T

    @functools.wraps(type(net).forward)
    def by_name(self, *args, fused=False, **kwargs):
        if not fused:
            return inner(*args, **kwargs)
        return self.base_model(*args, **kwargs).last_hidden_state @ self.lm_head.weight.T

    net.forward = types.MethodType({"getter": forward, "name": by_name}[head], net)


@pytest.mark.parametrize("head", ["getter", "name"])
def test_a_forward_that_reads_the_head_is_left(head):
    net = patched("llama")
    fused(net, head)
    report = ck.patch(net)
    assert not any(one.by == "ck.linear_logp" for one in report.replaced)
    left = {part.part: part.known for part in report.moving}
    assert f"{__name__}." in left["LlamaForCausalLM: loss"]
    with pytest.raises(PatchError, match="LlamaForCausalLM: loss"):
        ck.patch(net, strict=True)
    del net.forward
    assert ck.patch(net, strict=True).complete
