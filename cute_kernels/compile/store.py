"""The folder of compiled kernels on disk: what is loaded from it was written by this user.

Per entry: ``<stem>.so`` (or ``.o``), ``<stem>.manifest`` and ``<stem>.lock``.  A manifest is one
line of JSON with the file's size and SHA-256, and one line with the SHA-256 of the first.  It is
renamed into place last: that commits the entry.  Files of an unfinished write start with
``.<stem>.``; the next holder of the lock removes them.

Everything found there is refused unless it is a regular file of this user that nobody else can
write.  Digests find damage, not forgery: another process of the same user is trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CacheError

_FORMAT = 2
_MANIFEST_LIMIT = 1 << 20
_ADVICE = "set CUTE_KERNELS_CACHE_DIR to a folder of your own, or CUTE_KERNELS_CACHE=0"


class BadEntry(Exception):
    """Reason not to load an entry on disk.  Internal: the cache compiles the kernel again."""


@dataclass(frozen=True)
class Entry:
    """One verified file, and the name of the function in it."""

    path: Path
    symbol: str


class Store:
    """A cache folder, created with mode 0700 if absent.

    Raises:
        CacheError: ``root`` is a symbolic link, belongs to someone else, can be written by group or
            others, lies under a folder that anyone may rename, or cannot be created.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        with _named(self.root):
            _make_private(self.root)
            _check_root(self.root)

    def read(self, stem: str) -> Entry | None:
        """The entry, its size and digests checked; None if there is none.

        Raises:
            BadEntry: there is one, but it is damaged, or not this user's.
        """
        with _named(self.root):
            try:
                text = _read_private(self._path(stem, ".manifest"), _MANIFEST_LIMIT)
            except FileNotFoundError:
                return None
            body = self._verified(text, stem)
            path = self._path(stem, body["suffix"])
            try:
                content = _read_private(path, body["size"])
            except FileNotFoundError:
                raise BadEntry(f"{path.name} is missing") from None
        if len(content) != body["size"] or _sha256(content) != body["sha256"]:
            raise BadEntry(f"{path.name} is not what its manifest describes")
        return Entry(path, body["symbol"])

    def write(self, stem: str, binary: Path, symbol: str, about: Mapping[str, object]) -> Entry:
        """Stores the file ``binary`` under ``stem``; the caller holds the lock of ``stem``.

        ``about`` is kept in the manifest for people who read it.
        """
        with _named(self.root):
            content = binary.read_bytes()
            body = {
                "format": _FORMAT,
                "stem": stem,
                "suffix": binary.suffix,
                "size": len(content),
                "sha256": _sha256(content),
                "symbol": symbol,
                "about": about,
            }
            line = json.dumps(body, sort_keys=True).encode()
            path = self._path(stem, binary.suffix)
            self._replace(path, content)
            manifest = b"%b\n%b\n" % (line, _sha256(line).encode())
            self._replace(self._path(stem, ".manifest"), manifest)
        return Entry(path, symbol)

    @contextlib.contextmanager
    def locked(self, stem: str, wait: bool = True) -> Iterator[bool]:
        """Holds the file lock of ``stem`` against other processes, and sweeps unfinished writes.

        True; or at once False, with no lock, if another process holds it and ``wait`` is false.
        The kernel drops the lock when its holder dies; the empty lock file stays.
        """
        path = self._path(stem, ".lock")
        with _named(path):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with _named(path):
                if why := _not_private(os.fstat(lock)):
                    raise _refusal(path, why)
                free = _flocked(lock, wait)
                if free:
                    self._sweep(stem)
            yield free
        finally:
            # Unlocked by name, not by closing: a process forked meanwhile has a copy of the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    @contextlib.contextmanager
    def scratch(self, stem: str) -> Iterator[Path]:
        """An empty private folder, removed afterwards; the caller holds the lock of ``stem``.

        An OSError of the block, a full disk say, becomes a CacheError.
        """
        with _named(self.root):
            folder = tempfile.mkdtemp(prefix=f".{stem}.", dir=self.root)
            try:
                yield Path(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _path(self, stem: str, suffix: str) -> Path:
        return self.root / f"{stem}{suffix}"

    def _verified(self, text: bytes, stem: str) -> dict:
        line, _, digest = text.partition(b"\n")
        if digest != _sha256(line).encode() + b"\n":
            raise BadEntry(f"the manifest {stem} is damaged")
        body = json.loads(line)
        if body["stem"] != stem or body["format"] != _FORMAT:
            raise BadEntry(f"the manifest {stem} is that of {body['stem']}")
        return body

    def _replace(self, path: Path, content: bytes) -> None:
        """Content first, name second: at any kill there is the old file or the whole new one."""
        temporary = self.root / f".{path.stem}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _sweep(self, stem: str) -> None:
        for path in self.root.glob(f".{stem}.*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _flocked(lock: int, wait: bool) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _refusal(path: Path, why: object) -> CacheError:
    return CacheError(f"kernel cache {path}: {why}; {_ADVICE}")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turns an OSError into a CacheError that names the folder and what to do."""
    try:
        yield
    except OSError as error:
        raise _refusal(path, error) from error


def _make_private(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _check_root(root: Path) -> None:
    info = os.lstat(root)
    if stat.S_ISLNK(info.st_mode):
        raise _refusal(root, "it is a symbolic link")
    if not stat.S_ISDIR(info.st_mode):
        raise _refusal(root, "it is not a folder")
    if why := _foreign(info):
        raise _refusal(root, why)
    for parent in Path(os.path.realpath(root)).parents:
        mode = os.stat(parent).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _refusal(root, f"anyone may rename what is in {parent}")


def _foreign(info: os.stat_result) -> str | None:
    if info.st_uid != os.geteuid():
        return f"it belongs to user {info.st_uid}, not to user {os.geteuid()}"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its mode {stat.S_IMODE(info.st_mode):04o} lets group or others write"
    return None


def _not_private(info: os.stat_result) -> str | None:
    return _foreign(info) if stat.S_ISREG(info.st_mode) else "it is not a regular file"


def _read_private(path: Path, limit: int) -> bytes:
    """The content of a regular file of ours, at most ``limit`` + 1 bytes of it.

    Raises:
        FileNotFoundError: there is none.
        BadEntry: what is there is a link, not regular, or not private to this user.
    """
    # O_NONBLOCK: a FIFO in the file's place must not hang us.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadEntry(f"{path.name}: {error.strerror}") from None
    with open(descriptor, "rb") as file:
        if why := _not_private(os.fstat(descriptor)):
            raise BadEntry(f"{path.name}: {why}")
        return file.read(limit + 1)
