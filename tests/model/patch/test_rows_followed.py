"""Rows that follow other rows by exact ops and by hooks: named, or refused at the call."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama import modeling_llama

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.model.observe import leaks, mixing, repeats
from tests.contract import same_bytes
from tests.model.patch import families

PLACE = "model.layers.0.mlp"


def granite(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    sizes = {k: v for k, v in families._SIZES.items() if k != "head_dim"}
    config = transformers.GraniteConfig(
        **{**sizes, "hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1},
    )
    config.num_hidden_layers = layers
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def llama(layers: int = 1) -> nn.Module:
    return families.model("llama", num_hidden_layers=layers)


class After(nn.Module):
    """A part of a model, and a step behind it."""

    def __init__(self, inner: nn.Module, step) -> None:
        super().__init__()
        self.inner, self.step = inner, step

    def forward(self, x):
        return self.step(self.inner(x))


def quantized(y):
    """int8 with one dynamic scale for the tensor, straight through."""
    scale = y.detach().abs().amax() / 127
    return y + ((y / scale).round().clamp(-128, 127) * scale - y).detach()


def eight_bits(y):
    scale = y.detach().abs().amax() / 448
    return y + ((y / scale).to(torch.float8_e4m3fn).to(y.dtype) * scale - y).detach()


def dropping(y):
    """The capacity of an expert, over all tokens."""
    hit = (y[..., :1] > 0).flatten(0, 1)
    return y * (hit.int().cumsum(0) <= 20).view(*y.shape[:2], 1)


def by_place(y):
    return y + torch.arange(len(y))[:, None, None].to(y.dtype)


#: What a step reads -> the step.  Each of its ops is exact.
OF_ROWS = {
    "roll": lambda y: y + y.roll(1, 0),
    "the first": lambda y: y + y[:1],
    "transposed": lambda y: y.transpose(0, 1).reshape(y.shape),
    "maximum": lambda y: y + y.max(0, keepdim=True).values,
    "place": by_place,
    "count": lambda y: y * len(y),
    "nine": lambda y: y * 2 if len(y) >= 9 else y,
    "int8": quantized,
    "fp8": eight_bits,
    "capacity": dropping,
    "times 0": lambda y: y + 0 * y.roll(1, 0),
}
OF_TOKENS = {
    "flip": lambda y: y + y.flip(1),
    "length": lambda y: y * y.shape[1],
    "mean from 65": lambda y: y + y.mean(1, keepdim=True) if y.shape[1] > 64 else y,
}
STEPS = [pytest.param(granite, name, id=f"granite-{name}") for name in OF_ROWS | OF_TOKENS]
STEPS += [
    pytest.param(llama, name, id=f"llama-{name}", marks=[pytest.mark.nightly] * (name != "roll"))
    for name in OF_ROWS | OF_TOKENS
]


def changed(make, step, layers: int = 1, place: str = PLACE) -> nn.Module:
    net = make(layers)
    parent, _, name = place.rpartition(".")
    setattr(net.get_submodule(parent), name, After(net.get_submodule(place), step))
    return net


def moving(net: nn.Module) -> list[tuple[str, str]]:
    return [(one.name, one.known) for one in ck.patch(net).moving]


@pytest.mark.parametrize(("make", "name"), STEPS)
def test_exact_ops_that_read_other_rows(make, name):
    net = changed(make, (OF_ROWS | OF_TOKENS)[name])
    with pytest.raises(PatchError, match="its rows follow") as caught:
        ck.patch(net, strict=True)
    assert f"{PLACE} (After)" in str(caught.value)
    want = "other sequences" if name in OF_ROWS else "the tokens behind them"
    assert want in str(caught.value)


@pytest.mark.parametrize("make", [granite, llama])
def test_a_step_of_a_row_is_complete(make):
    assert ck.patch(changed(make, lambda y: y * 2 + y[..., :1]), strict=True).complete


def test_a_layer_that_differs_is_run():
    """Layers of one kind are passed over, and this one is of its own."""
    place = "model.layers.4.mlp"
    ((name, known), *_) = moving(changed(granite, OF_ROWS["roll"], 6, place))
    assert name == place and "other sequences" in known
    net, ran = granite(6), {}
    repeats.pass_over(net, ran)
    passed = [index for index, layer in enumerate(net.model.layers) if "forward" in vars(layer)]
    assert passed == [2, 3, 4, 5]


def test_a_bidirectional_model_may_read_what_is_behind():
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=128, intermediate_size=160, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=128, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    net = transformers.BertModel(config, add_pooling_layer=False).to(torch.bfloat16).eval()
    assert ck.patch(net, strict=True).complete
    layer = net.encoder.layer[0]
    layer.intermediate = After(layer.intermediate, OF_TOKENS["flip"])
    ((name, known),) = moving(net)
    assert name.endswith("intermediate") and "the padding behind them" in known


# ---- hooks --------------------------------------------------------------------------------------


def twice(module, grads, *others):
    """A backward hook that follows the number of sequences."""
    return tuple(g if g is None or len(g) == 1 else g * 2 for g in grads)


def add(y):
    y.add_(y.roll(1, 0))


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
    net, kept = llama(), []
    part = net.get_submodule(PLACE)
    part.register_forward_hook(lambda mod, args, y: kept.append(y.float().mean().item()))
    part.register_forward_hook(lambda mod, args, y: y * 2)
    assert ck.patch(net, strict=True).complete and kept == []
    tokens = families.ids(2, 17)
    both = families.logits(net, tokens)
    alone = families.logits(net, tokens[1:])
    assert len(kept) == 2
    assert same_bytes(both[1:], alone)


#: Hooks that change what comes out: another tensor, and the same one.
CHANGES = {
    "result": lambda mod, args, y: 2 * y if isinstance(y, torch.Tensor) else y,
    "in place": lambda mod, args, y: add(y if isinstance(y, torch.Tensor) else y.logits),
    "decorated": torch.no_grad()(lambda mod, args, y: 2 * y if isinstance(y, torch.Tensor) else y),
    "data": lambda mod, args, y: add((y if isinstance(y, torch.Tensor) else y.logits).data),
}


@pytest.mark.parametrize("way", CHANGES)
@pytest.mark.parametrize("place", ["", PLACE, "lm_head"])
def test_hooks_added_after_the_patch_change_nothing(place, way):
    net, tokens, seen = llama(), families.ids(1, 5), []
    ck.patch(net, strict=True)
    want = families.logits(net, tokens)
    part = net.get_submodule(place)
    part.register_forward_hook(lambda mod, args, y: seen.append(y))
    assert same_bytes(families.logits(net, tokens), want) and len(seen) == 1
    handle = part.register_forward_hook(CHANGES[way])
    for other in (net, net, copy.deepcopy(net)):
        with pytest.raises(PatchError, match=f"{place or 'the model'}: .* forward hook"):
            families.logits(other, tokens)
    handle.remove()
    assert same_bytes(families.logits(net, tokens), want)


def test_hooks_added_after_the_patch_do_not_write_in_inference_mode():
    """Where tensors count no writes."""
    net, tokens = llama(), families.ids(1, 5)
    ck.patch(net, strict=True)
    part = net.get_submodule(PLACE)
    part.register_forward_hook(lambda mod, args, y: None)
    with torch.inference_mode():
        net(tokens)
        part.register_forward_hook(CHANGES["in place"])
        for _ in range(2):
            with pytest.raises(PatchError, match="forward hook"):
                net(tokens)


def doubled_logits(mod, args, out):
    out.logits = 2 * out.logits


def doubled_table(mod, args, kwargs):
    kwargs["position_embeddings"] = tuple(2 * t for t in kwargs["position_embeddings"])


def test_hooks_added_after_the_patch_put_nothing_in_the_place_of_a_tensor():
    for place in ("", "model.layers.0"):
        net = llama()
        ck.patch(net, strict=True)
        part = net.get_submodule(place)
        if place:
            part.register_forward_pre_hook(doubled_table, with_kwargs=True)
        else:
            part.register_forward_hook(doubled_logits)
        with pytest.raises(PatchError, match="only hooks that change nothing"):
            net(families.ids(1, 5))


def test_a_second_patch_observes_hooks_added_after_the_first():
    net, tokens = llama(), families.ids(1, 5)
    ck.patch(net, strict=True)
    part = net.get_submodule(PLACE)
    handles = [part.register_forward_hook(CHANGES["result"])]
    with pytest.raises(PatchError):
        families.logits(net, tokens)
    assert ck.patch(net, strict=True).complete
    families.logits(net, tokens)
    handles.append(part.register_full_backward_hook(twice))
    with pytest.raises(PatchError, match="backward hook twice"):
        net(tokens.expand(2, -1), use_cache=False).logits.sum().backward()
    with pytest.raises(PatchError, match="its gradient follows"):
        ck.patch(net, strict=True)
    ck.unpatch(net)
    assert part._forward_hooks[handles[0].id] is CHANGES["result"]


def test_hooks_of_the_process():
    net, tokens = llama(), families.ids(1, 5)
    ck.patch(net, strict=True)
    handle = register_module_forward_hook(
        lambda mod, args, y: y.roll(1, 0) if type(mod).__name__ == "LlamaMLP" else None
    )
    try:
        with pytest.raises(PatchError, match="every module"):
            net(tokens)
        assert any("other sequences" in known for _, known in moving(llama()))
    finally:
        handle.remove()
    families.logits(net, tokens)


def test_hooks_of_libraries_are_let_through():
    """enable_input_require_grads, which trainers call, and transformers' own records."""
    net, tokens = llama(), families.ids(1, 5)
    ck.patch(net, strict=True)
    net.enable_input_require_grads()
    assert len(net(tokens, output_hidden_states=True, use_cache=False).hidden_states) == 2
    ck.audit(net, tokens, transforms=["repeat"], gradients=False)
    assert ck.patch(net, strict=True).ran == ()  # reviewed: not observed


def test_another_attention_is_refused():
    net, tokens = llama(), families.ids(1, 5)
    ck.patch(net, strict=True)
    net.set_attn_implementation("sdpa")
    for part in (net, net.model):
        with pytest.raises(PatchError, match="attn_implementation: expected 'cute_kernels'"):
            part(tokens)
    ck.patch(net, strict=True)
    families.logits(net, tokens)
    net.set_attn_implementation("eager")
    ck.unpatch(net)
    families.logits(net, tokens)


# ---- forwards of instances ----------------------------------------------------------------------


def test_a_softmax_in_a_forward_of_the_instance_is_named():
    """No forward of its class runs, so none mends it."""
    net = granite()
    part = net.get_submodule(PLACE)
    part.forward = lambda x: part.down_proj(torch.softmax(part.gate_proj(x), dim=-1))
    report = ck.patch(net)
    assert any(one.name == PLACE and "softmax" in one.known for one in report.moving)
    assert not any(one.name == PLACE for one in report.replaced)


@pytest.mark.parametrize("decorator", [lambda function: function, torch.no_grad()])
def test_a_forward_of_the_instance_around_the_authors_is_followed(decorator):
    net = llama()
    part = net.get_submodule(PLACE)
    inner = part.forward
    part.forward = decorator(lambda x: inner(x) + inner(x).roll(1, 0))
    report = ck.patch(net)
    assert any(one.name == PLACE and "other sequences" in one.known for one in report.moving)
    assert not any(one.name == PLACE for one in report.replaced)


# ---- caches, padding, and code in reviewed files ------------------------------------------------


class Layer(nn.Module):
    """A decoder layer, and a step that reads its keywords."""

    def __init__(self, inner: nn.Module, step) -> None:
        super().__init__()
        self.inner, self.step = inner, step

    def forward(self, x, *args, **kwargs):
        return self.step(self.inner(x, *args, **kwargs), kwargs)


def where_cached(y, kwargs):
    return y + y.roll(1, 0) if kwargs.get("past_key_values") is not None else y


def single(y, kwargs):
    return y + y.roll(1, 0) if y.shape[1] == 1 else y


@pytest.mark.parametrize("step", [where_cached, single])
def test_rows_of_a_cache_are_followed(step):
    net = granite()
    net.model.layers[0] = Layer(net.model.layers[0], step)
    ((name, known),) = moving(net)
    assert name == "model.layers.0" and "other sequences" in known


def test_another_formula_for_a_cache_is_named():
    net = granite()
    net.model.layers[0] = Layer(
        net.model.layers[0],
        lambda y, kwargs: y if kwargs.get("past_key_values") is None else y + y[..., :1],
    )
    ((name, known),) = moving(net)
    assert name == "" and "with a cache" in known


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
    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama.LlamaMLP, "forward", lambda s, x: mlp(s, x).roll(1, 0))
        assert any(name == PLACE for name, _ in moving(llama()))
    with monkeypatch.context() as patched:
        patched.setattr(
            modeling_llama,
            "apply_rotary_pos_emb",
            lambda *args, **kwargs: tuple(t + t.roll(1, 0) for t in rotate(*args, **kwargs)),
        )
        assert any("self_attn" in name for name, _ in moving(llama()))
    assert ck.patch(llama(), strict=True).ran == ()


def test_pooling_over_tokens_in_a_reviewed_family_is_named():
    net = llama()
    net.model.layers[0].mlp = nn.Sequential(net.model.layers[0].mlp, nn.MaxPool2d(3, 1, 1))
    assert any("MaxPool2d" in part.part for part in ck.patch(net).moving)


# ---- mutants ------------------------------------------------------------------------------------


def test_constants_are_noticed(monkeypatch):
    """The mutant: numbers of a product that do not follow its rows, as in the first observation."""
    mixed = mixing._numbers

    def constant(rows, salt=0):
        return mixed(torch.ones_like(rows), salt)

    monkeypatch.setattr(mixing, "_numbers", constant)
    with pytest.raises(pytest.fail.Exception):
        test_exact_ops_that_read_other_rows(granite, "int8")


def test_one_length_is_noticed(monkeypatch):
    monkeypatch.setattr(leaks, "_LENGTHS", (23,))
    with pytest.raises(pytest.fail.Exception):
        test_exact_ops_that_read_other_rows(granite, "mean from 65")
