"""Toolchain facts that a compiled object depends on: our source, the DSL, FFI, CUDA, the host.

Nothing here imports ``cutlass``: a process that finds its objects on disk never pays for it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import CacheError

NONE = "none"
RUNTIME_NAME = "libcute_dsl_runtime.so"
_PACKAGE = __package__.rpartition(".")[0]
_VARIANT = re.compile(r"nvidia-cutlass-dsl-libs-cu(\d+)")

#: DSL variables that choose where and what to print; every other CUTE_DSL_ variable enters the key.
_PRINTS_ONLY = re.compile(
    r"CUTE_DSL_(LOG_|PRINT_|KEEP|DUMP_DIR|CACHE_DIR|NO_CACHE|JIT_CACHE|JIT_TIME|DISABLE_FILE_CACHING"
    r"|SHOW_STACKTRACE|FILTER_STACKTRACE|WARNINGS_IGNORE|ENABLE_OPTIMIZATION_WARNINGS)"
)


def digest_of(folders: Mapping[str, Path]) -> str:
    """SHA-256 over the names and contents of all ``.py`` files, each under its folder's label."""
    files: dict[str, Path] = {}
    for label, folder in folders.items():
        for path in folder.rglob("*.py"):
            # A wheel holds schedulers/ inside the package, the source tree beside it: one name.
            files[f"{label}/{path.relative_to(folder).as_posix()}"] = path
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def source_digest() -> str:
    """The digest of this package's source as it is on disk now."""
    folders = {_PACKAGE: Path(__file__).parents[1]}
    spec = importlib.util.find_spec(f"{_PACKAGE}.schedulers")
    if spec is not None and spec.submodule_search_locations:
        folders[f"{_PACKAGE}/schedulers"] = Path(next(iter(spec.submodule_search_locations)))
    return digest_of(folders)


#: Taken at import: an edit made later must not be stored under the digest of the new source, nor
#: code of the new source under the old one.
SOURCE_AT_IMPORT = source_digest()


@functools.cache
def dsl_distributions() -> dict[str, str]:
    """Name -> version of every installed ``nvidia-cutlass-dsl*`` distribution.

    Names are normalised as by PEP 503: wheels spell them with dashes, underscores and capitals.
    """
    versions = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.name or "").lower()
        if name.startswith("nvidia-cutlass-dsl"):
            # Of two of a name, the first on the path is the one that is imported.
            versions.setdefault(name, distribution.version)
    return dict(sorted(versions.items()))


@functools.cache
def ffi_version() -> str:
    """The version of apache-tvm-ffi, or ``"none"``."""
    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:
        return NONE


@functools.cache
def driver_version() -> str:
    """Version that the CUDA driver reports ("13000" for 13.0), or ``"none"`` without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        failed = driver.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return NONE
    return NONE if failed or not version.value else str(version.value)


@functools.cache
def cuda_runtime_version() -> str:
    """The CUDA runtime this process computes with (torch's), or ``"none"``."""
    import torch

    return torch.version.cuda or NONE


def variant() -> str:
    """The CUDA variant of the DSL that a compile in this process uses: ``"cu13"``, or ``"none"``.

    The DSL's own rule: the newest installed one that the driver supports; without a driver, the
    newest one.
    """
    majors = [int(m[1]) for name in dsl_distributions() if (m := _VARIANT.fullmatch(name))]
    if (driver := driver_version()) != NONE:
        majors = [major for major in majors if major <= int(driver) // 1000]
    return f"cu{max(majors)}" if majors else NONE


def dsl_environment() -> dict[str, str]:
    """The DSL's environment variables that can change what it compiles."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("CUTE_DSL_") and not _PRINTS_ONLY.match(name)
    }


def runtime_library() -> Path:
    """The DSL's runtime library that objects of this process's `variant` are linked against.

    Raises:
        CacheError: the DSL's libraries are not installed.
    """
    named = dsl_environment().get("CUTE_DSL_LIBS", "").split(os.pathsep)
    candidates = [Path(path) for path in named if path.endswith(RUNTIME_NAME)]
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = spec.submodule_search_locations if spec is not None else None
    candidates += [Path(root) / variant() / "lib" / RUNTIME_NAME for root in roots or ()]
    for path in candidates:
        if path.is_file():
            return path
    raise CacheError(
        f"{RUNTIME_NAME} ({variant()}): not found; install nvidia-cutlass-dsl[cu13] (extra cu13)"
    )


@functools.cache
def _runtime_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def portable_facts() -> dict[str, str]:
    """Facts that an object depends on anywhere; ahead-of-time objects must match them all."""
    facts = {
        "source": SOURCE_AT_IMPORT,
        "ffi": ffi_version(),
        "variant": variant(),
        "machine": platform.machine(),
    }
    return facts | {f"dsl {name}": version for name, version in dsl_distributions().items()}


def facts() -> dict[str, str]:
    """Everything that the key of a cached object holds besides the kernel and its architecture."""
    library = NONE if variant() == NONE else _runtime_digest(runtime_library())
    host = {
        "driver": driver_version(),
        "cuda runtime": cuda_runtime_version(),
        "dsl runtime library": library,
    }
    environment = {f"environment {name}": value for name, value in dsl_environment().items()}
    return portable_facts() | host | environment
