"""``ck.contract``: what the bits of this process and of a model depend on, in one record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from .. import nn as own_modules
from ..errors import ArgumentTypeError, ArgumentValueError, expected
from ..integrations import causal_lm, engine_layers, experts, model_settings, transformers
from ..integrations import contract_exchange as exchange
from ..integrations.contract_exchange import ContractPart
from ..integrations.model_settings import Stated
from ..integrations.publish import Manifest
from ..runtime import process_contract
from ..runtime.process_contract import Contract as Contract
from ..runtime.process_contract import compare_contracts as compare_contracts
from .patch import guards, pretrained, state
from .patch.classes import PARALLEL_PRODUCTS
from .patch.forwards import mixers
from .patch.report import LOGP
from .patch.state import NOTES, kind_of

_LINEAR = {"linear", "head", "conv1d", *PARALLEL_PRODUCTS}
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu(approximate='tanh')",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "quick_gelu": "sigmoid, x sigmoid(1.702 x) in the steps of transformers",
}
_FREQUENCIES = "inv_freq"
#: Class of transformers -> activation that its own forward computes.
_GATES = dict.fromkeys(
    ("Qwen2MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock", "Qwen3NextAttention"), "sigmoid"
)
#: Attributes of nn.Embedding that change no value, or no gradient but that of one row.
_OF_EMBEDDINGS = ("norm_type", "padding_idx", "scale_grad_by_freq", "sparse")
#: Kinds whose ops are those of the modules inside.
_TRANSPARENT = {"positions", "attention", "residual", "mlp", "base_model", "causal_lm"}
_TRANSPARENT |= {mixers.BASE_MODEL, mixers.STATEFUL, mixers.CONVOLUTION}


def contract(
    device: torch.device | str | int | None = None,
    ops: Iterable[str] | None = None,
    model: torch.nn.Module | None = None,
    *,
    dtype: torch.dtype | None = None,
    weights: Manifest | int | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Contract:
    """Everything that the bits of this process depend on, to compare with those of another.

    A trainer and a rollout engine make one each; `compare_contracts` says what differs.

    Args:
        device: None: the model's; without a model the current GPU, or the CPU if there is none.
        ops: Names of the ops whose ids are in it; None: every op that has a contract.
        model: Its formulas, orders and logits go in: of each kind of layer, what computes it.  A
            model that ``ck.patch`` did not see says so, layer by layer.
        dtype: Of the inputs for which the ids are; None: the model's, or bf16.
        weights: What the model holds: the manifest of published weights, or its version.
        logits_dtype: Of the logits that log-probs are made of.  None: fp32 of a model that was
            patched with ``logits="linear_logp"``, as ``ck.linear_logp`` does not round them; else
            the dtype of the head's weight.

    Returns:
        A frozen `Contract`: ``to_dict()`` for an RPC, ``save(path)`` and ``Contract.load(path)``.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong; the message names it.

    Example:
        >>> ck.contract('cpu', ['linear'], dtype=torch.bfloat16).dtype
        'bfloat16'
    """
    fields: dict[str, object] = {"weights": exchange.weights_text(weights)}
    if model is not None:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentTypeError(expected("model", "a torch.nn.Module", type(model).__name__))
        first = next((p for p in model.parameters() if p.dtype.is_floating_point), None)
        if first is not None:
            device = first.device if device is None else device
            dtype = first.dtype if dtype is None else dtype
        logits_dtype = _logits_dtype(model, dtype) if logits_dtype is None else logits_dtype
        fields |= _described(model, dtype or torch.bfloat16)
    if model is not None or logits_dtype is not None:
        fields["logits_dtype"] = str(logits_dtype).removeprefix("torch.")
    return process_contract.of_device(device, ops, dtype or torch.bfloat16, **fields)


def _logits_dtype(model: torch.nn.Module, dtype: torch.dtype | None) -> torch.dtype | None:
    # DDP and torch.compile are around a patched model.
    marks = (guards.options_of(module) for module in model.modules())
    options = next((mark for mark in marks if mark is not None), None)
    return torch.float32 if options is not None and options.logits == LOGP else dtype


def _described(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """Return the fields of a contract that say what a trainer's model computes."""
    fields = exchange.described(
        model,
        "trainer",
        lambda module: _parts_of(module, dtype),
        state.user_class,
        pretrained.wrapping_forwards,
    )
    stated = [
        Stated(name, value, model_settings.layer_of(path))
        for path, module in model.named_modules()
        for name, value in _plain_settings(module).items()
    ]
    fields["settings"] |= model_settings.by_layer(stated)
    formulas: dict[str, set[str]] = {}
    for part in _model_parts(model):
        formulas.setdefault(part.kind, set()).add(part.formula)
    fields["formulas"] |= {kind: " and ".join(sorted(texts)) for kind, texts in formulas.items()}
    return fields


def _model_parts(model: torch.nn.Module) -> Iterator[ContractPart]:
    """Yield the parts of models of transformers in it: their attention, and their logits."""
    for module in state.pretrained_models(model):
        name = getattr(module.config, "_attn_implementation", None)
        if name in (transformers.NAME, transformers.PAGED):
            yield exchange.attention_part()
        else:
            yield ContractPart("attention", f"{name} of transformers")
        if callable(getattr(type(module), "get_output_embeddings", None)) and hasattr(
            module, "lm_head"
        ):
            yield _logits_part(module)


def _plain_settings(module: torch.nn.Module) -> dict[str, str]:
    """Return what a module's code reads and neither its formula nor `trainer_settings` holds."""
    kind, cls = kind_of(module) or own_modules.kind_of(module) or "", state.user_class(module)
    if kind in _LINEAR or kind in _ACTIVATIONS or kind == "rotary" or "norm" in kind:
        return {}
    if kind in (mixers.DELTA_NET, mixers.MAMBA2, mixers.CONVOLUTION):
        return {}
    known = [*_OF_EMBEDDINGS] if isinstance(module, torch.nn.Embedding) else []
    if kind == "invariant" and engine_layers.rule_of(cls.__name__, True) is not None:
        known = ["norm_topk_prob"]
    return model_settings.plain_settings(module, cls, known)


def _logits_part(model: torch.nn.Module) -> ContractPart:
    try:
        change = causal_lm.transform(model)
    except ArgumentValueError as error:
        return ContractPart("logits", f"not known ({error})")
    return exchange.logits_part(change.softcap, change.scale)


def _parts_of(module: torch.nn.Module, dtype: torch.dtype) -> tuple[ContractPart, ...]:
    """Return the parts of one module: patched, of ck.nn, named by an engine, or foreign."""
    kind = kind_of(module)
    if kind is None or NOTES not in vars(module):
        kind = own_modules.kind_of(module)
        if kind is None:
            return exchange.module_parts(module, dtype)
        notes = module
    else:
        notes = getattr(module, NOTES)
    if kind in _TRANSPARENT:
        return ()
    if kind in _LINEAR:
        return (exchange.linear_part(notes.order),)
    if kind.startswith("embedding"):
        return (exchange.embedding_part(),)
    if kind in _ACTIVATIONS:
        return (exchange.activation_part(_ACTIVATIONS[kind]),)
    if kind == "rotary":
        return _rotary_parts(module, dtype if notes.follows else torch.float32)
    if "norm" in kind:
        name = "layer_norm" if kind == "layer_norm" else "rms_norm"
        return (exchange.norm_part(name, *_norm_options(module, notes)),)
    if kind == mixers.DELTA_NET and not getattr(module, "allow_neg_eigval", False):
        sizes = mixers.rule_of(module).sizes(module)
        return (exchange.mixer_part("chunk_gated_delta_rule", *sizes),)
    if kind == mixers.MAMBA2 and getattr(module, "mamba_rms_norm", True):
        steps = tuple(map(float, module.time_step_limit))
        sizes = mixers.rule_of(module).sizes(module)
        return (exchange.mixer_part("mamba_chunk_scan_combined", *sizes, steps),)
    cls = state.user_class(module)
    text = f"{cls.__name__} of {cls.__module__.partition('.')[0]}, on ck's functions"
    return _mixture_parts(module, kind) or (ContractPart(kind, text),)


def _mixture_parts(module: torch.nn.Module, kind: str) -> tuple[ContractPart, ...]:
    """Return the parts of experts, routers and their blocks that engines have as well."""
    cls = type(module)
    if kind == "experts":
        plain = module.has_gate and experts.gates_by_default(module)
        if plain and kind_of(module.act_fn) == "silu":
            return (exchange.experts_part(),)
    elif kind == "invariant" and cls.__module__.startswith("transformers.models."):
        if cls.__name__ in _GATES:
            return (exchange.activation_part(_GATES[cls.__name__]),)
        rule = engine_layers.rule_of(cls.__name__, getattr(module, "norm_topk_prob", True))
        if rule is not None:
            return (exchange.linear_part(), exchange.router_part(rule))
    return ()


def _rotary_parts(module: torch.nn.Module, dtype: torch.dtype) -> tuple[ContractPart, ...]:
    """Return a part for each table of a module: Gemma 3's has one for each type of layer."""
    exact = state.exact_frequencies(module)
    types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    parts = []
    for name, buffer in module.named_buffers(recurse=False):
        if name.endswith(_FREQUENCIES) and "original" not in name:
            prefix = name.removesuffix(_FREQUENCIES)
            scaling = getattr(module, f"{prefix}attention_scaling", 1.0)
            part = exchange.rotary_part(dtype, exact.get(name, buffer), scaling)
            layers = tuple(i for i, kind in enumerate(types) if f"{kind}_" == prefix)
            parts.append(part._replace(layers=layers or None))
    return tuple(parts)


def _norm_options(module: torch.nn.Module, notes: object) -> tuple[float, float]:
    eps_name = getattr(notes, "eps_name", None)
    eps = notes.eps if eps_name is None else getattr(module, eps_name)
    if eps is None:  # nn.RMSNorm's default
        eps = torch.finfo(torch.float32).eps
    return eps, getattr(notes, "offset", 0.0)
