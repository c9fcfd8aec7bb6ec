"""Mutated copies of the CPU backend of moe."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from cute_kernels.moe import cpu
from tests.anchors import replaced


def engine_with(folder: Path, old: str, new: str) -> ModuleType:
    """The backend with one text replaced."""
    home = Path(cpu.__file__)
    path = folder / "mutant.py"
    path.write_text(replaced({"cpu": home.read_text()}, old, new)["cpu"])
    spec = importlib.util.spec_from_file_location("cute_kernels.moe.mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
