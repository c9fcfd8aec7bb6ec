"""Runs PTX snippets on the simulator core, without the DSL: numpy arrays in and out."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from ptxsim.native import Options, library

HEADER = ".version 8.4\n.target sm_90a\n.address_size 64\n"
_REGISTERS = """.reg .pred %p<32>; .reg .b16 %h<64>; .reg .b32 %r<400>; .reg .b64 %d<64>;
.reg .f32 %f<400>; .reg .f64 %g<32>;
"""


class SimError(Exception):
    """What the core says of a module that it cannot load or a launch that failed."""


def entry(body: str, params: list[str], shared: str = "", bounds: str = "") -> str:
    """A module with one entry `k` around `body`.

    params: PTX types; parameter i is loaded into %d<50+i> if it has 64 bits, else into %r<380+i>.
    shared: declarations of shared memory.
    bounds: performance directives, such as `.reqntid 384, 1, 1`.
    """
    declared = ", ".join(f".param .{t} p{i}" for i, t in enumerate(params))
    loads = ""
    for i, t in enumerate(params):
        register = f"%d{50 + i}" if t.endswith("64") else f"%r{380 + i}"
        loads += f"ld.param.{t} {register}, [p{i}];\n"
    code = f"{{\n{_REGISTERS}{loads}{body}\nret;\n}}\n"
    return f"{HEADER}{shared}\n.visible .entry k({declared})\n{bounds}\n{code}"


def launch(
    text: str,
    args: list,
    grid: tuple = (1, 1, 1),
    block: tuple = (32, 1, 1),
    cluster: tuple = (1, 1, 1),
    dynamic: int = 0,
    check: bool = True,
    **options: int,
) -> dict:
    """Runs entry `k` of a module and returns the report.

    args: numpy arrays (registered and passed by address; 0-d ones and scalars by value).
    check: whether the text is legal PTX, to be checked by ptxas if PTXSIM_CHECK_PTX is set.
    """
    if check and os.environ.get("PTXSIM_CHECK_PTX"):
        _assemble(text)
    lib = library()
    chosen = _options(options)
    module = lib.ptxsim_load(text.encode(), b"snippet")
    if not module:
        raise SimError(lib.ptxsim_error().decode())
    try:
        lib.ptxsim_clear_regions()
        values = [_by_value(lib, i, argument) for i, argument in enumerate(args)]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*[v.ctypes.data for v in values])
        dims = [(ctypes.c_uint32 * 3)(*d) for d in (grid, block, cluster)]
        if lib.ptxsim_launch(module, b"k", *dims, dynamic, pointers, ctypes.byref(chosen)):
            raise SimError(lib.ptxsim_error().decode())
        return json.loads(lib.ptxsim_report().decode())
    finally:
        lib.ptxsim_clear_regions()
        lib.ptxsim_unload(module)


def find_tool(name: str) -> str | None:
    """ptxas, nvdisasm, ...: from PATH or triton's wheel."""
    found = shutil.which(name)
    spec = None if found else importlib.util.find_spec("triton")
    if spec and spec.origin:
        path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
        found = str(path) if os.access(path, os.X_OK) else None
    return found


def _options(names: dict[str, int]) -> Options:
    chosen = Options()
    library().ptxsim_default_options(ctypes.byref(chosen))
    for name, value in names.items():
        assert hasattr(chosen, name), name
        setattr(chosen, name, value)
    return chosen


def _by_value(lib, position, argument) -> np.ndarray:
    """The parameter's bytes; memory of arrays is registered."""
    if isinstance(argument, np.ndarray) and argument.ndim:
        label = f"arg{position}".encode()
        lib.ptxsim_register_region(argument.ctypes.data, argument.nbytes, 1, label)
        return np.array([argument.ctypes.data], np.uint64)
    return np.atleast_1d(argument)


@functools.cache
def _assemble(text: str) -> None:
    """Fails on text that ptxas refuses, so that snippets stay legal PTX."""
    tool = find_tool("ptxas")
    assert tool, "PTXSIM_CHECK_PTX is set, but ptxas is not found"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k.ptx"
        path.write_text(text)
        done = subprocess.run(
            [tool, "-arch=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{text}"
