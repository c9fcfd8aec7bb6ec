"""Decide about models of transformers as wholes: their attention, soft caps, losses and heads."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import nn

from ...errors import ArgumentValueError
from ...integrations import causal_lm
from ...runtime import checking, data_parallel
from ...sparse_attn.config import VALUE_DIMS
from .. import aten
from . import families, instance, softcaps, weights
from .checks import LOGP, Options
from .classes import Action, Part, patched_class, user_class
from .forwards.notes import Notes
from .report import Kind, Left, Replaced
from .scan import bytecode, configs
from .scan.configs import Attention

#: Attributes of attention modules that say their head size.
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")
#: Argument of a causal LM that has its balancing loss added to the loss.
_BALANCING = "output_router_logits"
_BALANCE = "with output_router_logits=True: torch's means of the routers' scores over the batch"
_NO_HEAD = "the head is outside: logits are torch's unless the model that has it is patched too"
_TORCHS_LOSS = "torch's cross entropy of the logits, and its gradient"


class Decided(NamedTuple):
    """Decisions about the models of transformers in a model.

    actions: of causal LMs.  softcaps: of scores, that our attention applies.  attending: ids of the
    modules whose config is going to name our attention.  heads: id of each output layer -> whether
    a causal LM's loss is to come from it.
    """

    actions: list[Action]
    attentions: list[Attention]
    left: list[Left]
    softcaps: list[Replaced]
    attending: set[int]
    heads: dict[int, bool]


def decide(model: nn.Module, modules: list[Part], options: Options, tentative: bool) -> Decided:
    """Decide about the models of transformers in a model; tentative: as `decisions.decide`."""
    keys, ids = configs.groups(model)
    models = [part for part in modules if id(part.module) in ids]
    attentions, left = _attentions(models, keys, options, tentative)
    chosen = {keys[id(attention.modules[0])] for attention in attentions}
    attending = {module for module, key in keys.items() if key in chosen}
    replaced, not_replaced = softcaps.scores(modules, attending)
    result = Decided([], attentions, [*left, *not_replaced], replaced, attending, {})
    for part in models:
        head = _output_layer(part.module)
        result.heads.setdefault(id(head), False)
        if part.cls.__name__.endswith("ForCausalLM"):
            _causal_lm(part, head, options, result)
    if models and models[0].module is model and models[0].cls.__name__.endswith("Model"):
        result.left.append(models[0].left(_NO_HEAD, Kind.ELSEWHERE, False))
    return result


def _output_layer(model: nn.Module) -> nn.Module | None:
    """Return the layer that computes logits, or None."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


# ---- attention ----------------------------------------------------------------------------------


def _attentions(
    models: list[Part], keys: dict[int, tuple], options: Options, tentative: bool
) -> tuple[list[Attention], list[Left]]:
    """Return the configs that get our attention, and the reasons for the others."""
    groups: dict[tuple, list[Part]] = {}
    for part in models:
        groups.setdefault(keys[id(part.module)], []).append(part)
    attentions, left = [], []
    for (outer, *_), modules in ((g, tuple(p.module for p in g)) for g in groups.values()):
        config = outer.module.config
        reason = _why_not_attention(modules, tentative) if options.attention else "attention=False"
        if reason is None:
            attentions.append(Attention(outer.name, modules))
            if dropout := getattr(config, "attention_dropout", 0.0):
                refused = "ck.block_sparse_attention refuses it in training"
                text, moves = f"attention_dropout = {dropout}: {refused}", outer.module.training
                left.append(Left(outer.name, "attention", text, moves, Kind.DRAWN))
        else:
            before = f"attention ({getattr(config, '_attn_implementation', None)})"
            text = f"{reason}; {aten.ATTENTION.text}"
            left.append(Left(outer.name, before, text, kind=Kind.ATTENTION))
        if (reason := families.why_not_covered(config)) is not None:
            left.append(outer.left(reason, Kind.NOT_COVERED))
    return attentions, left


def _why_not_attention(modules: tuple[nn.Module, ...], tentative: bool) -> str | None:
    """Why a config's models cannot attend by our op; None: they can."""
    outer = modules[0]
    declared = any(getattr(type(m), "_supports_attention_backend", False) for m in modules)
    if not tentative and not declared:
        return "its models do not declare that they take another attention, and none was seen to"
    if (reason := families.why_not_attention(modules)) is not None:
        return reason
    sizes = set() if tentative else _head_sizes(outer)
    if not sizes <= VALUE_DIMS.items():
        supported = _listed(set(VALUE_DIMS.items()))
        return f"head sizes {_listed(sizes)}; ck.block_sparse_attention takes {supported}"
    dtype = compute_dtype(outer)
    if dtype not in (torch.bfloat16, torch.float16):
        return (
            f"{dtype}: ck.block_sparse_attention takes bfloat16 and float16 (fp32 masters: patch "
            "inside torch.autocast, or after fully_shard with a param_dtype)"
        )
    return None


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which a model of transformers computes, if it runs as it is patched.

    The one in which fully_shard gathers its parameters; that of autocast, if the patch is inside
    it; or its own.
    """
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is None:
        return model.dtype
    dtype = data_parallel.compute_dtype(weight) or model.dtype
    if dtype == torch.float32 and checking.autocast(weight.device):
        return torch.get_autocast_dtype(weight.device.type)
    return dtype


def _head_sizes(model: nn.Module) -> set[tuple[int, int]]:
    """Return the head sizes (of q and k, of v) of the attention modules of a config."""
    config = configs.original(model)
    mine = [m for m in model.modules() if configs.original(m) is config]
    candidates = {getattr(m, a, None) for m in mine for a in _HEAD_SIZES}
    sizes = {(size, size) for size in candidates if isinstance(size, int)}
    # Latent attention, as DeepSeek's: a config's head_dim is there the rotated part.
    pairs = {tuple(getattr(m, a, None) for a in ("qk_head_dim", "v_head_dim")) for m in mine}
    sizes |= {pair for pair in pairs if all(isinstance(size, int) for size in pair)}
    try:
        heads = getattr(config, "num_attention_heads", None)
    except RuntimeError:  # a config by layer
        return sizes
    if not sizes and isinstance(heads, int) and isinstance(config.hidden_size, int):
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        sizes = {(size, size)}
    return sizes


def _listed(sizes: set[tuple[int, int]]) -> str:
    """Format head sizes as [64, 192/128]: of q and k, and of v where it differs."""
    return f"[{', '.join(str(d) if d == v else f'{d}/{v}' for d, v in sorted(sizes))}]"


# ---- causal LMs ---------------------------------------------------------------------------------


def _causal_lm(part: Part, head: nn.Module | None, options: Options, result: Decided) -> None:
    """Decide about the forward and the loss of a causal LM."""
    name, module, cls = part
    refusal, notes = _loss(part, head, options)
    if refusal is not None:
        result.left.append(refusal)
    if _BALANCING in inspect.signature(cls.forward).parameters:
        part_name = f"{cls.__name__}: balancing loss"
        result.left.append(Left(name, part_name, _BALANCE, False, Kind.ELSEWHERE))
    if notes is None:
        if families.is_causal_lm(cls):
            devices = aten.devices_of(module)
            result.left.extend(softcaps.of_logits_left(part, devices))
        return
    if notes.logp:
        result.heads[id(head)] = True
    if notes.logp or notes.softcap:
        result.actions.append(Action(name, module, "causal_lm", notes))


def _loss(part: Part, head: nn.Module | None, options: Options) -> tuple[Left | None, Notes | None]:
    """Return (why the loss is torch's, notes of the forward).

    No row depends on who computes the loss; a wrapper that reads the head makes rows.
    """
    _, module, cls = part

    def left(reason: str, kind: Kind = Kind.ELSEWHERE) -> Left:
        moves = kind is Kind.HIDDEN
        return Left(part.name, f"{cls.__name__}: loss", reason, moves, kind)

    if not families.is_causal_lm(cls):
        return left(f"{_TORCHS_LOSS}: not a family that we know"), None
    if instance.hides(module, "causal_lm"):
        return left(f"{_TORCHS_LOSS}: its forward is an attribute of its own"), None
    from transformers.loss.loss_utils import ForCausalLMLoss

    try:
        notes = Notes(softcap=causal_lm.transform(module).softcap)
    except ArgumentValueError as error:
        return left(f"{_TORCHS_LOSS}: {error}"), None
    if (wrapper := _scores_itself(module, head)) is not None:
        reads = "is around its forward and reads the head by itself"
        return left(f"{wrapper} {reads}", Kind.HIDDEN), notes
    if options.logits != LOGP:
        return left(f"{_TORCHS_LOSS}: logits='{options.logits}'"), notes
    if module.loss_function is not ForCausalLMLoss:
        return left("its loss_function is not the one of causal LMs"), notes
    if not isinstance(head, nn.Linear):
        kind = f"{type(head).__module__.partition('.')[0]}'s {type(head).__name__}"
        return left(f"{_TORCHS_LOSS}: the head is {kind}"), notes
    _, reason = weights.forward_of(head, user_class(head))
    if reason is None and instance.hides(head, "head"):
        reason = f"{_TORCHS_LOSS}: the head's forward is an attribute of its own"
    return (left(reason), notes) if reason else (None, notes._replace(logp=True))


def _scores_itself(module: nn.Module, head: nn.Module | None) -> str | None:
    """Name of a forward around a causal LM's that reads the head, as TRL's fused one does."""
    if "forward" not in vars(module):
        return None
    ours = patched_class(user_class(module), "causal_lm")
    functions = instance.wrapping_forwards(module, ours)
    paths = {name for name, child in module.named_modules() if child is head and name}
    return bytecode.reading(functions or [], paths | {"get_output_embeddings"})
