"""Settings of a model that no formula holds: windows, scales, heads, experts, biases, by layer.

`SETTINGS` has for each its name, its reader on a module of transformers and its reader on a module
of an engine.  Both sides state it in the same words, from the modules that compute.  A setting
that one side does not state differs from what the other states.

`plain_settings` has the rest of a trainer's modules: every number and text that their code reads.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import NamedTuple

import torch

Reader = Callable[[torch.nn.Module, int | None], object]

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
        # in `SETTINGS`
        "attn_logit_softcapping", "embed_scale", "embedding_multiplier", "head_dim", "head_size",
        "is_causal", "layer_types", "num_attention_heads", "num_experts_per_tok",
        "num_hidden_layers", "num_key_value_heads", "num_local_experts", "n_layer", "num_experts",
        "residual_multiplier", "scaling", "sliding_window", "top_k", "use_bidirectional_attention",
        "has_sliding_layers", "vocab_size",
        # in `formulas` and `orders`
        "final_logit_softcapping", "logit_scale", "logits_scaling",
        # of training, tracing and loading
        "attention_dropout", "dtype", "gradient_checkpointing", "hidden_dim", "initializer_range",
        "jitter_noise", "layer_idx", "output_attentions", "output_hidden_states",
        "output_router_logits", "return_dict", "router_aux_loss_coef", "training", "use_cache",
    )
)  # fmt: skip
#: Linears whose biases fused linears of engines hold together -> what these hold.
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "q, k, v"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "gate, up"),
}
#: Attributes of linears that say their width: of torch, of vLLM, of transformers' Conv1D.
_WIDTHS = ("in_features", "input_size", "nf")


class Stated(NamedTuple):
    """One statement: a setting or kind of layer, its value, and the layer (None: outside)."""

    name: str
    value: str
    layer: int | None


class Setting(NamedTuple):
    """A setting in the words of both sides, and how each side's modules say it; None: not."""

    name: str
    trainer: Reader
    engine: Reader


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


# ---- readers of a trainer's modules -------------------------------------------------------------


def _of_attention(read: Reader) -> Reader:
    """Apply a reader to modules that call the attention which their config names."""

    def reader(module: torch.nn.Module, layer: int | None) -> object:
        attends = "ALL_ATTENTION_FUNCTIONS" in names_read(type(module))
        return read(module, layer) if attends and hasattr(module, "config") else None

    return reader


def _of_attribute(*names: str) -> Reader:
    """Read the first of these attributes that a module's code reads, as a number."""

    def reader(module: torch.nn.Module, layer: int | None) -> object:
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, int | float) and name in names_read(type(module)):
                return value
        return None

    return reader


def _scale(module: torch.nn.Module, _layer: int | None) -> float | None:
    scale = getattr(module, "scaling", None)
    return float(scale) if isinstance(scale, int | float) else None


def _window(module: torch.nn.Module, layer: int | None) -> object:
    """Return the window of the layer's mask, and that of the module, where it has another."""
    config, cls = module.config, type(module)
    files = [sys.modules.get(base.__module__) for base in cls.__mro__]
    types = getattr(config, "layer_types", None) or ()
    kind = types[layer] if layer is not None and layer < len(types) else "sliding_attention"
    window: object = NONE
    if kind == "chunked_attention":
        window = f"chunks of {getattr(config, 'attention_chunk_size', None)}"
    elif kind == "sliding_attention" and any(hasattr(f, name) for f in files for name in _WINDOWS):
        window = getattr(config, "sliding_window", None) or NONE
    elif kind not in ("full_attention", "sliding_attention"):
        window = kind
    own = getattr(module, "sliding_window", window) or NONE
    return window if own == window else f"{own} (mask: {window})"


def _soft_cap(module: torch.nn.Module, _layer: int | None) -> object:
    name = "attn_logit_softcapping"
    cap = getattr(module, name, getattr(module.config, name, None))
    return float(cap) if cap and "softcap" in names_read(type(module)) else NONE


def _sinks(module: torch.nn.Module, _layer: int | None) -> str:
    return "one a head" if {"s_aux", "sinks"} & names_read(type(module)) else NONE


def _causality(module: torch.nn.Module, _layer: int | None) -> str:
    config = module.config
    both = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True)
    return "causal" if causal and not both else "bidirectional"


def _head_size(module: torch.nn.Module, _layer: int | None = None) -> int | None:
    names = ("head_dim", "head_size", "attention_head_size")
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _heads(projection: str, setting: str) -> Reader:
    """Read heads from a projection's width, or from the config where it is fused with others."""

    def reader(module: torch.nn.Module, _layer: int | None) -> object:
        width = getattr(getattr(module, projection, None), "out_features", None)
        size = _head_size(module)
        if width and size:
            return width // size
        return getattr(module.config, setting, getattr(module.config, "num_attention_heads", None))

    return reader


def _in_layers(read: Reader) -> Reader:
    """Leave out what a causal LM says for its auxiliary loss."""
    return lambda module, layer: None if layer is None else read(module, layer)


def _embedding_scale(module: torch.nn.Module, _layer: int | None) -> float | None:
    """Return the multiplier of embeddings, rounded as it is applied."""
    scale = getattr(module, "embed_scale", None)
    if isinstance(scale, torch.Tensor) and hasattr(module, "weight") and not scale.is_meta:
        return scale.detach().to(module.weight.dtype).float().item()
    names = ("embed_scale", "embedding_multiplier")
    return _of_attribute(*names)(module, None)


def _tied(module: torch.nn.Module, _layer: int | None) -> str | None:
    """Say whether the head's weight is the embedding's."""
    if not callable(getattr(type(module), "get_output_embeddings", None)):
        return None
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    return _same_weight(head, table)


def _same_weight(head: object, table: object) -> str | None:
    weights = [getattr(layer, "weight", None) for layer in (head, table)]
    if any(weight is None for weight in weights):
        return None
    return "yes" if weights[0] is weights[1] else "no"


def _table_size(module: torch.nn.Module, _layer: int | None) -> str | None:
    """Return "entries x width" of the table of input ids."""
    read = getattr(type(module), "get_input_embeddings", None)
    if not callable(read) or not callable(getattr(type(module), "get_output_embeddings", None)):
        return None
    table = module.get_input_embeddings()
    return _size_of(table, "num_embeddings")


def _size_of(table: object, entries: str) -> str | None:
    numbers = [getattr(table, name, None) for name in (entries, "embedding_dim")]
    return None if None in numbers else f"{numbers[0]} x {numbers[1]}"


def _architecture(module: torch.nn.Module, layer: int | None) -> str | None:
    """Return the ``model_type`` of a model's own config."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    has_head = hasattr(module, "lm_head") or hasattr(type(module), "get_output_embeddings")
    return kind if isinstance(kind, str) and layer is None and has_head else None


def _fewer_layers(module: torch.nn.Module, _layer: int | None) -> int | None:
    """Return how many layers a base model runs, where its config says another number."""
    layers, config = getattr(module, "layers", None), getattr(module, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    reads = "num_hidden_layers" in names_read(type(module))
    differs = reads and isinstance(layers, torch.nn.ModuleList) and len(layers) != count
    return count if differs else None


# ---- readers of an engine's modules -------------------------------------------------------------


def _of_impl(read: Callable[[object], object]) -> Reader:
    """Apply a reader to the implementation of vLLM's attention layers."""

    def reader(module: torch.nn.Module, _layer: int | None) -> object:
        impl = getattr(module, "impl", None)
        return read(impl) if hasattr(impl, "num_kv_heads") else None

    return reader


def _engine_window(impl: object) -> object:
    window = getattr(impl, "sliding_window", None)
    if isinstance(window, tuple):  # FlashAttention's, without the token itself
        window = window[0] + 1
    return window or NONE


def _engine_soft_cap(impl: object) -> object:
    cap = getattr(impl, "softcap", getattr(impl, "logits_soft_cap", None))
    return float(cap) if cap else NONE


def _engine_causality(impl: object) -> str:
    kind = getattr(impl, "attn_type", "decoder")
    return "causal" if getattr(kind, "value", kind) == "decoder" else "bidirectional"


def _of_qkv(name: str) -> Reader:
    """Read from a QKVParallelLinear, which has the heads of all ranks."""

    def reader(module: torch.nn.Module, _layer: int | None) -> object:
        return (
            getattr(module, name, None)
            if hasattr(module, "total_num_kv_heads") and hasattr(module, "output_sizes")
            else None
        )

    return reader


def _of_router(name: str) -> Reader:
    return lambda module, _layer: getattr(getattr(module, "router", None), name, None)


def _engine_embedding_scale(module: torch.nn.Module, _layer: int | None) -> float | None:
    scale = getattr(module, "normalizer", None)  # of Gemma
    return scale.float().item() if isinstance(scale, torch.Tensor) else None


def _engine_table(module: torch.nn.Module) -> object:
    """Return the embedding of a model with a head."""
    return getattr(getattr(module, "model", None), "embed_tokens", None)


def _engine_tied(module: torch.nn.Module, _layer: int | None) -> str | None:
    return _same_weight(getattr(module, "lm_head", None), _engine_table(module))


def _engine_table_size(module: torch.nn.Module, _layer: int | None) -> str | None:
    return _size_of(_engine_table(module), "org_vocab_size")


def _nothing(module: torch.nn.Module, _layer: int | None) -> None:
    """Read a setting that no engine's model has."""


SETTINGS = (
    Setting("architecture", _architecture, _architecture),
    Setting("attention heads", _of_attention(_heads("q_proj", "num_attention_heads")),
            _of_qkv("total_num_heads")),
    Setting("attention key heads", _of_attention(_heads("k_proj", "num_key_value_heads")),
            _of_qkv("total_num_kv_heads")),
    Setting("attention head size", _of_attention(_head_size),
            _of_impl(lambda impl: getattr(impl, "head_size", None))),
    Setting("attention mask", _of_attention(_causality), _of_impl(_engine_causality)),
    Setting("attention scale", _of_attention(_scale),
            _of_impl(lambda impl: getattr(impl, "scale", None))),
    Setting("attention sinks", _of_attention(_sinks),
            _of_impl(lambda i: NONE if getattr(i, "sinks", None) is None else "one a head")),
    Setting("attention soft cap", _of_attention(_soft_cap), _of_impl(_engine_soft_cap)),
    Setting("attention window", _of_attention(_window), _of_impl(_engine_window)),
    Setting("embedding multiplier", _embedding_scale, _engine_embedding_scale),
    Setting("embedding table", _table_size, _engine_table_size),
    Setting("layers that run", _fewer_layers, _nothing),
    Setting("number of experts", _in_layers(_of_attribute("num_experts", "num_local_experts")),
            _of_router("global_num_experts")),
    Setting("experts per token", _in_layers(_of_attribute("top_k", "num_experts_per_tok")),
            _of_router("top_k")),
    Setting("residual multiplier", _of_attribute("residual_multiplier"), _nothing),
    Setting("tied head", _tied, _engine_tied),
)  # fmt: skip


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
        side: ``"trainer"`` or ``"engine"``, the column of `SETTINGS` that is read.
    """
    layer = layer_of(path)
    for setting in SETTINGS:
        value = getattr(setting, side)(module, layer)
        if value is not None:
            yield Stated(setting.name, _text(value), layer)
    has_bias = isinstance(getattr(module, "bias", None), torch.Tensor)
    if has_bias and any(hasattr(module, width) for width in _WIDTHS):
        name = path.removesuffix(".base_layer").rpartition(".")[2]
        yield Stated(f"bias of {_FUSED.get(name, name)}", "yes", layer)
