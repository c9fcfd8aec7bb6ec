"""Copies of a patched model's configs, which name our attention.

transformers' modules look their attention up in their config, and several models may hold one
config object: a policy, its critic and its reference.  ``ck.patch`` gives the modules of each model
a copy of it, and ``ck.unpatch`` puts the object back, with what was changed in the copy since.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ....integrations import transformers as integration

#: Attribute of a module: name of each attribute that held a config -> its `Swap`.
_SWAPS = "_cute_kernels_configs"
#: Attribute of a config: the name of its attention.
_ATTENTION = "_attn_implementation_internal"


class Attention(NamedTuple):
    """Modules of one config and one root that attend by ``attn_implementation="cute_kernels"``."""

    name: str
    modules: tuple[torch.nn.Module, ...]


class Swap(NamedTuple):
    """A config object, the copy that stands in for it, and its state when the copy was taken."""

    original: object
    copied: object
    state: object


def original(module: torch.nn.Module) -> object | None:
    """Return the config that a module has when it is not patched; None: it has none."""
    config = getattr(module, "config", None)
    swap = vars(module).get(_SWAPS, {}).get("config")
    return swap.original if swap is not None and swap.copied is config else config


def roots(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Return id of each module -> the outermost model of transformers that it lies in."""
    outermost: dict[int, torch.nn.Module] = {}
    for module in pretrained(model):
        if id(module) not in outermost:
            for part in module.modules():
                outermost.setdefault(id(part), module)
    return outermost


def groups(model: torch.nn.Module) -> tuple[dict[int, tuple[int, int]], set[int]]:
    """Return (id of each module -> key of its root and config, ids of models of transformers)."""
    outermost = roots(model)
    keys = {id(m): (id(outermost.get(id(m))), id(original(m))) for m in model.modules()}
    return keys, {id(module) for module in pretrained(model)}


def pretrained(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that are models of transformers, the outermost first."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    return [module for module in model.modules() if isinstance(module, library.PreTrainedModel)]


def apply(model: torch.nn.Module, attentions: Iterable[Attention]) -> None:
    """Restore the configs of a model, and make some of its modules attend by our op.

    `integration.register` comes first.
    """
    restore(model)
    attend(model, attentions)


def attend(model: torch.nn.Module, attentions: Iterable[Attention]) -> None:
    """Make modules attend by our op."""
    outermost = roots(model)
    by_root: dict[int, list[object]] = {}
    for _, modules in attentions:
        by_root.setdefault(id(outermost[id(modules[0])]), []).append(modules[0].config)
    wrappers = [module for module in model.modules() if id(module) not in outermost]
    for root in dict.fromkeys(outermost.values()):
        if id(root) not in by_root:
            continue
        copies: dict[int, object] = {}
        parts = [module for module in root.modules() if outermost[id(module)] is root]
        for _, config in _configs(parts):
            copy.deepcopy(config, copies)  # one memo: nested configs keep their identity
        _swap([*parts, *wrappers], copies)
        for config in by_root[id(root)]:
            # The property's setter would also set it in sub-configs that may not support it.
            setattr(copies[id(config)], _ATTENTION, integration.NAME)


def restore(model: torch.nn.Module) -> None:
    """Restore the config objects.

    Layers keep theirs if no model of transformers is given: the masks are made by the model.
    """
    if not any(_SWAPS in vars(module) for module in pretrained(model)):
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


def reachable(model: torch.nn.Module) -> list[object]:
    """Return every config that `attend` or `restore` may write, nested and kept ones included."""
    if not pretrained(model):
        return []
    ahead = [value for module in model.modules() for value in vars(module).values()]
    ahead += [
        part
        for module in model.modules()
        for swap in vars(module).get(_SWAPS, {}).values()
        for part in swap
    ]
    visited: dict[int, object] = {}
    while ahead:
        value = ahead.pop()
        if _is_config(value) and id(value) not in visited:
            visited[id(value)] = value
            ahead += vars(value).values()
    return list(visited.values())


def _configs(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, object]]:
    for module in modules:
        for value in vars(module).values():
            if _is_config(value):
                yield module, value


def _is_config(value: object) -> bool:
    return isinstance(value, sys.modules["transformers.configuration_utils"].PreTrainedConfig)


def _swap(modules: Iterable[torch.nn.Module], copies: dict[int, object]) -> None:
    states: dict[int, object] = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if not _is_config(value) or id(value) not in copies:
                continue
            state = copy.deepcopy(value, states)
            swap = Swap(value, copies[id(value)], state)
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
        elif name != _ATTENTION and (name not in before or _differ(values[name], before[name])):
            vars(original)[name] = values[name]
    # Modules outside of those that are unpatched may hold the copy.
    vars(copied)[_ATTENTION] = vars(original).get(_ATTENTION)


def _differ(value: object, before: object) -> bool:
    try:
        return bool(value != before)
    except Exception:  # values of any type may be in a config
        return True
