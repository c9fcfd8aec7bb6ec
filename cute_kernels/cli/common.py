"""Output of the commands: folded lines, errors of one line, files."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from .. import settings
from ..errors import CuteKernelsError

#: Exit codes besides 0: a rule is broken (a certificate, a byte), or the command cannot run.
BROKEN, CANNOT_RUN = 1, 2

#: Columns where the output is no terminal and COLUMNS is not set.
WIDTH = 80

#: Errors of a write to a disk that is full, or fails.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: The argument that an error names: `steps: expected ...`, `inputs[0]: expected ...`.
_SUBJECT = re.compile(r"([\w./~-]+)(?:\[\d+\])*(?=: )")


def width() -> int:
    """Number of columns of the terminal."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def folded(text: str) -> str:
    """The text with each line folded at spaces to the terminal's width."""
    options = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
    lines = text.split("\n")
    wide = [textwrap.fill(x, width(), **options) if len(x) > width() else x for x in lines]
    return "\n".join(wide)


def say(text: str) -> None:
    """Print the text, folded to the terminal's width."""
    typer.echo(folded(text))


def one_line(command: Callable | None = None, **options: str) -> Callable:
    """Turn what a command cannot do into one line on standard error and exit code 2.

    That is bad input, a setting that is not taken, a missing package, a full disk.  An error of any
    other kind is a bug, and keeps its traceback.

    Args:
        command: A function whose parameters are options of typer.
        options: For arguments of the library that the command has under another name: argument ->
            option.  The command's own parameters are known.
    """
    if command is None:
        return functools.partial(one_line, **options)

    @functools.wraps(command)
    def run(*args, **kwargs):
        try:
            settings.check()
            with flushed():
                return command(*args, **kwargs)
        except BrokenPipeError:  # the reader closed the pipe: typer handles it
            raise
        except (CuteKernelsError, ImportError, OSError) as error:
            values = inspect.signature(command).bind(*args, **kwargs).arguments
            line = _error_line(error, _option_names(command) | options, values)
            typer.echo(f"{command.__name__}: {line or type(error).__name__}", err=True)
            raise typer.Exit(CANNOT_RUN) from None

    return run


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Flush standard output at the end, and name it in an error of its write."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        # Every output file is written under `writing`: what names no file is the terminal's.
        if error.filename is None and error.errno in _FULL:
            raise OSError(error.errno, error.strerror, "standard output") from error
        raise


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name the file in an OSError: those of ``write`` and ``close`` (a full disk) name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and not isinstance(error, BrokenPipeError):
            code = errno.EIO if error.errno is None else error.errno
            raise OSError(code, error.strerror or str(error), str(path)) from error
        raise


@contextlib.contextmanager
def renamed(**options: str) -> Iterator[None]:
    """Name the option in an error that names the library's argument: argument -> option."""
    try:
        yield
    except CuteKernelsError as error:
        raise type(error)(_by_option(str(error), options)) from None


def _error_line(error: Exception, options: dict[str, str], values: dict[str, object]) -> str:
    if isinstance(error, OSError) and error.strerror:
        words = f"{error.filename}: " if error.filename is not None else ""
        words += error.strerror
    else:
        lines = [line.strip() for line in str(error).splitlines()]
        words = "; ".join(lines).replace(":;", ":")
    kinds = (Path, str) if isinstance(error, OSError) else Path
    for name, path in values.items():
        if isinstance(path, kinds) and words.startswith((f"{path}: ", f"{path}{os.sep}")):
            return f"{options[name]} {words}"
    return _by_option(words, options)


def _by_option(words: str, options: dict[str, str]) -> str:
    match = _SUBJECT.match(words)
    if match is None or match[1] not in options:
        return words
    return options[match[1]] + words[match.end() :]


def _option_names(command: Callable) -> dict[str, str]:
    """Parameter of a command -> its option, or its name in capitals for an argument."""
    names = {}
    for name, hint in typing.get_type_hints(command, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            # In an Annotated hint, typer keeps the first name that is given as the default.
            words = (option.default, *(option.param_decls or ()))
            declared = [x for x in words if isinstance(x, str) and x.startswith("--")]
            flag = declared[0] if declared else f"--{name.replace('_', '-')}"
            is_option = isinstance(option, typer.models.OptionInfo)
            names[name] = flag if is_option else name.upper()
    return names
