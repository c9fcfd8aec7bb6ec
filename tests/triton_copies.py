"""Mutated copies of a system's Triton kernels and launcher, importable beside the originals."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

from tests.anchors import replaced

_NUMBERS = itertools.count()


def copy_of(
    package: ModuleType,
    folder: Path,
    *edits: tuple[str, str],
    files: tuple[str, str] = ("kernel", "launch"),
) -> ModuleType:
    """The launcher of a ``triton`` package, a copy that launches a copy of the kernels.

    Each (old, new) is replaced; old must occur exactly once, in either file.

    files: the modules of the kernels and of their launcher.
    """
    home, number = Path(package.__file__).parent, next(_NUMBERS)
    texts = {name: (home / f"{name}.py").read_text() for name in files}
    for old, new in edits:
        texts = replaced(texts, old, new)
    kernels, launch = (
        _imported(package, folder / f"{name}_copy_{number}.py", text)
        for name, text in texts.items()
    )
    launch.kernels = kernels
    return launch


def _imported(package: ModuleType, path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
