"""SM90 attention kernels of a copy of the package in which pieces of one text are replaced."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import ptxsim
from cute_kernels.compile.kernel import Kernel
from cute_kernels.sparse_attn import launch
from tests import import_graph
from tests.kernels.edited import PACKAGE, edit
from tests.sparse_attn import simulated

#: Rooms that a copy has of its own, and what its modules take from the package itself.
ROOMS = ("", "dsl", "sparse_attn", "sparse_attn.device")
SHARED = ("compile", "compile.fake", "sparse_attn.config", "sparse_attn.masks")
SHARED += ("schedulers", "schedulers.tiles", "schedulers.tiles.ticket_device")
_NUMBERS = itertools.count()


def package(folder: Path, where: str, *pieces: str) -> str:
    """Name of a package like cute_kernels; ``where``: its module with other text, (old, new), .."""
    name = f"changed_kernels_{next(_NUMBERS)}"
    for room in ROOMS:
        module = ModuleType(".".join(filter(None, (name, room))))
        parts = room.split(".") if room else []
        module.__path__ = [str(top.joinpath(*parts)) for top in (folder / name, PACKAGE)]
        sys.modules[module.__name__] = module
    for shared in SHARED:
        sys.modules[f"{name}.{shared}"] = importlib.import_module(f"cute_kernels.{shared}")
    path = folder.joinpath(name, *where.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(edit(where, *pieces))
    return name


@functools.cache
def reaches(kernel: str, where: str) -> bool:
    """Whether a module of cute_kernels is made of another one."""
    graph, seen, left = import_graph.import_graph(), set(), {kernel}
    while left:
        name = left.pop()
        seen.add(name)
        left |= graph.get(name, set()) - seen
    return where in seen


def kernels(folder: Path, where: str | Callable, *pieces: str, packed: bool = False) -> Callable:
    """Map a configuration to its kernel with a defect: pieces of a text, or ``where(patch, ..)``.

    Kernels that are not made of the text are intact; so are those of dense tensors if ``packed``.
    """
    name = "cute_kernels" if callable(where) else package(folder, where, *pieces)

    @functools.cache
    def kernel(chosen):
        original = simulated.module_of(chosen).__name__
        of_text = callable(where) or reaches(original.removeprefix("cute_kernels."), where)
        if not of_text or packed > getattr(chosen, "packed", True):
            return intact(chosen)
        module = importlib.import_module(original.replace("cute_kernels", name, 1))
        with pytest.MonkeyPatch.context() as patch:
            if callable(where):
                where(patch, module)
            return module.build(chosen, compile=ptxsim.compile)

    intact = simulated.kernel
    return kernel


def entry(folder: Path, chosen, where: str, *pieces: str) -> Kernel:
    """The catalogue's entry of a configuration, which compiles a changed copy for the card."""
    intact = launch.entry(chosen)
    name = simulated.module_of(chosen).__name__.replace("cute_kernels", "{}", 1)
    module = importlib.import_module(name.format(package(folder, where, *pieces)))
    return Kernel(intact.name, intact.constexpr, lambda: module.build(chosen))


def by_group(mutants: dict[str, tuple]) -> Iterator:
    """(name, group) of each group of cases that a mutant names first: "a, b / c", c by night."""
    for name, (groups, *_) in mutants.items():
        day, _, night = groups.partition("/")
        for marks, some in (((), day), (pytest.mark.nightly, night)):
            for group in filter(None, map(str.strip, some.split(","))):
                yield pytest.param(name, group, marks=marks)
