"""Ahead-of-time kernels: compile a catalogue on any machine, load it where nothing is compiled.

A folder holds ``manifest.json`` and one folder per kernel with one shared library.  The manifest
names what the libraries were compiled from and with, and their digests; it is written last.  The
digests find damage, not forgery: whoever names the folder vouches for who wrote it.

The host that loads needs apache-tvm-ffi and the DSL's runtime library (the
``nvidia-cutlass-dsl-libs-cu*`` wheel), no linker, and never imports ``cutlass``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import AotError, ArgumentValueError, expected
from . import cache, toolchain
from . import load as binaries

MANIFEST = "manifest.json"
_FORMAT = 1
_SYMBOL = re.compile(r"ck_[a-z0-9_]+_[0-9a-f]{16}")


def export(
    kernels: Iterable[cache.Kernel],
    arch: str,
    out: Path,
    progress: Callable[[int, int, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Compiles kernels for ``arch`` into ``out``; no GPU is needed.

    Args:
        kernels: The catalogue, each configuration once.
        arch: Such as ``"sm_90a"``; every `Kernel.build` must compile for it.
        out: A folder that is new or empty.
        progress: Called after each kernel with how many are done, how many there are, its record.

    Returns:
        One record per kernel: name, constexpr, key, symbol, file, size, sha256.

    Raises:
        AotError: no linker, ``out`` is not empty, or the source was edited since import.
        ArgumentValueError: two kernels are the same.
    """
    chosen = list(kernels)
    identities = [kernel.identity for kernel in chosen]
    if twice := sorted({name for name in identities if identities.count(name) > 1}):
        raise ArgumentValueError(expected("kernels", "each configuration once", ", ".join(twice)))
    if binaries.linker() is None:
        raise AotError("ahead-of-time export needs a linker (cc, gcc or clang): none was found")
    if toolchain.source_digest() != toolchain.SOURCE_AT_IMPORT:
        raise AotError("the package's source changed since it was imported: start again")
    out.mkdir(mode=0o755, parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise AotError(f"{out}: expected a new or empty folder")
    records = []
    for kernel in chosen:
        records.append(_export_one(kernel, arch, out))
        if progress is not None:
            progress(len(records), len(chosen), records[-1])
    _write_manifest(arch, records, out)
    return records


def load(folder: Path, arch: str | None = None) -> None:
    """Loads what `export` wrote, so that `cache.get` finds it and compiles none of it.

    Args:
        folder: A folder written by `export`, by a trusted hand.
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
        path = _checked_file(folder, record)
        constexpr = tuple((name, value) for name, value in record["constexpr"])
        identity = cache.Kernel(record["name"], constexpr, build=_never).identity
        functions[identity, manifest["arch"]] = binaries.function(path, record["symbol"])
    cache.register_ahead(functions, folder.absolute())


def _export_one(kernel: cache.Kernel, arch: str, out: Path) -> dict[str, Any]:
    symbol = cache.symbol(kernel, arch)
    folder = out / symbol
    folder.mkdir(mode=0o755)
    path = binaries.build_binary(cache.build(kernel), symbol, folder)
    path.with_suffix(binaries.OBJECT).unlink()
    path.chmod(0o644)
    content = path.read_bytes()
    return {
        "name": kernel.name,
        "constexpr": [list(item) for item in kernel.constexpr],
        "key": cache.key(kernel, arch),
        "symbol": symbol,
        "file": f"{symbol}/{path.name}",
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _write_manifest(arch: str, records: list[dict[str, Any]], out: Path) -> None:
    body = {
        "format": _FORMAT,
        "arch": arch,
        "facts": toolchain.portable_facts(),
        "kernels": records,
    }
    text = json.dumps(body | {"digest": _digest(body)}, indent=1, sort_keys=True)
    temporary = out / f"{MANIFEST}.tmp"
    with open(temporary, "x", encoding="utf-8", opener=_readable_by_all) as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, out / MANIFEST)


def _readable_by_all(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    _check_folder(folder.resolve())
    try:
        body = json.loads(_read(path))
        digest = body.pop("digest")
    except (ValueError, KeyError, AttributeError) as error:
        raise AotError(f"{path}: it is damaged: {error}") from error
    if digest != _digest(body):
        raise AotError(f"{path}: it is damaged: its digest is not that of its content")
    if body["format"] != _FORMAT:
        raise AotError(f"{path}: expected format {_FORMAT}, got {body['format']}")
    return body


def _differences(manifest: dict[str, Any], arch: str | None) -> list[str]:
    here = toolchain.portable_facts()
    found = []
    if arch is not None and manifest["arch"] != arch:
        found.append(f"arch: compiled for {manifest['arch']}, asked for {arch}")
    for name, theirs in manifest["facts"].items():
        # A host that only loads may lack parts of the DSL; those it has must be the same.
        ours = here.get(name, theirs if name.startswith("dsl ") else toolchain.NONE)
        if ours != theirs:
            found.append(f"{name}: compiled with {theirs}, here is {ours}")
    return found


def _checked_file(folder: Path, record: dict[str, Any]) -> Path:
    symbol, file = record["symbol"], record["file"]
    if not _SYMBOL.fullmatch(symbol) or file != f"{symbol}/kernel{binaries.LIBRARY}":
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
