"""Guards against a launch that hangs, an exception, a lost device and a spent budget."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable, Iterator

from .rival import Absent, Case

_WHY = 2000  # characters of an exception that are kept


class Lost(RuntimeError):
    """The device itself failed: nothing after this in the process can be trusted."""


@contextlib.contextmanager
def watched(patience_s: float | None):
    """Ends the process, with its stack on stderr, if the block takes longer; None: no limit."""
    if patience_s:
        faulthandler.dump_traceback_later(patience_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def words(error: Exception, limit: int = _WHY) -> str:
    """An exception in a record."""
    return f"{type(error).__name__}: {error}"[:limit]


def failure(error: Exception, finish: Callable[[], None]) -> dict:
    """The fields of a record for an exception; Lost where the device does not finish any more."""
    if isinstance(error, Absent):
        return {"status": "absent", "why": str(error)}
    why = words(error)
    try:
        finish()
    except Exception as lost:
        raise Lost(f"{why}; then the device: {lost}"[:_WHY]) from error
    return {"status": "failed", "why": why}


def within(
    end: float, todo: list[Case], run: Callable[[Case], Iterator], now: Callable[[], float]
) -> Iterator:
    """Yield from `run` of each case, until one as long as the longest would end after `end`.

    Then one line of text names the cases that were not reached.
    """
    longest = 0.0
    for index, case in enumerate(todo):
        start = now()
        if start + longest > end:
            yield "not run, the time is spent: " + ", ".join(
                unreached.label for unreached in todo[index:]
            )
            return
        yield from run(case)
        longest = max(longest, now() - start)
