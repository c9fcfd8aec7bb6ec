"""Ahead-of-time kernels: compile a catalogue on any machine, load it where nothing is compiled.

A folder holds ``manifest.json`` and one folder per kernel with one shared library.  The manifest
names what the libraries were compiled from and with, and their digests; it is written last.

An export that fails leaves nothing.  One that is killed leaves the file ``.unfinished``, which it
held locked: by it the next export into that folder knows that it may remove the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import AotError, ArgumentValueError, CacheError, expected
from . import ahead, cache, toolchain
from . import load as binaries
from .ahead import FORMAT, MANIFEST, SYMBOL, digest
from .kernel import Kernel, symbol_of

_UNFINISHED = ".unfinished"
_NOT_EMPTY = "{}: expected a new or empty folder"


def export(
    kernels: Iterable[Kernel],
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
    listed = list(kernels)
    identities = [kernel.identity for kernel in listed]
    if repeated := sorted({name for name in identities if identities.count(name) > 1}):
        raise ArgumentValueError(
            expected("kernels", "each configuration once", ", ".join(repeated))
        )
    if binaries.linker() is None:
        raise AotError("ahead-of-time export needs a linker (cc, gcc or clang): none was found")
    if toolchain.source_digest() != toolchain.SOURCE_AT_IMPORT:
        raise AotError("the package's source changed since it was imported: start again")
    records = []
    with _made(out), _held(out):
        for kernel in listed:
            records.append(_export_one(kernel, arch, out))
            if progress is not None:
                progress(len(records), len(listed), records[-1])
        with _named(out):
            _write_manifest(arch, records, out)
    return records


def load(folder: Path, arch: str | None = None) -> None:
    """Loads what `export` wrote, so that `cache.get` finds it; see `ahead.read`."""
    cache.register_ahead(ahead.read(folder, arch), folder.absolute())


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
    with contextlib.ExitStack() as locks:
        with _named(out):
            _lock(out, locks)
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


def _lock(out: Path, locks: contextlib.ExitStack) -> None:
    """Locks the file of ``out`` that says unfinished, made in an empty folder."""
    names = os.listdir(out)
    if names and _UNFINISHED not in names:
        raise AotError(_NOT_EMPTY.format(out))
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if names else os.O_CREAT | os.O_EXCL)
    try:
        lock = os.open(out / _UNFINISHED, flags, 0o600)
        locks.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileExistsError, FileNotFoundError, BlockingIOError):
        raise AotError(f"{out}: another export is writing it") from None


def _sweep(out: Path) -> None:
    """Removes what an export writes into ``out``, and nothing else."""
    for name in (MANIFEST, f"{MANIFEST}.tmp"):
        (out / name).unlink(missing_ok=True)
    for path in out.iterdir():
        if SYMBOL.fullmatch(path.name):
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


def _export_one(kernel: Kernel, arch: str, out: Path) -> dict[str, Any]:
    compiled = cache.build(kernel)
    symbol = symbol_of(kernel, arch)
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
        "format": FORMAT,
        "arch": arch,
        "facts": toolchain.portable_facts(),
        "kernels": records,
    }
    text = json.dumps(body | {"digest": digest(body)}, indent=1, sort_keys=True)
    temporary = out / f"{MANIFEST}.tmp"
    with open(temporary, "x", encoding="utf-8", opener=_readable_by_all) as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, out / MANIFEST)


def _readable_by_all(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)
