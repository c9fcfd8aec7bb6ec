"""Which ops of aten run whose bits follow the batch on a CPU, by the table of the library."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.model import aten
from cute_kernels.model.observe import ops


class Watch(TorchDispatchMode):
    """Inside, collects the names of torch's ops that are not exact, and those of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.ours: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = ops.name_of(func)
        result = func(*args, **(kwargs or {}))
        tensors = ops.tensors([args, kwargs or {}, result])
        if space == "cute_kernels":
            self.ours.add(name)
        elif not aten.is_exact(name, args, tensors, {"cpu"}):
            self.found.add(name)
        return result
