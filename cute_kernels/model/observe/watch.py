"""Dispatch mode that records the ops that are not exact, by module and line of source."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...integrations.foreign_calls import foreign
from .. import aten
from . import ops
from .calls import Key, Stack, watched

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


#: Elements that a result reads: of each pass in which an op ran, the numbers of its calls.
Widths = set[frozenset[int]]


@dataclass(frozen=True)
class Site:
    """Place of an op: module's name, op, line of source, and whether it is part of a gradient."""

    module: str
    op: str
    line: str
    gradient: bool


@dataclass
class Observation:
    """Record of the ops that ran.

    sites, ours: place of each op that is not exact, and of each op of ours -> for each pass, how
    many elements a result of it reads: one site may have several calls.  ran: names of the modules
    that ran.  branches: steps of a module's formula that ran for one number of sequences and not
    for another.  ops: names of all ops that ran, by module.
    """

    sites: dict[Site, Widths] = field(default_factory=dict)
    ours: dict[Site, Widths] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    branches: set[Site] = field(default_factory=set)
    ops: dict[str, set[str]] = field(default_factory=dict)


class Watch(TorchDispatchMode):
    """Records ops inside; products and ops of ours give constants of the right shape.

    Everything else is computed, so that control flow which reads values runs.
    """

    def __init__(self, model: nn.Module, devices: set[str]) -> None:
        super().__init__()
        self.seen = Observation()
        self._devices, self._calls = devices, Stack()
        self._model = model
        self._steps: set[Site] = set()
        self._nodes: dict[object, str] = {}
        self._shapes: dict[Hashable, object] = {}
        self._pass: dict[tuple[Site, bool], set[int]] = {}

    def end_pass(self) -> None:
        """Record the ops of a pass; the next ones belong to another."""
        for (site, mine), widths in self._pass.items():
            sites = self.seen.ours if mine else self.seen.sites
            sites.setdefault(site, set()).add(frozenset(widths))
        self._pass.clear()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow which module is called, and enter the mode."""
        for module in self._model.modules():
            for hook in foreign(module):
                vars(module)[hook.attribute][hook.id] = self._aside(hook.function)
        try:
            with watched(self._model, self) as self._calls, self:
                yield
        finally:
            self._nodes.clear()

    @contextlib.contextmanager
    def steps(self) -> Iterator[set[Site]]:
        """Give the steps of formulas that run inside."""
        self._steps = taken = set()
        yield taken
        self._steps = set()

    def _aside(self, hook: Callable) -> Callable:
        """Return a hook whose ops count where it gives something, or writes to what it gets."""

        def called(*args: object, **kwargs: object) -> object:
            outer, self._pass = self._pass, {}
            try:
                result, changes = call_hook(hook, args, kwargs)
            finally:
                ran, self._pass = self._pass, outer
            for key, widths in ran.items() if changes else ():
                self._pass.setdefault(key, set()).update(widths)
            return result

        return called

    def before(self, key: Key, module: nn.Module, args: tuple, kwargs: dict) -> None:
        # What is computed before the call is the caller's.
        caller = self._calls[-2][0] if len(self._calls) > 1 else ""
        self._claim([args, kwargs], caller)
        self.seen.ran.add(key[0])

    def after(self, key: Key, parent: Key | None, result: object) -> None:
        self._claim(result, key[0])

    def _claim(self, results: object, name: str) -> None:
        """Record that the autograd nodes behind a module's results are the module's."""
        ahead = [t.grad_fn for t in ops.tensors(results)] if torch.is_grad_enabled() else []
        while ahead:
            node = ahead.pop()
            if node is not None and node not in self._nodes:
                self._nodes[node] = name
                ahead += [before for before, _ in node.next_functions]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        space, name = ops.name_of(func)
        self.seen.ops.setdefault(self._calls.module, set()).add(name)
        if space == "cute_kernels" or name in aten.PRODUCTS:
            result = _constants(self._shapes, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        mine = space == "cute_kernels"
        floats = any(t.is_floating_point() for t in ops.tensors(result))
        if floats and not torch.is_grad_enabled() and aten.computes(name):
            step = f"ck.{name}" if mine else name
            self._steps.add(Site(self._calls.module, step, _line(), False))
        operands = ops.tensors(args) + ops.tensors(kwargs) + ops.tensors(result)
        if mine or not aten.is_exact(name, args, operands, self._devices):
            node = torch._C._current_autograd_node()
            module = self._calls.module if node is None else self._nodes.get(node, "")
            site = Site(module, name, _line(), node is not None)
            self._pass.setdefault((site, mine), set()).add(aten.reduced_width(name, args))
        return result


def call_hook(
    hook: Callable, args: tuple, kwargs: dict, contents: bool = False
) -> tuple[object, bool]:
    """Call a hook; return what it gives, and whether it gives something or changes what it gets.

    contents: Whether to compare bytes: tensors of inference mode, and ``.data``, count no writes.
    """
    tensors = ops.tensors([args, kwargs])
    before = [_state(t, contents) for t in tensors]
    result = hook(*args, **kwargs)
    now = ops.tensors([args, kwargs])
    same = len(now) == len(tensors) and all(a is b for a, b in zip(now, tensors, strict=True))
    same = same and all(map(_is_in, before, tensors))
    return result, result is not None or not same


def _state(t: torch.Tensor, contents: bool) -> tuple[int | None, torch.Tensor | None]:
    """Return how often a tensor was written to, and a copy of it."""
    version = None if t.is_inference() else t._version
    plain = contents and type(t) in (torch.Tensor, nn.Parameter)
    return version, t.detach().clone() if plain else None


def _is_in(state: tuple[int | None, torch.Tensor | None], t: torch.Tensor) -> bool:
    version, copied = state
    if version != _state(t, False)[0]:
        return False
    return copied is None or ops.same_bytes(copied, t.detach())


def _constants(known: dict, func, args: tuple, kwargs: dict) -> object:
    """Return tensors of the shapes and dtypes that an op would give.

    known: calls by shapes and dtypes -> what they give on meta, as layers repeat each other's.
    """
    tree = torch.utils._pytree
    key = func, _signature(args), _signature(list(kwargs.items()))
    if key not in known:
        on_meta = tree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        known[key] = func(*on_meta[0], **on_meta[1])

    def constant(t: torch.Tensor) -> torch.Tensor:
        value = 0.01 if t.is_floating_point() else 0
        return torch.full(t.shape, value, dtype=t.dtype, device="cpu")

    return tree.tree_map_only(torch.Tensor, constant, known[key])


def _signature(value: object) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return type(value), value


def _line() -> str:
    """Return file:line of the innermost frame outside of torch and of this library."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and not file.startswith("<"):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
