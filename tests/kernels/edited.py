"""Sources of a system's SM90 kernels with a bug in each, and what is compiled of them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import cute_kernels
import ptxsim
from tests.anchors import replaced

PACKAGE = Path(cute_kernels.__file__).parent


def edit(name: str, *pieces: str) -> str:
    """The text of the module ``name`` of cute_kernels with pieces replaced: old, new, .."""
    text = source(name)
    for old, new in zip(pieces[::2], pieces[1::2], strict=True):
        text = replaced({name: text}, old, new)[name]
    return text


@functools.cache
def source(name: str) -> str:
    return PACKAGE.joinpath(*name.split(".")).with_suffix(".py").read_text()


def changed(folder: Path, name: str, *pieces: str) -> ModuleType:
    """The module ``name`` of cute_kernels with a piece of its text replaced: (old, new), or some.

    Traced code is read again from its file: the copy has one, in ``folder``.
    """
    copy = folder / f"{name}.py"
    copy.write_text(edit(name, *pieces))
    own = f"cute_kernels.{name}_changed"
    spec = importlib.util.spec_from_file_location(own, copy)
    module = importlib.util.module_from_spec(spec)
    # The DSL looks traced functions' modules up; the next copy takes its place.
    sys.modules[own] = module
    spec.loader.exec_module(module)
    return module


def kernels(system: ModuleType, folder: Path, name: str, *pieces: str) -> Callable:
    """Map a configuration to a function, of a changed source where it has one.

    ``system``: the test's module with ``launch`` and ``compiled``.  ``name``: a kernel's module of
    the system, or one of its device/ ("device.unit").  Without pieces the copy is unedited.
    """
    package = system.launch.__package__.removeprefix("cute_kernels.")
    module = changed(folder, f"{package}.{name}", *pieces)
    original = importlib.import_module(f"cute_kernels.{package}.{name}")

    @functools.cache
    def kernel(chosen):
        own = "kernel_" + system.launch.entry(chosen).name.removeprefix(f"{package}_")
        if own == name:
            return module.build(chosen, compile=ptxsim.compile)
        user = importlib.import_module(f"cute_kernels.{package}.{own}")
        # What the kernel has of a device module: itself, or classes of it.
        taken = {
            key: module if value is original else getattr(module, key)
            for key, value in vars(user).items()
            if value is original or getattr(value, "__module__", "") == original.__name__
        }
        if not name.startswith("device.") or not taken:
            return system.compiled(chosen)
        with mock.patch.multiple(user, **taken):
            return user.build(chosen, compile=ptxsim.compile)

    return kernel
