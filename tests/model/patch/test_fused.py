"""Two steps of a decoder layer or an MLP in one launch: in which, and the bytes of two steps."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch

import cute_kernels as ck
from cute_kernels.model.patch import classes, decisions
from cute_kernels.model.patch.forwards import authors, layers
from cute_kernels.norm import op
from cute_kernels.norm.config import RMS
from cute_kernels.rowwise import op as rowwise_op
from tests.contract import same_bytes
from tests.model.patch import families
from tests.model.patch.ops import Watch

TOKENS = families.ids(2, 17)
#: Kind of forward -> the op that it launches.
OPS = {"residual": "norm_in_steps", "mlp": "gated"}
each = pytest.mark.parametrize("kind", OPS)
FUSED = {
    "residual": ("llama", "mistral", "qwen2", "qwen3"),
    "mlp": ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2"),
}
CASES = [(kind, name) for kind, names in FUSED.items() for name in names]


def replaced(report, kind: str) -> int:
    return sum(part.by == classes.FORWARDS[kind].by for part in report.replaced)


def launches(net: torch.nn.Module, kind: str) -> bool:
    with Watch() as watch:
        families.logits(net, TOKENS)
    return OPS[kind] in watch.ours


def pair(monkeypatch, kind: str, name: str, **options) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model with the fused forward, and one without."""
    net, other = (families.model(name, num_hidden_layers=1) for _ in range(2))
    assert replaced(ck.patch(net, strict=True, **options), kind) == 1
    with monkeypatch.context() as patched:
        patched.setitem(decisions.CONDITIONS, kind, lambda *_: False)
        assert replaced(ck.patch(other, strict=True, **options), kind) == 0
    assert launches(net, kind) and not launches(other, kind)
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


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_bytes_are_those_of_two_steps(monkeypatch, kind, name):
    net, other = pair(monkeypatch, kind, name)
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    assert agree(step(net), step(other))
    assert agree(step(net, attention_mask=mask), step(other, attention_mask=mask))
    for cache in ("dynamic", "static"):
        decoded = (families.cached(m, TOKENS, [9, 10], cache) for m in (net, other))
        assert same_bytes(*decoded)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(monkeypatch, reentrant):
    net, other = pair(monkeypatch, "residual", "qwen3")
    want = step(other)
    calls = []
    add = op.norm_in_steps
    monkeypatch.setattr(op, "norm_in_steps", lambda *a: (calls.append(a), add(*a))[1])
    net.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert agree(step(net), want)
    # Once in the forward of each layer, once more in its backward.
    assert len(calls) == 2 * net.config.num_hidden_layers


def test_main_grad(monkeypatch):
    sums = []
    for net in pair(monkeypatch, "residual", "llama", main_grad=True):
        for parameter in net.parameters():
            parameter.main_grad = torch.full(parameter.shape, 0.37)
        step(net)
        sums.append([p.main_grad for p in net.parameters()])
    assert agree(*sums)


@each
def test_one_rounding_changes_bytes(monkeypatch, kind):
    """The mutants: the gradient of ck.rms_norm(residual=), and ck.silu_mul, are rounded once."""
    net, other = pair(monkeypatch, kind, "llama")
    want = step(other)
    if kind == "mlp":
        gated = rowwise_op.gated
        monkeypatch.setattr(rowwise_op, "gated", lambda *args: gated(*args[:3], False))
    else:
        monkeypatch.setattr(op, "norm_in_steps", op.norm)
    got = step(net)
    states = 2 + net.config.num_hidden_layers
    assert not agree(got, want)
    assert kind == "mlp" or agree(got[:states], want[:states])


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
            rule = RMS, 1e-6, 0.0
            y, h, _, _ = op.norm_in_steps(x, residual, weight, None, None, None, *rule)
        else:
            h = residual + x
            y = ck.rms_norm(h, weight, 1e-6)
        roots = {"both": ([y, h], [d_y, d_h]), "norm": ([y], [d_y]), "sum": ([h], [d_h])}[uses]
        torch.autograd.backward(*roots)
        gradients = [torch.ones(1) if t.grad is None else t.grad for t in leaves]
        results.append([y.detach(), h.detach(), *gradients])
    assert agree(*results)


@pytest.mark.parametrize(
    ("kind", "inside"), [("residual", authors.NORM), ("mlp", f"mlp.{authors.ACTIVATION}")]
)
def test_a_hook_inside_sees_both_steps(monkeypatch, kind, inside):
    net, other = pair(monkeypatch, kind, "llama")
    outputs = []
    module = net.model.layers[0].get_submodule(inside)
    handle = module.register_forward_hook(lambda module, args, y: outputs.append((*args, y)))
    want = step(other)
    assert agree(step(net), want)
    ((x, y),) = outputs
    assert same_bytes(y, module(x))
    handle.remove()
    outputs.clear()
    assert agree(step(net), want) and outputs == []


@pytest.mark.parametrize("hook", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_every_kind_of_hook_asks_for_both_steps(hook):
    norm = torch.nn.RMSNorm(8)
    handle = getattr(norm, f"register_{hook}_hook")(lambda *args: None)
    assert not layers.is_bare(norm)
    handle.remove()
    assert layers.is_bare(norm)


def test_an_addition_with_a_rule_of_its_own_is_two_steps():
    x = torch.randn(2, 3, 8)
    assert layers.is_plain_pair(x, x + 1)
    for other in (x[:1], x.double(), x.to("meta"), torch.nn.Parameter(x)):
        assert not layers.is_plain_pair(x, other) and not layers.is_plain_pair(other, x)


@each
def test_copies_pickles_and_unpatch(monkeypatch, kind):
    net, other = pair(monkeypatch, kind, "llama")
    want = step(other)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert launches(copied, kind) and agree(step(copied), want)
    ck.unpatch(net)
    assert not launches(net, kind)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("residual", n) for n in sorted(set(families.FAMILIES) - set(FUSED["residual"]))]
    + [("mlp", "phi3")],
)
def test_others_keep_their_forward(kind, name):
    net = families.model(name)
    assert not replaced(ck.patch(net, strict=True), kind) and not launches(net, kind)


@each
def test_without_norms_and_activations_it_is_left(kind):
    net = families.model("llama")
    assert not replaced(ck.patch(net, norm=False), kind) and not launches(net, kind)


def test_a_layer_that_differs_is_not_known():
    module = importlib.import_module("transformers.models.nemotron.modeling_nemotron")
    assert not authors.is_pre_norm(module.NemotronDecoderLayer)  # its attention gets no kwargs
    llama = importlib.import_module("transformers.models.llama.modeling_llama").LlamaDecoderLayer
    assert authors.is_pre_norm(llama)
    own = type("Own", (llama,), {"forward": lambda self, hidden_states: hidden_states})
    assert not authors.is_pre_norm(own)


def test_an_mlp_that_differs_is_not_known():
    class Doubled(torch.nn.Module):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2

    class Alike(torch.nn.Module):
        def forward(self, h):
            out = self.down_proj(self.act_fn(self.gate_proj(h)) * self.up_proj(h))
            return out

    assert authors.is_gated(Alike) and not authors.is_gated(Doubled)
