"""Mutated copies of a system's Triton kernels and launcher, importable beside the originals.

What systems share (runtime/triton_*.py) is copied with them, so that a mutant may edit that too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

from tests.anchors import replaced

_NUMBERS = itertools.count()
_RUNTIME = "cute_kernels.runtime"
#: Its modules that Triton kernels and their launchers share.
_SHARED = ("triton_elementary", "triton_products", "triton_sums", "triton_tiles")


def copy_of(
    package: ModuleType,
    folder: Path,
    *edits: tuple[str, str],
    files: tuple[str, ...] = ("kernel", "launch"),
    surroundings: contextlib.AbstractContextManager | None = None,
) -> ModuleType:
    """The launcher of a ``triton`` package, a copy that launches copies of the kernels.

    Each (old, new) is replaced; old must occur exactly once in all of the files.

    files: the modules of the kernels and, last, of their launcher; each may import those before.
    surroundings: what the copies are imported in; the originals are not.
    """
    number = next(_NUMBERS)
    originals = {name: importlib.import_module(path) for name, path in _paths(package, files)}
    copies: dict[str, ModuleType] = {}
    with surroundings or contextlib.nullcontext():
        for name, text in texts(package, files, *edits).items():
            parent = originals[name].__name__.rpartition(".")[0]
            module = _imported(parent, folder / f"{name}_copy_{number}.py", text)
            for other, copy in copies.items():
                _use_copy(module, originals[other], copy)
            copies[name] = module
    return copies[files[-1]]


def texts(package: ModuleType, names: tuple[str, ...], *edits: tuple[str, str]) -> dict[str, str]:
    """The modules of a copy by name, shared ones first, in which each (old, new) is replaced."""
    out = {}
    for name, path in _paths(package, names):
        out[name] = Path(importlib.util.find_spec(path).origin).read_text()
    for old, new in edits:
        out = replaced(out, old, new)
    return out


def _paths(package: ModuleType, names: tuple[str, ...]) -> list[tuple[str, str]]:
    own = package.__name__
    return [*((n, f"{_RUNTIME}.{n}") for n in _SHARED), *((n, f"{own}.{n}") for n in names)]


def _use_copy(module: ModuleType, original: ModuleType, copy: ModuleType) -> None:
    """Replace in a module a module that it imports, or functions of it, by those of a copy."""
    for name, value in vars(module).items():
        if value is original:
            setattr(module, name, copy)
        elif callable(value) and value is vars(original).get(name) and not isinstance(value, type):
            setattr(module, name, getattr(copy, name))


def _imported(package: str, path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module
