"""Skip layers of one kind: two of them stand for all where values alone are followed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import nn

from ...integrations.foreign_calls import foreign

#: How many layers of a kind run.
_RUN = 2
#: Attributes of every module: what is in them is looked at by itself.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def pass_over(model: nn.Module, ops: Mapping[str, set[str]]) -> dict[str, str]:
    """Make layers give back what they get where two of their kind run before them.

    Returns the name of each layer that is passed over -> that of one of its kind that runs.

    Layers are the children of a ModuleList.  They are of one kind if the modules inside have the
    same classes, shapes, attributes, hooks and forwards of their own, and ran the same ops.

    Args:
        model: A replica.
        ops: Names of the ops that ran, by module.
    """
    passed: dict[str, str] = {}
    for path, stack in model.named_modules():
        if not isinstance(stack, nn.ModuleList):
            continue
        kinds, layers = _Kinds(stack, ops), {}
        for index, layer in enumerate(stack):
            name = f"{path}.{index}" if path else str(index)
            layers.setdefault(kinds.kind_of(layer, name), []).append((name, layer))
        for (_, first), *others in layers.values():
            if len(others) >= _RUN:
                result = _Result()
                first.register_forward_hook(result.keep)
                for name, layer in others[_RUN - 1 :]:
                    vars(layer)["forward"] = _passing(layer, result)
                    passed[name] = others[0][0]
    return passed


class _Result:
    """Last result of the first layer of a kind."""

    value: object = None

    def keep(self, module: nn.Module, args: tuple, out: object) -> None:
        self.value = out


def _passing(layer: nn.Module, last: _Result) -> Callable:
    """Return a forward with a result like the first layer's: its first argument in the front."""
    forward = layer.forward

    def passing(*args: object, **kwargs: object) -> object:
        x = args[0] if args else kwargs.get("hidden_states")
        result = last.value
        front = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(front, torch.Tensor) or not isinstance(x, torch.Tensor):
            return forward(*args, **kwargs)
        if (front.shape, front.dtype) != (x.shape, x.dtype):
            return forward(*args, **kwargs)
        return (x, *result[1:]) if isinstance(result, tuple) else x

    return passing


class _Kinds:
    """Kinds of the layers of a stack; attributes that hold a layer's index alone do not count."""

    def __init__(self, stack: nn.ModuleList, ops: Mapping[str, set[str]]) -> None:
        self._ops = ops
        whole = [
            (name, value == index)
            for index, layer in enumerate(stack)
            for module in layer.modules()
            for name, value in vars(module).items()
            if type(value) is int
        ]
        indices = {name for name, _ in whole} - {name for name, same in whole if not same}
        self._ignored = _OF_EVERY_MODULE | indices

    def kind_of(self, layer: nn.Module, path: str) -> Hashable:
        """Return the kind of a layer."""
        parts = []
        for name, module in layer.named_modules():
            attributes = {n: v for n, v in vars(module).items() if n not in self._ignored}
            tensors = (*module._parameters.items(), *module._buffers.items())
            theirs = [(hook.attribute, hook.function) for hook in foreign(module)]
            ran = frozenset(self._ops.get(f"{path}.{name}" if name else path, ()))
            parts.append(
                (name, type(module), _plain([attributes, tensors, theirs, module.training]), ran)
            )
        return tuple(parts)


def _plain(value: object) -> Hashable:
    """Return what tells a value from others: tensors by shape, containers by what they hold.

    Functions and other objects are told apart unless they are equal: layers that hold objects of
    their own are of a kind of their own, and run.
    """
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, nn.Module):
        return type(value)
    if isinstance(value, dict):
        return _plain([*value.items()])
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    try:
        hash(value)
    except TypeError:  # it may change
        return type(value), id(value)
    return type(value), value
