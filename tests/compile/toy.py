"""A kernel that compiles in milliseconds with the C compiler, and helpers of the cache tests.

Its object has the same calling convention as a real one, so linking and loading are the real thing.
"""

import errno
import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from cute_kernels.compile.kernel import Kernel

ARCH = "sm_90a"
REPOSITORY = Path(__file__).parents[2]

needs_linker = pytest.mark.skipif(
    shutil.which("cc") is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="links and loads real objects: needs cc and apache-tvm-ffi",
)
needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="compiles: needs nvidia-cutlass-dsl"
)

_SOURCE = """
#include <stdint.h>
typedef struct {{ int32_t type; uint32_t zero; int64_t value; }} Any;
int __tvm_ffi_{symbol}(void *self, const Any *args, int32_t count, Any *out) {{
  out->type = 1;  /* an integer */
  out->zero = 0;
  out->value = {value};
  return 0;
}}
"""


class Compiled:
    """Compile result, as far as the cache looks: a function that returns ``value``."""

    ir_module = None

    def __init__(self, value: int):
        self.value = value

    def export_to_c(self, path: str, function_name: str, export_only_tvm_ffi_symbols: bool) -> None:
        source = _SOURCE.format(symbol=function_name, value=self.value)
        Path(path).write_bytes(_object(source))


@functools.cache
def _object(source: str) -> bytes:
    """Object file of a C source, compiled once a process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "made.o"
        command = ["cc", "-fPIC", "-c", "-x", "c", "-o", str(out), "-"]
        subprocess.run(command, input=source.encode(), check=True)
        return out.read_bytes()


#: A `_SOURCE` whose object does not link.
UNLINKABLE = "int __tvm_ffi_{symbol}(void) {{ extern int nowhere(void); return nowhere(); }}"


def full(path_or_descriptor, path=None, **_):
    """A disk that is full, in place of ``os.fsync`` or `Compiled.export_to_c`."""
    if path:
        Path(path).write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def swap_link(path: Path) -> None:
    """Replace a file or folder by a symbolic link to it."""
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def kernel(value: int, counter: Path | None = None, before=lambda: None) -> Kernel:
    """A kernel whose function returns ``value``; each build adds a byte to ``counter``."""

    def build() -> Compiled:
        before()
        if counter is not None:
            note(counter)
        return Compiled(value)

    return Kernel("toy", (("value", value),), build)


def note(counter: Path) -> None:
    descriptor = os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, b".")
    os.close(descriptor)


def noted(counter: Path) -> int:
    return counter.stat().st_size if counter.exists() else 0


def is_locked(path: Path) -> bool:
    """Whether someone holds the lock; a second open file conflicts even in one process."""
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def python(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """Runs a script in a fresh interpreter at the repository's root."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUTE_KERNELS_", "CUTE_DSL_"))}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=REPOSITORY,
        env=kept | environment,
        capture_output=True,
        text=True,
    )
