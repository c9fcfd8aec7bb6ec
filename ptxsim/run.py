"""Compiles host functions with the DSL, links them against the simulator, and calls them."""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from .build import link
from .errors import PtxsimError
from .native import LOCK, built, library
from .tensors import Arguments, CudaView, addressed, extra_regions

_ARCH = "sm_90a"
_FUNCTION = "ptxsim_call"  # the name under which compiled functions are exported
_unpatched_compile = None  # cute.compile before `patch`, while it lasts


class SimulatedFunction:
    """A compiled host function whose kernels run on the simulator.

    Other attributes are those of the DSL's compiled function.
    """

    def __init__(self, function, group: _Group, compiled=None):
        self._function, self._group, self._compiled = function, group, compiled

    @property
    def ptx_paths(self) -> list[str]:
        """Files with the PTX of the kernels."""
        return list(self._group.ptx_paths)

    def __call__(self, *args, **kwargs):
        arguments = Arguments()
        args = [arguments.convert(a, f"argument {i}") for i, a in enumerate(args)]
        kwargs = {k: arguments.convert(v, k) for k, v in kwargs.items()}
        lib = library()
        with LOCK:
            lib.ptxsim_clear_regions()
            for r in [*arguments.regions.values(), *extra_regions, *addressed.values()]:
                lib.ptxsim_register_region(r.base, r.nbytes, int(r.writable), r.label.encode())
            lib.ptxsim_rt_clear_error()
            lib.ptxsim_rt_select_group(self._group.handle)
            try:
                return self._function(*args, **kwargs)
            except Exception:
                text = lib.ptxsim_rt_last_error().decode(errors="replace")
                if text:
                    raise PtxsimError(text) from None
                raise
            finally:
                lib.ptxsim_clear_regions()

    def __getattr__(self, name):
        compiled = self.__dict__.get("_compiled")
        if compiled is None:
            raise AttributeError(name)
        return getattr(compiled, name)

    def to(self, device=None) -> SimulatedFunction:
        """Itself: there is one device."""
        return self


def compile(function, *args, **kwargs) -> SimulatedFunction:
    """Like cute.compile; the returned function takes torch CPU tensors and runs on the simulator.

    Errors: PtxsimError if CUTE_DSL_ARCH is not sm_90a, or the object calls what is not modelled.
    """
    import cutlass.cute as cute

    return compile_with(_unpatched_compile or cute.compile, function, *args, **kwargs)


def run_object(
    object_path: str | os.PathLike,
    ptx_paths: str | os.PathLike | Iterable[str | os.PathLike],
    function_name: str,
) -> SimulatedFunction:
    """A function of an object that export_to_c wrote, with the PTX of its kernels."""
    if isinstance(ptx_paths, (str, os.PathLike)):
        ptx_paths = [ptx_paths]
    function = _load_function(_link(os.fspath(object_path), _work_dir()), function_name)
    return SimulatedFunction(function, _Group([os.fspath(p) for p in ptx_paths]))


def compile_with(compiler, function, *args, **kwargs) -> SimulatedFunction:
    """`compile` by a given cute.compile object."""
    require_arch()
    folder = _work_dir()
    compiler, kwargs = _with_ptx(compiler, kwargs, folder)
    args = [_show_as_cuda(a) for a in args]
    made = []
    with LOCK, _linked_here(made):
        compiled = compiler(function, *args, **kwargs)
    paths = sorted(str(path) for path in Path(folder).rglob("*.ptx"))
    if not paths:
        raise PtxsimError("ptxsim: the compiler wrote no PTX")
    call = compiled if made else _export_and_load(compiled)
    return SimulatedFunction(call, _Group(paths), compiled)


def require_arch() -> None:
    """Sets the DSL to sm_90a: it reads CUTE_DSL_ARCH when imported, maybe before ptxsim was."""
    from cutlass.cutlass_dsl import CuTeDSL

    settings = CuTeDSL._get_dsl().envar
    if settings.arch == _ARCH:
        return
    wanted = os.environ.get("CUTE_DSL_ARCH", _ARCH)
    if wanted != _ARCH:
        raise PtxsimError(f"ptxsim runs {_ARCH}; CUTE_DSL_ARCH is {wanted}")
    settings.arch = _ARCH


class _Group:
    """PTX modules of one compiled object."""

    def __init__(self, ptx_paths: list[str]):
        lib = library()
        self.ptx_paths = ptx_paths
        self.handle = lib.ptxsim_rt_new_group()
        for path in map(Path, ptx_paths):
            text = path.read_bytes().rstrip(b"\0")
            if lib.ptxsim_rt_group_load(self.handle, text, path.name.encode()):
                why = lib.ptxsim_rt_last_error().decode()
                raise PtxsimError(f"ptxsim: loading {path.name}: {why}")


@functools.cache
def _work_root() -> str:
    keep = os.environ.get("PTXSIM_KEEP")
    if keep:
        os.makedirs(keep, exist_ok=True)
        return tempfile.mkdtemp(prefix="ptxsim-", dir=keep)
    root = tempfile.mkdtemp(prefix="ptxsim-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def _work_dir() -> str:
    """A folder of this process for objects and PTX; removed at exit unless PTXSIM_KEEP is set."""
    return tempfile.mkdtemp(dir=_work_root())


def _link(object_path: str, folder: str) -> str:
    """Links an exported object against the simulator's runtime; the shared library's path."""
    import tvm_ffi

    ffi = Path(tvm_ffi.__file__).parent / "lib" / "libtvm_ffi.so"
    library()
    out = Path(folder) / "kernel.so"
    done = link([object_path, built().thunks, built().library, ffi], out)
    if done.returncode:
        found = re.findall(r"undefined reference to [`'\"]([^'`\"]+)", done.stdout)
        if found:
            names = ", ".join(sorted(set(found)))
            raise PtxsimError(
                f"ptxsim: the object calls runtime functions that are not provided: {names}"
            )
        raise PtxsimError("ptxsim: linking failed:\n" + done.stdout[-3000:])
    return str(out)


def _load_function(shared_path: str, function_name: str):
    import tvm_ffi

    handle = ctypes.CDLL(shared_path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    try:
        symbol = getattr(handle, "__tvm_ffi_" + function_name)
    except AttributeError:
        raise PtxsimError(f"ptxsim: the object has no function {function_name!r}") from None
    address = ctypes.cast(symbol, ctypes.c_void_p).value
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=handle)


def _export_and_load(compiled):
    folder = _work_dir()
    path = os.path.join(folder, "kernel.o")
    compiled.export_to_c(path, function_name=_FUNCTION)
    return _load_function(_link(path, folder), _FUNCTION)


def _with_ptx(compiler, kwargs: dict, folder: str):
    """The compile callable and its keywords that also write PTX into folder, with TVM-FFI on."""
    from cutlass.base_dsl import compiler as dsl_compiler

    wanted = f"--enable-tvm-ffi --keep-ptx --dump-dir={folder}"
    given = kwargs.get("options")
    if given is None or (isinstance(given, str) and not given.strip()):
        chosen = getattr(compiler, "_compile_options", None)
        if chosen is None:
            return compiler, {**kwargs, "options": wanted}
        fresh = copy.copy(compiler)
        fresh._compile_options = copy.deepcopy(chosen)
        table = fresh._compile_options.options
        table[dsl_compiler.EnableTVMFFI].value = True
        table[dsl_compiler.KeepPTX].value = True
        table[dsl_compiler.DumpDir].value = folder
        return fresh, {k: v for k, v in kwargs.items() if k != "options"}
    if not isinstance(given, str):
        raise TypeError(f"options: a string of compile options, not {type(given).__name__}")
    ours = ("--dump-dir", "--keep-ptx", "--enable-tvm-ffi")
    parts = [part for part in given.split() if not part.startswith(ours)]
    return compiler, {**kwargs, "options": " ".join([*parts, wanted])}


@contextlib.contextmanager
def _linked_here(made: list) -> Iterator[None]:
    """While it lasts, functions the DSL compiles are linked against the simulator instead of being
    handed to its execution engine, and appended to `made`.

    Without the DSL's hook `made` stays empty, and compile_with calls the exported object, which
    takes positional arguments only.
    """
    try:
        from cutlass.cutlass_dsl import tvm_ffi_provider

        base = tvm_ffi_provider.TVMFFIJitCompiledFunctionBase
        original = base._create_tvm_ffi_function
    except (ImportError, AttributeError):
        yield
        return

    def create(self):
        made.append(_export_and_load(self))
        return made[-1]

    base._create_tvm_ffi_function = create
    try:
        yield
    finally:
        base._create_tvm_ffi_function = original


def _show_as_cuda(value):
    """Compile-time torch CPU tensors, shown to the DSL as CUDA tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        from cutlass.cute import runtime

        return runtime.from_dlpack(CudaView(value), enable_tvm_ffi=True)
    return value
