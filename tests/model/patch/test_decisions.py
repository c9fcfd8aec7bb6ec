"""What is left, and why: modules, models and steps in a model, with the kind of the reason."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import cute_kernels as ck
from cute_kernels.errors import ArgumentValueError, PatchError
from cute_kernels.model.observe import leaks, mixing, repeats
from cute_kernels.model.patch import decisions, state
from tests.model import refusals
from tests.model.patch import all_causal_lms, families
from tests.model.patch.families import PLACE, After, changed, granite, llama


def said(report) -> list[str]:
    """A line for each part that is left; "still" begins those whose bits follow no batch."""
    return [
        f"{'' if one.moves else 'still '}{one.kind.name}: {one.name} ({one.part}): {one.known}"
        for one in report.left
    ]


def require(report, reason: str) -> None:
    """That a part is left for the reason; "": that none is whose bits follow the batch."""
    if not reason:
        assert report.complete, report
    else:
        assert any(refusals.agrees(reason, line) for line in said(report)), report


# ---- modules ------------------------------------------------------------------------------------


class Boxed(torch.Tensor):
    """A weight of a quantisation library, or of tensor parallelism."""


def with_weight(module: nn.Module, weight: torch.Tensor) -> nn.Module:
    module._parameters["weight"] = weight
    return module


def hooked() -> nn.Linear:
    """As accelerate does: the forward is an attribute, which no class is asked for."""
    net = nn.Linear(8, 8)
    inner = net.forward
    net.forward = lambda input: inner(input)
    return net


def of(base: type[nn.Module], forward) -> type[nn.Module]:
    return type("Own", (base,), {"forward": forward})


def weights(x):
    return x.softmax(-1)


class Custom(nn.Module):
    """Reads a method, a function of its file and a child, whose name is no op."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(8, 8)

    def forward(self, x):
        return self.pooled(self.mean(x)) @ weights(x).mT

    def pooled(self, x):
        return next(row.cumsum(0) for row in x)


OWN_FORWARD = "NOT_TAKEN ... a forward of its own"
#: Module -> (how it is made, why it is left).
MODULES = {
    "norm's weight": (
        lambda: with_weight(nn.LayerNorm(8), torch.ones(8).as_subclass(Boxed)),
        "NOT_TAKEN ... a Boxed, not a plain tensor",
    ),
    "norm in float64": (lambda: nn.LayerNorm(8).double(), "NOT_TAKEN ... torch.float64"),
    "norm of 2-D": (lambda: nn.LayerNorm((4, 8)), "NOT_TAKEN ... not over the last dimension"),
    "int8": (
        lambda: with_weight(nn.Linear(8, 8), torch.ones(8, 8, dtype=torch.int8)),
        "NOT_TAKEN ... torch.int8",
    ),
    "subclass of tensors": (
        lambda: with_weight(nn.Linear(8, 8), torch.ones(8, 8).as_subclass(Boxed)),
        "NOT_TAKEN ... a Boxed, not a plain tensor",
    ),
    "lazy": (lambda: nn.LazyLinear(8), "NOT_TAKEN ... not initialised yet"),
    "max_norm": (lambda: nn.Embedding(9, 8, max_norm=1.0), "NOT_TAKEN ... max_norm is set"),
    "frequency": (
        lambda: nn.Embedding(9, 8, scale_grad_by_freq=True),
        "NOT_TAKEN ... scale_grad_by_freq",
    ),
    "sparse": (lambda: nn.Embedding(9, 8, sparse=True), "NOT_TAKEN ... sparse is set"),
    "own product": (
        lambda: of(nn.Linear, lambda self, x: nn.Linear.forward(self, x) * 2)(8, 8),
        OWN_FORWARD,
    ),
    "own look-up": (
        lambda: of(nn.Embedding, lambda self, i: nn.functional.embedding(i, self.weight) + 1)(9, 8),
        OWN_FORWARD,
    ),
    "attribute": (hooked, "HIDDEN ... an attribute of its own"),
    "script": (lambda: torch.jit.script(nn.Linear(8, 8)), "HIDDEN ... TorchScript"),
    "convolution": (lambda: nn.Conv1d(8, 8, 3), "NAMED ... cuDNN and oneDNN"),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "NAMED ... splits of the keys"),
    "batch norm": (lambda: nn.BatchNorm1d(8), "NAMED ... statistics over the batch"),
    "recurrent": (lambda: nn.LSTM(8, 8), "NAMED ... gates of cuDNN"),
    "softmax": (lambda: nn.Softmax(dim=-1), "NAMED ... softmax"),
    "bag": (lambda: nn.EmbeddingBag(9, 8), "still NAMED ... atomic"),
    "bag on meta": (lambda: nn.EmbeddingBag(9, 8, device="meta"), "NAMED ... atomic"),
    "loss": (nn.CrossEntropyLoss, "still NAMED ... sum over the batch"),
    "dropout": (lambda: nn.Dropout(0.1), "DRAWN ... p = 0.1"),
    "dropout of evaluation": (lambda: nn.Dropout(0.1).eval(), "still DRAWN ... p = 0.1"),
    "no dropout": (lambda: nn.Dropout(0.0), ""),
    "a product": (Custom, "NAMED ... @: "),
    "a method": (Custom, "NAMED ... cumsum: "),
    "a function of the file": (Custom, "NAMED ... softmax: "),
    **{
        name: (lambda name=name: transformers.activations.ACT2FN[name], f"NAMED ... {op}: ")
        for name, op in (("mish", "mish"), ("laplace", "erf"), ("sqrtsoftplus", "softplus"))
    },
    **{
        name: (lambda name=name: transformers.activations.ACT2FN[name], "")
        for name in ("relu", "relu2", "relu6", "linear", "leaky_relu", "hardswish")
    },
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("which", MODULES)
def test_a_module_that_is_left(which):
    make, reason = MODULES[which]
    net = nn.Sequential(nn.Identity(), make())
    cls = type(net[1])
    report = ck.patch(net)
    assert type(net[1]) is cls and "1" not in {one.name for one in report.replaced}
    require(report, reason)
    assert all(one.known in str(report) and one.name for one in report.left)


# ---- models -------------------------------------------------------------------------------------

TEXT = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 97}
IDS = families.ids(2, 9)


def built(name: str, **settings: object) -> nn.Module:
    """``XForCausalLM`` or another class with its config."""
    torch.manual_seed(3)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**settings)).bfloat16().eval()


def rope(kind: str, **settings: object) -> nn.Module:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0} | settings
    parameters = rope | {"original_max_position_embeddings": 64}
    return families.model("llama", rope_parameters=parameters, num_hidden_layers=1)


def deepseek(**settings: object) -> nn.Module:
    """Latent attention, one layer without experts and one with."""
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    sizes |= {"kv_lora_rank": 32, "q_lora_rank": 48, "first_k_dense_replace": 1}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes |= {"moe_intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {**families._SIZES, **sizes, **settings}
    del config["head_dim"]
    return built("DeepseekV3ForCausalLM", **config)


def cut_experts() -> nn.Module:
    net = all_causal_lms.build("qwen3_moe")
    net.model.layers[1].mlp.experts._is_expert_parallel = True
    return net


def base_model() -> nn.Module:
    return families.model("llama", num_hidden_layers=1).model


#: A MiniMax-M3 with sparse layers: with blocks of 128 keys the short sequences see all of them.
M3 = {**TEXT, "hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 2}
M3 |= {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 64, "rotary_dim": 64}
M3 |= {"num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 1, "index_head_dim": 64}
M3 |= {"max_position_embeddings": 4096, "layer_types": ["minimax_m3_sparse"]}
M3 |= {"bos_token_id": None, "eos_token_id": None}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8}
DOGE = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
MOBILE = {"num_attention_heads": 4, "intermediate_size": 64, "embedding_size": 32}
T5 = {"d_model": 128, "d_kv": 64, "num_heads": 2, "num_layers": 1, "d_ff": 160, "vocab_size": 97}
SIZES = "takes [64, 96, 128, 192/128, 256]"
#: Model -> (how it is made, why a part is left, options of the patch).
MODELS = {
    "heads of 32": (
        lambda: families.model("llama", head_dim=32),
        f"ATTENTION ... head sizes [32]; ck.block_sparse_attention {SIZES}",
    ),
    "heads of 320": (lambda: families.model("llama", head_dim=320), "ATTENTION ... [320]"),
    "heads of 256": (lambda: families.model("llama", head_dim=256), ""),
    "narrow values": (lambda: deepseek(v_head_dim=64), "ATTENTION ... head sizes [192/64]; "),
    "latent attention": (deepseek, ""),
    "float32": (
        lambda: families.model("llama").float(),
        "ATTENTION ... torch.float32: ck.block_sparse_attention takes",
    ),
    "dropout": (
        lambda: families.model("llama", attention_dropout=0.1),
        "still DRAWN|still ATTENTION ... attention_dropout = 0.1",
    ),
    "dynamic": (lambda: rope("dynamic"), "SEQUENCES: model.rotary_emb ... the longest sequence"),
    "longrope": (
        lambda: rope("longrope", short_factor=[1.0] * 32, long_factor=[2.0] * 32),
        "SEQUENCES: model.rotary_emb ... the longest sequence of the batch",
    ),
    "mamba2 of width 5": (
        lambda: built("Mamba2ForCausalLM", **TEXT, **MAMBA2, conv_kernel=5),
        "NOT_COVERED ... a convolution of width 5",
    ),
    "doge": (lambda: built("DogeForCausalLM", **TEXT, **DOGE), "ATTENTION ... values of the mask"),
    "mobilebert": (
        lambda: built("MobileBertModel", **TEXT, **MOBILE, intra_bottleneck_size=32),
        "ATTENTION ... head sizes [8]",
    ),
    "t5": (
        lambda: built("T5ForConditionalGeneration", **T5),
        "NOT_OBSERVED ... an encoder-decoder is not observed",
    ),
    "a bias of positions": (lambda: all_causal_lms.build("mpt"), "RUNS ... bmm"),
    "a mask by torch.where": (lambda: all_causal_lms.build("gpt_neo"), "RUNS ... bmm"),
    "blocks of the longest": (
        lambda: all_causal_lms.build("big_bird"),
        "SEQUENCES|ATTENTION|NOT_COVERED ... attention_type = 'block_sparse'",
    ),
    "short convolutions": (
        lambda: all_causal_lms.build("lfm2_moe"),
        "RUNS: model.layers.0.conv (Lfm2MoeShortConv): convolution (modeling",
    ),
    "chosen blocks": (
        lambda: (
            transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model("minimax_m3_vl_text", **M3)
            )
            .bfloat16()
            .eval()
        ),
        "ATTENTION ... block_indices: expected None",
    ),
    "a base model": (base_model, "still ELSEWHERE|still NAMED ... the head is outside"),
    "an expert of a rank": (cut_experts, "EXPERTS: model.layers.1.mlp.experts ... cut over ranks"),
    "experts, linear=False": (
        lambda: all_causal_lms.build("qwen3_moe"),
        "OPTION: model.layers.0.mlp.experts ... linear=False",
        {"linear": False},
    ),
    "a router that draws": (
        lambda: all_causal_lms.build("phimoe"),
        "still DRAWN ... exponential_ ... random numbers",
    ),
    "a loss": (lambda: granite(), "still ELSEWHERE|still NAMED ... torch's cross entropy"),
}


def run(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        more = {"decoder_input_ids": IDS} if net.config.is_encoder_decoder else {}
        return net(IDS, **more)[0].float()


@pytest.mark.parametrize("which", MODELS)
def test_a_model_with_parts_that_are_left(which):
    """It runs, and computes the same function: what is ours rounds elsewhere."""
    make, reason, *options = MODELS[which]
    net = make()
    want = run(net)
    require(ck.patch(net, **dict(*options)), reason)
    got = run(net)
    assert (got - want).norm() <= 0.05 * want.norm()


@pytest.mark.parametrize("kind", ["deepseek_v2", "gpt_oss"])
def test_models_that_are_complete(kind):
    """Groups of experts, complex rotary embeddings; biases, sinks.

    test_every_causal_lm has the others, by night.
    """
    assert all_causal_lms.outcome(kind)[0] == "complete"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", all_causal_lms.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_causal_lm(kind):
    """As the page of docs says; what is called complete has no byte that differs."""
    state, _ = all_causal_lms.outcome(kind)
    assert state == all_causal_lms.recorded().get(kind), state
    assert state not in ("differs", "crash")


def test_what_draws_moves_bits_in_training():
    net = families.model("llama", attention_dropout=0.1)
    (left,) = ck.patch(net.train()).moving
    assert "attention_dropout = 0.1" in left.known
    with pytest.raises(ArgumentValueError, match="dropout"):
        net(families.ids(1, 5))
    with pytest.raises(PatchError, match="exponential_"):
        ck.patch(all_causal_lms.build("phimoe").train(), strict=True)
    assert ck.patch(all_causal_lms.build("mixtral").train(), strict=True).complete


def test_a_known_hybrid_is_refused_before_it_is_observed(monkeypatch):
    """Hundreds of layers on meta would take minutes."""
    monkeypatch.setattr(decisions, "decide", lambda *_: pytest.fail("planned"))
    with torch.device("meta"):
        net = transformers.ZambaForCausalLM(all_causal_lms.config_of("zamba"))
    with pytest.raises(PatchError) as caught:
        ck.patch(net, strict=True)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and "zamba: state space" in lines[1]
    assert "docs/model_families.md" in lines[2]


def test_a_hybrid_of_attention_layers_alone_is_no_hybrid():
    """What a layer is decides, not the name of the type."""
    for kind in ("lfm2", "minimax"):
        config = all_causal_lms.config_of(kind)
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        net = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
        assert ck.patch(net, strict=True).complete


def test_each_config_is_asked_by_itself():
    """A text model of 64 and one whose heads are of 32; one whose attributes are by layer."""
    net = nn.ModuleDict({"a": families.model("llama"), "b": families.model("qwen3", head_dim=32)})
    (left,) = ck.patch(net).left
    assert left.name == "b" and left.part == "attention (sdpa)"
    assert [m.config._attn_implementation for m in net.values()] == ["cute_kernels", "sdpa"]

    class ByLayer(transformers.Qwen3Config):
        def __getattribute__(self, name):
            if name == "num_attention_heads" and "whole" in vars(self):
                raise RuntimeError(f"{name} is a per-layer attribute")
            return super().__getattribute__(name)

    net = families.model("qwen3", num_hidden_layers=1)
    config = ByLayer(**net.config.to_dict())
    for module in net.modules():
        if "config" in vars(module):
            module.config = config
    config.whole = False
    assert ck.patch(net, strict=True).complete


def test_options_leave_their_parts():
    """Each says so; logits has its own."""
    for flag, kind in (("linear", "linear"), ("norm", "rms_norm"), ("embedding", "embedding")):
        net = families.model("llama", num_hidden_layers=1)
        report = ck.patch(net, **{flag: False})
        kinds = {name: state.kind_of(m) for name, m in net.named_modules()}
        assert kind not in kinds.values() and kinds["lm_head"] == "head"
        assert {left.known for left in report.left} == {f"{flag}=False"} and not report.complete
    net = families.model("llama", num_hidden_layers=1)
    report = ck.patch(net, attention=False)
    assert net.config._attn_implementation == "sdpa"
    assert state.kind_of(net.model.rotary_emb) is None
    assert {left.part for left in report.left} == {"attention (sdpa)", "LlamaRotaryEmbedding"}


def test_parts_that_are_skipped():
    """They stay torch's, may change later, and are said not to be promised."""
    net = families.model("llama")
    net.tower = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 4)).bfloat16().requires_grad_(False)
    with pytest.raises(PatchError, match="tower"):
        ck.patch(net, strict=True)
    skip = ["tower", "model.layers.*.mlp", "model.layers.1.mlp.*"]
    report = ck.patch(net, strict=True, skip=skip)
    trained = {"model.layers.0.mlp": True, "model.layers.1.mlp": True, "tower": False}
    assert report.complete and {one.name: one.trained for one in report.skipped} == trained
    assert "skipped (not promised):" in str(report)
    kinds = {name: state.kind_of(m) for name, m in net.named_modules()}
    inside = ("tower.1", "model.layers.0.mlp.up_proj", "model.layers.0.mlp")
    assert {kinds[name] for name in inside} == {None}
    assert kinds["model.layers.0.self_attn.q_proj"] == "linear" and kinds["lm_head"] == "head"
    net.tower[1] = nn.Linear(4, 4).bfloat16()
    net.tower(torch.zeros(1, 4, 6).bfloat16())  # no guard in a part that was skipped
    net.model.norm = nn.LayerNorm(128).bfloat16()
    with pytest.raises(PatchError, match="norm"):
        net(families.ids())


# ---- steps in a model: what runs ----------------------------------------------------------------


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


def broken(y):
    raise RuntimeError("no")


def widths(y):
    """Each width of a row is the same in every pass; a sum over tokens is not."""
    for columns in (32, 64):
        y = y + y[..., :columns].mean(-1, keepdim=True)
    return y


def turned(y):
    z = torch.view_as_complex(y.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * (0.6 + 0.8j) ** 1 * z.abs().sign()).flatten(-2).to(y.dtype)


AT = f"{PLACE} (After): "
ROWS = f"ROWS: {AT} ... other sequences"
BEHIND = f"ROWS: {AT} ... the tokens behind them"
OVER_TOKENS = f"RUNS: {AT} ... reduces over the sequence"
BRANCH = f"RUNS|ROWS ... {AT} ... some numbers of sequences"
#: What a step behind an MLP computes -> (the step, why the model is left).
STEPS = {
    "nothing": (lambda y: y, ""),
    "its own row": (lambda y: y * 2 + y[..., :1], ""),
    "a branch not taken": (lambda y: y if len(y) else torch.cumsum(y, dim=1), ""),
    "reductions of a row": (
        lambda y: y + torch.softmax(y, dim=-1) * y.square().mean(-1, keepdim=True),
        "",
    ),
    "several widths of a row": (widths, ""),
    # ops that are not exact
    "cumsum": (lambda y: torch.cumsum(y, dim=-1), f"RUNS: {AT}cumsum (test_decisions.py:LINE)"),
    "topk": (
        lambda y: y + y.topk(1, dim=0).values,
        f"RUNS: {AT}topk (test_decisions.py:LINE)",
    ),
    "sort": (lambda y: y.sort(dim=-1).values, f"RUNS: {AT}sort (test_decisions.py"),
    "abs of complex": (turned, f"RUNS: {AT}abs (test_decisions.py"),
    "softmax of tokens": (lambda y: y + torch.softmax(y, dim=1), OVER_TOKENS),
    "mean of tokens": (lambda y: y + y.mean(1, keepdim=True), OVER_TOKENS),
    "our product of tokens": (
        lambda y: ck.linear(y.mT, y.new_ones(1, y.shape[1])).mT + y,
        f"RUNS: {AT}linear ( ... reduces over the sequence",
    ),
    "a branch on sequences": (lambda y: y + (y * 2 if len(y) > 1 else y), BRANCH),
    "a branch of reductions": (
        lambda y: y + (y.square().mean(-1, keepdim=True) if len(y) > 1 else y.mean(-1, True)),
        BRANCH,
    ),
    "an error": (broken, "NOT_OBSERVED ... it could not be observed (RuntimeError: no)"),
    # exact ops that read other rows
    "roll": (lambda y: y + y.roll(1, 0), ROWS),
    "the first": (lambda y: y + y[:1], ROWS),
    "transposed": (lambda y: y.transpose(0, 1).reshape(y.shape), ROWS),
    "maximum": (lambda y: y + y.max(0, keepdim=True).values, ROWS),
    "place": (lambda y: y + torch.arange(len(y))[:, None, None].to(y.dtype), ROWS),
    "count": (lambda y: y * len(y), ROWS),
    "nine": (lambda y: y * 2 if len(y) >= 9 else y, ROWS),
    "int8": (quantized, ROWS),
    "fp8": (eight_bits, ROWS),
    "capacity": (dropping, ROWS),
    "times 0": (lambda y: y + 0 * y.roll(1, 0), ROWS),
    "flip": (lambda y: y + y.flip(1), BEHIND),
    "length": (lambda y: y * y.shape[1], BEHIND),
    "mean from 65": (lambda y: y + y.mean(1, keepdim=True) if y.shape[1] > 64 else y, BEHIND),
}


#: Steps that read other rows as others of the table do.
_BY_NIGHT = {"the first", "transposed", "maximum", "place", "fp8"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in _BY_NIGHT)) for n in STEPS]
)
@pytest.mark.parametrize("make", [granite, pytest.param(llama, marks=pytest.mark.nightly)])
def test_what_a_step_runs(make, name):
    step, reason = STEPS[name]
    net = changed(make, step)
    report = ck.patch(net)
    require(report, reason.replace("LINE", str(step.__code__.co_firstlineno)))
    if reason:
        return
    replaced = {one.name: one.by for one in report.replaced}
    if "reductions" in name:
        assert "ck.batch_invariant" in replaced[PLACE] and all_causal_lms.differing(net) == []


def test_steps_are_observed_in_a_reviewed_family_and_refused():
    net = changed(llama, STEPS["roll"][0])
    with pytest.raises(PatchError, match=r"layers\.0\.mlp \(After\): its rows follow other seq"):
        ck.patch(net, strict=True)
    assert {state.kind_of(m) for m in net.modules()} == {None}
    net.model.layers[0].mlp = nn.Sequential(net.model.layers[0].mlp.inner, nn.MaxPool2d(3, 1, 1))
    assert any("MaxPool2d" in part.part for part in ck.patch(net).moving)


def test_a_layer_that_differs_is_run():
    """Layers of one kind are passed over, and this one is of its own."""
    place = "model.layers.3.mlp"
    first = ck.patch(changed(granite, STEPS["roll"][0], 4, place)).moving[0]
    assert first.name == place and "other sequences" in first.known
    net, ran = granite(4), {}
    repeats.pass_over(net, ran)
    passed = [index for index, layer in enumerate(net.model.layers) if "forward" in vars(layer)]
    assert passed == [2, 3]


def test_a_bidirectional_model_may_read_what_is_behind():
    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 1, "vocab_size": 97}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, attn_implementation="sdpa")
    torch.manual_seed(0)
    net = transformers.BertModel(config, add_pooling_layer=False).to(torch.bfloat16).eval()
    assert ck.patch(net, strict=True).complete
    layer = net.encoder.layer[0]
    layer.intermediate = After(layer.intermediate, STEPS["flip"][0])
    (one,) = ck.patch(net).moving
    assert one.name.endswith("intermediate") and "the padding behind them" in one.known


# ---- mutants ------------------------------------------------------------------------------------


def constant(mixed):
    """Numbers of a product that do not follow its rows, as in the first observation."""
    return lambda rows, salt=0: mixed(torch.ones_like(rows), salt)


@pytest.mark.parametrize(
    ("module", "name", "change", "step"),
    [
        (mixing, "_numbers", constant, "int8"),
        (leaks, "_LENGTHS", lambda lengths: (23,), "mean from 65"),
    ],
    ids=["constants", "one length"],
)
def test_a_mutant_of_the_observation_is_killed(monkeypatch, module, name, change, step):
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    with pytest.raises(AssertionError):
        test_what_a_step_runs(granite, step)
