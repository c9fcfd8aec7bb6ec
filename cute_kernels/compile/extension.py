"""The Python module calls.c: compiled on this machine at first use, kept in the kernel cache.

It only spares the host time.  Where it cannot be had, callers do the same in Python, and `missing`
says why: no C compiler, no Python headers, no apache-tvm-ffi.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from .. import log, settings
from ..errors import CacheError
from . import toolchain
from .store import BadEntry, Store

SOURCE = Path(__file__).with_name("calls.c")
#: What `_find` names its module, whose last part is in the name of the function that C defines.
_MODULE = f"{__package__}.calls"
_COMPILERS = ("cc", "gcc", "clang")
_LOG = logging.getLogger(__name__)


class Missing(Exception):
    """Reason that there is no such module.  Internal."""


def calls() -> ModuleType | None:
    """The module, or None where it cannot be had; decided once a process."""
    return _find()[0]


def missing() -> str | None:
    """Reason that `calls` returns None, or None if it does not."""
    return _find()[1]


@functools.cache
def _find() -> tuple[ModuleType | None, str | None]:
    try:
        module = _load()
    except Missing as why:
        log.say("launch plans are looked up in Python: %s", why)
        return None, str(why)
    return module, None


def _load() -> ModuleType:
    if not settings.extension():
        raise Missing(f"{settings.PREFIX}EXTENSION=0")
    if toolchain.ffi_version() == toolchain.NONE:
        raise Missing("apache-tvm-ffi is not installed")
    try:
        if settings.cache_enabled():
            return imported(_stored(Store(settings.cache_dir())))
        with tempfile.TemporaryDirectory() as folder:
            return imported(build(SOURCE, Path(folder)))
    except (CacheError, ImportError, OSError) as why:
        raise Missing(str(why)) from why


def _stored(store: Store) -> Path:
    """The library in the cache folder, compiled into it if it is not there."""
    stem = f"calls-{_key()[:40]}"
    with store.locked(stem):
        try:
            entry = store.read(stem)
        except BadEntry as why:
            _LOG.warning("kernel cache %s: %s; compiling again", store.root, why)
            entry = None
        if entry is None:
            with store.scratch(stem) as folder:
                library = build(SOURCE, folder)
                entry = store.write(stem, library, library.stem, {"python": sys.version})
    return entry.path


def _key() -> str:
    """SHA-256 over all that the library is made of and for."""
    facts = [
        SOURCE.read_text(),
        sys.version,
        sysconfig.get_config_var("SOABI"),
        toolchain.ffi_version(),
        platform.machine(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def build(source: Path, folder: Path) -> Path:
    """Compiles ``source`` into a library in ``folder``.

    Raises:
        Missing: there is no compiler, or it failed; then with the last line that it printed.
    """
    import tvm_ffi

    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise Missing(f"no C compiler ({', '.join(_COMPILERS)})")
    target = folder / "calls.so"
    paths = tvm_ffi.libinfo
    headers = (
        sysconfig.get_path("include"),
        paths.find_include_path(),
        paths.find_dlpack_include_path(),
    )
    # Not linked with tvm_ffi's library by a path: the process has loaded it already.
    command = [compiler, "-O2", "-fPIC", "-shared", *(f"-I{path}" for path in headers)]
    command += ["-o", str(target), str(source), paths.find_libtvm_ffi()]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if "error" in line] or [""]
        raise Missing(f"{compiler} could not compile {source.name}: {lines[0].strip()}")
    return target


def imported(library: Path) -> ModuleType:
    """The module in a library that `build` has made."""
    import tvm_ffi  # noqa: F401  (loads what the library was linked with)

    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(library))
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
