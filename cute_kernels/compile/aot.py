"""Ahead-of-time kernels: compile a catalogue on any machine, load it where nothing is compiled.

A folder holds ``manifest.json`` and one folder per kernel with one shared library.  The manifest
names what the libraries were compiled from and with, and their digests; it is written last.  The
digests find damage, not forgery: whoever names the folder vouches for who wrote it.

An export that fails leaves nothing.  One that is killed leaves the file ``.unfinished``, which it
held locked: by it the next export into that folder knows that it may remove the rest.

The host that loads needs apache-tvm-ffi and the DSL's runtime library (the
``nvidia-cutlass-dsl-libs-cu*`` wheel), no linker, and never imports ``cutlass``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import AotError, ArgumentValueError, CacheError, CuteKernelsError, expected
from . import cache, toolchain
from . import load as binaries

MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished"
_NOT_EMPTY = "{}: expected a new or empty folder"
_FORMAT = 1
_FIELDS = {"arch": str, "facts": dict, "kernels": list}
_RECORD_FIELDS = {"name": str, "constexpr": list, "symbol": str, "file": str, "sha256": str}
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
        out: A folder that is new or empty, or in which an export was killed.
        progress: Called after each kernel with how many are done, how many there are, its record.

    Returns:
        One record per kernel: name, constexpr, key, symbol, file, size, sha256.

    Raises:
        AotError: no linker, ``out`` is not empty, another export is writing it, it cannot be
            written (a full disk, say), or the source was edited since import.
        ArgumentValueError: two kernels are the same.
        Whatever `Kernel.build` raises.
    """
    chosen = list(kernels)
    identities = [kernel.identity for kernel in chosen]
    if twice := sorted({name for name in identities if identities.count(name) > 1}):
        raise ArgumentValueError(expected("kernels", "each configuration once", ", ".join(twice)))
    if binaries.linker() is None:
        raise AotError("ahead-of-time export needs a linker (cc, gcc or clang): none was found")
    if toolchain.source_digest() != toolchain.SOURCE_AT_IMPORT:
        raise AotError("the package's source changed since it was imported: start again")
    records = []
    with _made(out), _held(out):
        for kernel in chosen:
            records.append(_export_one(kernel, arch, out))
            if progress is not None:
                progress(len(records), len(chosen), records[-1])
        with _named(out):
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
        identity = _identity(folder, record)
        path = _checked_file(folder, record)
        functions[identity, manifest["arch"]] = binaries.function(path, record["symbol"])
    cache.register_ahead(functions, folder.absolute())


@contextlib.contextmanager
def _made(out: Path) -> Iterator[None]:
    """Makes ``out`` where it is not; if the block fails, what was made is removed."""
    absent = [path for path in (out, *out.parents) if not path.exists()]
    try:
        with _named(out):
            out.mkdir(mode=0o755, parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in absent:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


@contextlib.contextmanager
def _held(out: Path) -> Iterator[None]:
    """Holds ``out`` against other exports, swept; if the block fails, it is swept again."""
    with contextlib.ExitStack() as held:
        with _named(out):
            _lock(out, held)
            _sweep(out)
            if os.listdir(out) != [_UNFINISHED]:
                raise AotError(_NOT_EMPTY.format(out))
        try:
            yield
        except BaseException:
            _sweep(out)
            raise
        finally:
            (out / _UNFINISHED).unlink()


def _lock(out: Path, held: contextlib.ExitStack) -> None:
    """Locks the file of ``out`` that says unfinished, made in an empty folder."""
    names = os.listdir(out)
    if names and _UNFINISHED not in names:
        raise AotError(_NOT_EMPTY.format(out))
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if names else os.O_CREAT | os.O_EXCL)
    try:
        lock = os.open(out / _UNFINISHED, flags, 0o600)
        held.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileExistsError, FileNotFoundError, BlockingIOError):
        raise AotError(f"{out}: another export is writing it") from None


def _sweep(out: Path) -> None:
    """Removes what an export writes into ``out``, and nothing else."""
    for name in (MANIFEST, f"{MANIFEST}.tmp"):
        (out / name).unlink(missing_ok=True)
    for path in out.iterdir():
        if _SYMBOL.fullmatch(path.name):
            shutil.rmtree(path)


@contextlib.contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turns an error of the file system or of the linker into an AotError that names the folder."""
    try:
        yield
    except OSError as error:
        raise AotError(f"{folder}: {error.strerror or error}") from error
    except CacheError as error:
        raise AotError(f"{folder}: {error}") from error


def _export_one(kernel: cache.Kernel, arch: str, out: Path) -> dict[str, Any]:
    compiled = cache.build(kernel)
    symbol = cache.symbol(kernel, arch)
    folder = out / symbol
    with _named(out):
        folder.mkdir(mode=0o755)
        path = binaries.build_binary(compiled, symbol, folder)
        path.with_suffix(binaries.OBJECT).unlink()
        path.chmod(0o644)
        content, key = path.read_bytes(), cache.key(kernel, arch)
    return {
        "name": kernel.name,
        "constexpr": [list(item) for item in kernel.constexpr],
        "key": key,
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
    except (ValueError, RecursionError) as error:
        raise AotError(f"{path}: it is damaged: {error}") from error
    _check_fields(path, body, {"digest": str, "format": int})
    if body.pop("digest") != _digest(body):
        raise AotError(f"{path}: it is damaged: its digest is not that of its content")
    if body["format"] != _FORMAT:
        raise AotError(f"{path}: expected format {_FORMAT}, got {body['format']}")
    _check_fields(path, body, _FIELDS)
    for record in body["kernels"]:
        _check_fields(path, record, _RECORD_FIELDS)
    return body


def _check_fields(path: Path, found: Any, fields: Mapping[str, type]) -> None:
    """AotError unless ``found``, of the JSON in ``path``, is an object with these fields."""
    if not isinstance(found, dict):
        want = f"an object with {', '.join(fields)}"
        raise AotError(f"{path}: it is damaged: {expected('JSON', want, type(found).__name__)}")
    for name, kind in fields.items():
        if type(found.get(name)) is not kind:
            got = type(found[name]).__name__ if name in found else "none"
            raise AotError(f"{path}: it is damaged: {expected(name, kind.__name__, got)}")


def _identity(folder: Path, record: dict[str, Any]) -> str:
    try:
        constexpr = tuple((name, value) for name, value in record["constexpr"])
        return cache.Kernel(record["name"], constexpr, build=_never).identity
    except (CuteKernelsError, TypeError, ValueError) as error:
        raise AotError(f"{folder / MANIFEST}: it is damaged: {error}") from error


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
