"""What the commands share: errors of one line, and the packages that an extra brings."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import typer

from . import settings
from .errors import CuteKernelsError, MissingPackageError, missing

#: Exit codes besides 0: a rule is broken (a certificate, a byte), or the command cannot run.
BROKEN, CANNOT_RUN = 1, 2

#: Module -> the distribution that brings it.
_DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


def one_line(command: Callable) -> Callable:
    """The command, but what it cannot do is one line on standard error and exit code 2.

    That is bad input, a setting that is not taken, a missing package, a full disk.  An error of any
    other kind is a bug, and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args, **kwargs):
        try:
            settings.check()
            return command(*args, **kwargs)
        except BrokenPipeError:  # the reader of the output has gone: typer's to handle
            raise
        except (CuteKernelsError, ImportError, OSError) as error:
            words = "; ".join(line.strip() for line in str(error).splitlines()).replace(":;", ":")
            typer.echo(f"{command.__name__}: {words or type(error).__name__}", err=True)
            raise typer.Exit(CANNOT_RUN) from None

    return run


def require(extra: str, *modules: str) -> None:
    """MissingPackageError, which names the extra, if a module cannot be imported here."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        names = [_DISTRIBUTIONS.get(name, name) for name in absent]
        raise MissingPackageError(missing(names, extra))
