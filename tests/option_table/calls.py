"""Calls of public ops, recorded by argument name, and the options that no call has exercised."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

import cute_kernels as ck
from cute_kernels.schedulers import Schedule
from cute_kernels.schedulers.model.selection import Selection
from cute_kernels.systems import SYSTEMS

#: Label -> runs one case and returns the largest |error| / bound of each result.
Cases = Mapping[str, Callable[[], dict[str, float]]]
#: Op -> the arguments of each call so far, by name, without those that were left out.
recorded: dict[str, list[dict[str, object]]] = defaultdict(list)

#: One type of an annotation -> whether a value is of it.
_TYPES = {
    "None": lambda value: value is None,
    "torch.Tensor": lambda value: isinstance(value, torch.Tensor),
    "float": lambda value: isinstance(value, (int, float)),
    "str": lambda value: isinstance(value, str),
    "Schedule": lambda value: isinstance(value, Schedule),
    "Selection": lambda value: isinstance(value, Selection),
    "Sequence[int]": lambda value: isinstance(value, (list, tuple)),
}


def ops() -> list[str]:
    """Names of all public ops; those of a namespace as ``"namespace.op"``."""
    names = []
    for system in SYSTEMS:
        names += [op for op in system.ops if not system.namespace or op != system.package]
        if not system.namespace:
            continue
        package = getattr(ck, system.package)
        members = {name: getattr(package, name) for name in package.__all__}
        names += [
            f"{system.package}.{name}"
            for name, member in members.items()
            if inspect.isfunction(member) and member.__module__.endswith(".api")
        ]
    return names


def function_of(op: str) -> Callable:
    """The public function of an op's name."""
    value = ck
    for part in op.split("."):
        value = getattr(value, part)
    return value


def call(op: str, *args: object, **options: object):
    """Call a public op and record its arguments."""
    function = function_of(op)
    recorded[op].append(dict(inspect.signature(function).bind(*args, **options).arguments))
    return function(*args, **options)


def unused(op: str) -> list[str]:
    """Arguments of an op that no recorded call gave another value than the default.

    Where the annotation is a union, each of its types is an argument of its own.
    """
    missing = []
    for name, parameter in inspect.signature(function_of(op)).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:  # names that are refused
            continue
        values = [arguments[name] for arguments in recorded[op] if name in arguments]
        default = parameter.default
        if not any(default is parameter.empty or differs(value, default) for value in values):
            missing.append(name)
        types = [part.strip() for part in str(parameter.annotation).split("|")]
        seen = values if default is parameter.empty else [*values, default]
        for kind in types if len(types) > 1 else ():
            if kind in _TYPES and not any(map(_TYPES[kind], seen)):
                missing.append(f"{name}: {kind}")
        if dataclasses.is_dataclass(default):
            fields = [field.name for field in dataclasses.fields(default)]
            missing += [
                f"{name}.{field}"
                for field in fields
                if all(getattr(v, field) == getattr(default, field) for v in values)
            ]
    return missing


def differs(value: object, default: object) -> bool:
    """Whether an argument is not its default."""
    return isinstance(value, torch.Tensor) or type(value) is not type(default) or value != default
