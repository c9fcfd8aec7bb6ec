"""Decide about models of transformers as wholes: their attention, soft caps, losses and heads."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import NamedTuple

import torch
from torch import nn

from ... import nn as own_modules
from ...errors import ArgumentValueError
from ...integrations import causal_lm, experts, foreign_calls
from ...integrations import transformers as integration
from ...moe.config import MAX_EXPERTS
from ...runtime import checking, data_parallel
from ...sparse_attn.config import VALUE_DIMS
from .. import aten
from . import state
from .bytecode import named_ops, reading
from .classes import author_of, patched_class
from .forwards import mixers
from .report import LOGP, Kind, Left, Options, Replaced
from .state import Action, Attention, Notes, Part, Survey, original_config, user_class

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
_MODELING_FILES = {
    f"transformers.models.{folder}.modeling_{folder}"
    for folder in (_FOLDERS.get(name, name) for name in FAMILIES)
}
#: Packages whose functions are in reviewed files.
_PACKAGES = frozenset((
    "accelerate", "contextlib", "copy", "dataclasses", "functools", "huggingface_hub", "inspect",
    "packaging", "peft", "safetensors", "torch", "transformers", "warnings",
))  # fmt: skip
#: Files whose modules keep to a row, or are named by `decisions`.
_REVIEWED = tuple(
    f"torch.nn.modules.{name}"
    for name in ("activation", "container", "dropout", "linear", "normalization", "sparse")
) + ("torch.nn.parallel.", "torch.nn.utils.", "transformers.activations")

#: Reasons why a family is not covered.
HYBRID = "state space or linear attention layers: their scans and convolutions are torch's"
#: Classes of PEFT 0.21 that were reviewed: an adapter multiplies by its own linears, which are
#: replaced like others, and multiplies matrices itself only where it is merged.
_ADAPTERS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.model", "LoraModel")}

#: Types that are not covered where a layer is of a kind in `_NOT_COVERED_LAYERS`, or where their
#: config does not say what kinds its layers are.
NOT_COVERED = frozenset({
    "zamba", "recurrent_gemma", "rwkv", "minimax", "xlstm",
})  # fmt: skip
_NOT_COVERED_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "hybrid", "recurrent"})


#: Types whose attention reads the values of its mask: ours is no mask of scores but the ranges of
#: keys that a row attends.
_COMPUTE_WITH_THE_MASK = frozenset({"deepseek_v32", "glm_moe_dsa", "doge"})


def why_not_by_type(models: Sequence[torch.nn.Module]) -> str | None:
    """Why the models of a config are known not to attend by our op; None: it is not known."""
    types = list(map(model_type, models))
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


def is_reviewed(cls: type) -> bool:
    """Whether a class was reviewed, or lies in a reviewed file."""
    if (cls.__module__, cls.__name__) in _ADAPTERS or cls.__module__ == "peft.peft_model":
        return True
    return cls.__module__ in _MODELING_FILES


def _run_as_reviewed(survey: Survey) -> bool:
    """Whether a model's classes lie in reviewed files with the functions of these, or in libraries.

    Liger and others write into classes of transformers, and into its files.
    """
    return all(
        cls.__module__.startswith(_REVIEWED) or (is_reviewed(cls) and _packages(cls) <= _PACKAGES)
        for cls in {part.cls for part in survey.parts}
    ) and by_libraries(survey.model)


def _packages(cls: type) -> set[str]:
    """Packages of the functions of a class, its bases and its file, and of what they wrap."""
    spaces = [*map(vars, cls.__mro__), vars(sys.modules[cls.__module__])]
    homes = set()
    for function in (value for space in spaces for value in space.values()):
        while isinstance(function, FunctionType):
            homes.add(str(function.__globals__.get("__name__")).partition(".")[0])
            function = getattr(function, "__wrapped__", None)
    return homes


def is_causal_lm(cls: type) -> bool:
    """Whether a class is a causal LM of a reviewed family."""
    return is_reviewed(cls) and cls.__name__.endswith("ForCausalLM") and "forward" in vars(cls)


# ---- forwards that are attributes of a module ----------------------------------------------------
# accelerate, TRL and hooks of one's own put a forward around the author's; Liger and transformers'
# kernels put another one in its place. What can be seen is what a function holds: what it wraps,
# what it closes over, methods of the module that it finds in its file, the parts of a
# ``functools.partial`` and of an object that is called. As with names in bytecode, to hold a
# function is not to call it.

#: Reason why a module is left whose forward may call anything.
OWN_FORWARD = "its forward is an attribute of its own, and not around the author's"
#: Module of torch.compile: its forward is always an attribute, and calls the module inside.
_COMPILED = "torch._dynamo.eval_frame"


def wrapping_forwards(module: torch.nn.Module, cls: type) -> list[FunctionType] | None:
    """Return the functions that a module's own forward wraps around that of ``cls``.

    ``cls``: the author's class, or ours below it.  None: the forward of the class is not held.  An
    empty list: the module has no forward of its own.
    """
    forward = vars(module).get("forward")
    if forward is None or cls.__module__ == _COMPILED:
        return []
    author = cls.forward
    ends = {id(author), id(inspect.unwrap(author))}
    # By id, and stored: the id of a deleted object may be reused.
    visited: dict[int, object] = {}
    ahead, reached = [forward], False
    while ahead:
        function = ahead.pop()
        if id(function) in ends:
            reached = True
        elif (theirs := author_of(function)) is not None:
            ahead.append(theirs)  # ours calls the author's on modules that are not patched
        elif id(function) not in visited:
            visited[id(function)] = function
            ahead += [part for part in _contents(function, module) if callable(part)]
    return (
        [function for function in visited.values() if isinstance(function, FunctionType)]
        if reached
        else None
    )


def hides(module: torch.nn.Module, kind: str) -> bool:
    """Whether a forward in the instance would hide ours: not if it wraps the author's, or ours."""
    if "forward" not in vars(module):
        return False
    ours = patched_class(user_class(module), kind)
    return wrapping_forwards(module, ours) is None


def by_libraries(model: torch.nn.Module) -> bool:
    """Whether libraries alone put hooks, or forwards around those of their classes, in a model."""
    modules = list(model.modules())
    if foreign_calls.is_hooked(modules):
        return False
    for module in modules:
        functions = wrapping_forwards(module, type(module))
        hook = vars(module).get("_hf_hook")  # accelerate's, which its forward calls
        hooks = [type(one) for one in (hook, *getattr(hook, "hooks", ())) if one is not None]
        if functions is None or not all(map(foreign_calls.is_known, [*functions, *hooks])):
            return False
    return True


def _contents(holder: object, module: torch.nn.Module) -> Iterator[object]:
    """Yield the objects that a function, a method or a callable object holds."""
    if isinstance(holder, MethodType):
        # A method of another module says nothing of this one's.
        if holder.__self__ is module or not isinstance(holder.__self__, torch.nn.Module):
            yield holder.__func__
            yield from () if holder.__self__ is module else _contents(holder.__self__, module)
    elif isinstance(holder, functools.partial):
        yield from (holder.func, *holder.args, *holder.keywords.values(), *vars(holder).values())
    elif isinstance(holder, FunctionType):
        yield from vars(holder).values()
        yield from holder.__defaults__ or ()
        yield from (holder.__kwdefaults__ or {}).values()
        for cell in holder.__closure__ or ():
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                yield cell.cell_contents
        globals_used = (holder.__globals__.get(name) for name in holder.__code__.co_names)
        yield from (part for part in globals_used if isinstance(part, MethodType))
    elif not isinstance(holder, type | torch.nn.Module):
        yield from getattr(holder, "__dict__", {}).values()
        yield type(holder).__call__


# ---- modules by their class: linear layers, embeddings, experts ----------------------------------

#: Dtypes of parameters that our ops read.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Options of nn.Embedding that ck.embedding does not have -> their value where they are not set.
EMBEDDING_OPTIONS = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


def forward_by_class(module: nn.Module, cls: type) -> tuple[str, str | None] | None:
    """Return (name of our forward, why it cannot take the module); None: it is none of these."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    if isinstance(module, nn.Linear):
        return "linear", _why_not_linear(module, cls)
    library = sys.modules.get("transformers.pytorch_utils")
    if library is not None and cls.forward is library.Conv1D.forward:
        return "conv1d", why_not_parameters(module, "weight")
    if isinstance(module, nn.Embedding):
        kind = "embedding" if cls.forward is nn.Embedding.forward else "embedding_step"
        return kind, _why_not_embedding(module, cls)
    if (mixer := mixers.mixer_of(cls)) is not None:
        return mixer.kind, _why_not_mixer(module)
    if experts.is_experts(module):
        many = f"{module.num_experts} experts; ck.grouped_linear takes at most {MAX_EXPERTS}"
        reason = many if module.num_experts > MAX_EXPERTS else experts.why_not(module)
        return "experts", reason or why_not_parameters(module)
    return None


def why_not_parameters(module: nn.Module, *names: str) -> str | None:
    """Why an op of ours cannot read a module's own parameters, or those of names; None: it can."""
    parameters = [getattr(module, n) for n in names] or module.parameters(recurse=False)
    reasons = (_why_not_parameter(parameter) for parameter in parameters)
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_parameter(weight: torch.Tensor) -> str | None:
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight is not initialised yet"
    plain = type(weight) in (nn.Parameter, torch.Tensor) or _sharded_by_fsdp(weight)
    if not plain and not hasattr(weight, "ds_status"):
        return f"its weight is a {type(weight).__name__}, not a plain tensor (quantised, sharded?)"
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}; our ops take bfloat16, float16 and float32"
    return None


def _sharded_by_fsdp(weight: torch.Tensor) -> bool:
    """Whether a DTensor is one that fully_shard gathers before the module runs."""
    states = sys.modules.get(data_parallel.FSDP2_STATES)
    if states is None or not hasattr(weight, "full_tensor"):
        return False
    return any(state.sharded_param is weight for state in data_parallel._gathered(states))


def _why_not_linear(module: nn.Linear, cls: type) -> str | None:
    if own_modules.kind_of(module) is not None:
        return f"ck.nn.{cls.__name__} has a forward of its own; give the model an nn.Linear"
    if cls.forward is not nn.Linear.forward:
        return "a subclass of nn.Linear with a forward of its own (quantised?)"
    return why_not_parameters(module, "weight")


def _why_not_mixer(module: nn.Module) -> str | None:
    """Why a known mixer of linear attention is left: also if its convolution is."""
    if (reason := mixers.why_not(module)) is not None:
        return reason
    for name, (kind, what) in mixers.PARTS.items():
        if hasattr(module, name) and hides(getattr(module, name), kind):
            return f"its {what} has a forward of its own"
    return why_not_parameters(module) or why_not_parameters(module.conv1d)


def _why_not_embedding(module: nn.Embedding, cls: type) -> str | None:
    for option in EMBEDDING_OPTIONS:
        if getattr(module, option):
            return f"{option} is set, which ck.embedding does not have"
    if cls.forward is not nn.Embedding.forward and not _looks_up_by_super(module, cls):
        return "a subclass of nn.Embedding with a forward of its own"
    return why_not_parameters(module, "weight")


def _looks_up_by_super(module: nn.Embedding, cls: type) -> bool:
    """Whether a forward leaves the look-up to super().forward, and calls no known op."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or not {"super", "forward"} <= set(code.co_names):
        return False
    return not named_ops(module, cls)


# ---- soft caps -----------------------------------------------------------------------------------
# Soft caps, cap · tanh(z / cap), of attention scores and of logits, and the ops that compute them.
#
# A cap of scores is handed to the attention that the config names; one of logits is applied by the
# causal LM's forward, behind its head.

_UNKNOWN_CAP = f"{OWN_FORWARD}: whether it caps, and by what, is not known"
#: Where attention modules of transformers keep the cap that they hand on.
_OF_SCORES = "attn_logit_softcapping"


def caps_of_scores(modules: list[Part], attending: set[int]) -> tuple[list[Replaced], list[Left]]:
    """Return the caps of scores in a model; ``attending``: ids of modules with our attention."""
    replaced, left = [], []
    for name, module, cls in modules:
        cap = getattr(module, _OF_SCORES, None)
        code = cap and getattr(inspect.unwrap(cls.forward), "__code__", None)
        # Gemma 3's modules keep one that their forward does not read.
        if not code or _OF_SCORES not in code.co_names:
            continue
        part = f"soft cap {cap:g} of scores"
        if wrapping_forwards(module, cls) is None:
            left.append(Left(name, part, _UNKNOWN_CAP, kind=Kind.HIDDEN))
        elif id(module) in attending:
            replaced.append(Replaced(name, part, "attn_implementation='cute_kernels'"))
        else:
            left.append(Left(name, part, "part of the attention, which is left"))
    return replaced, left


def cap_part(cls: type, cap: float) -> str:
    """Name of the soft cap of a causal LM's logits in a report."""
    return f"{cls.__name__}: soft cap {cap:g} of logits"


def cap_left(lm: Part) -> list[Left]:
    """Report the cap of logits of a causal LM whose forward is not replaced."""
    cap = causal_lm.softcap(lm.module)
    if not cap:
        return []
    part = cap_part(lm.cls, cap)
    if wrapping_forwards(lm.module, lm.cls) is None:
        return [Left(lm.name, part, _UNKNOWN_CAP, kind=Kind.HIDDEN)]
    facts = aten.ELEMENTWISE
    text = f"torch's tanh, in the author's forward: {facts.text}"
    return [Left(lm.name, part, text, facts.applies(state.devices_of(lm.module)), Kind.HIDDEN)]


# ---- models as wholes ----------------------------------------------------------------------------

#: Attributes of attention modules that say their head size.
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")
#: Argument of a causal LM that has its balancing loss added to the loss.
_BALANCING = "output_router_logits"
_BALANCE = "with output_router_logits=True: torch's means of the routers' scores over the batch"
_NO_HEAD = "the head is outside: logits are torch's unless the model that has it is patched too"
_TORCHS_LOSS = "torch's cross entropy of the logits, and its gradient"


class Decisions(NamedTuple):
    """Actions of a patch, and parts that it leaves.

    softcaps: of scores, that our attention applies.  attending: ids of the modules whose config is
    going to name our attention.  heads: id of each output layer -> whether a causal LM's loss is to
    come from it.  reviewed: whether all that runs lies in a reviewed file, or in a library.
    family: its name.  ran: of an observed model, (module, op of ours) that ran in it.
    """

    actions: list[Action]
    attentions: list[Attention]
    left: list[Left]
    softcaps: list[Replaced]
    attending: set[int]
    heads: dict[int, bool]
    reviewed: bool
    family: str | None
    ran: tuple[tuple[str, str], ...] = ()

    def with_actions(self, actions: Iterable[Action], model: nn.Module) -> Decisions:
        """Return these decisions with other actions for some modules, in the model's order."""
        chosen = {action.name: action for action in (*self.actions, *actions)}
        order = {id(module): position for position, module in enumerate(model.modules())}
        ordered = sorted(chosen.values(), key=lambda action: order[id(action.module)])
        return self._replace(actions=ordered)


def decide_wholes(survey: Survey, options: Options, tentative: bool) -> Decisions:
    """Decide about the models of transformers in a model; tentative: as `decisions.by_modules`.

    Raises:
        MissingPackageError: a model of transformers, older than 5.4.
    """
    model, modules, models, keys = survey.model, survey.parts, survey.models, survey.keys
    if models:
        integration.register()
    attentions, left = _attentions(models, keys, options, tentative)
    chosen = {keys[id(attention.modules[0])] for attention in attentions}
    attending = {module for module, key in keys.items() if key in chosen}
    replaced, not_replaced = caps_of_scores(modules, attending)
    left += not_replaced
    reviewed = not tentative and bool(survey.roots) and _run_as_reviewed(survey)
    types = (FAMILIES.get(model_type(module)) for module in model.modules())
    family = next(filter(None, types), None)
    result = Decisions([], attentions, left, replaced, attending, {}, reviewed, family)
    for part in models:
        head = getattr(part.module, "get_output_embeddings", lambda: None)()
        result.heads.setdefault(id(head), False)
        if part.cls.__name__.endswith("ForCausalLM"):
            _causal_lm(part, head, options, result)
    if models and models[0].module is model and models[0].cls.__name__.endswith("Model"):
        result.left.append(models[0].left(_NO_HEAD, Kind.ELSEWHERE, False))
    return result


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
        if (reason := why_not_covered(config)) is not None:
            left.append(outer.left(reason, Kind.NOT_COVERED))
    return attentions, left


def _why_not_attention(modules: tuple[nn.Module, ...], tentative: bool) -> str | None:
    """Why a config's models cannot attend by our op; None: they can."""
    outer = modules[0]
    declared = any(getattr(type(m), "_supports_attention_backend", False) for m in modules)
    if not tentative and not declared:
        return "its models do not declare that they take another attention, and none was seen to"
    if (reason := why_not_by_type(modules)) is not None:
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
    config = original_config(model)
    mine = [m for m in model.modules() if original_config(m) is config]
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


def _causal_lm(part: Part, head: nn.Module | None, options: Options, result: Decisions) -> None:
    """Decide about the forward and the loss of a causal LM."""
    name, module, cls = part
    refusal, notes = _loss(part, head, options)
    if refusal is not None:
        result.left.append(refusal)
    if _BALANCING in inspect.signature(cls.forward).parameters:
        part_name = f"{cls.__name__}: balancing loss"
        result.left.append(Left(name, part_name, _BALANCE, False, Kind.ELSEWHERE))
    if notes is None:
        if is_causal_lm(cls):
            result.left.extend(cap_left(part))
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

    if not is_causal_lm(cls):
        return left(f"{_TORCHS_LOSS}: not a family that we know"), None
    if hides(module, "causal_lm"):
        return left(f"{_TORCHS_LOSS}: its forward is an attribute of its own"), None
    from transformers.loss.loss_utils import ForCausalLMLoss

    wrapper = _scores_itself(module, head)
    try:
        notes = Notes(softcap=causal_lm.transform(module).softcap)
    except ArgumentValueError as error:
        return left(f"{_TORCHS_LOSS}: {error}"), None
    if wrapper is not None:
        reads = "is around its forward and reads the head by itself"
        return left(f"{wrapper} {reads}", Kind.HIDDEN), notes
    if options.logits != LOGP:
        return left(f"{_TORCHS_LOSS}: logits='{options.logits}'"), notes
    if module.loss_function is not ForCausalLMLoss:
        return left("its loss_function is not the one of causal LMs"), notes
    if not isinstance(head, nn.Linear):
        kind = f"{type(head).__module__.partition('.')[0]}'s {type(head).__name__}"
        return left(f"{_TORCHS_LOSS}: the head is {kind}"), notes
    _, reason = forward_by_class(head, user_class(head))
    if reason is None and hides(head, "head"):
        reason = f"{_TORCHS_LOSS}: the head's forward is an attribute of its own"
    return (left(reason), notes) if reason else (None, notes._replace(logp=True))


def _scores_itself(module: nn.Module, head: nn.Module | None) -> str | None:
    """Name of a forward around a causal LM's that reads the head, as TRL's fused one does."""
    if "forward" not in vars(module):
        return None
    ours = patched_class(user_class(module), "causal_lm")
    functions = wrapping_forwards(module, ours)
    paths = {name for name, child in module.named_modules() if child is head and name}
    return reading(functions or [], paths | {"get_output_embeddings"})
