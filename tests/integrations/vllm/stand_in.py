"""The plug-in's classes without vLLM, on classes that have vLLM's names; a worker."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch

from cute_kernels.integrations.contract_exchange import WorkerExtension

PLUGIN = "cute_kernels.integrations.vllm"
PARTS = ("attention", "layers", "mixtures", "rotary")
#: Functions that the plug-in imports from vLLM.
FUNCTIONS = (
    "get_current_vllm_config",
    "get_forward_context",
    "is_forward_context_available",
    "register_backend",
)


class Members(type(torch.nn.Module)):
    """Type of the stand-ins: members of enumerations, and methods that are taken over."""

    def __getattr__(cls, name: str) -> str:
        if name.isupper() or name == "create_weights":
            return name
        raise AttributeError(name)


class Plain(metaclass=Members):
    """A class of vLLM's, generic or not."""

    def __class_getitem__(cls, item: object) -> type:
        return cls


class Layer(Plain, torch.nn.Module):
    """A layer of vLLM's."""


class Vllm(ModuleType):
    """A module of vLLM: any class, and some functions."""

    def __getattr__(self, name: str) -> type:
        if not name[0].isupper() and name not in FUNCTIONS:
            raise AttributeError(name)
        base = Layer if ".layers." in self.__name__ else Plain
        setattr(self, name, type(name, (base,), {"__module__": self.__name__}))
        return vars(self)[name]


class Finder:
    """Finds every module of vLLM."""

    def find_spec(self, name: str, path: object = None, target: object = None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> Vllm:
        return Vllm(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


class Worker(WorkerExtension):
    """Duck type of a worker of vLLM, with ``worker_extension_cls`` mixed in."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model_runner = SimpleNamespace(model=model)

    def reload_weights(self, weights_iterator) -> None:
        self.model_runner.model.load_state_dict(dict(weights_iterator))

    def rpc(self, method: object, *args: object) -> object:
        """vLLM's collective_rpc: of a method's name, or of a function of the worker."""
        if not isinstance(method, str):
            return json.loads(json.dumps(method(self, *args)))
        return json.loads(json.dumps(getattr(self, method)(*args)))


@functools.cache
def plugin() -> SimpleNamespace:
    """Return the plug-in's modules with layers; this process has no vLLM before and after."""
    names = [f"{PLUGIN}.{part}" for part in PARTS]
    installed = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "vllm" or n in names}
    finder = Finder()
    for name in installed:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        modules = {part: importlib.import_module(f"{PLUGIN}.{part}") for part in PARTS}
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.split(".")[0] == "vllm" or n in names]:
            del sys.modules[name]
        sys.modules.update(installed)
    return SimpleNamespace(**modules)


def made(cls: type, **attributes: object):
    """Return an object of a class, past its constructor, with these attributes."""
    one = cls.__new__(cls)
    if isinstance(one, torch.nn.Module):
        torch.nn.Module.__init__(one)
    for name, value in attributes.items():
        setattr(one, name, value)
    return one
