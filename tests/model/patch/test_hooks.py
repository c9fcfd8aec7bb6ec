"""Hooks, forwards of instances and functions in files: observed, or refused at the call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama import modeling_llama

import cute_kernels as ck
from cute_kernels.errors import PatchError
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.families import PLACE, changed, granite, llama

TOKENS = families.ids(1, 5)


def moving(net: nn.Module) -> list[tuple[str, str]]:
    return [(one.name, one.known) for one in ck.patch(net).moving]


def patched() -> nn.Module:
    net = llama()
    ck.patch(net, strict=True)
    return net


def twice(module, grads, *others):
    """A backward hook that follows the number of sequences."""
    return tuple(g if g is None or len(g) == 1 else g * 2 for g in grads)


def add(y):
    y.add_(y.roll(1, 0))


def tensor(y):
    return y if isinstance(y, torch.Tensor) else y.logits


def double(mod, args, y):
    return 2 * y if isinstance(y, torch.Tensor) else y


#: How a hook is put on a part of a model.
HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda mod, args, y: y + y.roll(1, 0)),
    "sum": lambda m: m.register_forward_hook(lambda mod, args, y: y + y.mean(0, keepdim=True)),
    "in place": lambda m: m.register_forward_hook(lambda mod, args, y: add(y)),
    "decorated": lambda m: m.register_forward_hook(
        torch.no_grad()(lambda mod, args, y: y + y.roll(1, 0))
    ),
    "pre": lambda m: m.register_forward_pre_hook(lambda mod, args: (args[0].roll(1, 0),)),
    "backward": lambda m: m.register_full_backward_hook(twice),
    "backward pre": lambda m: m.register_full_backward_pre_hook(twice),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_observed(kind):
    """In a reviewed family too."""
    net = llama()
    HOOKS[kind](net.get_submodule(PLACE))
    # The gradient of a part may be named by the layer around it.
    with pytest.raises(PatchError, match=r"model\.layers\.0(\.mlp)? \("):
        ck.patch(net, strict=True)


def test_hooks_that_look_or_keep_to_the_row():
    """What they add up is not the model's, and what they keep is not from the observation."""
    net, sums = llama(), []
    part = net.get_submodule(PLACE)
    part.register_forward_hook(lambda mod, args, y: sums.append(y.float().mean().item()))
    part.register_forward_hook(lambda mod, args, y: y * 2)
    assert ck.patch(net, strict=True).complete and sums == []
    tokens = families.ids(2, 17)
    both, alone = families.logits(net, tokens), families.logits(net, tokens[1:])
    assert len(sums) == 2 and same_bytes(both[1:], alone)


#: Hooks that change what comes out: another tensor, and the same one.
CHANGES = {
    "result": double,
    "in place": lambda mod, args, y: add(tensor(y)),
    "decorated": torch.no_grad()(double),
    "data": lambda mod, args, y: add(tensor(y).data),
}


@pytest.mark.parametrize("way", CHANGES)
@pytest.mark.parametrize("place", ["", PLACE, "lm_head"])
def test_hooks_added_after_the_patch_change_nothing(place, way):
    net, seen = patched(), []
    want = families.logits(net, TOKENS)
    part = net.get_submodule(place)
    part.register_forward_hook(lambda mod, args, y: seen.append(y))
    assert same_bytes(families.logits(net, TOKENS), want) and len(seen) == 1
    handle = part.register_forward_hook(CHANGES[way])
    for other in (net, net, copy.deepcopy(net)):
        with pytest.raises(PatchError, match=f"{place or 'the model'}: .* forward hook"):
            families.logits(other, TOKENS)
    handle.remove()
    assert same_bytes(families.logits(net, TOKENS), want)


def doubled_logits(mod, args, out):
    out.logits = 2 * out.logits


def doubled_table(mod, args, kwargs):
    kwargs["position_embeddings"] = tuple(2 * t for t in kwargs["position_embeddings"])


def test_hooks_added_after_the_patch_put_nothing_in_the_place_of_a_tensor():
    """Nor write in inference mode, where tensors count no writes."""
    nets = [patched() for _ in range(3)]
    nets[0].model.layers[0].register_forward_pre_hook(doubled_table, with_kwargs=True)
    nets[1].register_forward_hook(doubled_logits)
    for net in nets[:2]:
        with pytest.raises(PatchError, match="only hooks that change nothing"):
            net(TOKENS)
    with torch.inference_mode():
        part = nets[2].get_submodule(PLACE)
        part.register_forward_hook(lambda mod, args, y: None)
        nets[2](TOKENS)
        part.register_forward_hook(CHANGES["in place"])
        for _ in range(2):
            with pytest.raises(PatchError, match="forward hook"):
                nets[2](TOKENS)


def test_a_second_patch_observes_hooks_added_after_the_first():
    net = patched()
    part = net.get_submodule(PLACE)
    handles = [part.register_forward_hook(CHANGES["result"])]
    with pytest.raises(PatchError):
        families.logits(net, TOKENS)
    assert ck.patch(net, strict=True).complete
    families.logits(net, TOKENS)
    handles.append(part.register_full_backward_hook(twice))
    with pytest.raises(PatchError, match="backward hook twice"):
        net(TOKENS.expand(2, -1), use_cache=False).logits.sum().backward()
    with pytest.raises(PatchError, match="its gradient follows"):
        ck.patch(net, strict=True)
    ck.unpatch(net)
    assert part._forward_hooks[handles[0].id] is CHANGES["result"]


def test_hooks_of_the_process_and_of_libraries():
    """The latter are let through: enable_input_require_grads, and transformers' own records."""
    net = patched()
    handle = register_module_forward_hook(
        lambda mod, args, y: y.roll(1, 0) if type(mod).__name__ == "LlamaMLP" else None
    )
    try:
        with pytest.raises(PatchError, match="every module"):
            net(TOKENS)
        assert any("other sequences" in known for _, known in moving(llama()))
    finally:
        handle.remove()
    net.enable_input_require_grads()
    assert len(net(TOKENS, output_hidden_states=True, use_cache=False).hidden_states) == 2
    ck.audit(net, TOKENS, transforms=["repeat"], gradients=False)
    assert ck.patch(net, strict=True).ran == ()  # reviewed: not observed


def test_another_attention_is_refused():
    net = patched()
    net.set_attn_implementation("sdpa")
    for part in (net, net.model):
        with pytest.raises(PatchError, match="attn_implementation: expected 'cute_kernels'"):
            part(TOKENS)
    ck.patch(net, strict=True)
    families.logits(net, TOKENS)
    net.set_attn_implementation("eager")
    ck.unpatch(net)
    families.logits(net, TOKENS)


# ---- forwards of instances, and functions of files ----------------------------------------------


def softmaxed(part):
    """No forward of its class runs, so none mends it."""
    return lambda x: part.down_proj(torch.softmax(part.gate_proj(x), dim=-1))


def around(part, decorator=lambda function: function):
    inner = part.forward
    return decorator(lambda x: inner(x) + inner(x).roll(1, 0))


@pytest.mark.parametrize(
    ("make", "forward", "known"),
    [
        (granite, softmaxed, "softmax"),
        (llama, around, "other sequences"),
        (llama, lambda part: around(part, torch.no_grad()), "other sequences"),
    ],
    ids=["another", "around", "decorated"],
)
def test_a_forward_of_the_instance_is_followed(make, forward, known):
    net = make()
    part = net.get_submodule(PLACE)
    part.forward = forward(part)
    report = ck.patch(net)
    assert any(one.name == PLACE and known in one.known for one in report.moving)
    assert not any(one.name == PLACE for one in report.replaced)


def of_cache(kwargs) -> bool:
    return kwargs.get("past_key_values") is not None


#: What a layer does by its keywords -> (the step, name of the module, what is said).
KEYWORDS = {
    "rows of a cache": (
        lambda y, kwargs: y + y.roll(1, 0) if of_cache(kwargs) else y,
        "model.layers.0",
        "other sequences",
    ),
    "single tokens": (
        lambda y, kwargs: y + y.roll(1, 0) if y.shape[1] == 1 else y,
        "model.layers.0",
        "other sequences",
    ),
    "another formula": (
        lambda y, kwargs: y + y[..., :1] if of_cache(kwargs) else y,
        "",
        "with a cache",
    ),
}


@pytest.mark.parametrize("which", KEYWORDS)
def test_steps_of_a_cache_are_followed(which):
    step, name, known = KEYWORDS[which]
    ((place, text),) = moving(changed(granite, step, place="model.layers.0", keywords=True))
    assert place == name and known in text


def test_the_longest_mask_of_a_batch_is_named():
    net = granite()

    class GraniteForCausalLM(type(net)):
        def forward(self, input_ids=None, attention_mask=None, **others):
            out = super().forward(input_ids, attention_mask=attention_mask, **others)
            if attention_mask is not None:
                out.logits = out.logits * attention_mask.sum(1).max()
            return out

    net.__class__ = GraniteForCausalLM
    ((name, known),) = moving(net)
    assert name == "" and "padding" in known


def test_functions_put_into_reviewed_files_are_observed(monkeypatch):
    """As Liger does: into a class, and into the file."""
    rotate, mlp = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaMLP.forward

    def rolled(*args, **kwargs):
        return tuple(t + t.roll(1, 0) for t in rotate(*args, **kwargs))

    for holder, name, function, named in (
        (modeling_llama.LlamaMLP, "forward", lambda s, x: mlp(s, x).roll(1, 0), PLACE),
        (modeling_llama, "apply_rotary_pos_emb", rolled, "self_attn"),
    ):
        with monkeypatch.context() as changed_file:
            changed_file.setattr(holder, name, function)
            assert any(named in place for place, _ in moving(llama()))
    assert ck.patch(llama(), strict=True).ran == ()
