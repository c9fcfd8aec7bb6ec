"""Settings of a model that no formula holds: windows, scales, heads, experts, biases, by layer.

`trainer_settings` reads them from a module of transformers, `engine_settings` from an engine's.
Both state them in the same words, from the modules that compute.  A setting that one side does not
state differs from what the other states.

`plain_settings` has the rest of a trainer's modules: every number and text that their code reads.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import NamedTuple

import torch

NONE = "none"
#: Functions of transformers that make masks of windows and chunks.
_WINDOWS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")
_PLAIN = (bool, int, float, str)
#: Modules of base classes whose methods say nothing of a layer; transformers' but for its models.
_FRAMEWORK = (
    "accelerate.", "builtins", "deepspeed.", "torch.distributed.", "torch.jit.",
    "torch.nn.modules.module", "torch.nn.parallel.",
)  # fmt: skip
#: Elements of the largest buffer that is digested.
_MOST = 1 << 20
#: Methods that do not run in a forward pass.
_SETUP = ("__init__", "extra_repr", "reset_parameters", "_init_weights")
#: Attributes and entries of configs that are in another field, or that change no value.
_ELSEWHERE = frozenset(
    (
        # in `trainer_settings`
        "attn_logit_softcapping", "embed_scale", "embedding_multiplier", "head_dim", "head_size",
        "is_causal", "layer_types", "num_attention_heads", "num_experts_per_tok",
        "num_hidden_layers", "num_key_value_heads", "num_local_experts", "n_layer", "num_experts",
        "residual_multiplier", "scaling", "sliding_window", "top_k", "use_bidirectional_attention",
        "has_sliding_layers", "vocab_size",
        # in `formulas` and `orders`
        "block_type", "has_experts",
        "final_logit_softcapping", "logit_scale", "logits_scaling",
        # of training, tracing and loading
        "attention_dropout", "dtype", "gradient_checkpointing", "hidden_dim", "initializer_range",
        "jitter_noise", "layer_idx", "num_logits_to_keep", "output_attentions",
        "output_hidden_states", "output_router_logits", "return_dict", "router_aux_loss_coef",
        "training", "use_cache",
    )
)  # fmt: skip
#: Linears whose biases fused linears of engines hold together -> what these hold.
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "q, k, v"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "gate, up"),
}
#: Attributes of linears and convolutions that say their width: of torch, of vLLM, of transformers'
#: Conv1D, of torch's.
_WIDTHS = ("in_features", "input_size", "nf", "in_channels")


class Stated(NamedTuple):
    """One statement: a setting or kind of layer, its value, and the layer (None: outside)."""

    name: str
    value: str
    layer: int | None


# ---- layers -------------------------------------------------------------------------------------


def layer_of(name: str) -> int | None:
    """Return the number of the layer in a module's qualified name; None: it lies in none."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return None if number is None else int(number[1])


def by_layer(stated: Iterable[Stated], layers: int | None = None) -> dict[str, str]:
    """Return name -> value, once if all agree, else with the layers of each value.

    Args:
        stated: Statements in any order; a layer that states several values has them all.
        layers: Number of layers that a value has to be stated for to stand alone; None: any.
    """
    columns: dict[str, dict[str, set[int | None]]] = {}
    for name, value, layer in stated:
        columns.setdefault(name, {}).setdefault(value, set()).add(layer)
    return {name: _compact(columns[name], layers) for name in sorted(columns)}


def _compact(coords: dict[str, set[int | None]], layers: int | None) -> str:
    texts = sorted(coords)
    first = coords[texts[0]]
    partial = layers is not None and None not in first and len(first) < layers
    if all(coords[text] == first for text in texts) and not partial:
        return " and ".join(texts)
    return " and ".join(f"{text} {_where(coords[text])}" for text in texts)


def _where(coords: set[int | None]) -> str:
    """Return "in layers 0-3, 5" of numbers, "outside the layers" of None."""
    runs: list[list[int]] = []
    for number in sorted(coords - {None}):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    numbers = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    texts = [f"in layer{'' if numbers.isdigit() else 's'} {numbers}"] if runs else []
    return " and ".join(texts + ["outside the layers"] * (None in coords))


# ---- what a class's code reads ------------------------------------------------------------------


@functools.cache
def names_read(cls: type) -> frozenset[str]:
    """Return the names and keywords in the code of a class and its bases, but for frameworks'."""
    names: set[str] = set()
    for base in cls.__mro__:
        home = base.__module__
        models = home.startswith("transformers.models.")
        if home.startswith(_FRAMEWORK) or (home.startswith("transformers.") and not models):
            continue
        for name, member in vars(base).items():
            function = inspect.unwrap(member) if callable(member) else member
            if name not in _SETUP and isinstance(function, FunctionType):
                for code in _codes(function.__code__):
                    names.update(code.co_names)
                    for constant in code.co_consts:  # names of keywords, in a call
                        names.update(constant if isinstance(constant, tuple) else ())
    return frozenset(name for name in names if isinstance(name, str))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _plain(value: object) -> bool:
    if isinstance(value, tuple | list | dict):
        items = value.values() if isinstance(value, dict) else value
        return all(isinstance(item, _PLAIN) for item in items)
    return isinstance(value, _PLAIN)


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return eight letters that follow the bytes of a tensor."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:8]


def plain_settings(module: torch.nn.Module, cls: type, known: Iterable[str] = ()) -> dict[str, str]:
    """Return "class.attribute" -> value of what a trainer's module reads and no field holds.

    Args:
        module: Its numbers, texts, and lists and dicts of them count, as attributes, in its config,
            or as buffers that no checkpoint has.
        cls: Class by whose name they are stated, and whose code is searched.
        known: Names that a formula holds.
    """
    reads = names_read(cls) - _ELSEWHERE - set(known)
    values = {
        name: value
        for name, value in vars(module).items()
        if name in reads and not name.startswith("_") and _plain(value)
    }
    config = getattr(module, "config", None)
    if "config" in reads and not isinstance(config, dict) and hasattr(config, "__dict__"):
        values |= {
            f"config.{name}": value
            for name, value in vars(config).items()
            if name in reads and name not in vars(module) and _plain(value)
        }
    for name in getattr(module, "_non_persistent_buffers_set", set()) & reads:
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.numel() <= _MOST and buffer.device.type != "meta":
            values[name] = buffer.item() if buffer.numel() == 1 else tensor_digest(buffer)
    return {f"{cls.__name__}.{name}": _text(value) for name, value in values.items()}


# ---- a trainer's modules ------------------------------------------------------------------------


def trainer_settings(module: torch.nn.Module, layer: int | None) -> dict[str, object]:
    """Return what a module of transformers states: setting -> value; None: it does not state it."""
    cls, reads = type(module), names_read(type(module))
    stated = {
        "architecture": _architecture(module, layer),
        "embedding multiplier": _embedding_scale(module),
        "layers that run": _fewer_layers(module),
        "residual multiplier": _number(module, "residual_multiplier"),
    }
    if "ALL_ATTENTION_FUNCTIONS" in reads and hasattr(module, "config"):
        stated |= _attention(module, layer)
    if layer is not None:  # a causal LM has them for its auxiliary loss
        stated["number of experts"] = _number(module, "num_experts", "num_local_experts")
        stated["experts per token"] = _number(module, "top_k", "num_experts_per_tok")
    ends = ("get_input_embeddings", "get_output_embeddings")
    if all(callable(getattr(cls, name, None)) for name in ends):
        table, head = (getattr(module, name)() for name in ends)
        stated |= _ends(table, "num_embeddings", head)
    return stated


def _number(module: torch.nn.Module, *names: str) -> float | None:
    """Return the first of these attributes that a module's code reads, and that is a number."""
    values = (getattr(module, name, None) for name in names if name in names_read(type(module)))
    return next((value for value in values if isinstance(value, int | float)), None)


def _attention(module: torch.nn.Module, layer: int | None) -> dict[str, object]:
    """Return what a module states that calls the attention which its config names."""
    config, reads = module.config, names_read(type(module))
    sizes = ("head_dim", "head_size", "attention_head_size")
    size = next((getattr(module, name) for name in sizes if hasattr(module, name)), None)

    def heads(projection: str, setting: str) -> object:
        """Number of heads by a projection's width, or by the config where it is fused."""
        width = getattr(getattr(module, projection, None), "out_features", None)
        if width and size:
            return width // size
        return getattr(config, setting, getattr(config, "num_attention_heads", None))

    scale = getattr(module, "scaling", None)
    causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True)
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    name = "attn_logit_softcapping"
    cap = getattr(module, name, getattr(config, name, None))
    return {
        "attention heads": heads("q_proj", "num_attention_heads"),
        "attention key heads": heads("k_proj", "num_key_value_heads"),
        "attention head size": size,
        "attention mask": "causal" if causal and not both_ways else "bidirectional",
        "attention scale": float(scale) if isinstance(scale, int | float) else None,
        "attention sinks": "one a head" if {"s_aux", "sinks"} & reads else NONE,
        "attention soft cap": float(cap) if cap and "softcap" in reads else NONE,
        "attention window": _window(module, layer),
    }


def _window(module: torch.nn.Module, layer: int | None) -> object:
    """Return the window of the layer's mask, and that of the module, where it has another."""
    config = module.config
    files = [sys.modules.get(base.__module__) for base in type(module).__mro__]
    types = getattr(config, "layer_types", None) or ()
    kind = types[layer] if layer is not None and layer < len(types) else "sliding_attention"
    window: object = NONE
    if kind == "chunked_attention":
        window = f"chunks of {getattr(config, 'attention_chunk_size', None)}"
    elif kind == "sliding_attention" and any(hasattr(f, name) for f in files for name in _WINDOWS):
        window = getattr(config, "sliding_window", None) or NONE
    elif kind not in ("full_attention", "sliding_attention"):
        window = kind
    width = getattr(module, "sliding_window", window) or NONE
    return window if width == window else f"{width} (mask: {window})"


def _embedding_scale(module: torch.nn.Module) -> float | None:
    """Return the multiplier of embeddings, rounded as it is applied."""
    scale = getattr(module, "embed_scale", None)
    if isinstance(scale, torch.Tensor) and hasattr(module, "weight") and not scale.is_meta:
        return scale.detach().to(module.weight.dtype).float().item()
    return _number(module, "embed_scale", "embedding_multiplier")


def _fewer_layers(module: torch.nn.Module) -> int | None:
    """Return how many layers a base model runs, where its config says another number."""
    layers, config = getattr(module, "layers", None), getattr(module, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    reads = "num_hidden_layers" in names_read(type(module))
    differs = reads and isinstance(layers, torch.nn.ModuleList) and len(layers) != count
    return count if differs else None


# ---- both sides' models -------------------------------------------------------------------------


def _architecture(module: torch.nn.Module, layer: int | None) -> str | None:
    """Return the ``model_type`` of a model's own config."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    has_head = hasattr(module, "lm_head") or hasattr(type(module), "get_output_embeddings")
    return kind if isinstance(kind, str) and layer is None and has_head else None


def _ends(table: object, entries: str, head: object) -> dict[str, str | None]:
    """Return the size of the table of input ids, and whether the head's weight is the table's."""
    weights = [getattr(end, "weight", None) for end in (head, table)]
    size = [getattr(table, name, None) for name in (entries, "embedding_dim")]
    tied = "yes" if weights[0] is weights[1] else "no"
    return {
        "embedding table": None if None in size else f"{size[0]} x {size[1]}",
        "tied head": None if any(weight is None for weight in weights) else tied,
    }


# ---- an engine's modules ------------------------------------------------------------------------


def engine_settings(module: torch.nn.Module, layer: int | None) -> dict[str, object]:
    """Return what a module of an engine states: setting -> value; None: it does not state it."""
    stated: dict[str, object] = {"architecture": _architecture(module, layer)}
    impl, router = getattr(module, "impl", None), getattr(module, "router", None)
    if hasattr(impl, "num_kv_heads"):
        stated |= _engine_attention(impl)
    if hasattr(module, "total_num_kv_heads") and hasattr(module, "output_sizes"):
        # A QKVParallelLinear, which has the heads of all ranks.
        stated["attention heads"] = getattr(module, "total_num_heads", None)
        stated["attention key heads"] = module.total_num_kv_heads
    if router is not None:
        stated["number of experts"] = getattr(router, "global_num_experts", None)
        stated["experts per token"] = getattr(router, "top_k", None)
    scale = getattr(module, "normalizer", None)  # of Gemma
    if isinstance(scale, torch.Tensor):
        stated["embedding multiplier"] = scale.float().item()
    for name in ("embedding_multiplier", "residual_multiplier"):  # of Granite
        if isinstance(value := getattr(module, name, None), int | float):
            stated[name.replace("_", " ")] = value
    table = getattr(getattr(module, "model", None), "embed_tokens", None)
    return stated | _ends(table, "org_vocab_size", getattr(module, "lm_head", None))


def _engine_attention(impl: object) -> dict[str, object]:
    """Return what the implementation of an attention layer of vLLM's states."""
    window = getattr(impl, "sliding_window", None)
    if isinstance(window, tuple):  # FlashAttention's, without the token itself
        window = window[0] + 1
    cap = getattr(impl, "softcap", getattr(impl, "logits_soft_cap", None))
    kind = getattr(impl, "attn_type", "decoder")
    return {
        "attention head size": getattr(impl, "head_size", None),
        "attention mask": "causal"
        if getattr(kind, "value", kind) == "decoder"
        else "bidirectional",
        "attention scale": getattr(impl, "scale", None),
        "attention sinks": NONE if getattr(impl, "sinks", None) is None else "one a head",
        "attention soft cap": float(cap) if cap else NONE,
        "attention window": window or NONE,
    }


# ---- all of them --------------------------------------------------------------------------------


def located(
    model: torch.nn.Module, path: str = "", around: tuple[torch.nn.Module, ...] = ()
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (qualified name, module); a module that several layers share is in each of them."""
    yield path, model
    for name, child in model._modules.items():
        if child is not None and all(child is not outer for outer in (*around, model)):
            yield from located(child, f"{path}.{name}" if path else name, (*around, model))


def settings_of(path: str, module: torch.nn.Module, side: str) -> Iterator[Stated]:
    """Yield the settings that one module states.

    Args:
        path: Qualified name of the module.
        module: Of a trainer's or an engine's model.
        side: ``"trainer"`` or ``"engine"``: whose words are read.
    """
    layer = layer_of(path)
    read = {"trainer": trainer_settings, "engine": engine_settings}[side]
    for name, value in read(module, layer).items():
        if value is not None:
            yield Stated(name, _text(value), layer)
    has_bias = isinstance(getattr(module, "bias", None), torch.Tensor)
    if has_bias and any(hasattr(module, width) for width in _WIDTHS):
        name = path.removesuffix(".base_layer").rpartition(".")[2]
        yield Stated(f"bias of {_FUSED.get(name, name)}", "yes", layer)
