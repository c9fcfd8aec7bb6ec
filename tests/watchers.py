"""Modes of torch that keep the names of the calls that they see, and change nothing."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Names of ops below autograd, such as ``cute_kernels::linear``."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    """Names of functions above autograd."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
