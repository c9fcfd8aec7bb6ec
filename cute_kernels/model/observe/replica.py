"""Copy of a model on the CPU whose parameters take no memory: their elements overlap."""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType, MethodType

import torch
from torch import nn

from ...integrations.foreign_calls import foreign

#: Buffers up to this size keep their values: frequencies, masks, biases.
_VALUES = 1 << 20
#: Attributes that say by a hook's id how it is called.
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
_FLAGS += ("_forward_hooks_always_called",)
#: Containers up to this length are copied with what they hold.
_ITEMS = 1000


def replica(model: nn.Module) -> nn.Module:
    """Return a copy of a model without its weights, with the hooks of unknown authors.

    Hooks, and forwards that are attributes, call the copy's modules where they hold the model's.

    Raises whatever copying the model's attributes raises.
    """
    memo: dict[int, object] = {}
    for seed, parameter in enumerate(model.parameters()):
        memo[id(parameter)] = nn.Parameter(_overlapping(parameter, seed), requires_grad=False)
    for seed, buffer in enumerate(model.buffers()):
        memo[id(buffer)] = _buffer(buffer, seed)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, dict) and (name.endswith("_hooks") or name in _FLAGS):
                memo[id(value)] = type(value)()  # the copy has no hooks yet
    copied = copy.deepcopy(model, memo)
    # Copies of objects that hold functions hold those of the model: they are made anew.
    copies = {id(module): memo[id(module)] for module in model.modules()}
    for module in model.modules():
        values = vars(copies[id(module)])
        if "forward" in vars(module):
            values["forward"] = _rebound(vars(module)["forward"], copies)
        for hook in foreign(module):
            values[hook.attribute][hook.id] = _rebound(hook.function, copies)
            for name in _FLAGS:
                if hook.id in vars(module)[name]:
                    values[name][hook.id] = True
    return copied


def _rebound(value: object, memo: dict[int, object]) -> object:
    """Return a function that holds the copies of ``memo`` where ``value`` holds the originals.

    Containers are copied, so that what it appends to is not the caller's; other objects are not.
    """
    if id(value) in memo:
        return memo[id(value)]
    again = functools.partial(_rebound, memo=memo)
    if isinstance(value, MethodType):
        return MethodType(again(value.__func__), again(value.__self__))
    if isinstance(value, functools.partial):
        keywords = {name: again(one) for name, one in value.keywords.items()}
        return functools.partial(again(value.func), *map(again, value.args), **keywords)
    if isinstance(value, FunctionType):
        return _function(value, memo)
    if type(value) in (list, dict, set) and len(value) <= _ITEMS:
        new = memo[id(value)] = type(value)()
        if isinstance(value, dict):
            new.update((key, again(one)) for key, one in value.items())
        else:
            (new.extend if isinstance(value, list) else new.update)(map(again, value))
        return new
    if isinstance(value, type | nn.Module | torch.Tensor) or not callable(value):
        return value
    try:
        new = memo[id(value)] = copy.copy(value)
    except Exception:  # an object that cannot be copied is shared
        return value
    for name, one in getattr(new, "__dict__", {}).items():
        new.__dict__[name] = again(one)
    return new


def _function(function: FunctionType, memo: dict[int, object]) -> FunctionType:
    """Return a copy of a function with its own closure, defaults and methods of the model."""
    names = function.__globals__
    used = {n: names[n] for n in function.__code__.co_names if n in names}
    methods = {n: v for n, v in used.items() if id(getattr(v, "__self__", None)) in memo}
    cells = tuple(CellType() for _ in function.__closure__ or ())
    names = names | {n: _rebound(v, memo) for n, v in methods.items()} if methods else names
    closure = cells if function.__closure__ is not None else None
    new = FunctionType(function.__code__, names, function.__name__, None, closure)
    memo[id(function)] = new
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        if old != CellType():  # a name that is bound
            cell.cell_contents = _rebound(old.cell_contents, memo)
    defaults = function.__defaults__
    new.__defaults__ = defaults and tuple(_rebound(one, memo) for one in defaults)
    new.__kwdefaults__ = _rebound(function.__kwdefaults__, memo)
    new.__dict__.update({n: _rebound(v, memo) for n, v in vars(function).items()})
    return new


def _overlapping(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return random numbers of a tensor's shape: element [i, j] is number i + j."""
    # ZeRO-3 leaves an empty tensor in place of the parameter.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    if 0 in shape:
        return torch.empty(shape, dtype=tensor.dtype, device="cpu")
    count = 1 + sum(size - 1 for size in shape)
    # Rows, and columns, differ from each other: what looks one up can be told from another.
    generator = torch.Generator(device="cpu").manual_seed(seed)
    values = torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")
    return values.add_(0.5).mul_(0.02).to(tensor.dtype).as_strided(shape, (1,) * len(shape))


def _buffer(buffer: torch.Tensor, seed: int) -> torch.Tensor:
    if buffer.is_meta or (buffer.is_floating_point() and buffer.numel() > _VALUES):
        return _overlapping(buffer, seed)
    return buffer.detach().to("cpu", copy=True)
