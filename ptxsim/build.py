"""Builds libptxsim.so from csrc/, once per content, into a cache folder of the user.

Any number of processes may ask at once: one builds under a file lock, in a folder of its own that
it renames when everything is there; the others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .errors import PtxsimError

SOURCES = Path(__file__).resolve().parent / "csrc"
_FLAGS = ["-O2", "-march=native", "-std=c++17", "-fPIC", "-pthread"]
_UNUSED_SECONDS = 7 * 86400


@dataclass(frozen=True)
class Built:
    """The library, and the object to link next to each object that the DSL exports."""

    library: Path
    thunks: Path

    def complete(self) -> bool:
        return self.library.exists() and self.thunks.exists()


def compiler() -> str:
    """The C++ compiler: $CXX or g++."""
    return os.environ.get("CXX") or "g++"


def cache_dir() -> Path:
    """$PTXSIM_CACHE_DIR, else `ptxsim` in the user's cache folder, else in the temporary folder.

    Errors: PtxsimError if $PTXSIM_CACHE_DIR cannot be written, or the last is someone else's.
    """
    wanted = os.environ.get("PTXSIM_CACHE_DIR")
    if wanted:
        if not _writable(Path(wanted)):
            raise PtxsimError(f"ptxsim: PTXSIM_CACHE_DIR={wanted} is not a folder we can write")
        return Path(wanted).resolve()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if _writable(Path(home) / "ptxsim"):
        return Path(home).resolve() / "ptxsim"
    shared = Path(tempfile.gettempdir()) / f"ptxsim-{os.getuid()}"
    if not _writable(shared) or shared.stat().st_uid != os.getuid():
        raise PtxsimError(f"ptxsim: no cache folder: neither {home} nor {shared} is ours to write")
    return shared


def build() -> Built:
    """The library, built if this content, compiler and CPU have none yet.

    $PTXSIM_LIBRARY names a prebuilt one, with thunks.o beside it.
    """
    prebuilt = os.environ.get("PTXSIM_LIBRARY")
    if prebuilt:
        library = Path(prebuilt).resolve()
        return Built(library, library.with_name("thunks.o"))
    cache = cache_dir()
    folder = cache / _key()
    built = Built(folder / "libptxsim.so", folder / "thunks.o")
    if not built.complete():
        with _lock(cache / "build.lock"):
            if not built.complete():
                _build_into(folder)
                _prune(cache, folder)
    with contextlib.suppress(OSError):
        os.utime(folder)  # the time of the last use, for _prune
    return built


def link(inputs: list[str | Path], output: Path) -> subprocess.CompletedProcess[str]:
    """Links objects and libraries into one shared library; the caller looks at the exit status."""
    command = [compiler(), "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-o", str(output)]
    return _run([*command, *map(str, inputs), "-lm"])


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise PtxsimError(f"ptxsim: the C++ compiler {command[0]} does not run: {error}") from None


def _compile(arguments: list[str], what: str) -> None:
    done = _run([compiler(), *arguments])
    if done.returncode:
        raise PtxsimError(f"ptxsim: building {what} failed:\n{done.stdout[-4000:]}")


def _flags() -> list[str]:
    return [*_FLAGS, *os.environ.get("PTXSIM_CXXFLAGS", "").split()]


def _cpu_flags() -> str:
    """A line that differs between CPUs on which -march=native code differs."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return line
    return ""


def _key() -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = _run([compiler(), "--version"]).stdout
    digest.update(repr((_flags(), compiler(), version, _cpu_flags())).encode())
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system drops it when the process dies."""
    import fcntl  # absent on Windows, where this module must still import

    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build_into(folder: Path) -> None:
    """Builds in a folder beside `folder`, then renames it.  The caller holds the lock."""
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix="build-"))
    try:
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
        objects = [work / f"{source.stem}.o" for source in sources]

        def one(pair: tuple[Path, Path]) -> None:
            source, target = pair
            _compile([*_flags(), "-c", str(source), "-o", str(target)], source.name)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(one, zip(sources, objects, strict=True)))
        library, thunks = work / "libptxsim.so", work / "thunks.o"
        _compile(["-shared", "-pthread", *map(str, objects), "-o", str(library)], library.name)
        flags = ["-O1", "-std=c++17", "-fPIC", "-DPTXSIM_THUNKS"]
        _compile([*flags, "-c", str(SOURCES / "runtime.cpp"), "-o", str(thunks)], thunks.name)
        for path in objects:
            path.unlink()
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete one that someone left
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _prune(cache: Path, current: Path) -> None:
    """Removes builds unused for a week, and what killed builds left.  The caller holds the lock."""
    for library in cache.glob("*/libptxsim.so"):
        folder = library.parent
        with contextlib.suppress(OSError):
            unused = time.time() - folder.stat().st_mtime > _UNUSED_SECONDS
            if folder != current and unused:
                shutil.rmtree(folder, ignore_errors=True)
    for folder in cache.glob("build-*"):
        shutil.rmtree(folder, ignore_errors=True)
