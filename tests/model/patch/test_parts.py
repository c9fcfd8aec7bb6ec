"""What is replaced, what is left, and what is said of it: module by module."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError
from cute_kernels.model.patch import pretrained, state
from cute_kernels.norm.config import part_rows
from tests.contract import same_bytes
from tests.model.patch import families

GENERATOR = torch.Generator().manual_seed(4)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


def kinds(net: nn.Module) -> dict[str, str | None]:
    return {name: state.kind_of(m) for name, m in net.named_modules()}


# ---- products and look-ups ----------------------------------------------------------------------


def test_a_linear_is_ck_linear():
    net = nn.Linear(48, 24)
    ck.patch(net)
    given = x(3, 5, 48)
    assert same_bytes(net(given), ck.linear(given, net.weight, net.bias))


def test_the_order_of_linears_is_an_argument():
    """K of 300 has more leaves than one."""
    net, conv = nn.Linear(300, 24), Conv1D(24, 300)
    given, weights = x(3, 300), (net.weight, conv.weight.mT)
    for order, other in (("tree", "chain"), ("chain", "tree")):
        for module, weight in zip((net, conv), weights, strict=True):
            ck.patch(module, order=order)
            y = module(given)
            assert same_bytes(y, ck.linear(given, weight, module.bias, order=order))
            assert not same_bytes(y, ck.linear(given, weight, module.bias, order=other))


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


def test_conv1d_is_ck_linear():
    net, given = Conv1D(24, 48), x(3, 5, 48)
    want = ck.linear(given, net.weight.mT, net.bias)
    ck.patch(net, strict=True)
    assert same_bytes(net(given), want)
    net(given).sum().backward()
    assert net.weight.grad.shape == (48, 24)


class OwnForward(nn.Linear):
    """As quantised layers are."""

    def forward(self, input):
        return super().forward(input) * 2


class Scaled(nn.Embedding):
    """As Gemma's is."""

    def forward(self, input):
        return super().forward(input) * 3


class Summed(nn.Embedding):
    def forward(self, input):
        return super().forward(input).mean(-1)


class OwnLookUp(nn.Embedding):
    def forward(self, input):
        return nn.functional.embedding(input, self.weight) + 1


def test_a_linear_with_its_own_forward_is_left():
    net = nn.Sequential(OwnForward(8, 8))
    report = ck.patch(net)
    assert type(net[0]) is OwnForward and "a forward of its own" in report.left[0].known


def quantised() -> nn.Linear:
    net = nn.Linear(8, 8)
    net.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    return net


class Boxed(torch.Tensor):
    """A weight of a quantisation library."""


def boxed() -> nn.Linear:
    net = nn.Linear(8, 8)
    net.weight = nn.Parameter(net.weight.detach().as_subclass(Boxed), requires_grad=False)
    net._parameters["weight"] = net.weight.as_subclass(Boxed)
    return net


def hooked() -> nn.Linear:
    """As accelerate does: the forward is an attribute, which no class is asked for."""
    net = nn.Linear(8, 8)
    inner = net.forward
    net.forward = lambda input: inner(input)
    return net


def boxed_norm() -> nn.LayerNorm:
    """As tensor parallelism leaves a norm's weight: of a class of its own."""
    net = nn.LayerNorm(8)
    net._parameters["weight"] = net.weight.as_subclass(Boxed)
    return net


LEFT = {
    "norm's weight": (boxed_norm, "a Boxed, not a plain tensor"),
    "norm in float64": (lambda: nn.LayerNorm(8).double(), "torch.float64"),
    "int8": (quantised, "torch.int8"),
    "float64": (lambda: nn.Linear(8, 8).double(), "torch.float64"),
    "tensor subclass": (boxed, "a Boxed, not a plain tensor"),
    "lazy": (lambda: nn.LazyLinear(8), "not initialised yet"),
    "attribute": (hooked, "an attribute of its own"),
    "max_norm": (lambda: nn.Embedding(9, 8, max_norm=1.0), "max_norm is set"),
    "frequency": (lambda: nn.Embedding(9, 8, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "sparse": (lambda: nn.Embedding(9, 8, sparse=True), "sparse is set"),
    "look-up": (lambda: OwnLookUp(9, 8), "a forward of its own"),
    "look-up and more": (lambda: Summed(9, 8), "a forward of its own"),
    "convolution": (lambda: nn.Conv1d(8, 8, 3), "cuDNN and oneDNN"),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "splits of the keys"),
    "batch norm": (lambda: nn.BatchNorm1d(8), "statistics over the batch"),
    "recurrent": (lambda: nn.LSTM(8, 8), "gates of cuDNN"),
    "softmax": (lambda: nn.Softmax(dim=-1), "softmax"),
    "bag": (lambda: nn.EmbeddingBag(9, 8), "atomic"),
    "loss": (lambda: nn.CrossEntropyLoss(), "sum over the batch"),
    "script": (lambda: torch.jit.script(nn.Linear(8, 8)), "TorchScript"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("which", LEFT)
def test_what_is_left_is_said(which):
    make, fragment = LEFT[which]
    net = nn.Sequential(nn.Identity(), make())
    cls = type(net[1])
    report = ck.patch(net)
    assert type(net[1]) is cls and report.replaced == ()
    assert any(fragment in left.known for left in report.left), report
    assert fragment in str(report)


def test_atomics_move_bits_on_a_gpu():
    """What is said is for the device that the model is on."""
    net = nn.Sequential(nn.EmbeddingBag(9, 8))
    assert [left.moves for left in ck.patch(net).left] == [False]
    assert [left.moves for left in ck.patch(net.to("meta")).left] == [True]


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


# ---- activations --------------------------------------------------------------------------------

ACTIVATIONS = {
    "silu": lambda t: ck.silu(t),
    "swish": lambda t: ck.silu(t),
    "gelu": lambda t: ck.gelu(t),
    "gelu_python": lambda t: ck.gelu(t),
    "gelu_pytorch_tanh": lambda t: ck.gelu(t, approximate="tanh"),
    "gelu_python_tanh": lambda t: ck.gelu(t, approximate="tanh"),
    "gelu_new": lambda t: ck.gelu(t, approximate="tanh"),
    "gelu_fast": lambda t: ck.gelu(t, approximate="tanh"),
    "gelu_accurate": lambda t: ck.gelu(t, approximate="tanh"),
    "quick_gelu": lambda t: t * ck.sigmoid(1.702 * t),
    "tanh": lambda t: ck.tanh(t),
    "sigmoid": lambda t: ck.sigmoid(t),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    net, given = transformers.activations.ACT2FN[name], x(5, 33, dtype=torch.bfloat16)
    before = net(given).double()
    report = ck.patch(net, strict=True)
    assert len(report.replaced) == 1
    assert same_bytes(net(given), ACTIVATIONS[name](given))
    assert (net(given).double() - before).abs().max() <= 2.0**-6 * before.abs().max()


@pytest.mark.parametrize("name", ["relu", "relu2", "relu6", "linear", "leaky_relu", "hardswish"])
def test_exact_activations_are_no_matter(name):
    report = ck.patch(transformers.activations.ACT2FN[name])
    assert report.replaced == () and report.complete


@pytest.mark.parametrize("name", ["mish", "laplace", "sqrtsoftplus"])
def test_other_activations_are_said(name):
    assert not ck.patch(transformers.activations.ACT2FN[name]).complete


# ---- rotary tables ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_batch_are_left(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    rope["original_max_position_embeddings"] = 64
    rope |= {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32} if kind == "longrope" else {}
    net = families.model("llama", rope_parameters=rope)
    report = ck.patch(net)
    (left,) = report.moving
    assert left.name == "model.rotary_emb" and "the longest sequence of the batch" in left.known


# ---- transformers' models -----------------------------------------------------------------------


def test_flags():
    """Each leaves its parts, and says so; logits has its own."""
    for flag, kind in (("linear", "linear"), ("norm", "rms_norm"), ("embedding", "embedding")):
        net = families.model("llama")
        report = ck.patch(net, **{flag: False})
        assert kind not in kinds(net).values() and kinds(net)["lm_head"] == "head"
        assert {left.known for left in report.left} == {f"{flag}=False"} and not report.complete
    net = families.model("llama")
    report = ck.patch(net, attention=False)
    assert net.config._attn_implementation == "sdpa" and kinds(net)["model.rotary_emb"] is None
    assert {left.part for left in report.left} == {"attention (sdpa)", "LlamaRotaryEmbedding"}


@pytest.mark.parametrize("size", [32, 192, 320])
def test_head_sizes_that_the_attention_does_not_take(size):
    net = families.model("llama", head_dim=size)
    (left,) = ck.patch(net).left
    assert net.config._attn_implementation == "sdpa"
    taken = "ck.block_sparse_attention takes [64, 96, 128, 192/128, 256]"
    assert f"head sizes [{size}]; {taken}" in left.known
    families.logits(net, families.ids())


def deepseek(**settings) -> nn.Module:
    """Latent attention, one layer without experts and one with."""
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    sizes |= {"kv_lora_rank": 32, "q_lora_rank": 48, "first_k_dense_replace": 1}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes |= {"moe_intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {**families._SIZES, **sizes, **settings}
    del config["head_dim"]
    torch.manual_seed(0)
    made = transformers.DeepseekV3Config(**config)
    return transformers.AutoModelForCausalLM.from_config(made).to(torch.bfloat16).eval()


def test_an_attention_whose_values_are_narrower_is_ours():
    """DeepSeek's: its config's head_dim is 64, of which nothing is attended."""
    net, tokens = deepseek(), families.ids(2, 30)
    before = families.logits(net, tokens)
    report = ck.patch(net)
    assert net.config._attn_implementation == "cute_kernels"
    assert not [left for left in report.left if left.part.startswith("attention")]
    after = families.logits(net, tokens)
    assert not same_bytes(after, before) and (after - before).norm() < 0.02 * before.norm()
    (left,) = (x for x in ck.patch(deepseek(v_head_dim=64)).left if "head sizes" in x.known)
    assert "head sizes [192/64]; " in left.known


def test_wide_heads_are_taken():
    net = families.model("llama", head_dim=256)
    assert ck.patch(net).complete and net.config._attn_implementation == "cute_kernels"


def test_float32_keeps_its_attention():
    report = ck.patch(families.model("llama").float())
    (left,) = report.left
    assert "torch.float32: ck.block_sparse_attention takes" in left.known and left.moves


def test_dropout_of_the_attention_is_said():
    net = families.model("llama", attention_dropout=0.1)
    assert [left.moves for left in ck.patch(net).left] == [False]
    (left,) = ck.patch(net.train()).moving
    assert "attention_dropout = 0.1" in left.known
    with pytest.raises(ArgumentValueError, match="dropout"):
        net(families.ids(1, 5))


def test_two_configs_in_one_model():
    """Each config by itself: here a text model of 64 and one whose heads are of 32."""
    net = nn.ModuleDict({"a": families.model("llama"), "b": families.model("qwen3", head_dim=32)})
    (left,) = ck.patch(net).left
    assert left.name == "b" and left.part == "attention (sdpa)"
    assert [m.config._attn_implementation for m in net.values()] == ["cute_kernels", "sdpa"]


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


def test_a_causal_lm_whose_forward_is_an_attribute():
    net = families.model("llama")
    inner = net.forward
    net.forward = lambda *given, **named: inner(*given, **named)
    (left,) = ck.patch(net, strict=True).left
    assert "an attribute of its own" in left.known and not left.moves
    assert net.train()(families.ids(1, 5), labels=families.ids(1, 5)).logits is not None


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
    assert kinds(net)["score"] == "linear" and report.family == "Llama"


HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}


def test_linear_attention_is_not_covered():
    sizes = families.FAMILIES["llama"][1] | families._SIZES | HYBRID
    net = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3NextConfig(**sizes))
    report = ck.patch(net.bfloat16())
    assert report.family is None and not report.complete
    said = [left.known for left in report.moving]
    assert any("qwen3_next: state space or linear attention" in known for known in said)


def test_the_tables_do_not_meet():
    assert not set(pretrained.FAMILIES) & set(pretrained.NOT_COVERED)
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    missing = {*pretrained.FAMILIES, *pretrained.NOT_COVERED} - set(known)
    assert not missing, "names that this version of transformers does not have"


# ---- a module of nobody's library ---------------------------------------------------------------


class Custom(nn.Module):
    """An attention pooling by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(8, 8)

    def forward(self, x):
        return self.pooled(self.mean(x)) @ weights(x).mT

    def pooled(self, x):
        return next(row.cumsum(0) for row in x)


def weights(x):
    return x.softmax(-1)


class Plain(nn.Module):
    def forward(self, x):
        return x + x * 2


def test_a_forward_is_read():
    """Its methods and the functions of its file as well; names of children are no ops."""
    report = ck.patch(nn.Sequential(Custom(), Plain()))
    found = {left.known.split(":")[0] for left in report.left}
    assert found == {"@", "cumsum", "softmax"} and {left.name for left in report.left} == {"0"}


def test_dropout_counts_in_training_only():
    net = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0))
    assert [left.moves for left in ck.patch(net.train()).left] == [True]
    assert [left.moves for left in ck.patch(net.eval()).left] == [False]


# ---- parametrizations and main_grad -------------------------------------------------------------


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("first", ["patch", "parametrization"])
def test_parametrizations(first):
    """Before and after the patch; both can be taken back in any order."""
    net, given = nn.Linear(16, 16, bias=False), x(3, 16)
    weight = net.weight.detach().clone()
    steps = [
        lambda: ck.patch(net),
        lambda: parametrize.register_parametrization(net, "weight", Double()),
    ]
    for step in steps if first == "patch" else reversed(steps):
        step()
    assert same_bytes(net(given), ck.linear(given, weight * 2)) and isinstance(net, nn.Linear)
    parametrize.remove_parametrizations(net, "weight", leave_parametrized=False)
    assert same_bytes(net(given), ck.linear(given, weight))
    ck.unpatch(net)
    assert type(net) is nn.Linear and same_bytes(net.weight, weight)


@pytest.mark.parametrize("name", ["gemma3", "gpt_neox"])
def test_main_grad(name):
    """Every gradient but the linears' biases goes there, in fp32, and stays out of grad."""
    net = families.model(name).train()
    report = ck.patch(net, main_grad=True)
    biases = {n for n, _ in net.named_parameters() if n.endswith("bias") and "norm" not in n}
    assert set(report.main_grad_left) == biases
    tokens = families.ids(2, 24)
    net(tokens, labels=tokens, use_cache=False).loss.backward()
    want = {n: p.grad.float() for n, p in net.named_parameters()}
    net.zero_grad()
    for parameter in net.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
    net(tokens, labels=tokens, use_cache=False).loss.backward()
    for at, parameter in net.named_parameters():
        if at in biases:
            assert parameter.grad is not None and not parameter.main_grad.any()
            continue
        assert parameter.grad is None, at
        gap = (parameter.main_grad - want[at]).abs().max()
        assert parameter.main_grad.any() and gap <= 2.0**-7 * want[at].abs().max(), at


def test_main_grads_keep_their_bytes_in_micro_batches():
    """Sequences one at a time, two at a time and all at once; the loss counts all items.

    Each is as long as the parts in which ck.rms_norm adds dweight: docs/norm.md.
    """
    net = families.model("llama").train()
    ck.patch(net, main_grad=True)
    tokens, found = families.ids(4, part_rows(128)), []
    for cut in (1, 2, 4):
        for parameter in net.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
        for part in tokens.split(cut):
            net(part, labels=part, use_cache=False, num_items_in_batch=500).loss.backward()
        found.append({n: p.main_grad for n, p in net.named_parameters()})
    for other in found[1:]:
        assert [n for n in other if not same_bytes(other[n], found[0][n])] == []


def test_main_grad_is_ignored_unless_asked_for():
    net = families.model("llama").train()
    ck.patch(net)
    for parameter in net.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
    tokens = families.ids(2, 16)
    net(tokens, labels=tokens, use_cache=False).loss.backward()
    assert all(p.grad is not None and not p.main_grad.any() for p in net.parameters())
