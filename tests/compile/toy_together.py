"""Kernels of a folder of notes, which processes that compile together find by name."""

from __future__ import annotations

import os
import time
from functools import partial

from cute_kernels.compile.kernel import Kernel
from tests.compile import toy
from tests.hang import HANG_SECONDS

COUNT = 6
#: The environment variable with the folder.
NOTES = "TOY_NOTES"
CATALOGUE = f"{__name__}:kernels"


def _build(value: int) -> toy.Compiled:
    """Notes who builds; meets one other process inside a build, or waits for it in vain."""
    folder = os.environ[NOTES]
    open(f"{folder}/built-{value}-{os.getpid()}", "x").close()
    for _ in range(100 * HANG_SECONDS):
        if len({name.split("-")[2] for name in os.listdir(folder)}) >= 2:
            return toy.Compiled(value)
        time.sleep(0.01)
    raise AssertionError("one process does all")


def kernels() -> list[Kernel]:
    """Kernel i returns i."""
    return [Kernel("toy", (("value", i),), partial(_build, i)) for i in range(COUNT)]
