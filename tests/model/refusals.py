"""What an error says, as one line of a table: its type ... and pieces of its message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from cute_kernels import errors


def agrees(said: str, message: str) -> bool:
    """Whether a message begins as ``said`` does, up to " ... ", and holds what comes behind.

    ``|`` is between beginnings that it may have.
    """
    starts, *pieces = said.split(" ... ")
    return message.startswith(tuple(starts.split("|"))) and all(one in message for one in pieces)


@contextlib.contextmanager
def raises(said: str) -> Iterator[None]:
    """Inside, an error of ours is raised, whose type and message agree with ``said``."""
    with pytest.raises(errors.CuteKernelsError) as caught:
        yield
    message = f"{type(caught.value).__name__}: {caught.value}"
    assert agrees(said, message), message
