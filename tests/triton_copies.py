"""Mutated copies of a system's Triton kernels and launcher, importable beside the originals.

What systems share (runtime/triton_*.py) is copied with them, so that a mutant may edit that too.
"""

from __future__ import annotations

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
_SHARED = ("triton_products", "triton_sums", "triton_tiles")


def copy_of(
    package: ModuleType,
    folder: Path,
    *edits: tuple[str, str],
    files: tuple[str, str] = ("kernel", "launch"),
    beside: tuple[str, ...] = (),
) -> ModuleType:
    """The launcher of a ``triton`` package, a copy that launches a copy of the kernels.

    Each (old, new) is replaced; old must occur exactly once in all of the files.

    files: the modules of the kernels and of their launcher.
    beside: other modules of the package that those two import from.
    """
    home, number = Path(package.__file__).parent, next(_NUMBERS)
    own = package.__name__
    shared = {name: importlib.import_module(f"{_RUNTIME}.{name}") for name in _SHARED}
    shared |= {name: importlib.import_module(f"{own}.{name}") for name in beside}
    texts = {name: (home / f"{name}.py").read_text() for name in files}
    texts |= {name: Path(module.__file__).read_text() for name, module in shared.items()}
    for old, new in edits:
        texts = replaced(texts, old, new)

    def imported(name: str) -> ModuleType:
        parent = _RUNTIME if name in _SHARED else own
        return _imported(parent, folder / f"{name}_copy_{number}.py", texts[name])

    copies = {name: imported(name) for name in shared}
    kernels, launch = map(imported, files)
    for name, original in shared.items():
        for module in (kernels, launch):
            _use_copy(module, original, copies[name])
    launch.kernels = kernels
    return launch


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
    module = sys.modules[spec.name] = importlib.util.module_from_spec(
        spec
    )  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module
