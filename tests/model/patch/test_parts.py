"""What computes the parts that are replaced: products, look-ups, activations, gradients."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

import cute_kernels as ck
from cute_kernels.model.patch import pretrained, state
from cute_kernels.norm.config import part_rows
from tests.contract import bits, same_bytes
from tests.model.patch import families

GENERATOR = torch.Generator().manual_seed(4)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


# ---- products and look-ups ----------------------------------------------------------------------


def test_the_order_of_linears_is_an_argument():
    """K of 300 has more leaves than one."""
    net, conv = nn.Linear(300, 24), Conv1D(24, 300)
    inputs, weights = x(3, 300), (net.weight, conv.weight.mT)
    for order, other in (("tree", "chain"), ("chain", "tree")):
        for module, weight in zip((net, conv), weights, strict=True):
            ck.patch(module, order=order, strict=True)
            y = module(inputs)
            assert same_bytes(y, ck.linear(inputs, weight, module.bias, order=order))
            assert not same_bytes(y, ck.linear(inputs, weight, module.bias, order=other))
    conv(inputs).sum().backward()
    assert conv.weight.grad.shape == (300, 24)


def test_the_batches_that_may_be_cut():
    """Linears ask for 16 tokens, norms for those of a part, the narrowest for the most."""
    net = nn.Sequential(nn.Embedding(9, 64), nn.Linear(64, 64), nn.SiLU())
    assert ck.patch(net).granularity == 16
    net.append(nn.LayerNorm(4096)).append(nn.RMSNorm(128, eps=1e-6))
    assert ck.patch(net).granularity == part_rows(128) > part_rows(4096) > 16
    assert ck.patch(net, norm=False).granularity == 16


def test_a_weight_that_two_modules_add_into_is_named():
    net = nn.ModuleDict({"below": nn.Embedding(9, 64), "head": nn.Linear(64, 9, bias=False)})
    assert ck.patch(net, main_grad=True).main_grad_shared == ()
    net["head"].weight = net["below"].weight
    report = ck.patch(net, main_grad=True)
    assert report.main_grad_shared == ("below.weight",) and "several modules" in str(report)
    assert ck.patch(net).main_grad_shared == ()


class Scaled(nn.Embedding):
    """As Gemma's is."""

    def forward(self, input):
        return super().forward(input) * 3


def test_an_embedding_below_a_subclass():
    net, ids = Scaled(9, 8), torch.tensor([[1, 8, 1]])
    want = net(ids)
    ck.patch(net, strict=True)
    assert state.kind_of(net) == "embedding_step" and isinstance(net, Scaled)
    assert same_bytes(net(ids), want)
    net(ids).sum().backward()
    assert same_bytes(net.weight.grad[1], torch.full((8,), 6.0))


def test_padding_has_no_gradient():
    net = nn.Embedding(9, 8, padding_idx=2)
    ck.patch(net)
    net(torch.tensor([2, 3])).sum().backward()
    assert not net.weight.grad[2].any() and net.weight.grad[3].all()


def test_a_module_that_comes_twice():
    shared = nn.Linear(64, 64, bias=False)
    net = nn.Sequential(shared, nn.SiLU(), shared)
    report = ck.patch(net)
    assert [r.name for r in report.replaced] == ["0", "1"] and net[0] is net[2]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    want = ck.linear(ck.silu(ck.linear(x, shared.weight)), shared.weight)
    assert same_bytes(net(x), want)
    assert bits(net(x)).any()


# ---- activations and rotary tables ---------------------------------------------------------------

#: Names in transformers -> what computes them.
ACTIVATIONS = {
    "silu": ck.silu,
    "gelu gelu_python": ck.gelu,
    "gelu_pytorch_tanh gelu_python_tanh gelu_new gelu_fast gelu_accurate": (
        lambda t: ck.gelu(t, approximate="tanh")
    ),
    "quick_gelu": lambda t: t * ck.sigmoid(1.702 * t),
    "tanh": ck.tanh,
    "sigmoid": ck.sigmoid,
}


@pytest.mark.parametrize("names", ACTIVATIONS)
def test_activations(names):
    inputs = x(5, 33, dtype=torch.bfloat16)
    for name in names.split():
        net = transformers.activations.ACT2FN[name]
        before = net(inputs).double()
        assert len(ck.patch(net, strict=True).replaced) == 1
        assert same_bytes(net(inputs), ACTIVATIONS[names](inputs))
        assert (net(inputs).double() - before).abs().max() <= 2.0**-6 * before.abs().max()


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rotary_tables(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    net = families.model("llama", rope_parameters=rope).float()
    positions = torch.arange(100)[None]
    before = type(net.model.rotary_emb)(net.config)(x(1), positions)  # net's were rounded
    ck.patch(net.model.rotary_emb, strict=True)
    after = net.model.rotary_emb(x(1), positions)
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(before, after, strict=True))
    assert state.kind_of(net.model.rotary_emb) == "rotary"


def test_rotary_positions_of_sections_keep_their_forward():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 61, "intermediate_size": 64}
    sizes |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    config = transformers.Qwen2VLConfig(
        text_config={**sizes, "num_attention_heads": 2, "num_key_value_heads": 1}
    )
    text = transformers.Qwen2VLTextModel(config.text_config).bfloat16().eval()
    sections = torch.stack([torch.arange(9).expand(2, 9) * i for i in (1, 2, 3)])
    ids = torch.randint(61, (2, 9), generator=GENERATOR)
    with torch.no_grad():
        want = text(ids, position_ids=sections).last_hidden_state
        report = ck.patch(text)
        got = text(ids, position_ids=sections).last_hidden_state
    (rotary,) = [one for one in report.replaced if "rotary_emb" in one.name]
    assert rotary.by == "its author's forward in ck.batch_invariant"
    assert (got.float() - want.float()).norm() <= 0.05 * want.float().norm()


# ---- transformers' models -----------------------------------------------------------------------


def test_a_compiled_model_and_wrappers():
    """What is patched lies inside of them; compiled code of before is not run."""
    net = families.model("llama")
    compiled = torch.compile(net, backend="eager")
    tokens = families.ids(2, 9)
    before = families.logits(compiled, tokens)
    assert ck.patch(nn.Sequential(compiled)).complete
    assert same_bytes(families.logits(compiled, tokens), families.logits(net, tokens))
    assert not same_bytes(families.logits(compiled, tokens), before)
    ck.unpatch(compiled)
    assert type(net.lm_head) is nn.Linear


def test_autocast():
    """Of a model in bf16: the bytes that it has without."""
    net, tokens = families.model("gemma3"), families.ids(2, 9)
    ck.patch(net)
    want = families.logits(net, tokens)
    net.train()
    loss = net(tokens, labels=tokens, use_cache=False).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bytes(families.logits(net.eval(), tokens), want)
        assert same_bytes(net.train()(tokens, labels=tokens, use_cache=False).loss, loss)


def test_another_head():
    torch.manual_seed(0)
    config = families.model("llama").config
    net = transformers.AutoModelForSequenceClassification.from_config(config).bfloat16()
    report = ck.patch(net)
    assert state.kind_of(net.score) == "linear" and report.family == "Llama"
    assert repr(report) == str(report) and "replaced:" in repr(report)


def test_the_tables_do_not_meet():
    assert not set(pretrained.FAMILIES) & set(pretrained.NOT_COVERED)
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    missing = {*pretrained.FAMILIES, *pretrained.NOT_COVERED} - set(known)
    assert not missing, "names that this version of transformers does not have"


# ---- parametrizations and main_grad -------------------------------------------------------------


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("first", ["patch", "parametrization"])
def test_parametrizations(first):
    """Before and after the patch; both can be taken back in any order."""
    net, inputs = nn.Linear(16, 16, bias=False), x(3, 16)
    weight = net.weight.detach().clone()
    steps = [
        lambda: ck.patch(net),
        lambda: parametrize.register_parametrization(net, "weight", Double()),
    ]
    for step in steps if first == "patch" else reversed(steps):
        step()
    assert same_bytes(net(inputs), ck.linear(inputs, weight * 2)) and isinstance(net, nn.Linear)
    parametrize.remove_parametrizations(net, "weight", leave_parametrized=False)
    assert same_bytes(net(inputs), ck.linear(inputs, weight))
    ck.unpatch(net)
    assert type(net) is nn.Linear and same_bytes(net.weight, weight)


@pytest.mark.parametrize("name", ["gemma3", "gpt_neox"])
def test_main_grad(name):
    """Every gradient but the linears' biases goes there, in fp32, and stays out of grad.

    Unless it is not asked for.
    """
    net, tokens = families.model(name).train(), families.ids(2, 24)

    def step() -> None:
        for parameter in net.parameters():
            parameter.grad, parameter.main_grad = None, torch.zeros(parameter.shape)
        net(tokens, labels=tokens, use_cache=False).loss.backward()

    ck.patch(net)
    step()
    assert all(p.grad is not None and not p.main_grad.any() for p in net.parameters())
    want = {n: p.grad.float() for n, p in net.named_parameters()}
    report = ck.patch(net, main_grad=True)
    biases = {n for n, _ in net.named_parameters() if n.endswith("bias") and "norm" not in n}
    assert set(report.main_grad_left) == biases
    step()
    for key, parameter in net.named_parameters():
        assert (parameter.grad is None) == (key not in biases) == parameter.main_grad.any(), key
        if key not in biases:
            gap = (parameter.main_grad - want[key]).abs().max()
            assert gap <= 2.0**-7 * want[key].abs().max(), key


def test_main_grads_keep_their_bytes_in_micro_batches():
    """Sequences one at a time, two at a time and all at once; the loss counts all items.

    Each is as long as the parts in which ck.rms_norm adds dweight: docs/norm.md.
    """
    net = families.model("llama").train()
    ck.patch(net, main_grad=True)
    tokens, sums = families.ids(4, part_rows(128)), []
    for cut in (1, 2, 4):
        families.give_main_grads(net)
        for part in tokens.split(cut):
            net(part, labels=part, use_cache=False, num_items_in_batch=500).loss.backward()
        sums.append({n: p.main_grad for n, p in net.named_parameters()})
    for other in sums[1:]:
        assert [n for n in other if not same_bytes(other[n], sums[0][n])] == []
