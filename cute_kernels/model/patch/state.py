"""State of a patched module: its class, notes, config and frequencies, and how each is restored."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ...errors import ArgumentValueError, PatchError, expected
from ...integrations import transformers as integration
from ...integrations.sharded_head import NOTES as NOTES
from .report import Kind, Left

#: Attribute of a patched class: the name of its forward in `classes.FORWARDS`.
KIND = "_cute_kernels_kind"


class Notes(NamedTuple):
    """Options that the forward of one module reads.

    order: of linear products.
    main_grad: whether gradients go to the ``main_grad`` of parameters that have one.
    weight, bias: the names of a norm's parameters; None: it has none.
    eps, offset: of a norm.  eps_name: the attribute that its eps is read from at each call; None:
    it is ``eps``.  reads: (attribute, value) that the author's forward reads and ours does not: a
    call with another value is refused.
    norm_before_gate, group_size, activation: of a norm with a gate.
    follows: whether a rotary table has the dtype of its input, or fp32.
    softcap: of a causal LM's logits, 0: none.  logp: whether its loss is
    ck.linear_logp's; of a head, whether it can score targets.
    """

    order: str = "chain"
    main_grad: bool = False
    weight: str | None = None
    bias: str | None = None
    eps: float = 0.0
    offset: float = 0.0
    follows: bool = True
    softcap: float = 0.0
    logp: bool = False
    eps_name: str | None = None
    reads: tuple[tuple[str, object], ...] = ()
    norm_before_gate: bool = True
    group_size: int | None = None
    activation: str = "silu"


def main_grad_of(module: torch.nn.Module, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Destination of a parameter's gradient other than its ``grad``, or None."""
    if not (module._cute_kernels.main_grad and torch.is_grad_enabled()):
        return None
    return getattr(parameter, "main_grad", None)


def sums_of(module: torch.nn.Module) -> dict[str, object]:
    """Options of ck.linear for a module with a weight: order and main_grad."""
    into = main_grad_of(module, module.weight)
    return {"order": module._cute_kernels.order, "main_grad": into}


def parameter_of(module: torch.nn.Module, name: str | None) -> torch.Tensor | None:
    """Parameter of a norm; None: the norm has none of this role."""
    return None if name is None else getattr(module, name)


def eps_of(module: torch.nn.Module) -> float:
    """Return the eps of a norm, which may have changed since the patch."""
    notes = module._cute_kernels
    unchanged(module, notes.reads)
    if notes.eps_name is None:
        return notes.eps
    eps = getattr(module, notes.eps_name)
    return torch.finfo(torch.float32).eps if eps is None else eps  # None: nn.RMSNorm's default


# ---- attributes that an author's forward reads ---------------------------------------------------


class Absent:
    """Sentinel for an attribute that a module does not have."""


def unchanged(module: torch.nn.Module, reads: tuple[tuple[str, object], ...]) -> None:
    """Check that attributes which the author's forward reads are unchanged since the patch."""
    for name, value in reads:
        now = getattr(module, name, Absent)
        if now is not value and now != value:
            want = f"{_describe(value)}, as when it was patched (patch again)"
            raise PatchError(expected(f"{type(module).__name__}.{name}", want, _describe(now)))


def _describe(value: object) -> str:
    return "no value" if value is Absent else repr(value)


# ---- configs -------------------------------------------------------------------------------------
# Copies of a patched model's configs, which name our attention.
#
# transformers' modules look their attention up in their config, and several models may hold one
# config object: a policy, its critic and its reference. ``ck.patch`` gives the modules of each
# model a copy of it, and ``ck.unpatch`` puts the object back, with what was changed in the copy
# since.

#: Attribute of a module: name of each attribute that held a config -> its `Swap`.
_SWAPS = "_cute_kernels_configs"
#: Attribute of a config: the name of its attention.
_ATTENTION_NAME = "_attn_implementation_internal"


class Attention(NamedTuple):
    """Modules of one config and one root that attend by ``attn_implementation="cute_kernels"``."""

    name: str
    modules: tuple[torch.nn.Module, ...]


class Swap(NamedTuple):
    """A config object, the copy that stands in for it, and its state when the copy was taken."""

    original: object
    copied: object
    state: object


def original_config(module: torch.nn.Module) -> object | None:
    """Return the config that a module has when it is not patched; None: it has none."""
    config = getattr(module, "config", None)
    swap = vars(module).get(_SWAPS, {}).get("config")
    return swap.original if swap is not None and swap.copied is config else config


def roots(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Return id of each module -> the outermost model of transformers that it lies in."""
    outermost: dict[int, torch.nn.Module] = {}
    for module in pretrained_models(model):
        if id(module) not in outermost:
            for part in module.modules():
                outermost.setdefault(id(part), module)
    return outermost


def pretrained_models(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that are models of transformers, the outermost first."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    return [module for module in model.modules() if isinstance(module, library.PreTrainedModel)]


def attend(model: torch.nn.Module, attentions: Sequence[Attention]) -> None:
    """Make modules attend by our op."""
    outermost = roots(model)
    wrappers = [module for module in model.modules() if id(module) not in outermost]
    attending = [(outermost[id(modules[0])], modules[0].config) for _, modules in attentions]
    for root in dict.fromkeys(root for root, _ in attending):
        parts = [module for module in root.modules() if outermost[id(module)] is root]
        # One memo each: nested configs keep their identity.
        copies: dict[int, object] = {}
        states: dict[int, object] = {}
        for value in (value for module in parts for value in vars(module).values()):
            if _is_config(value):
                copy.deepcopy(value, copies)
        for module in (*parts, *wrappers):
            _swap(module, copies, states)
        for config in (config for one, config in attending if one is root):
            # The property's setter would also set it in sub-configs that may not support it.
            setattr(copies[id(config)], _ATTENTION_NAME, integration.NAME)


def restore_configs(model: torch.nn.Module) -> None:
    """Restore the config objects.

    Layers keep theirs if no model of transformers is given: the masks are made by the model.
    """
    if not any(_SWAPS in vars(module) for module in pretrained_models(model)):
        return
    modules = list(model.modules())
    saved = [vars(module).pop(_SWAPS, {}) for module in modules]
    swaps = {id(swap.copied): swap for swaps in saved for swap in swaps.values()}
    for swap in swaps.values():
        _write_back(*swap)
    # Modules created from the copy hold it as well.
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in swaps:
                vars(module)[name] = swaps[id(value)].original


def reachable_configs(model: torch.nn.Module) -> list[object]:
    """Return every config that `attend` or `restore` may write, nested and kept ones included."""
    if not pretrained_models(model):
        return []
    modules = [vars(module) for module in model.modules()]
    ahead = [value for values in modules for value in values.values()]
    swaps = [swap for values in modules for swap in values.get(_SWAPS, {}).values()]
    ahead += [config for swap in swaps for config in swap]
    visited: dict[int, object] = {}
    while ahead:
        value = ahead.pop()
        if _is_config(value) and id(value) not in visited:
            visited[id(value)] = value
            ahead += vars(value).values()
    return list(visited.values())


def _is_config(value: object) -> bool:
    return isinstance(value, sys.modules["transformers.configuration_utils"].PreTrainedConfig)


def _swap(module: torch.nn.Module, copies: dict[int, object], states: dict[int, object]) -> None:
    for name, value in list(vars(module).items()):
        if _is_config(value) and id(value) in copies:
            swap = Swap(value, copies[id(value)], copy.deepcopy(value, states))
            vars(module).setdefault(_SWAPS, {})[name] = swap
            vars(module)[name] = swap.copied


def _write_back(original: object, copied: object, state: object) -> None:
    """Copy changes of the copy back to the config, except the name of the attention."""
    values, before = vars(copied), vars(state)
    for name in set(values) | set(before):
        if name not in values:
            vars(original).pop(name, None)
        elif _is_config(values[name]) and _is_config(vars(original).get(name)):
            nested = before.get(name)
            if _is_config(nested):
                _write_back(vars(original)[name], values[name], nested)
        elif name != _ATTENTION_NAME and (
            name not in before or _differ(values[name], before[name])
        ):
            vars(original)[name] = values[name]
    # Modules outside of those that are unpatched may hold the copy.
    vars(copied)[_ATTENTION_NAME] = vars(original).get(_ATTENTION_NAME)


def _differ(value: object, before: object) -> bool:
    try:
        return bool(value != before)
    except Exception:  # values of any type may be in a config
        return True


# ---- frequencies ---------------------------------------------------------------------------------
# Restore the fp32 frequencies of rotary modules that ``module.to(dtype)`` has rounded.
#
# A later ``.float()`` leaves the rounded values in fp32, so that values decide, not the dtype
# alone.

#: Attribute of a module: buffer name -> the rounded frequencies, which ``ck.unpatch`` puts back.
_ROUNDED = "_cute_kernels_rounded"
#: Attribute of a module: buffer name -> the frequencies that were looked at last.
_CHECKED = "_cute_kernels_checked"
#: Dtypes that round frequencies, in the order of casts.
_CASTS = (
    (),
    (torch.bfloat16,),
    (torch.float16,),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
)


def exact_frequencies(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return buffer name -> fp32 frequencies on the CPU, where ``module.to(dtype)`` rounded them.

    They are computed again by the module's class from its config, as a checkpoint that is loaded
    with ``dtype=`` has them.

    Raises:
        ArgumentValueError: the class gives other frequencies than those that were rounded.
    """
    rounded = {name: buffer for name, buffer in _frequencies(module) if _is_rounded(buffer)}
    if not rounded:
        return {}
    want = "frequencies in torch.float32 (load the model with dtype=)"
    try:
        with torch.device("cpu"):
            fresh = dict(type(module)(module.config).named_buffers(recurse=False))
    except Exception as error:  # any constructor may run here
        actual = f"those of .to(dtype), and {type(error).__name__} from its class: {error}"
        raise ArgumentValueError(expected("inv_freq", want, actual)) from error
    for name, buffer in rounded.items():
        exact = fresh.get(name)
        if exact is None or exact.dtype != torch.float32:
            raise ArgumentValueError(expected("inv_freq", want, f"{buffer.dtype} by its class"))
        if not _is_unknown(buffer) and not _comes_from(buffer.cpu(), exact):
            actual = "rounded values that the config does not give"
            raise ArgumentValueError(expected("inv_freq", want, actual))
    return {name: fresh[name] for name in rounded}


def restore_frequencies(module: torch.nn.Module) -> None:
    """Give a rotary module back the fp32 frequencies that ``module.to(dtype)`` has rounded."""
    for name, exact in exact_frequencies(module).items():
        rounded = module._buffers[name]
        vars(module).setdefault(_ROUNDED, {})[name] = rounded
        module._buffers[name] = exact.to(rounded.device)
    vars(module)[_CHECKED] = dict(_frequencies(module))


def is_checked(module: torch.nn.Module, name: str) -> bool:
    """Whether a buffer is the one that `restore_frequencies` looked at: no cast came since."""
    return vars(module).get(_CHECKED, {}).get(name) is module._buffers.get(name)


def _frequencies(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = module.named_buffers(recurse=False)
    return [(name, buffer) for name, buffer in buffers if name.endswith("inv_freq")]


def _is_rounded(buffer: torch.Tensor) -> bool:
    """Whether frequencies have another dtype than fp32, or values of a smaller one."""
    if buffer.dtype != torch.float32:
        return True
    if _is_unknown(buffer):
        return False
    values = buffer.cpu()
    return any(_same_values(values.to(dtype), values) for dtype in (torch.bfloat16, torch.float16))


def _is_unknown(buffer: torch.Tensor) -> bool:
    """Whether frequencies have no values yet: on meta, or constants in the copy of a model."""
    return buffer.is_meta or (buffer.numel() > 1 and not any(buffer.stride()))


def _comes_from(buffer: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether frequencies are the exact ones, or a rounding of them."""
    rounded = (functools.reduce(torch.Tensor.to, casts, exact) for casts in _CASTS)
    return any(_same_values(values, buffer) for values in rounded)


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of floats have the same numbers, whatever their dtypes."""
    return torch.equal(a.float(), b.float())


# ---- classes -------------------------------------------------------------------------------------
# Exchange a module's class in place for a subclass with another forward, and back.
#
# Parameters, buffers, names, hooks and identity stay what they are, and so do ``isinstance`` and
# the class's name. Wrappers that are classes themselves stay outermost, whichever came first:
#
#     FSDPLinear(FSDPModule, Linear)   ->  FSDPLinear(FSDPModule, Linear with our forward(Linear))
#     ParametrizedLinear(Linear)       ->  ParametrizedLinear(Linear with our forward(Linear))

_FSDP2 = "torch.distributed.fsdp"


class Part(NamedTuple):
    """A module of a model: its name there, and the class that its author wrote."""

    name: str
    module: torch.nn.Module
    cls: type

    def left(self, known: str, kind: Kind = Kind.NOT_TAKEN, moves: bool = True) -> Left:
        """Return the entry of a report that says why the module is left."""
        return Left(self.name, self.cls.__name__, known, moves, kind)


class Action(NamedTuple):
    """One module that gets the forward ``kind``, with these notes."""

    name: str
    module: torch.nn.Module
    kind: str
    notes: Notes


def user_class(module: torch.nn.Module) -> type:
    """Return the class that the author of the model wrote, without our forward and wrappers."""
    cls = _inside(type(module))
    return cls.__bases__[0] if KIND in vars(cls) else cls


def kind_of(module: torch.nn.Module) -> str | None:
    """Name of our forward that a module has; None: it has its own."""
    return vars(_inside(type(module))).get(KIND)


def exchange(action: Action, cls: type) -> None:
    """Give a module its patched class, the notes that the forward reads, and exact frequencies."""
    module = action.module
    module.__class__ = _around(type(module), cls)
    module.__dict__[NOTES] = action.notes
    if action.kind == "rotary":
        restore_frequencies(module)


def restore(module: torch.nn.Module) -> None:
    """Take back what `exchange` did; a module that was not patched is unchanged."""
    if kind_of(module) is not None:
        module.__class__ = _around(type(module), user_class(module))
    module.__dict__.pop(NOTES, None)
    vars(module).pop(_CHECKED, None)
    for name, rounded in vars(module).pop(_ROUNDED, {}).items():
        module._buffers[name] = rounded.to(module._buffers[name].device)


def devices_of(model: torch.nn.Module) -> set[str]:
    """Return the types of device that a model's tensors are on."""
    tensors = [*model.parameters(), *model.buffers()]
    return {t.device.type for t in tensors if isinstance(t, torch.Tensor)}


class Survey(NamedTuple):
    """Modules of a model, in the order of ``named_modules``.

    models: those of transformers; roots: the outermost of them.  keys: id of each module -> its
    root and config.  devices: the types of device of its tensors.
    """

    model: torch.nn.Module
    parts: list[Part]
    models: list[Part]
    roots: list[Part]
    keys: dict[int, tuple[int, int]]
    devices: set[str]


def survey(model: torch.nn.Module) -> Survey:
    """Return the modules of a model, which decisions go over."""
    parts = [Part(name, module, user_class(module)) for name, module in model.named_modules()]
    by_id = {id(part.module): part for part in parts}
    models = [by_id[id(module)] for module in pretrained_models(model)]
    outermost = roots(model)
    ids = {id(module) for module in outermost.values()}
    keys = {key: (id(outermost.get(key)), id(original_config(by_id[key].module))) for key in by_id}
    roots_of_model = [part for part in models if id(part.module) in ids]
    return Survey(model, parts, models, roots_of_model, keys, devices_of(model))


# ---- wrappers that are classes ------------------------------------------------------------------


def _wraps(cls: type) -> int | None:
    """Return the inner base of a wrapper class; None: ``cls`` is no wrapper."""
    fsdp = sys.modules.get(_FSDP2)
    if fsdp is not None and len(cls.__bases__) == 2 and cls.__bases__[0] is fsdp.FSDPModule:
        return 1
    parametrized = cls.__name__.startswith("Parametrized") and "__getstate__" in vars(cls)
    return 0 if parametrized and cls.__module__ == "torch.nn.utils.parametrize" else None


def _inside(cls: type) -> type:
    while (position := _wraps(cls)) is not None:
        cls = cls.__bases__[position]
    return cls


def _around(wrapper: type, inner: type) -> type:
    """Rebuild the wrappers of a class around another class."""
    position = _wraps(wrapper)
    if position is None:
        return inner
    bases = list(wrapper.__bases__)
    bases[position] = _around(bases[position], inner)
    if tuple(bases) == wrapper.__bases__:
        return wrapper
    attributes = {k: v for k, v in vars(wrapper).items() if k not in ("__dict__", "__weakref__")}
    return type(wrapper.__name__, tuple(bases), attributes)


# ---- exchange and rollback ---------------------------------------------------------------------

#: Dictionary whose content is not saved: a mesh replaces parameters, and frees their memory.
_PARAMETERS = "_parameters"


def apply(
    model: torch.nn.Module,
    changes: Iterable[tuple[Action, type]] = (),
    attentions: Sequence[Attention] = (),
) -> None:
    """Restore a model, and give some of its modules patched classes and our attention."""
    for module in model.modules():
        restore(module)
    for change in changes:
        exchange(*change)
    restore_configs(model)
    attend(model, attentions)


@contextlib.contextmanager
def applied(
    model: torch.nn.Module,
    changes: Iterable[tuple[Action, type]],
    attentions: Sequence[Attention],
) -> Iterator[None]:
    """Context in which `apply` has run; after an exception modules and configs are as before."""
    classes = [(module, type(module)) for module in model.modules()]
    dicts = [vars(config) for config in reachable_configs(model)]
    for module, _ in classes:
        values = vars(module).items()
        dicts += [v for n, v in values if isinstance(v, dict) and n != _PARAMETERS]
        dicts.append(vars(module))
    saved = [(values, dict(values)) for values in dicts]
    try:
        apply(model, changes, attentions)
        yield
    except BaseException:
        for module, cls in classes:
            module.__class__ = cls
        for values, before in saved:
            values.clear()
            values.update(before)
        raise
