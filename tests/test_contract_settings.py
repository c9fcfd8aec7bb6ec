"""Contracts of models that compute other functions differ, each by the name of what differs.

A trainer is a tiny patched model of transformers.  An engine is a stand-in: modules of our vLLM
plug-in, past their constructors, with the attributes that vLLM makes from a config.
"""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.integrations import contract_exchange as exchange
from cute_kernels.integrations import foreign_calls
from cute_kernels.integrations.engine_layers import Rule, rule_of
from tests.integrations.vllm.stand_in import made, plugin

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 2, "head_dim": 64,
    "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 97, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
OF_KIND = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": MIXTURE | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": MIXTURE,
}


def new(kind: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | OF_KIND.get(kind, {}) | options)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
    ck.patch(model)
    return model


#: Of a kind without options: a model that others are copies of, as a patch of a mixture observes it
#: for a second.
first = functools.cache(new)


def built(kind: str, **options: object) -> torch.nn.Module:
    """A patched model that a test may change."""
    return new(kind, **options) if options else copy.deepcopy(first(kind))


@functools.cache
def plain(kind: str) -> ck.Contract:
    return ck.contract(model=first(kind))


def names(ours: ck.Contract, theirs: ck.Contract) -> list[str]:
    """Return what differs, as an error names it."""
    with pytest.raises(ck.errors.ContractError):
        ck.compare_contracts(ours, theirs.to_dict())
    return [difference.name for difference in ours.differences(theirs)]


# ---- one trainer and another --------------------------------------------------------------------

SLIDING, FULL = "sliding_attention", "full_attention"
#: kind, options, other options, what differs.
OPTIONS = [
    ("mistral", {"sliding_window": 8}, {"sliding_window": 24}, ["attention window"]),
    ("gemma2", {}, {"attn_logit_softcapping": 30.0}, ["attention soft cap"]),
    ("gemma2", {}, {"layer_types": [FULL, SLIDING]}, ["attention window"]),
    ("granite", {}, {"attention_multiplier": 0.5, "embedding_multiplier": 3.0},
     ["attention scale", "embedding multiplier"]),
    ("granite", {}, {"residual_multiplier": 0.5, "logits_scaling": 2.0},
     ["formula of logits", "residual multiplier"]),
    ("qwen3_moe", {}, {"num_experts_per_tok": 3, "num_experts": 8},
     ["experts per token", "number of experts"]),
    ("llama", {}, {"num_hidden_layers": 1}, ["layers"]),
    ("llama", {}, {"num_key_value_heads": 2}, ["attention key heads"]),
    ("llama", {}, {"num_attention_heads": 4}, ["attention heads"]),
    ("llama", {}, {"tie_word_embeddings": True}, ["tied head"]),
    ("llama", {}, {"attention_bias": True}, ["bias of o_proj", "bias of q, k, v"]),
    ("llama", {}, {"vocab_size": 98}, ["embedding table"]),
    ("gpt_oss", {}, {"rope_theta": 5e5}, ["GptOssRotaryEmbedding.inv_freq"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "some", "others", "differ"), OPTIONS)
def test_another_option_of_a_config_is_named(kind, some, others, differ):
    ours = ck.contract(model=built(kind, **some)) if some else plain(kind)
    assert names(ours, ck.contract(model=built(kind, **others))) == differ


class Mixed(torch.nn.Module):
    """MLP that reads another row of the batch."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y + y.roll(1, 0)


def _wrapped(module: torch.nn.Module) -> None:
    author = module.forward
    module.forward = lambda *args: author(*args) * 1.5


def _product(module: torch.nn.Module) -> None:
    module.forward = lambda x: F.linear(x, module.weight)


def _half(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
    return out / 2


def _embed_scale(model: torch.nn.Module) -> None:
    model.model.embed_tokens.embed_scale.fill_(3.0)


def _layer(change):
    return lambda model: change(model.model.layers[1])


def _in_place_of_mlp(layer: torch.nn.Module) -> None:
    layer.mlp = Mixed(layer.mlp)


def _norms(model: torch.nn.Module) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3


#: kind, change of a patched model, what differs, words of the difference.
CHANGES = {
    "scale": ("llama", _layer(lambda l: setattr(l.self_attn, "scaling", 0.5)), "attention scale",
              "0.125 here, 0.125 in layer 0 and 0.5 in layer 1 there"),
    "window": ("qwen3", _layer(lambda l: setattr(l.self_attn, "sliding_window", 7)),
               "attention window", "7 (mask: none) in layer 1"),
    "causality": ("llama", lambda m: setattr(m.config, "is_causal", False), "attention mask",
                  "causal here, bidirectional there"),
    "k": ("qwen3_moe", _layer(lambda l: setattr(l.mlp.gate, "top_k", 3)), "experts per token",
          "2 here, 2 in layer 0 and 3 in layer 1 there"),
    "router": ("qwen3_moe", _layer(lambda l: setattr(l.mlp.gate, "norm_topk_prob", True)),
               "formula of router", "halves, in the dtype of the logits in layer 1"),
    "depth": ("llama", lambda m: setattr(m.config, "num_hidden_layers", 1), "layers that run",
              "not stated here, 1 there"),
    "residual": ("granite", _layer(lambda l: setattr(l, "residual_multiplier", 0.5)),
                 "residual multiplier", "0.5 in layer 1"),
    "embeddings": ("gemma3_text", _embed_scale, "embedding multiplier", "11.3125 here, 3.0 there"),
    "limit": ("gpt_oss", _layer(lambda l: setattr(l.mlp.experts, "limit", 3.0)),
              "GptOssExperts.limit", "3.0 in layer 1"),
    "eps": ("llama", _norms, "formula of rms_norm",
            "offset 0.0 in layer 1 and ck.rms_norm, eps 1e-06, offset 0.0 in layers 0-1 and out"),
    "linear": ("llama", _layer(lambda l: _product(l.mlp.down_proj)), "formula of linear",
               "Linear of torch, forward by _product.<locals>.<lambda> of tests"),
    "around": ("llama", _layer(lambda l: _wrapped(l.mlp)), "formula of LlamaMLP",
               "not stated here, LlamaMLP of transformers, inside _wrapped.<locals>.<lambda>"),
    "module": ("llama", _layer(_in_place_of_mlp), "formula of Mixed", "there"),
    "hook": ("llama", _layer(lambda l: l.mlp.register_forward_hook(_half)), "formula of hooks",
             "LlamaMLP: forward hook _half of tests, code "),
    "pre-hook": ("llama", _layer(lambda l: l.mlp.register_forward_pre_hook(lambda m, x: None)),
                 "formula of hooks", "LlamaMLP: forward pre-hook "),
    "gradients": ("llama", _layer(
        lambda l: l.mlp.register_full_backward_hook(lambda m, x, y: None)),
        "formula of hooks", "LlamaMLP: backward hook "),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "name", "words"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_patched_model_is_named(kind, change, name, words):
    model = built(kind)
    ck.compare_contracts(plain(kind), ck.contract(model=model))
    change(model)
    theirs = ck.contract(model=model)
    assert names(plain(kind), theirs) == [name]
    assert words in str(plain(kind).differences(theirs)[0])


def test_hooks_with_other_code_differ_and_those_of_libraries_are_not_stated():
    models = [built("llama") for _ in range(2)]
    for model, factor in zip(models, (1.5, 2.5), strict=True):
        code = compile(f"lambda m, x, y: y * {factor}", "same", "eval")
        model.model.register_forward_hook(eval(code))
    ours, theirs = (ck.contract(model=model) for model in models)
    assert names(ours, theirs) == ["formula of hooks"]
    model = built("llama")
    model.enable_input_require_grads()  # a hook of transformers
    ck.compare_contracts(plain("llama"), ck.contract(model=torch.compile(model)))


@pytest.mark.parametrize(
    ("source", "some", "others"),
    [
        ("lambda y: y.{}()", "abs", "neg"),
        ("lambda y: (lambda: y * {})()", "1.5", "2.5"),
        ("lambda y: y in {{1, {}}}", "2", "3"),
    ],
)
def test_a_digest_of_code_follows_all_that_is_in_it(source, some, others):
    texts = [
        foreign_calls.text_of(eval(compile(source.format(part), "same", "eval")))
        for part in (some, others)
    ]
    assert texts[0] != texts[1]


# ---- a trainer and an engine --------------------------------------------------------------------


def module_of(**children: object) -> torch.nn.Module:
    """Module of a class of vLLM that puts others together, and states nothing."""
    return made(type("Module", (torch.nn.Module,), {"__module__": "vllm.models"}), **children)


def linear(bias: bool = False, **attributes: object):
    bias = torch.nn.Parameter(torch.zeros(1)) if bias else None
    order = {"cute_kernels_order": "chain"}
    return made(plugin().layers.RowLinear, input_size=1, bias=bias, **order, **attributes)


def engine_of(trainer: torch.nn.Module, **overrides: object) -> torch.nn.Module:
    """An engine's model from the folder of a trainer's model, with ``hf_overrides``."""
    config, ours = copy.deepcopy(trainer.config), plugin().layers
    for name, value in overrides.items():
        setattr(config, name, value)
    norm = ours.GemmaNorm if config.model_type == "gemma3_text" else ours.Norm
    make_norm = functools.partial(made, norm, variance_epsilon=config.rms_norm_eps)
    weight, other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    sizes = {"org_vocab_size": config.vocab_size, "embedding_dim": config.hidden_size}
    table = made(ours.Embedding, weight=weight, **sizes)
    layers = [_layer_of(trainer, config, number, make_norm) for number in range(2)]
    head_weight = weight if config.tie_word_embeddings else other
    head = made(ours.Head, weight=head_weight, cute_kernels_order="chain")
    base = module_of(embed_tokens=table, layers=torch.nn.ModuleList(layers), norm=make_norm())
    if config.model_type == "gemma3_text":
        base.register_buffer("normalizer", torch.tensor(config.hidden_size**0.5).bfloat16())
    processor = made(ours.Logits, soft_cap=None, scale=1.0)
    return module_of(config=config, model=base, lm_head=head, logits_processor=processor)


def _layer_of(trainer, config, number: int, make_norm) -> torch.nn.Module:
    ours, mixtures = plugin().layers, plugin().mixtures
    kinds = getattr(config, "layer_types", None) or [SLIDING, SLIDING]
    scalar = getattr(config, "query_pre_attn_scalar", config.head_dim)
    impl = made(
        plugin().attention.Impl,
        num_kv_heads=1,
        head_size=config.head_dim,
        softcap=0.0,
        scale=scalar**-0.5,
        sliding_window=getattr(config, "sliding_window", None)
        if kinds[number] == SLIDING
        else None,
    )
    rope = trainer.model.rotary_emb
    name = f"{kinds[number]}_inv_freq"
    frequencies = getattr(rope, name if hasattr(rope, name) else "inv_freq")
    heads = {"total_num_heads": config.num_attention_heads, "output_sizes": [128, 64, 64]}
    heads["total_num_kv_heads"] = config.num_key_value_heads
    attention = module_of(
        qkv_proj=linear(config.model_type == "qwen2_moe", **heads),
        o_proj=linear(),
        rotary_emb=made(plugin().rotary.Rotary, frequencies=frequencies),
        attn=module_of(impl=impl),
    )
    is_gemma = config.model_type == "gemma3_text"
    gated = made(ours.Gelu, approximate="tanh") if is_gemma else made(ours.Silu)
    mlp = module_of(gate_up_proj=linear(), act_fn=gated, down_proj=linear())
    if hasattr(config, "num_experts"):
        rule = rule_of(type(trainer.model.layers[0].mlp.gate).__name__, config.norm_topk_prob)
        router = types.SimpleNamespace(
            rule=rule, top_k=config.num_experts_per_tok, global_num_experts=config.num_experts
        )
        mlp = module_of(
            runner=made(mixtures.Runner, router=router),
            gate=made(mixtures.Gate, cute_kernels_order="chain"),
            experts=made(mixtures.Experts),
        )
        if config.model_type == "qwen2_moe":
            mlp.shared = made(mixtures.SharedExpert)
    return module_of(self_attn=attention, mlp=mlp, input_layernorm=make_norm())


def engine_contract(engine: torch.nn.Module) -> ck.Contract:
    return exchange.engine_contract(engine, device="cpu", dtype=torch.bfloat16)


#: Types of models that an engine has as well -> their options.
PAIRS = {
    "llama": {},
    "mistral": {"sliding_window": 32},
    "gemma3_text": {"layer_types": [SLIDING, FULL]},
    "qwen2_moe": {},
    "qwen3_moe": {},
}


@functools.cache
def pair(kind: str) -> tuple[torch.nn.Module, ck.Contract]:
    trainer = built(kind, **PAIRS[kind])
    return trainer, ck.contract(model=trainer)


@pytest.mark.parametrize("kind", PAIRS)
def test_an_engine_states_what_a_patched_model_states(kind):
    trainer, ours = pair(kind)
    ck.compare_contracts(ours, engine_contract(engine_of(trainer)))


#: kind, what the engine's config has in another way, what differs.
OVERRIDES = [
    ("mistral", {"sliding_window": 16}, ["attention window"]),
    ("qwen3_moe", {"num_experts_per_tok": 3}, ["experts per token"]),
    ("qwen3_moe", {"norm_topk_prob": True}, ["formula of router"]),
    ("gemma3_text", {"query_pre_attn_scalar": 16}, ["attention scale"]),
    ("gemma3_text", {"layer_types": [FULL, SLIDING]}, ["formula of rotary", "attention window"]),
    ("llama", {"num_key_value_heads": 2}, ["attention key heads"]),
    ("llama", {"tie_word_embeddings": True}, ["tied head"]),
    ("llama", {"model_type": "mistral"}, ["architecture"]),
]


@pytest.mark.parametrize(("kind", "overrides", "differ"), OVERRIDES)
def test_an_engine_with_another_config_is_named(kind, overrides, differ):
    trainer, ours = pair(kind)
    assert names(ours, engine_contract(engine_of(trainer, **overrides))) == differ


def test_bidirectional_attention_of_the_trainer_alone_is_named():
    """Both sides read the checkpoint's config; vLLM's Gemma 3 stays causal."""
    trainer = built("gemma3_text", use_bidirectional_attention=True, **PAIRS["gemma3_text"])
    ours = ck.contract(model=trainer)
    assert names(ours, engine_contract(engine_of(trainer))) == ["attention mask"]


def _set(path: str, name: str, value: object):
    return lambda engine: setattr(engine.get_submodule(path), name, value)


def _hook(engine: torch.nn.Module) -> None:
    engine.model.layers[0].mlp.register_forward_hook(_half)


_FIRST = "model.layers.0.self_attn"
#: Change of an engine of Llama, what differs.
ENGINES = {
    "rotary": (_set(f"{_FIRST}.rotary_emb", "frequencies", torch.ones(32)), "formula of rotary"),
    "order": (_set(f"{_FIRST}.qkv_proj", "cute_kernels_order", "tree"), "order of linear"),
    "bias": (_set(f"{_FIRST}.o_proj", "bias", torch.nn.Parameter(torch.ones(1))), "bias of o_proj"),
    "logits": (_set("logits_processor", "soft_cap", 30.0), "formula of logits"),
    "linear": (_set(f"{_FIRST}.o_proj", "forward", F.linear), "formula of linear"),
    "hook": (_hook, "formula of hooks"),
    "sinks": (lambda e: setattr(e.get_submodule(f"{_FIRST}.attn").impl, "sinks", 1),
              "attention sinks"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "name"), ENGINES.values(), ids=ENGINES)
def test_a_change_of_an_engine_is_named(change, name):
    trainer, ours = pair("llama")
    engine = engine_of(trainer)
    change(engine)
    assert names(ours, engine_contract(engine)) == [name]


def test_what_one_side_does_not_state_differs():
    """And a router that rounds elsewhere."""
    trainer, ours = pair("qwen2_moe")
    engine = engine_of(trainer)
    for layer in engine.model.layers:
        layer.mlp.runner.router.rule = Rule(normalize=False, rounded=False)
    assert names(ours, engine_contract(engine)) == ["formula of router"]
    trainer, ours = pair("llama")
    engine = engine_of(trainer)
    for layer in engine.model.layers:
        del layer.self_attn.attn.impl.scale
    theirs = engine_contract(engine)
    assert names(ours, theirs) == ["attention scale"]
    assert str(ours.differences(theirs)[0]) == "attention scale: 0.125 here, not stated there"
    for layer in engine.model.layers:
        impl = type("FlashImpl", (), {"num_kv_heads": 1, "__module__": "vllm.v1"})()
        layer.self_attn.attn.impl = impl
    assert "FlashImpl of vllm there" in str(ours.differences(engine_contract(engine))[0])
