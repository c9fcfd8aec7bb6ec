"""Decide for each module: replace it, or report why not."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from ... import nn as own_modules
from ...errors import ArgumentValueError
from ...integrations import causal_lm, experts
from ...moe.config import MAX_EXPERTS
from ...rowwise.config import GATES
from ...runtime import checking, data_parallel
from ...sparse_attn.config import VALUE_DIMS
from .. import aten
from . import families, instance
from .checks import LOGP, Options
from .classes import patched_class, user_class
from .forwards import base_model, positions
from .forwards import softcaps as patch_softcaps
from .forwards.layers import Notes
from .report import Left, Replaced
from .scan import bytecode, configs, formula
from .scan import decoder as patch_decoder
from .scan import mlp as patch_mlp
from .scan import rotary as patch_rotary

#: Dtypes of parameters that our ops read.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Options of nn.Embedding that ck.embedding does not have -> their value where they are not set.
_EMBEDDING_OPTIONS = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
#: Attributes of attention modules that say their head size.
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")
#: Families (config.model_type) whose attention reads the values of its mask: ours is no mask of
#: scores but the ranges of keys that a row attends.
_COMPUTE_WITH_THE_MASK = frozenset({"deepseek_v32", "glm_moe_dsa", "doge"})
_READS_THE_HEAD = "is around its forward and reads the head by itself"
#: Argument of a causal LM that has its balancing loss added to the loss.
_BALANCING = "output_router_logits"
_BALANCE = "with output_router_logits=True: torch's means of the routers' scores over the batch"
_NO_HEAD = "the head is outside: logits are torch's unless the model that has it is patched too"
_DRAWN = "in training, if it runs there: random numbers by the place in the batch"
#: Parts of transformers' models that are not called while our attention is set.
_EAGER = frozenset({"eager_attention_forward"})


class Action(NamedTuple):
    """One module that gets the forward ``kind``, with these notes."""

    name: str
    module: nn.Module
    kind: str
    notes: Notes


class Attention(NamedTuple):
    """Modules of one config and one root that attend by ``attn_implementation="cute_kernels"``."""

    name: str
    modules: tuple[nn.Module, ...]


class Plan(NamedTuple):
    """Plan of a patch.

    softcaps: of scores, that our attention applies.  ran: of an observed model, (module, op of
    ours) that ran in it.
    """

    actions: list[Action]
    attentions: list[Attention]
    left: list[Left]
    softcaps: list[Replaced]
    ran: tuple[tuple[str, str], ...] = ()


class _Context(NamedTuple):
    """Facts shared by all decisions about one model.

    heads: output layers of causal LMs whose loss is to come from them.  outputs: of all models.
    attends: ids of the modules whose config is going to name our attention.  alike: rules found.
    """

    options: Options
    devices: set[str]
    heads: set[int]
    outputs: set[int]
    attends: set[int]
    alike: formula.Alike

    def left(self, name: str, cls: type, facts: aten.Cause) -> Left:
        moves = facts is not aten.LOSS and facts.applies(self.devices)
        return Left(name, cls.__name__, facts.text, moves)


def plan(model: nn.Module, options: Options, *, tentative: bool = False) -> Plan:
    """Decide for each module of a model: replace it, or report why not.

    tentative: Whether models that do not declare so are taken to attend by the function that their
    config names, and by heads of sizes that are ours; whoever asks observes whether they do.
    """
    result = Plan([], [], [], [])
    _attentions(model, options, result, tentative)
    attends = _attending(model, result.attentions)
    replaced, left = patch_softcaps.scores(model, attends)
    result.softcaps.extend(replaced)
    result.left.extend(left)
    heads = _causal_lms(model, options, result)
    result.left.extend(_without_head(model))
    outputs = {id(_output_layer(module)) for _, module in _pretrained(model)}
    devices = aten.devices_of(model)
    context = _Context(options, devices, heads, outputs, attends, formula.Alike())
    inside: set[int] = set()
    causal = {id(action.module) for action in result.actions}
    for name, module in model.named_modules():
        if id(module) in inside | causal:
            continue
        decided = _decided(name, module, context)
        if isinstance(decided, Action):
            result.actions.append(decided)
        elif decided:
            result.left.extend(decided)
        if isinstance(module, nn.MultiheadAttention):
            inside |= {id(child) for child in module.modules()}
    if options.main_grad and options.embedding:
        result.actions.extend(_positions(model, options))
    if options.attention:
        replaced_already = {id(action.module) for action in result.actions}
        result.actions.extend(_rotations(model, options, replaced_already))
    result.actions.extend(_residuals(model, options, result.actions))
    result.actions.extend(_mlps(model, options, result.actions))
    result.actions.extend(_base_models(model, options, attends))
    order = {id(m): position for position, m in enumerate(model.modules())}
    result.actions.sort(key=lambda action: order[id(action.module)])
    return result


def _positions(model: nn.Module, options: Options) -> list[Action]:
    """Return actions for the modules that must look positions up for each sequence."""
    notes = Notes(options.order, options.main_grad)
    return [
        Action(name, module, "positions", notes)
        for name, module in model.named_modules()
        if positions.is_known(user_class(module)) and not _calls_another(module, "positions")
    ]


def _rotations(model: nn.Module, options: Options, but: set[int]) -> list[Action]:
    """Return actions for the modules that rotate q and k by a known function.

    but: ids of modules with an action.
    """
    notes = Notes(options.order, options.main_grad)
    return [
        Action(name, module, "attention", notes)
        for name, module in model.named_modules()
        if id(module) not in but
        and not isinstance(module, torch.jit.ScriptModule)
        and patch_rotary.pos_emb(user_class(module)) is not None
        and not _calls_another(module, "attention")
    ]


def _residuals(model: nn.Module, options: Options, actions: list[Action]) -> list[Action]:
    """Return actions for the decoder layers that add a residual and normalize the sum."""
    notes = Notes(options.order, options.main_grad)
    norms = {id(action.module) for action in actions if action.kind == "rms_norm"}
    taken = {id(action.module) for action in actions}
    return [
        Action(name, module, "residual", notes)
        for name, module in model.named_modules()
        if id(module) not in taken
        and not isinstance(module, torch.jit.ScriptModule)
        and patch_decoder.is_pre_norm(user_class(module))
        and id(module._modules.get(patch_decoder.NORM)) in norms
        and not _calls_another(module, "residual")
    ]


def _mlps(model: nn.Module, options: Options, actions: list[Action]) -> list[Action]:
    """Return actions for the MLPs that multiply an activation of ours by a product."""
    notes = Notes(options.order, options.main_grad)
    gates = {id(action.module) for action in actions if action.kind in GATES}
    taken = {id(action.module) for action in actions}
    return [
        Action(name, module, "mlp", notes)
        for name, module in model.named_modules()
        if id(module) not in taken
        and not isinstance(module, torch.jit.ScriptModule)
        and patch_mlp.is_gated(user_class(module))
        and id(module._modules.get(patch_mlp.ACTIVATION)) in gates
        and not _calls_another(module, "mlp")
    ]


def _base_models(model: nn.Module, options: Options, attends: set[int]) -> list[Action]:
    """Return actions for the base models that tell our attention that nothing is packed."""
    notes = Notes(options.order, options.main_grad)
    return [
        Action(name, module, "base_model", notes)
        for name, module in _pretrained(model)
        if id(module) in attends
        and base_model.is_known(user_class(module), families.model_type(module))
        and not _calls_another(module, "base_model")
    ]


def _decided(name: str, module: nn.Module, context: _Context) -> Action | list[Left] | None:
    """Return the action for one module, or the parts that are left."""
    cls = user_class(module)
    if own_modules.kind_of(module) is not None:
        return None  # It calls our op already, with its own options.
    if isinstance(module, torch.jit.ScriptModule):
        return [Left(name, cls.__name__, "TorchScript: its forward is not Python's")]
    replacement = _replacement(name, module, cls, context)
    if replacement is None:
        return _report_left(name, module, cls, context) + _drawn(name, module, cls)
    if isinstance(replacement, Action) and _calls_another(module, replacement.kind):
        reason = "its forward is an attribute of its own (accelerate's hooks?): no class is asked"
        return [Left(name, cls.__name__, reason)]
    if isinstance(replacement, Left):
        return [replacement, *_drawn(name, module, cls)]
    return replacement


def _calls_another(module: nn.Module, kind: str) -> bool:
    """Whether a forward in the instance hides ours: not if it wraps ours."""
    if "forward" not in vars(module):
        return False
    return instance.around(module, patched_class(user_class(module), kind)) is None


def _replacement(name, module: nn.Module, cls: type, context: _Context) -> Action | Left | None:
    """Return the replacement of a module of a known kind; None: its kind is not known."""
    options = context.options

    def action(kind: str, **notes: object) -> Action:
        return Action(name, module, kind, Notes(options.order, options.main_grad, **notes))

    def left(reason: str) -> Left:
        return Left(name, cls.__name__, reason)

    if isinstance(module, nn.Linear) or _is_conv1d(cls):
        reason = _why_not_linear(module, cls)
        if reason is not None:
            return left(reason)
        if id(module) in context.heads:
            return action("head", logp=True)
        if not options.linear and id(module) not in context.outputs:
            return left("linear=False")
        return action("linear" if isinstance(module, nn.Linear) else "conv1d")
    if isinstance(module, nn.Embedding):
        reason = _why_not_embedding(module, cls) if options.embedding else "embedding=False"
        kind = "embedding" if cls.forward is nn.Embedding.forward else "embedding_step"
        reads = tuple(_EMBEDDING_OPTIONS.items())
        return action(kind, reads=reads) if reason is None else left(reason)
    if _is_activation(cls):
        rule = context.alike.rule(_activation, module)
        if rule is not None:
            return action(rule.kind, reads=rule.reads) if options.norm else left("norm=False")
        return context.left(name, cls, aten.CALLED["gelu"])
    if formula.is_rotary(module):
        rule = formula.rotary_rule(module)
        if isinstance(rule, str):
            return left(rule)
        return action("rotary", **rule._asdict()) if options.attention else left("attention=False")
    if formula.is_norm_like(module):
        return _norm(module, cls, context, action, left)
    if experts.is_experts(module):
        reason = _why_not_experts(module) if options.linear else "linear=False"
        return action("experts") if reason is None else left(reason)
    return None


def _activation(module: nn.Module) -> formula.ActivationRule | None:
    return formula.activation(module, formula.ACTIVATIONS)


def _norm(module: nn.Module, cls: type, context: _Context, action, left) -> Action | Left | None:
    rule = context.alike.rule(formula.norm_rule, module)
    if isinstance(rule, str):
        torchs = isinstance(module, nn.LayerNorm | nn.RMSNorm) or "norm" in cls.__name__.lower()
        return left(rule) if torchs or rule.startswith(formula.A_NORM_THAT) else None
    refused = [reason for p in module.parameters(recurse=False) if (reason := _why_not_weight(p))]
    if refused or not context.options.norm:
        return left(refused[0] if refused else "norm=False")
    notes = {name: value for name, value in rule._asdict().items() if name != "kind"}
    return action(rule.kind, **notes)


# ---- products and look-ups ----------------------------------------------------------------------


def _is_conv1d(cls: type) -> bool:
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and cls.forward is library.Conv1D.forward


def _why_not_linear(module: nn.Module, cls: type) -> str | None:
    if own_modules.kind_of(module) is not None:
        return f"ck.nn.{cls.__name__} has a forward of its own; give the model an nn.Linear"
    if isinstance(module, nn.Linear) and cls.forward is not nn.Linear.forward:
        return "a subclass of nn.Linear with a forward of its own (quantised?)"
    return _why_not_weight(module.weight)


def _why_not_weight(weight: torch.Tensor) -> str | None:
    """Why an op of ours cannot read a parameter; None: it can."""
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight is not initialised yet"
    plain = type(weight) in (nn.Parameter, torch.Tensor) or _sharded_by_fsdp(weight)
    if not plain and not hasattr(weight, "ds_status"):
        return f"its weight is a {type(weight).__name__}, not a plain tensor (quantised, sharded?)"
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}; our ops take bfloat16, float16 and float32"
    return None


def _why_not_experts(module: nn.Module) -> str | None:
    """Why experts cannot run as grouped products of ours; None: they can."""
    if module.num_experts > MAX_EXPERTS:
        return f"{module.num_experts} experts; ck.grouped_linear takes at most {MAX_EXPERTS}"
    reasons = (_why_not_weight(p) for p in module.parameters(recurse=False))
    return experts.why_not(module) or next((r for r in reasons if r is not None), None)


def _sharded_by_fsdp(weight: torch.Tensor) -> bool:
    """Whether a DTensor is one that fully_shard gathers before the module runs."""
    states = sys.modules.get(data_parallel.FSDP2_STATES)
    if states is None or not hasattr(weight, "full_tensor"):
        return False
    return any(state.sharded_param is weight for state in data_parallel._gathered(states))


def _why_not_embedding(module: nn.Embedding, cls: type) -> str | None:
    for option in _EMBEDDING_OPTIONS:
        if getattr(module, option):
            return f"{option} is set, which ck.embedding does not have"
    if cls.forward is not nn.Embedding.forward and not _looks_up_by_super(cls, module):
        return "a subclass of nn.Embedding with a forward of its own"
    return _why_not_weight(module.weight)


def _looks_up_by_super(cls: type, module: nn.Module) -> bool:
    """Whether a forward leaves the look-up to super().forward, and calls no known op."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or not {"super", "forward"} <= set(code.co_names):
        return False
    return not bytecode.named(cls, module, frozenset())


def _is_activation(cls: type) -> bool:
    if cls in (nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid):
        return True
    library = sys.modules.get("transformers.activations")
    return library is not None and cls in {
        library.SiLUActivation,
        library.GELUActivation,
        library.GELUTanh,
        library.NewGELUActivation,
        library.FastGELUActivation,
        library.AccurateGELUActivation,
        library.QuickGELUActivation,
    }


# ---- transformers' models -----------------------------------------------------------------------


def _pretrained(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that are models of transformers, the outermost first."""
    ids = {id(module) for module in configs.pretrained(model)}
    return [(name, module) for name, module in model.named_modules() if id(module) in ids]


def _output_layer(model: nn.Module) -> nn.Module | None:
    """Return the layer that computes logits, or None."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _attentions(model: nn.Module, options: Options, result: Plan, tentative: bool) -> None:
    """Plan the configs that get our attention, and the reasons for the others."""
    by_config: dict[tuple[int, int], list[tuple[str, nn.Module]]] = {}
    roots = configs.roots(model)
    for name, module in _pretrained(model):
        key = id(roots[id(module)]), id(configs.original(module))
        by_config.setdefault(key, []).append((name, module))
    for group in by_config.values():
        name, modules = group[0][0], tuple(m for _, m in group)
        reason = _why_not_attention(modules, tentative) if options.attention else "attention=False"
        if reason is None:
            result.attentions.append(Attention(name, modules))
        else:
            before = getattr(modules[0].config, "_attn_implementation", None)
            text = f"{reason}; {aten.ATTENTION.text}"
            result.left.append(Left(name, f"attention ({before})", text))
        dropout = getattr(modules[0].config, "attention_dropout", 0.0)
        if reason is None and dropout:
            text = (
                f"attention_dropout = {dropout}: ck.block_sparse_attention refuses it in training"
            )
            result.left.append(Left(name, "attention", text, modules[0].training))
        reason = families.why_not_covered(modules[0].config)
        if reason is not None:
            result.left.append(Left(name, user_class(modules[0]).__name__, reason))


def _attending(model: nn.Module, attentions: list[Attention]) -> set[int]:
    """Return the ids of the modules whose config will name our attention."""
    roots = configs.roots(model)

    def key(module: nn.Module) -> tuple[int, int]:
        return id(roots.get(id(module))), id(configs.original(module))

    chosen = {key(attention.modules[0]) for attention in attentions}
    return {id(module) for module in model.modules() if key(module) in chosen}


def _why_not_attention(modules: tuple[nn.Module, ...], tentative: bool) -> str | None:
    """Why a config's models cannot attend by our op; None: they can."""
    outer = modules[0]
    if not tentative and not any(
        getattr(type(m), "_supports_attention_backend", False) for m in modules
    ):
        return "its models do not declare that they take another attention, and none was seen to"
    if any(families.model_type(m) in _COMPUTE_WITH_THE_MASK for m in modules):
        return "its attention computes with the values of the mask"
    sparse = getattr(outer.config, "attention_type", None) == "block_sparse"
    if sparse and families.model_type(outer) == "big_bird":
        return "attention_type = 'block_sparse': which keys a row sees follows the longest sequence"
    sizes = _head_sizes(outer)
    if not tentative and not sizes <= VALUE_DIMS.items():
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


def _causal_lms(model: nn.Module, options: Options, result: Plan) -> set[int]:
    """Plan forwards of causal LMs; return the ids of the heads that compute log-probs."""
    heads = set()
    for name, module in _pretrained(model):
        cls = user_class(module)
        if not cls.__name__.endswith("ForCausalLM"):
            continue
        reason, notes = _causal_notes(module, cls, options)
        if reason is not None:
            # No row depends on who computes the loss; a wrapper that reads the head makes rows.
            moves = reason.endswith(_READS_THE_HEAD)
            result.left.append(Left(name, f"{cls.__name__}: loss", reason, moves))
        if _BALANCING in inspect.signature(cls.forward).parameters:
            result.left.append(Left(name, f"{cls.__name__}: balancing loss", _BALANCE, False))
        if notes is None:
            if families.is_causal_lm(cls):
                devices = aten.devices_of(model)
                result.left.extend(patch_softcaps.of_logits_left(name, module, cls, devices))
            continue
        if notes.logp:
            heads.add(id(module.get_output_embeddings()))
        if notes.logp or notes.softcap:
            result.actions.append(Action(name, module, "causal_lm", notes))
    return heads


def _without_head(model: nn.Module) -> list[Left]:
    """Say of a base model that is patched alone that what makes logits of it is outside."""
    cls = user_class(model)
    alone = configs.pretrained(model)[:1] == [model] and cls.__name__.endswith("Model")
    return [Left("", cls.__name__, _NO_HEAD, False)] if alone else []


def _causal_notes(
    module: nn.Module, cls: type, options: Options
) -> tuple[str | None, Notes | None]:
    """Return (why the loss is torch's, notes of the forward)."""
    torchs = "torch's cross entropy of the logits, and its gradient"
    if not families.is_causal_lm(cls):
        return f"{torchs}: not a family that we know", None
    if _calls_another(module, "causal_lm"):
        return f"{torchs}: its forward is an attribute of its own", None
    from transformers.loss.loss_utils import ForCausalLMLoss

    try:
        softcap = causal_lm.transform(module).softcap
    except ArgumentValueError as error:
        return f"{torchs}: {error}", None
    if (wrapper := _scores_itself(module)) is not None:
        return f"{wrapper} {_READS_THE_HEAD}", Notes(softcap=softcap)
    if options.logits != LOGP:
        return f"{torchs}: logits='{options.logits}'", Notes(softcap=softcap)
    if module.loss_function is not ForCausalLMLoss:
        return "its loss_function is not the one of causal LMs", Notes(softcap=softcap)
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        kind = f"{type(head).__module__.partition('.')[0]}'s {type(head).__name__}"
        return f"{torchs}: the head is {kind}", Notes(softcap=softcap)
    reason = _why_not_linear(head, user_class(head))
    if reason is None and _calls_another(head, "head"):
        reason = f"{torchs}: the head's forward is an attribute of its own"
    return (reason, Notes(softcap=softcap)) if reason else (None, Notes(softcap=softcap, logp=True))


def _scores_itself(module: nn.Module) -> str | None:
    """Name of a forward around a causal LM's that reads the head, as TRL's fused one does."""
    if "forward" not in vars(module):
        return None
    functions = instance.around(module, patched_class(user_class(module), "causal_lm"))
    head = module.get_output_embeddings()
    paths = {name for name, child in module.named_modules() if child is head and name}
    return bytecode.reading(functions or [], paths | {"get_output_embeddings"})


# ---- what is left -------------------------------------------------------------------------------


def _report_left(name: str, module: nn.Module, cls: type, context: _Context) -> list[Left]:
    """Report a module that is not replaced."""
    functions = instance.around(module, cls)
    if functions is None:
        reason = f"{instance.REASON}: what it computes is not known"
        return [Left(name, cls.__name__, reason)]
    if families.adapts_parameters(cls):
        return [Left(name, cls.__name__, families.ON_PARAMETERS)]
    facts = aten.of_module(module)
    if facts is not None:
        return [context.left(name, cls, facts)]
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return _dropout(name, module, cls)
    gone_through = cls.__module__.startswith("torch.nn.") or families.known(cls)
    but = _EAGER if id(module) in context.attends else frozenset()
    ops = {} if gone_through else bytecode.named(cls, module, but)
    ops |= bytecode.named_by(functions, cls, module, but)
    entries = {op: context.left(name, cls, facts) for op, facts in ops.items()}
    return [replace(one, known=f"{op}: {one.known}") for op, one in entries.items()]


def _drawn(name: str, module: nn.Module, cls: type) -> list[Left]:
    """Report functions that draw numbers; an observation in training names those that run."""
    if cls.__module__.startswith("torch.nn.") or families.known(cls):
        return []
    functions = [inspect.unwrap(cls.forward)]
    draws = bytecode.named_by(functions, cls, module, frozenset(), aten.DRAWS)
    return [Left(name, cls.__name__, f"{op}: {_DRAWN}", False) for op in draws]


def _dropout(name: str, module: nn.Module, cls: type) -> list[Left]:
    if not module.p:
        return []
    reason = f"p = {module.p}: in training, random numbers by the place in the batch"
    return [Left(name, cls.__name__, reason, module.training)]
