"""Mutated copies of a triton_kernel.py, importable beside the original."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

_NUMBERS = itertools.count()


def copy_of(package: ModuleType, folder: Path, *edits: tuple[str, str]) -> ModuleType:
    """A copy of the package's triton_kernel.py with each (old, new) replaced; old must occur
    exactly once."""
    text = (Path(package.__file__).parent / "triton_kernel.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} times in triton_kernel.py: {old!r}"
        text = text.replace(old, new)
    name = f"triton_copy_{next(_NUMBERS)}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
