"""Configurations of the engine that are refused, by name, before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...errors import ArgumentValueError, expected
from . import families, options

#: Architectures whose vLLM model was reviewed, and compared with a patched transformers model.
ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    *families.ROUTERS,
)
_DTYPES = ("bfloat16", "float16")
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
#: Loaders that build the model and load weights in the way that is checked.
_LOAD_FORMATS = ("auto", "hf", "safetensors", "pt", "dummy")
#: Tensor-parallel degrees that cut eight leaves of a sum at their edges.
_DEGREES = (1, 2, 4, 8)
#: Executors whose workers are this process or its children, which have its environment.
_EXECUTORS = (None, "uni", "mp", "external_launcher")
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
    for refusal in _executor(engine_args):
        raise ArgumentValueError(expected(*refusal))


def check_config(config: object, device: str) -> None:
    """Refuse a ``VllmConfig`` that the plug-in does not cover.

    Raises:
        ArgumentValueError: the first setting that is not taken.
    """
    for refusal in find(config, device):
        raise ArgumentValueError(expected(*refusal))
    order = options.order_of(config)
    if order != options.CHAIN and _experts(config.model_config):
        want = f"{options.CHAIN!r} for a mixture of experts (grouped products have no other)"
        raise ArgumentValueError(expected("order", want, repr(order)))


def find(config: object, device: str) -> Iterator[Refusal]:
    """Yield the settings of a ``VllmConfig`` that are not taken."""
    yield from _model(config.model_config)
    yield from _parallel(config.parallel_config)
    if _experts(config.model_config):
        yield from _mixture(config)
    yield from _engine(config, device)


def _model(model: object) -> Iterator[Refusal]:
    names = list(getattr(model, "architectures", None) or [])
    hf_config, experts = _hf_config(model), _experts(model)
    if getattr(model, "quantization", None) is not None:
        yield Refusal("quantization", "None", repr(model.quantization))
    if getattr(model, "use_mla", False):
        yield Refusal("model", "attention with keys and values", "latent attention (MLA)")
    if experts and names[:1] and names[0] not in families.ROUTERS:
        want = f"no mixture of experts but {', '.join(families.ROUTERS)}"
        yield Refusal("model", want, f"{names[0]}, {experts} experts")
    if not names or names[0] not in ARCHITECTURES:
        yield Refusal("architecture", f"one of {', '.join(ARCHITECTURES)}", ", ".join(names))
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        yield Refusal("dtype", " or ".join(_DTYPES), dtype)
    mode = str(getattr(model, "logprobs_mode", _LOGPROBS_MODES[0]))
    if mode not in _LOGPROBS_MODES:
        yield Refusal("logprobs_mode", " or ".join(_LOGPROBS_MODES), mode)
    most = getattr(model, "max_logprobs", 0)
    vocab = getattr(hf_config, "vocab_size", None)
    if most < 0 or (vocab is not None and most >= vocab):
        yield Refusal("max_logprobs", "fewer than the vocabulary (each costs a pass)", most)
    if str(getattr(model, "runner_type", "generate")) != "generate":
        yield Refusal("runner", "generate", model.runner_type)
    for factor in _partial_rotary_factors(hf_config):
        want = "1.0 (of these models transformers rotates whole heads)"
        yield Refusal("model: partial_rotary_factor", want, factor)


def _hf_config(model: object) -> object:
    """Config of transformers of the text model."""
    return getattr(model, "hf_text_config", None) or model.hf_config


def _partial_rotary_factors(hf_config: object) -> Iterator[float]:
    """Yield the factors that are not 1, of the config and of its kinds of layers."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)]
    for holder in (vars(hf_config), parameters, *kinds):
        factor = holder.get("partial_rotary_factor")
        if factor not in (None, 1.0):
            yield factor


def _experts(model: object) -> int:
    """Number of experts of a model; 0: it is no mixture."""
    counts = (getattr(_hf_config(model), name, 0) or 0 for name in _EXPERTS)
    return next((count for count in counts if count > 1), 0)


def _mixture(config: object) -> Iterator[Refusal]:
    """Yield the settings that are not taken of a mixture of experts."""
    model, parallel = config.model_config, config.parallel_config
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            want = "1 for a mixture of experts (experts are not cut over ranks)"
            yield Refusal(name, want, getattr(parallel, name))
    if getattr(parallel, "enable_eplb", False):
        yield Refusal("enable_eplb", "False", True)
    backend = getattr(getattr(config, "kernel_config", None), "moe_backend", "auto")
    if backend != "auto":
        yield Refusal("moe_backend", "auto (the plug-in runs the experts)", backend)
    hf_config = _hf_config(model)
    for name, values in families.FIXED.get(model.architectures[0], ()):
        value = getattr(hf_config, name, values[0])
        if value not in values:
            want = f"{values[0]}, which vLLM's {model.architectures[0]} takes it to be"
            yield Refusal(f"model: {name}", want, value)


def _parallel(parallel: object) -> Iterator[Refusal]:
    degree = getattr(parallel, "tensor_parallel_size", 1)
    if degree not in _DEGREES:
        yield Refusal("tensor_parallel_size", "one of 1, 2, 4, 8", degree)
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            yield Refusal(name, "1", getattr(parallel, name))
    for name in ("enable_expert_parallel", "enable_dbo", "enable_batch_sharded_sampling"):
        if getattr(parallel, name, False):
            yield Refusal(name, "False", True)
    yield from _executor(parallel)
    if getattr(parallel, "data_parallel_backend", "mp") != "mp":
        yield Refusal("data_parallel_backend", "mp", parallel.data_parallel_backend)


def _executor(holder: object) -> Iterator[Refusal]:
    """Yield an executor that starts workers elsewhere, of arguments or of a parallel config."""
    executor = getattr(holder, "distributed_executor_backend", None)
    if executor not in _EXECUTORS:
        want = "mp, uni, external_launcher or unset (others start workers without this environment)"
        name = getattr(executor, "__qualname__", executor)
        yield Refusal("distributed_executor_backend", want, name)


def _engine(config: object, device: str) -> Iterator[Refusal]:
    for name, what in (
        ("speculative_config", "speculative decoding"),
        ("lora_config", "LoRA (merge the adapter)"),
        ("kv_transfer_config", "a KV connector"),
        ("watermark_config", "a watermark (tokens are not drawn from the model's distribution)"),
    ):
        if getattr(config, name, None) is not None:
            yield Refusal(name, "None", what)
    cache, dtype = (
        str(value).removeprefix("torch.")
        for value in (config.cache_config.cache_dtype, config.model_config.dtype)
    )
    if cache not in ("auto", dtype):
        yield Refusal("kv_cache_dtype", f"auto or {dtype}, the dtype of the model", cache)
    linears = getattr(getattr(config, "kernel_config", None), "linear_backend", "auto")
    if linears != "auto":
        yield Refusal("linear_backend", "auto (the plug-in runs the linears)", linears)
    load_format = str(
        getattr(config.load_config.load_format, "value", None) or config.load_config.load_format
    )
    if load_format not in _LOAD_FORMATS:
        yield Refusal("load_format", " or ".join(_LOAD_FORMATS), load_format)
    mode = int(config.compilation_config.mode or 0)
    if mode:
        yield Refusal("compilation_config", "mode 0, or enforce_eager", f"mode {mode}")
    backend = getattr(config.attention_config.backend, "name", None)
    taken = {"cpu": (None, "CPU_ATTN"), "cuda": ("CUSTOM",)}[device]
    if backend not in taken:
        yield Refusal("attention_backend", f"{taken[-1]}, or unset", backend)
