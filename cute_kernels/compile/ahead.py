"""Read a folder of kernels that were compiled ahead of time (`aot` writes it).

The digests in its manifest find damage, not forgery: whoever names the folder vouches for who wrote
it.  The host needs apache-tvm-ffi and the DSL's runtime library (the wheel
``nvidia-cutlass-dsl-libs-cu*``), no linker, and never imports ``cutlass``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import AotError, CuteKernelsError, expected
from . import load, toolchain
from .kernel import Kernel

MANIFEST = "manifest.json"
FORMAT = 1
#: The name of a kernel's folder, and of the function in its library.
SYMBOL = re.compile(r"ck_[a-z0-9_]+_[0-9a-f]{16}")
_FIELDS = {"arch": str, "facts": dict, "kernels": list}
_RECORD_FIELDS = {"name": str, "constexpr": list, "symbol": str, "file": str, "sha256": str}


def read(folder: Path, arch: str | None = None) -> dict[tuple[str, str], Callable[..., Any]]:
    """The functions in a folder, by (identity, arch); none of them is compiled here.

    Args:
        folder: A folder written by `aot.export`, by a trusted hand.
        arch: If given, the architecture that the folder must hold.

    Raises:
        AotError: the folder is damaged, others can write to it, or it was compiled from another
            source, with another DSL, FFI or CUDA variant, for another machine or architecture; the
            message says which.
    """
    manifest = _read_manifest(folder)
    if differs := _differences(manifest, arch):
        raise AotError(f"{folder}: " + "; ".join(differs))
    functions = {}
    for record in manifest["kernels"]:
        identity = _identity(folder, record)
        path = _checked_file(folder, record)
        functions[identity, manifest["arch"]] = load.function(path, record["symbol"])
    return functions


def digest(body: dict[str, Any]) -> str:
    """Digest of a manifest without its digest field."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    _check_folder(folder.resolve())
    try:
        body = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise AotError(f"{path}: it is damaged: {error}") from error
    _check_fields(path, body, {"digest": str, "format": int})
    if body.pop("digest") != digest(body):
        raise AotError(f"{path}: it is damaged: its digest is not that of its content")
    if body["format"] != FORMAT:
        raise AotError(f"{path}: expected format {FORMAT}, got {body['format']}")
    _check_fields(path, body, _FIELDS)
    for record in body["kernels"]:
        _check_fields(path, record, _RECORD_FIELDS)
    return body


def _check_fields(path: Path, body: Any, fields: Mapping[str, type]) -> None:
    """Check that ``body``, of the JSON in ``path``, is an object with these fields."""
    if not isinstance(body, dict):
        want = f"an object with {', '.join(fields)}"
        raise AotError(f"{path}: it is damaged: {expected('JSON', want, type(body).__name__)}")
    for name, kind in fields.items():
        if type(body.get(name)) is not kind:
            got = type(body[name]).__name__ if name in body else "none"
            raise AotError(f"{path}: it is damaged: {expected(name, kind.__name__, got)}")


def _identity(folder: Path, record: dict[str, Any]) -> str:
    try:
        constexpr = tuple((name, value) for name, value in record["constexpr"])
        return Kernel(record["name"], constexpr, build=_never).identity
    except (CuteKernelsError, TypeError, ValueError) as error:
        raise AotError(f"{folder / MANIFEST}: it is damaged: {error}") from error


def _differences(manifest: dict[str, Any], arch: str | None) -> list[str]:
    host_facts = toolchain.portable_facts()
    differences = []
    if arch is not None and manifest["arch"] != arch:
        differences.append(f"arch: compiled for {manifest['arch']}, asked for {arch}")
    for name, theirs in manifest["facts"].items():
        # A host that only loads may lack parts of the DSL; those it has must be the same.
        ours = host_facts.get(name, theirs if name.startswith("dsl ") else toolchain.NONE)
        if ours != theirs:
            differences.append(f"{name}: compiled with {theirs}, here is {ours}")
    return differences


def _checked_file(folder: Path, record: dict[str, Any]) -> Path:
    symbol, file = record["symbol"], record["file"]
    if not SYMBOL.fullmatch(symbol) or file != f"{symbol}/kernel{load.LIBRARY}":
        raise AotError(f"{folder}: {file} is not a name that export writes")
    path = folder / file
    _check_folder(path.parent)
    if hashlib.sha256(_read(path)).hexdigest() != record["sha256"]:
        raise AotError(f"{path}: it is damaged: its digest is not the one in {MANIFEST}")
    return path


def _check_folder(folder: Path) -> None:
    try:
        info = os.lstat(folder)
    except OSError as error:
        raise AotError(f"{folder}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise AotError(f"{folder}: it is not a folder")
    _check_mode(folder, info)


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AotError(f"{path}: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise AotError(f"{path}: it is not a regular file")
        _check_mode(path, info)
        return file.read()


def _check_mode(path: Path, info: os.stat_result) -> None:
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(info.st_mode)
        raise AotError(f"{path}: its mode {mode:04o} lets group or others write; chmod go-w")


def _never() -> None:
    raise AssertionError("a kernel that was compiled ahead of time is not built")
