"""The functions of examples/grpo_vllm.py, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.ranks import ROOT

PATH = ROOT / "examples" / "grpo_vllm.py"


def load() -> ModuleType:
    """The example as a module, imported once."""
    name = "grpo_vllm_example"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, PATH)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
