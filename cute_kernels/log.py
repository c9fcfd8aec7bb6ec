"""CUTE_KERNELS_LOG=1: what runs, what is copied and what is compiled, each said once.

Lines go to the logger ``cute_kernels`` at level INFO, and so to the handlers of the program; to
standard error where it has none.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from . import settings

if TYPE_CHECKING:
    import torch

LOGGER = logging.getLogger("cute_kernels")
_copies: set[tuple[str, str, str]] = set()


def say(message: str, *args: object) -> None:
    """One line, if CUTE_KERNELS_LOG=1; ``args`` are formatted as by `logging`."""
    if settings.log():
        _open()
        LOGGER.info(message, *args)


def copied(kernel: str, argument: str, t: torch.Tensor, why: str) -> None:
    """Says that a launcher copies an argument: once for each (kernel, argument, why).

    Args:
        kernel: The launcher's name in `dispatch`.
        argument: The launcher's name of ``t``, which is described as it comes.
        why: What it would have to be; the same text for every shape.
    """
    if not settings.log() or (kernel, argument, why) in _copies:
        return
    _copies.add((kernel, argument, why))
    shape, strides, dtype = list(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")
    past = t.data_ptr() % 16
    say(
        "%s: copies %s: %s %s, strides %s, %d bytes past a multiple of 16; wanted: %s",
        *(kernel, argument, dtype, shape, strides, past, why),
    )


def contiguous(kernel: str, argument: str, t: torch.Tensor, why: str) -> torch.Tensor:
    """``t.contiguous()``, and says so if that is a copy; see `copied`."""
    if t.is_contiguous():
        return t
    copied(kernel, argument, t, why)
    return t.contiguous()


@functools.cache
def _open() -> None:
    """Lets INFO through, and to standard error while the program has no handlers of its own."""
    LOGGER.setLevel(min(logging.INFO, LOGGER.level or logging.INFO))
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        handler.addFilter(lambda _: not logging.root.handlers)
        LOGGER.addHandler(handler)
