"""Configurations of the engine that are refused, by name, before a model is loaded.

`SETTINGS` is the table of what is taken; what depends on several settings is a function below it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from ...errors import ArgumentValueError, PatchError, expected
from ...linear_attn.config import DELTA_CHUNK, SSD_CHUNK
from .. import engine_layers
from . import ranks

_OFF = ("False", "None")
#: Setting of a ``VllmConfig`` -> texts of the values that are taken.  One that a config lacks is.
SETTINGS = {
    "model_config.quantization": ("None",),
    "model_config.dtype": ("bfloat16", "float16"),
    "model_config.logprobs_mode": ("raw_logprobs", "processed_logprobs"),
    # Degrees that cut eight leaves of a sum at their edges.
    "parallel_config.tensor_parallel_size": ("1", "2", "4", "8"),
    "parallel_config.pipeline_parallel_size": ("1",),
    "parallel_config.decode_context_parallel_size": ("1",),
    "parallel_config.prefill_context_parallel_size": ("1",),
    "parallel_config.enable_expert_parallel": _OFF,
    "parallel_config.enable_dbo": _OFF,
    "parallel_config.enable_batch_sharded_sampling": _OFF,
    "parallel_config.distributed_executor_backend": ("None", "uni", "mp", "external_launcher"),
    "parallel_config.data_parallel_backend": ("mp",),
    "speculative_config": ("None",),
    "lora_config": ("None",),
    "kv_transfer_config": ("None",),
    "watermark_config": ("None",),
    "kernel_config.linear_backend": ("auto",),
    # Loaders that build the model and load weights in the way that is checked.
    "load_config.load_format": ("auto", "hf", "safetensors", "pt", "dummy"),
}
#: Those of a mixture of experts besides.
OF_MIXTURES = {
    "parallel_config.tensor_parallel_size": ("1",),
    "parallel_config.data_parallel_size": ("1",),
    "parallel_config.enable_eplb": _OFF,
    "kernel_config.moe_backend": ("auto",),
}
#: Those of a model with layers that have a state.
OF_HYBRIDS = {
    "parallel_config.tensor_parallel_size": ("1",),
    "parallel_config.data_parallel_size": ("1",),
    "cache_config.mamba_cache_mode": ("none", "align"),
    "cache_config.use_replayssm": _OFF,
    "cache_config.enable_mamba_shared_prefix_checkpoint": _OFF,
}
_EXECUTOR = "distributed_executor_backend"
#: Setting -> why other values are not taken.
_WHY = {
    _EXECUTOR: "others start workers without this environment",
    "lora_config": "merge the adapter",
    "watermark_config": "tokens are drawn from the model's distribution",
    "linear_backend": "the plug-in runs the linears",
    "moe_backend": "the plug-in runs the experts",
    "data_parallel_size": "experts and states are not cut over ranks",
    "mamba_cache_mode": "states are kept at the ends of a step",
}

#: Mixtures whose vLLM model was compared with a patched transformers model -> what routes there.
ROUTERS = {
    "MixtralForCausalLM": "MixtralTopKRouter",
    "OlmoeForCausalLM": "OlmoeTopKRouter",
    "Qwen2MoeForCausalLM": "Qwen2MoeTopKRouter",
    "Qwen3MoeForCausalLM": "Qwen3MoeTopKRouter",
    "Qwen3NextForCausalLM": "Qwen3NextTopKRouter",
}
#: Models with layers that have a state -> rows of a chunk of their rule.
HYBRIDS = {
    "GraniteMoeHybridForCausalLM": SSD_CHUNK,
    "NemotronHForCausalLM": SSD_CHUNK,
    "Qwen3NextForCausalLM": DELTA_CHUNK,
}
#: Architectures whose vLLM model was reviewed, and compared with a patched transformers model.
ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    *dict.fromkeys((*ROUTERS, *HYBRIDS)),
)
_SILU, _NO_WINDOW = {"hidden_act": ("silu",)}, {"use_sliding_window": (False, None)}
#: Mixture -> entries of its config that vLLM's model takes to be one of these values: it does not
#: read them.  Biases that one side has are `loading`'s.
FIXED = {
    "MixtralForCausalLM": _SILU,
    "OlmoeForCausalLM": _SILU
    | {"clip_qkv": (None,), "norm_topk_prob": (False, None), "rms_norm_eps": (1e-5,)},
    "Qwen2MoeForCausalLM": _SILU | _NO_WINDOW,
    "Qwen3MoeForCausalLM": _SILU | _NO_WINDOW | {"shared_expert_intermediate_size": (None, 0)},
    "Qwen3NextForCausalLM": _SILU | {"attn_output_gate": (True,), "layer_scale": (False, None)},
    "NemotronHForCausalLM": {"mlp_hidden_act": ("relu2",), "residual_in_fp32": (False,)},
    "GraniteMoeHybridForCausalLM": _SILU | {"mamba_n_groups": (1,)},
}
#: Counts of experts in the configs of transformers.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Refusal(NamedTuple):
    """A setting that is not taken: its name, what is taken, what came."""

    name: str
    want: str
    got: object


def check_arguments(engine_args: object) -> None:
    """Refuse arguments that vLLM changes before they are in a ``VllmConfig``.

    Raises:
        ArgumentValueError: the first one.
    """
    compilation = engine_args.compilation_config
    if not hasattr(compilation, "mode"):
        want = "a CompilationConfig, or a dict for LLM(...)"
        raise ArgumentValueError(expected("compilation_config", want, repr(compilation)))
    mode = int(compilation.mode or 0)
    if mode and not engine_args.enforce_eager:
        want = "mode 0, or enforce_eager (inductor drops roundings between ops that it fuses)"
        raise ArgumentValueError(expected("compilation_config", want, f"mode {mode}"))
    for refusal in _others(engine_args, {_EXECUTOR: SETTINGS[f"parallel_config.{_EXECUTOR}"]}):
        raise ArgumentValueError(expected(*refusal))


def check_config(config: object, device: str) -> None:
    """Refuse a ``VllmConfig`` that the plug-in does not cover.

    Raises:
        ArgumentValueError: the first setting that is not taken.
    """
    for refusal in find(config, device):
        raise ArgumentValueError(expected(*refusal))


def find(config: object, device: str) -> Iterator[Refusal]:
    """Yield the settings of a ``VllmConfig`` that are not taken."""
    yield from _model(config.model_config)
    yield from _others(config, SETTINGS)
    if _architecture(config.model_config) in HYBRIDS:
        yield from _others(config, OF_HYBRIDS)
    is_mixture = _experts(config.model_config) > 0
    if is_mixture:
        yield from _others(config, OF_MIXTURES)
    yield from _engine(config, device)
    order = ranks.order_of(config)
    if is_mixture and order != ranks.CHAIN:
        want = f"{ranks.CHAIN!r} for a mixture of experts (the plug-in has no other)"
        yield Refusal("order", want, repr(order))


def _others(config: object, table: Mapping[str, tuple[str, ...]]) -> Iterator[Refusal]:
    """Yield the settings that have other values than those of a table."""
    for path, taken in table.items():
        *parts, name = path.split(".")
        holder = functools.reduce(lambda part, name: getattr(part, name, None), parts, config)
        value = _text(getattr(holder, name, taken[0]))
        if value not in taken:
            why = f" ({_WHY[name]})" if name in _WHY else ""
            yield Refusal(name, " or ".join(taken) + why, value)


def _text(value: object) -> str:
    """Return the text of a plain value, an enumeration or a dtype; else the name of the class."""
    value = getattr(value, "value", value)
    if value is None or isinstance(value, bool | int | str | torch.dtype):
        return str(value).removeprefix("torch.")
    return (value if isinstance(value, type) else type(value)).__qualname__


def _model(model: object) -> Iterator[Refusal]:
    name, hf_config, experts = _architecture(model), _hf_config(model), _experts(model)
    if getattr(model, "use_mla", False):
        yield Refusal("model", "attention with keys and values", "latent attention (MLA)")
    if (runner := _text(getattr(model, "runner_type", "generate"))) != "generate":
        yield Refusal("runner", "generate", runner)
    if experts and name and name not in ROUTERS:
        want = f"no mixture of experts but {', '.join(ROUTERS)}"
        yield Refusal("model", want, f"{name}, {experts} experts")
    if name not in ARCHITECTURES:
        yield Refusal("architecture", f"one of {', '.join(ARCHITECTURES)}", name)
    for entry, values in FIXED.get(name, {}).items():
        value = getattr(hf_config, entry, values[0])
        if value not in values:
            want = f"{values[0]}, which vLLM's {name} takes it to be"
            yield Refusal(f"model: {entry}", want, value)
    most = getattr(model, "max_logprobs", 0)
    vocab = getattr(hf_config, "vocab_size", None)
    if most < 0 or (vocab is not None and most >= vocab):
        yield Refusal("max_logprobs", "fewer than the vocabulary (each costs a pass)", most)
    # Factors of the config, and of its kinds of layers.
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)]
    for holder in (vars(hf_config), parameters, *kinds):
        factor = holder.get("partial_rotary_factor")
        if factor not in (None, 1.0) and name not in HYBRIDS:
            want = "1.0 (of these models transformers rotates whole heads)"
            yield Refusal("model: partial_rotary_factor", want, factor)


def _hf_config(model: object) -> object:
    """Config of transformers of the text model."""
    return getattr(model, "hf_text_config", None) or model.hf_config


def _architecture(model: object) -> str:
    """Name of the model's class; "" if it has none."""
    return next(iter(getattr(model, "architectures", None) or ()), "")


def _experts(model: object) -> int:
    """Number of experts of a model; 0: it is no mixture."""
    kinds = getattr(_hf_config(model), "layers_block_type", None) or ()
    if _architecture(model) == "NemotronHForCausalLM" and "moe" not in kinds:
        return 0
    counts = (getattr(_hf_config(model), name, 0) or 0 for name in _EXPERTS)
    return next((count for count in counts if count > 1), 0)


def _engine(config: object, device: str) -> Iterator[Refusal]:
    cache, dtype = _text(config.cache_config.cache_dtype), _text(config.model_config.dtype)
    if cache not in ("auto", dtype):
        yield Refusal("kv_cache_dtype", f"auto or {dtype}, the dtype of the model", cache)
    mode = int(config.compilation_config.mode or 0)
    if mode:
        yield Refusal("compilation_config", "mode 0, or enforce_eager", f"mode {mode}")
    backend = getattr(config.attention_config.backend, "name", None)
    taken = {"cpu": (None, "CPU_ATTN"), "cuda": ("CUSTOM",)}[device]
    if backend not in taken:
        yield Refusal("attention_backend", f"{taken[-1]}, or unset", backend)


def chunk_of(config: object) -> int | None:
    """Rows of a chunk of a hybrid's rule; None: it is no hybrid."""
    return HYBRIDS.get(_architecture(config.model_config))


def step_limit(model_config: object) -> tuple[float, float]:
    """Return the least and the greatest step of a scan, as the trainer's mixer has them."""
    config = _hf_config(model_config)
    if _architecture(model_config) == "NemotronHForCausalLM":
        return float(config.time_step_min), math.inf
    least, most = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    return float(least), float(most)


def router_rule(model_config: object, normalize: bool) -> engine_layers.Rule:
    """Return how the router of this engine's model makes weights.

    Raises:
        PatchError: an architecture that is not of `ROUTERS`.
    """
    name = _architecture(model_config)
    if name not in ROUTERS:
        raise PatchError(expected("model", f"one of {', '.join(ROUTERS)}", name))
    rule = engine_layers.rule_of(ROUTERS[name], normalize)
    assert rule is not None
    return rule
