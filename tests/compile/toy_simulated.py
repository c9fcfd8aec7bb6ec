"""Runs a stored library, unchanged, on the simulator: only the DSL's runtime is replaced."""

import subprocess
from pathlib import Path

from cute_kernels.compile import toolchain
from ptxsim import build, native
from ptxsim.run import SimulatedFunction, _Group


def replace_runtime(folder: Path) -> None:
    """Makes this process load, as the DSL's runtime library, one that calls the simulator.

    The simulator's own link step puts hidden functions next to an object; a library that is linked
    already finds them, made visible, in a library of the runtime's name.
    """
    native.library()
    source = (build.SOURCES / "runtime.cpp").read_text()
    (folder / "runtime.cpp").write_text(
        source.replace('visibility("hidden")', 'visibility("default")')
    )
    target = folder / toolchain.RUNTIME_NAME
    command = [build.compiler(), "-std=c++17", "-fPIC", "-shared", "-DPTXSIM_THUNKS"]
    command += [f"-I{build.SOURCES}", f"-Wl,-soname,{target.name}", "-o", target]
    command += [folder / "runtime.cpp", native.built().library]
    subprocess.run([str(part) for part in command], check=True)
    toolchain.runtime_library = lambda: target


def simulated(function, ptx: Path) -> SimulatedFunction:
    """The loaded function, with the PTX that its kernel was compiled from."""
    return SimulatedFunction(function, _Group([str(path) for path in ptx.rglob("*.ptx")]))
