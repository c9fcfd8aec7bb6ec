"""Calls of cute.arch that are left out while a kernel is compiled, by where they are written."""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from cutlass import cute


@functools.cache
def _functions(path: str) -> list[ast.FunctionDef]:
    tree = ast.parse(Path(path).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def enclosing(path: str, line: int) -> set[str]:
    """Names of the functions around a line, as written: the DSL traces loops as functions."""
    return {f.name for f in _functions(path) if f.lineno <= line <= f.end_lineno}


@contextlib.contextmanager
def dropped(
    name: str, file: str, function: str | None, number: int | None = None
) -> Iterator[list]:
    """Inside, ``cute.arch.<name>`` does nothing where ``function`` of ``file`` calls it.

    ``file``: the end of its path.  ``function``: None for all.  ``number``: which of its calls, as
    traced, from 0; None: all.
    Gives the list of the calls left out: an empty one means that nothing was changed.
    """
    true, recorded, out = getattr(cute.arch, name), [], []

    def call(*args, **options):
        frame = sys._getframe(1)
        while frame.f_code.co_filename.endswith(("dropped.py", "unittest/mock.py")):
            frame = frame.f_back
        path, line = frame.f_code.co_filename, frame.f_lineno
        if path.endswith(file) and (function is None or function in enclosing(path, line)):
            recorded.append(frame.f_lineno)
            if number is None or len(recorded) - 1 == number:
                out.append(frame.f_lineno)
                return None
        return true(*args, **options)

    # The functions of a traced file are compiled anew from its text, under its path.
    with mock.patch.object(cute.arch, name, call):
        yield out
