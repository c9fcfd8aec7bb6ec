"""Residual and norm of a decoder layer in one launch: which layers, and the bytes of two steps."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch

import cute_kernels as ck
from cute_kernels.model.patch import plan
from cute_kernels.model.patch.forwards import layers, residual
from cute_kernels.model.patch.scan import decoder
from cute_kernels.norm import op
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.ops import Watch

FUSED = ("llama", "mistral", "qwen2", "qwen3")
each = pytest.mark.parametrize("name", FUSED)
TOKENS = families.ids(2, 17)
OP = "ck.rms_norm(residual=)"


def fused(report: ck.model.patch.report.Report) -> list[str]:
    return [part.name for part in report.replaced if part.by == OP]


def launches(net: torch.nn.Module) -> bool:
    with Watch() as watch:
        families.logits(net, TOKENS)
    return "norm_in_steps" in watch.ours


def pair(monkeypatch, name: str, **options) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model with fused layers, and one without."""
    net, other = families.model(name), families.model(name)
    assert len(fused(ck.patch(net, strict=True, **options))) == net.config.num_hidden_layers
    with monkeypatch.context() as patched:
        patched.setattr(plan, "_residuals", lambda *args: [])
        assert fused(ck.patch(other, strict=True, **options)) == []
    assert launches(net) and not launches(other)
    return net, other


def step(net: torch.nn.Module, **inputs: object) -> list[torch.Tensor]:
    """Loss, hidden states and gradients of a step, that of the embedded tokens among them."""
    net.zero_grad()
    embedded = net.get_input_embeddings()(TOKENS).detach().requires_grad_()
    options = {"use_cache": False, "output_hidden_states": True}
    output = net(inputs_embeds=embedded, labels=TOKENS, **options, **inputs)
    output.loss.backward()
    weights = [p.grad for p in net.parameters() if p.grad is not None]
    tensors = [output.loss, *output.hidden_states, embedded.grad, *weights]
    return [t.detach().clone() for t in tensors]


def agree(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(same_bytes, got, want))


@each
def test_the_bytes_are_those_of_two_steps(monkeypatch, name):
    net, other = pair(monkeypatch, name)
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    assert agree(step(net), step(other))
    assert agree(step(net, attention_mask=mask), step(other, attention_mask=mask))
    for kind in ("dynamic", "static"):
        decoded = (families.cached(m, TOKENS, [9, 10], kind) for m in (net, other))
        assert same_bytes(*decoded)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(monkeypatch, reentrant):
    net, other = pair(monkeypatch, "qwen3")
    want = step(other)
    calls = []
    add = op.norm_in_steps
    monkeypatch.setattr(op, "norm_in_steps", lambda *a: (calls.append(1), add(*a))[1])
    net.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert agree(step(net), want)
    # Once in the forward of each layer, once more in its backward.
    assert len(calls) == 2 * net.config.num_hidden_layers


def test_main_grad(monkeypatch):
    sums = []
    for net in pair(monkeypatch, "llama", main_grad=True):
        for parameter in net.parameters():
            parameter.main_grad = torch.full(parameter.shape, 0.37)
        step(net)
        sums.append([p.main_grad for p in net.parameters()])
    assert agree(*sums)


def test_one_rounding_in_the_backward_changes_bytes(monkeypatch):
    """The mutant: the fused gradient of ck.rms_norm(residual=), which is rounded once."""
    net, other = pair(monkeypatch, "llama")
    monkeypatch.setattr(op, "norm_in_steps", op.norm)
    got, want = step(net), step(other)
    states = 2 + net.config.num_hidden_layers
    assert agree(got[:states], want[:states]) and not agree(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("uses", ["both", "norm", "sum"])
def test_gradients_of_the_op(dtype, uses):
    generator = torch.Generator().manual_seed(3)
    shapes = (5, 3, 96), (5, 3, 96), (96,)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    d_y, d_h = (torch.randn(5, 3, 96, generator=generator).to(dtype) for _ in range(2))
    d_h[0] = -0.0
    d_y[0] = 0.0
    results = []
    for in_steps in (True, False):
        x, residual, weight = leaves = [t.clone().requires_grad_() for t in tensors]
        if in_steps:
            rule = layers.RMS, 1e-6, 0.0
            y, h, _, _ = op.norm_in_steps(x, residual, weight, None, None, None, *rule)
        else:
            h = residual + x
            y = ck.rms_norm(h, weight, 1e-6)
        roots = {"both": ([y, h], [d_y, d_h]), "norm": ([y], [d_y]), "sum": ([h], [d_h])}[uses]
        torch.autograd.backward(*roots)
        gradients = [torch.ones(1) if t.grad is None else t.grad for t in leaves]
        results.append([y.detach(), h.detach(), *gradients])
    assert agree(*results)


def test_a_hook_of_the_norm_sees_both_steps(monkeypatch):
    net, other = pair(monkeypatch, "llama")
    outputs = []
    norm = net.model.layers[0].post_attention_layernorm
    handle = norm.register_forward_hook(lambda module, args, y: outputs.append((*args, y)))
    want = step(other)
    assert agree(step(net), want)
    ((h, y),) = outputs
    assert same_bytes(y, norm(h))
    handle.remove()
    outputs.clear()
    assert agree(step(net), want) and outputs == []


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_every_kind_of_hook_asks_for_both_steps(kind):
    norm = torch.nn.RMSNorm(8)
    handle = getattr(norm, f"register_{kind}_hook")(lambda *args: None)
    assert not residual.is_bare(norm)
    handle.remove()
    assert residual.is_bare(norm)


def test_an_addition_with_a_rule_of_its_own_is_two_steps():
    x = torch.randn(2, 3, 8)
    assert residual.alike(x, x + 1)
    for other in (x[:1], x.double(), x.to("meta"), torch.nn.Parameter(x)):
        assert not residual.alike(x, other) and not residual.alike(other, x)


def test_copies_pickles_and_unpatch(monkeypatch):
    net, other = pair(monkeypatch, "llama")
    want = step(other)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert launches(copied) and agree(step(copied), want)
    cls = type(families.model("llama").model.layers[0])
    ck.unpatch(net)
    assert type(net.model.layers[0]) is cls and not launches(net)


@pytest.mark.parametrize("name", sorted(set(families.FAMILIES) - set(FUSED)))
def test_others_keep_their_forward(name):
    net = families.model(name)
    assert fused(ck.patch(net, strict=True)) == [] and not launches(net)


def test_without_norms_it_is_left():
    net = families.model("llama")
    assert fused(ck.patch(net, norm=False)) == [] and not launches(net)


def test_a_forward_that_differs_is_not_known():
    module = importlib.import_module("transformers.models.nemotron.modeling_nemotron")
    assert not decoder.is_pre_norm(module.NemotronDecoderLayer)  # its attention gets no kwargs
    llama = importlib.import_module("transformers.models.llama.modeling_llama").LlamaDecoderLayer
    assert decoder.is_pre_norm(llama)
    own = type("Own", (llama,), {"forward": lambda self, hidden_states: hidden_states})
    assert not decoder.is_pre_norm(own)
