"""Compiled kernels on disk: the workers of a run share them, and the next run compiles none again.

The folder is pytest's cache (``pytest --cache-clear`` empties it), or a temporary one without it.
An entry is named by the digest of everything that it was made from, and appears by one rename.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests import import_graph

#: Seconds after which an entry that no run has used goes.
UNUSED = 7 * 24 * 3600
_TEMPORARY = tempfile.TemporaryDirectory(prefix="kernels-")
_folder = Path(_TEMPORARY.name)


def keep_in(folder: Path) -> None:
    """Keep entries in a folder from now on, and remove those that were not used for a week."""
    global _folder
    _folder = folder
    oldest = time.time() - UNUSED
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another worker removes the same
            if path.name != "triton" and path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)


def triton_folder() -> str:
    """Folder of Triton's own cache, whose keys are digests of sources too."""
    return str(_folder / "triton")


def entry(made_from: tuple[str, ...], make: Callable[[Path], None]) -> Path:
    """The folder that ``make(folder)`` fills, made unless there is one from the same."""
    path = _folder / hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:40]
    if path.is_dir():
        os.utime(path)
        return path
    new = Path(tempfile.mkdtemp(dir=_folder, prefix="new-"))
    try:
        make(new)
        new.rename(path)
    except OSError:
        if not path.is_dir():  # else another worker was faster
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return path


def source_digest(module: str, paths: dict[str, Path] | None = None) -> str:
    """SHA-256 over the code of a module of the package and all of ours that it imports.

    paths: module below the package -> file; None: those of the tree.
    """
    paths = paths or import_graph.modules()
    left, closure = {module.removeprefix("cute_kernels.")}, set()
    while left:
        name = left.pop()
        closure.add(name)
        left |= import_graph.imports(name) - closure
    total = hashlib.sha256()
    add_code(total, {name: paths[name] for name in closure})
    return total.hexdigest()


def add_code(total: hashlib._Hash, files: Mapping[str, Path]) -> None:
    """Add the names of files, and their code without comments, to a digest."""
    from verify.sources import code

    for name, path in sorted(files.items()):
        content = code(path)
        total.update(f"{name}\0{len(content)}\0".encode() + content)


@functools.cache
def _toolchain() -> str:
    """Everything but our kernels' code on which a compile depends."""
    from cute_kernels.compile import toolchain

    return json.dumps({n: v for n, v in toolchain.facts().items() if n != "source"})


def simulated(module: str, config: object) -> Callable:
    """``build(config)`` of a kernel's module for ptxsim, compiled unless it is stored."""
    import ptxsim

    compiled = []

    def make(folder: Path) -> None:
        build = importlib.import_module(module).build
        compiled.append(build(config, compile=ptxsim.compile))
        compiled[0].export_to_c(str(folder / "kernel.o"), function_name="kernel")
        for path in compiled[0].ptx_paths:
            shutil.copy(path, folder)

    digest = _digest_of(module)
    path = entry(("simulated", module, digest, repr(config), _toolchain()), make)
    if compiled:
        return compiled[0]
    return ptxsim.run_object(path / "kernel.o", sorted(path.glob("*.ptx")), "kernel")


_digest_of = functools.cache(source_digest)


def pickled(made_from: tuple[str, ...], compute: Callable[[], object]) -> object:
    """The value of ``compute()``, which an earlier run may have pickled."""

    def make(folder: Path) -> None:
        (folder / "value").write_bytes(pickle.dumps(compute()))

    return pickle.loads((entry((*made_from, _toolchain()), make) / "value").read_bytes())
