"""Tables of overrides with something left out, and what reaches torch below the mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.model.batch_invariant import overrides


@contextlib.contextmanager
def installed(covered: tuple, refused: tuple) -> Iterator[None]:
    """Inside, these tables are registered; afterwards those of the library."""
    before = overrides.COVERED, overrides.REFUSED
    _again(covered, refused)
    try:
        yield
    finally:
        _again(*before)


def _again(covered: tuple, refused: tuple) -> None:
    for library in overrides._installed.values():
        library._destroy()
    overrides._installed.clear()
    overrides.COVERED, overrides.REFUSED = covered, refused
    overrides.install(strict=True)


class Seen(TorchDispatchMode):
    """The names of the ops that run: ``mean.dim``, ``cute_kernels.linear``."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.").removesuffix(".default")
        self.names.append(name)
        return func(*args, **(kwargs or {}))
