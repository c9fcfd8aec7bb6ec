"""Architectures of transformers that were reviewed module by module.

A family in `FAMILIES` has, in transformers 5.23, nothing left that `patch` does not replace: the
rest of its forwards are look-ups, additions, multiplications and comparisons of elements.  The
classes of its ``modeling_`` file are therefore not searched for what torch computes (patch_scan).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType

import torch

#: model_type -> name of the family.
FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "phi3": "Phi-3",
    "olmo2": "OLMo 2",
    "gpt_neox": "GPT-NeoX",
}
#: Folders in transformers.models that differ from the model_type.
_FOLDERS = {"gemma3_text": "gemma3"}
#: Packages whose functions are in reviewed files.
_PACKAGES = frozenset((
    "accelerate", "contextlib", "copy", "dataclasses", "functools", "huggingface_hub", "inspect",
    "packaging", "peft", "safetensors", "torch", "transformers", "warnings",
))  # fmt: skip
#: Files whose modules keep to a row, or are named by `reading`.
_REVIEWED = tuple(
    f"torch.nn.modules.{name}"
    for name in ("activation", "container", "dropout", "linear", "normalization", "sparse")
) + ("torch.nn.parallel.", "torch.nn.utils.", "transformers.activations")

#: Reasons why a family is not covered.
HYBRID = "state space or linear attention layers: their scans and convolutions are torch's"
#: Classes of PEFT 0.21 that were reviewed: an adapter multiplies by its own linears, which are
#: replaced like others, and multiplies matrices itself only where it is merged.
_ADAPTERS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.model", "LoraModel")}
#: Class of PEFT that adapts a parameter, as experts have them -> why it is left.
_OF_PARAMETERS = ("peft.tuners.lora.layer", "ParamWrapper")
ON_PARAMETERS = (
    "LoRA on a parameter (target_parameters): its products are torch's; adapt linear layers instead"
)

#: Types that are not covered where a layer is of a kind in `_NOT_COVERED_LAYERS`, or where their
#: config does not say what kinds its layers are.
NOT_COVERED = frozenset({
    "mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "nemotron_h",
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "recurrent_gemma", "rwkv",
    "minimax", "falcon_h1", "kimi_linear", "olmo_hybrid", "xlstm",
})  # fmt: skip
_NOT_COVERED_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "hybrid", "recurrent"})


#: Types whose attention reads the values of its mask: ours is no mask of scores but the ranges of
#: keys that a row attends.
_COMPUTE_WITH_THE_MASK = frozenset({"deepseek_v32", "glm_moe_dsa", "doge"})


def why_not_attention(models: Sequence[torch.nn.Module]) -> str | None:
    """Why the models of a config are known not to attend by our op; None: it is not known."""
    types = [model_type(model) for model in models]
    if not _COMPUTE_WITH_THE_MASK.isdisjoint(types):
        return "its attention computes with the values of the mask"
    sparse = getattr(models[0].config, "attention_type", None) == "block_sparse"
    if sparse and types[0] == "big_bird":
        return "attention_type = 'block_sparse': which keys a row sees follows the longest sequence"
    return None


def why_not_covered(config: object) -> str | None:
    """Why a config's models are known not to be covered, before any runs; None: it is not known."""
    name = getattr(config, "model_type", None)
    if name not in NOT_COVERED:
        return None
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds and _NOT_COVERED_LAYERS.isdisjoint(kinds):
        return None
    return f"{name}: {HYBRID}"


def model_type(model: torch.nn.Module) -> str | None:
    """Name of an architecture in transformers; None: the module has no config that says it."""
    name = getattr(getattr(model, "config", None), "model_type", None)
    return name if isinstance(name, str) else None


def of(model: torch.nn.Module) -> str | None:
    """Return the family of a model or of its wrapper, as `FAMILIES` names it; None: another one."""
    return next((FAMILIES[t] for t in map(model_type, model.modules()) if t in FAMILIES), None)


def known(cls: type) -> bool:
    """Whether a class was reviewed, or lies in a reviewed file."""
    if (cls.__module__, cls.__name__) in _ADAPTERS or cls.__module__ == "peft.peft_model":
        return True
    folders = {_FOLDERS.get(name, name) for name in FAMILIES}
    return cls.__module__ in {f"transformers.models.{f}.modeling_{f}" for f in folders}


def run_as_reviewed(classes: Iterable[type]) -> bool:
    """Whether these classes lie in reviewed files, and nobody has put other functions there.

    Liger and others write into classes of transformers, and into its files.
    """
    return all(
        cls.__module__.startswith(_REVIEWED)
        or (known(cls) and all(map(_is_theirs, _functions(cls))))
        for cls in classes
    )


def _functions(cls: type) -> Iterator[FunctionType]:
    """Yield the functions of a class, of its bases and of its file, and what decorators wrap."""
    spaces = [*map(vars, cls.__mro__), vars(sys.modules[cls.__module__])]
    for function in (value for space in spaces for value in space.values()):
        while isinstance(function, FunctionType):
            yield function
            function = getattr(function, "__wrapped__", None)


def _is_theirs(function: FunctionType) -> bool:
    home = str(function.__globals__.get("__name__"))
    return home.partition(".")[0] in _PACKAGES


def adapts_parameters(cls: type) -> bool:
    """Whether a class of PEFT multiplies adapters of a parameter by itself."""
    return (cls.__module__, cls.__name__) == _OF_PARAMETERS


def is_causal_lm(cls: type) -> bool:
    """Whether a class is a causal LM of a reviewed family."""
    return known(cls) and cls.__name__.endswith("ForCausalLM") and "forward" in vars(cls)
