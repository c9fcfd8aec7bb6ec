"""Compile the kernels of a list ahead of their use, in several processes, into the cache folder.

The DSL compiles one kernel at a time in a process.  Each process here goes through the whole list
and leaves what another one has locked, so the list needs no master; who asks `cache.get` meanwhile
waits for that one kernel alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator

from . import cache
from .kernel import Kernel

#: More would wait for one another's memory and, on most lists, for the longest compile.
MOST = 8


@contextlib.contextmanager
def compiling(kernels: Iterable[Kernel], arch: str, catalogue: str) -> Iterator[int]:
    """Compile what the cache folder lacks in processes that end with the block.

    At most `MOST` of them, and no more than there are CPUs beside this process's own.

    Args:
        kernels: In the order in which they will be needed.
        arch: Such as ``"sm_90a"``.
        catalogue: ``"module:function"``, by which a process finds them among others.

    Yields:
        How many there are: 0 where there is nothing to compile, no folder to compile into
        (CUTE_KERNELS_CACHE=0), or one CPU.

    Raises:
        CacheError, AotError: as `cache.get` does.
    """
    lacking = [kernel.identity for kernel in cache.lacking(kernels, arch)]
    count = min(MOST, len(lacking), len(os.sched_getaffinity(0)) - 1)
    workers: list[subprocess.Popen] = []
    try:
        workers.extend(_worker(lacking, arch, catalogue) for _ in range(count))
        yield len(workers)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


def _worker(identities: list[str], arch: str, catalogue: str) -> subprocess.Popen:
    """A fresh interpreter: a fork would have the locks of this one's threads, and its CUDA."""
    worker = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.together", arch, catalogue],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process, which then ends them
    )
    with contextlib.suppress(BrokenPipeError), worker.stdin as pipe:  # it may have failed at once
        pipe.write(json.dumps(identities).encode())
    return worker


def main(arch: str, catalogue: str) -> None:
    """Compile this process's share of the kernels."""
    module, function = catalogue.split(":")
    kernels = getattr(importlib.import_module(module), function)()
    by_identity = {kernel.identity: kernel for kernel in kernels}
    for identity in json.load(sys.stdin):
        cache.fill(by_identity[identity], arch)


if __name__ == "__main__":
    main(*sys.argv[1:])
