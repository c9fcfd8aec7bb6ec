"""Convert a compile result to an object file, a shared library, and a function again.

A stored kernel is a shared library wherever a system linker is found: `tvm_ffi` loads it without
importing ``cutlass``.  Without a linker the object file itself is stored, and the DSL's own engine
loads it, at the price of importing ``cutlass`` (seconds); so it does where nothing is stored.  All
give the same function: a ``tvm_ffi.Function`` that takes torch tensors by position and checks them
before it launches.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CacheError
from . import toolchain

LIBRARY, OBJECT = ".so", ".o"
_LINKERS = ("cc", "gcc", "clang", "g++", "c++")

#: The oldest host CPU that objects run on, for the machines that CUDA has.  Left alone, the DSL
#: compiles host code for the CPU of the build machine (AVX-512 and all): an illegal instruction on
#: another node of the same cluster.
_HOST_CPU = {
    "x86_64": ("x86-64-v2", ("+cx16", "+popcnt", "+sahf", "+sse4.2")),
    "aarch64": ("generic", ("+neon",)),
}


def write_object(compiled: Any, symbol: str, path: Path) -> None:
    """Writes what ``cute.compile(..., options="--enable-tvm-ffi")`` returned as an object file.

    ``symbol`` names the function in it: two configurations of one kernel class would otherwise
    define the same symbols.
    """
    if compiled.ir_module is not None:
        _fix_host_cpu(compiled.ir_module)
    compiled.export_to_c(str(path), function_name=symbol, export_only_tvm_ffi_symbols=True)


def _fix_host_cpu(module: Any) -> None:
    """Pins the CPU of every host function in an MLIR module; device code is already binary."""
    from cutlass._mlir import ir

    cpu, features = _HOST_CPU[platform.machine()]
    with module.context:
        name = ir.StringAttr.get(cpu)
        listed = ", ".join(f'"{feature}"' for feature in features)
        flags = ir.Attribute.parse(f"#llvm.target_features<[{listed}]>")

        def pin(op: Any) -> Any:
            if op.name == "llvm.func":
                op.attributes["target_cpu"] = name
                op.attributes["target_features"] = flags
            return ir.WalkResult.ADVANCE

        module.operation.walk(pin)


@functools.cache
def linker() -> str | None:
    """The path of a compiler driver that can link, or None."""
    return next((path for name in _LINKERS if (path := shutil.which(name))), None)


def link(source: Path, target: Path) -> None:
    """Links an object file into a shared library that names its libraries without a folder.

    Raises:
        CacheError: the linker failed; the message ends with what it printed.
    """
    import tvm_ffi

    command = [linker(), "-shared", "-Wl,-z,defs", "-Wl,--build-id=none", "-o", target, source]
    command += [toolchain.runtime_library(), tvm_ffi.libinfo.find_libtvm_ffi()]
    process = subprocess.run(
        [str(argument) for argument in command], capture_output=True, text=True
    )
    if process.returncode:
        raise CacheError(f"{target.name}: {linker()} could not link it:\n{process.stderr[-2000:]}")


def build_binary(compiled: Any, symbol: str, folder: Path) -> Path:
    """The file to store for a compile result, made in ``folder``: a library, or else an object."""
    source = folder / f"kernel{OBJECT}"
    write_object(compiled, symbol, source)
    if linker() is None:
        return source
    target = folder / f"kernel{LIBRARY}"
    link(source, target)
    return target


def function(path: Path, symbol: str) -> Callable[..., Any]:
    """Loads one function of a stored file.  The caller has checked the file's digest.

    Raises:
        CacheError: the file is what was written but this process cannot load it.
    """
    loader = _from_library if path.suffix == LIBRARY else _from_object
    try:
        return loader(path, symbol)
    except CacheError:
        raise
    except Exception as error:
        raise CacheError(f"{path}: its digest is right but it does not load: {error}") from error


def resident(compiled: Any, symbol: str) -> Callable[..., Any]:
    """The function of a compile result by way of an object in memory: no file gets a name.

    Not the compile result itself: it cannot be called if the DSL took this host for another
    architecture than the one compiled for, which it judges by the first GPU alone.
    """
    descriptor = os.memfd_create(symbol, os.MFD_CLOEXEC)
    try:
        path = Path(f"/proc/self/fd/{descriptor}")
        write_object(compiled, symbol, path)
        return function(path, symbol)
    finally:
        os.close(descriptor)


def _from_library(path: Path, symbol: str) -> Callable[..., Any]:
    import tvm_ffi

    _runtime(toolchain.runtime_library())
    return tvm_ffi.load_module(str(path))[symbol]


def _from_object(path: Path, symbol: str) -> Callable[..., Any]:
    from cutlass.cute import runtime

    return runtime.load_module(str(path), enable_tvm_ffi=True)[symbol]


@functools.cache
def _runtime(path: Path) -> ctypes.CDLL:
    """Load the runtime by its full path first: libraries that need it name it without a folder."""
    return ctypes.CDLL(str(path))
