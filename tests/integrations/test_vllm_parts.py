"""Parts of the vLLM plug-in that need no vLLM: what asks for it, refusals, the walk, log-probs."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch

import cute_kernels as ck
from cute_kernels import settings
from cute_kernels.errors import ArgumentValueError, BackendUnavailable, PatchError
from cute_kernels.integrations import engine_logits
from cute_kernels.integrations.vllm import (
    arguments,
    families,
    log_probs,
    model_check,
    options,
    plugin,
    refusals,
    releases,
)
from tests.contract import same_bytes
from tests.ranks import ROOT

PLUGIN = "cute_kernels.integrations.vllm"


def namespace(**values: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**values)


def config(**changes: object) -> types.SimpleNamespace:
    """Return a VllmConfig of a model that is taken; changes are named ``part__name``."""
    parts = namespace(
        model_config=namespace(
            architectures=["LlamaForCausalLM"],
            hf_config=namespace(vocab_size=32000),
            quantization=None,
            use_mla=False,
            dtype=torch.bfloat16,
            logprobs_mode="raw_logprobs",
            max_logprobs=20,
            runner_type="generate",
        ),
        parallel_config=namespace(pipeline_parallel_size=1, tensor_parallel_size=1),
        additional_config={"cute_kernels": True},
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        cache_config=namespace(cache_dtype="auto"),
        load_config=namespace(load_format="auto"),
        compilation_config=namespace(mode=0),
        attention_config=namespace(backend=None),
    )
    for path, value in changes.items():
        *folders, name = path.split("__")
        part = parts
        for folder in folders:
            part = getattr(part, folder)
        setattr(part, name, value)
    return parts


#: (change of the configuration, the name that its refusal begins with)
REFUSED = [
    ({"model_config__quantization": "fp8"}, "quantization"),
    ({"model_config__use_mla": True}, "model"),
    ({"model_config__hf_config__num_experts": 8}, "model"),
    ({"model_config__hf_config__num_local_experts": 8}, "model"),
    ({"model_config__architectures": ["MambaForCausalLM"]}, "architecture"),
    ({"model_config__dtype": torch.float32}, "dtype"),
    ({"model_config__logprobs_mode": "raw_logits"}, "logprobs_mode"),
    ({"model_config__max_logprobs": -1}, "max_logprobs"),
    ({"model_config__max_logprobs": 32000}, "max_logprobs"),
    ({"model_config__runner_type": "pooling"}, "runner"),
    ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ({"parallel_config__tensor_parallel_size": 3}, "tensor_parallel_size"),
    ({"speculative_config": namespace()}, "speculative_config"),
    ({"lora_config": namespace()}, "lora_config"),
    ({"kv_transfer_config": namespace()}, "kv_transfer_config"),
    ({"cache_config__cache_dtype": "fp8_e4m3"}, "kv_cache_dtype"),
    ({"load_config__load_format": "tensorizer"}, "load_format"),
    ({"compilation_config__mode": 3}, "compilation_config"),
    ({"attention_config__backend": namespace(name="FLASH_ATTN")}, "attention_backend"),
]


@pytest.mark.parametrize(("change", "name"), REFUSED, ids=[next(iter(c)) for c, _ in REFUSED])
def test_a_configuration_that_breaks_a_promise_is_refused_by_name(change, name):
    with pytest.raises(ArgumentValueError, match=rf"^{name}: expected .*, got ") as error:
        refusals.check_config(config(**change), "cpu")
    assert "\n" not in str(error.value)


def mixture(name: str, **changes: object) -> types.SimpleNamespace:
    """Return a VllmConfig of a mixture that is taken, but for the changes."""
    fixed = {entry: values[0] for entry, values in families.FIXED[name]}
    hf_config = namespace(vocab_size=32000, num_experts=64, **fixed)
    parts = {"model_config__architectures": [name], "model_config__hf_config": hf_config}
    return config(**parts, **changes)


#: (change of a mixture's configuration, the name that its refusal begins with)
REFUSED_OF_MIXTURES = [
    ("Qwen3MoeForCausalLM", {"parallel_config__tensor_parallel_size": 2}, "tensor_parallel_size"),
    ("Qwen3MoeForCausalLM", {"parallel_config__data_parallel_size": 2}, "data_parallel_size"),
    (
        "Qwen3MoeForCausalLM",
        {"parallel_config__enable_expert_parallel": True},
        "enable_expert_parallel",
    ),
    ("Qwen3MoeForCausalLM", {"parallel_config__enable_eplb": True}, "enable_eplb"),
    ("Qwen3MoeForCausalLM", {"kernel_config": namespace(moe_backend="triton")}, "moe_backend"),
    ("Qwen3MoeForCausalLM", {"additional_config": {"cute_kernels": {"order": "tree"}}}, "order"),
    (
        "Qwen3MoeForCausalLM",
        {"model_config__hf_config__use_sliding_window": True},
        "model: use_sliding_window",
    ),
    ("Qwen2MoeForCausalLM", {"model_config__hf_config__qkv_bias": False}, "model: qkv_bias"),
    ("OlmoeForCausalLM", {"model_config__hf_config__clip_qkv": 8.0}, "model: clip_qkv"),
    ("OlmoeForCausalLM", {"model_config__hf_config__rms_norm_eps": 1e-6}, "model: rms_norm_eps"),
    (
        "OlmoeForCausalLM",
        {"model_config__hf_config__norm_topk_prob": True},
        "model: norm_topk_prob",
    ),
    ("MixtralForCausalLM", {"model_config__hf_config__hidden_act": "gelu"}, "model: hidden_act"),
    (
        "MixtralForCausalLM",
        {"model_config__architectures": ["GptOssForCausalLM"]},
        "model",
    ),
]


@pytest.mark.parametrize(("name", "change", "refused"), REFUSED_OF_MIXTURES)
def test_a_mixture_that_breaks_a_promise_is_refused_by_name(name, change, refused):
    refusals.check_config(mixture(name), "cpu")
    changed = mixture(name)
    for path, value in change.items():
        *folders, last = path.split("__")
        part = changed
        for folder in folders:
            part = getattr(part, folder)
        setattr(part, last, value)
    with pytest.raises(ArgumentValueError, match=rf"^{refused}: expected .*, got ") as error:
        refusals.check_config(changed, "cpu")
    assert "\n" not in str(error.value)


def test_every_mixture_has_a_rule_and_others_are_refused_by_name():
    for name, router in families.ROUTERS.items():
        rule = families.rule_of(namespace(architectures=[name]), normalize=False)
        assert rule.normalize == rule_is_fixed(router) and set(families.FIXED) >= {name}
    with pytest.raises(PatchError, match=r"^model: expected .*, got GptOssForCausalLM"):
        families.rule_of(namespace(architectures=["GptOssForCausalLM"]), normalize=False)


def rule_is_fixed(router: str) -> bool:
    """Whether a router divides, whatever its config says."""
    return router == "MixtralTopKRouter"


def test_a_configuration_that_is_covered_is_taken():
    refusals.check_config(config(), "cpu")
    refusals.check_config(config(attention_config__backend=namespace(name="CUSTOM")), "cuda")
    with pytest.raises(ArgumentValueError, match=r"^attention_backend: "):
        refusals.check_config(config(), "cuda")  # the defaults had to choose it


@pytest.mark.parametrize(
    ("versions", "name"),
    [
        (("0.33.0", "cpu", "2.13.0"), "vllm"),
        (("0.32.0", "cuda", "2.13.0"), "vllm"),
        (("0.25.10", "cuda", "2.11.0"), "vllm"),
        (("0.25.1", "cuda", "2.13.0+cu130"), "torch"),
        (("0.32.0", "cpu", "2.1.0"), "torch"),
    ],
)
def test_releases_that_were_not_run_are_refused_by_name(versions, name):
    with pytest.raises(BackendUnavailable, match=rf"^{name}: expected .*, got "):
        releases.check_versions(*versions)


def test_releases_that_were_run_are_taken():
    releases.check_versions("0.25.1", "cuda", "2.11.0+cu130")
    releases.check_versions("0.32.0+cpu", "cpu", "2.13.1+cpu")


def test_several_ranks_have_an_order_that_they_can_share():
    def order(degree: int, value: object) -> str:
        changes = {"parallel_config__tensor_parallel_size": degree}
        return options.order_of(config(additional_config={"cute_kernels": value}, **changes))

    assert [order(1, True), order(2, True)] == ["chain", "tree"]
    assert [order(1, {"order": "tree"}), order(8, {"order": "tree"})] == ["tree", "tree"]
    for degree, name in ((1, "bush"), (2, "chain")):
        with pytest.raises(ArgumentValueError, match=r"^order: expected .*, got "):
            order(degree, {"order": name})


# ---- what asks for the plug-in -------------------------------------------------------------------


def test_nothing_is_imported_unless_asked():
    code = (
        "import sys\n"
        "from cute_kernels.integrations.vllm import plugin\n"
        "plugin.register()\n"
        "found = [m for m in ('torch', 'vllm', 'triton', 'cutlass') if m in sys.modules]\n"
        "assert not found, found\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_KERNELS")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def test_a_value_that_is_no_switch_is_refused(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_VLLM", "yes")
    with pytest.raises(settings.SettingError, match="CUTE_KERNELS_VLLM"):
        plugin.register()


def test_the_engine_is_left_alone_unless_its_arguments_ask(monkeypatch):
    class EngineArgs:
        additional_config: dict

        def create_engine_config(self, usage=None):
            return "config", usage

    monkeypatch.delenv("CUTE_KERNELS_VLLM", raising=False)
    arguments.watch(EngineArgs)
    watched = EngineArgs.create_engine_config
    arguments.watch(EngineArgs)
    assert EngineArgs.create_engine_config is watched
    engine = EngineArgs()
    for additional in ({}, {"cute_kernels": False}, None):
        engine.additional_config = additional
        assert engine.create_engine_config("serve") == ("config", "serve")
    assert "CUTE_KERNELS_VLLM" not in os.environ
    assert options.asked_for({"cute_kernels": True})


# ---- the built model -----------------------------------------------------------------------------


def of_module(name: str, *bases: type) -> type:
    return type("Part", bases or (torch.nn.Module,), {"__module__": name})


def test_a_part_that_is_not_ours_is_named():
    model = of_module("vllm.model_executor.models.llama")()
    model.layers = torch.nn.ModuleList([of_module("cute_kernels.integrations.vllm.layers")()])
    model.layers[0].inside = torch.nn.Linear(4, 4)  # not called by ours
    assert model_check.find_unknown(model) == []
    model.layers.append(torch.nn.Linear(4, 4))
    with pytest.raises(PatchError, match=r"^model: layers\.1: .*torch\.nn\.modules\.linear"):
        model_check.check_model(model)
    model.layers[1] = of_module("vllm.model_executor.models.gpt_oss")()
    assert [name for name, _ in model_check.find_unknown(model)] == ["layers.1"]
    model.layers[1] = of_module("vllm.model_executor.models.llama")()
    model.layers[1].scale = torch.nn.Parameter(torch.ones(2))
    assert "parameter scale" in model_check.find_unknown(model)[0][1]
    model.layers[1] = of_module("vllm.model_executor.layers.attention")()
    model.layers[1].attn_backend = of_module("vllm.v1.attention.backends.flash_attn", object)
    assert [name for name, _ in model_check.find_unknown(model)] == ["layers.1"]


def test_a_model_whose_device_has_our_ops_has_their_contracts():
    paged = ck.contract_id("paged_attention", "cpu", torch.bfloat16)
    ids = model_check.contract_ids(torch.device("cpu"), torch.bfloat16)
    assert ids["paged_attention"] == paged
    assert set(ids) == set(model_check.OPS)
    more = model_check.contract_ids(torch.device("cpu"), torch.bfloat16, model_check.MIXTURE_OPS)
    assert set(more) == {"grouped_linear", "moe", "sigmoid"}


def test_a_mixture_needs_the_ops_of_experts(monkeypatch):
    model = of_module("vllm.model_executor.models.mixtral")()
    model.head = torch.nn.Identity()
    model.experts = type("Experts", (torch.nn.Module,), {"__module__": f"{PLUGIN}.mixtures"})()
    model.experts.w2_weight = torch.nn.Parameter(torch.zeros(2, 4, 4))
    asked = []
    monkeypatch.setattr(model_check, "contract_ids", lambda device, dtype, ops: asked.append(ops))
    monkeypatch.setattr(model_check, "_checked", False)
    model_check.check_model(model)
    assert set(asked[0]) == set(model_check.OPS) | set(model_check.MIXTURE_OPS)


# ---- log-probs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_of_an_engines_logits_are_those_of_linear_logp(bias):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    hidden, head = draw(5, 64).bfloat16(), draw(1003, 64).bfloat16()
    bias = draw(1003).bfloat16() if bias else None
    tokens = torch.randint(0, 1003, (5, 3), generator=generator)
    temperature = torch.tensor([1.0, 0.7, 0.3, 2.5, 1.0])
    logits = engine_logits.fp32_logits(hidden, head, bias)
    engine = log_probs.of_tokens(logits, tokens, temperature)
    for column, target in zip(engine.unbind(1), tokens.unbind(1), strict=True):
        trainer = ck.linear_logp(hidden, head, target, bias, temperature=temperature)
        assert same_bytes(column.contiguous(), trainer)
    alone = log_probs.of_tokens(engine_logits.fp32_logits(hidden[2:3], head, bias), tokens[2:3])
    assert same_bytes(alone, log_probs.of_tokens(logits, tokens)[2:3])
    assert engine_logits.fp32_logits(hidden[:0], head).shape == (0, 1003)
    tree = log_probs.of_tokens(engine_logits.fp32_logits(hidden, head, bias, order="tree"), tokens)
    assert same_bytes(
        tree[:, 0].contiguous(), ck.linear_logp(hidden, head, tokens[:, 0], bias, order="tree")
    )


def test_filtered_tokens_have_no_probability():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    logits[0, :30] = -torch.inf
    made = log_probs.of_tokens(logits, torch.tensor([[3, 40], [3, 40]]))
    assert made[0, 0] == -torch.inf and made.isfinite().sum() == 3
    kept = log_probs.of_tokens(logits[:1, 16:], torch.tensor([[24]]))
    assert same_bytes(made[:1, 1:], kept)  # a unit of 16 that has nothing adds nothing
