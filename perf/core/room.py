"""Calls whose frames do not meet the end of a chunk of Python's stack.

CPython 3.11 and later keep the frames of a thread in chunks of 16 KB, or of the power of two that
holds a wider frame.  Until python/cpython#142183 was mended (3.11 and 3.12 never were) a chunk is
unmapped when its first frame ends, so each call made where a chunk is full maps one, faults on its
page and unmaps it.  Whether a loop does so is decided by how deep it runs, so it is nothing that a
comparison should measure.
"""

from __future__ import annotations

from collections.abc import Callable

#: Of 8 bytes.  A frame of more than half a MiB gets a chunk of one MiB, half of which stays free.
_SLOTS = 66_000


def with_room(call: Callable, *args: object) -> object:
    """``call(*args)``, with room for the frames of all that it calls."""
    return call(*args)


with_room.__code__ = with_room.__code__.replace(co_stacksize=_SLOTS)
