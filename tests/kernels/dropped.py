"""Calls of cute.arch that are left out while a kernel is compiled, by where they are written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

from cutlass import cute


@contextlib.contextmanager
def dropped(name: str, file: str, function: str, number: int | None = None) -> Iterator[list]:
    """Inside, ``cute.arch.<name>`` does nothing where ``function`` of ``file`` calls it.

    ``file``: the end of its path.  ``number``: which of its calls, as traced, from 0; None: all.
    Gives the list of the calls left out: an empty one means that nothing was changed.
    """
    true, seen, out = getattr(cute.arch, name), [], []

    def call(*args, **options):
        frame = sys._getframe(1)
        while frame.f_code.co_filename.endswith(("dropped.py", "unittest/mock.py")):
            frame = frame.f_back
        code = frame.f_code
        if code.co_filename.endswith(file) and (function is None or code.co_name == function):
            seen.append(frame.f_lineno)
            if number is None or len(seen) - 1 == number:
                out.append(frame.f_lineno)
                return None
        return true(*args, **options)

    # The functions of a traced file are compiled anew from its text, under its path.
    with mock.patch.object(cute.arch, name, call):
        yield out
