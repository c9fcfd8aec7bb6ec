"""One protocol for everybody who is measured, our own kernels included.

A system's folder says what its cases are, what a problem is (a case on a device, with what is made
once, or the case itself) and what an input set is.  A rival starts each thing it can do (a product,
a pass) on a problem; what starts is a call from one input set to its results, and calls alone are
timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

Call = Callable[[Any], Any]
Start = Callable[[Any], Call]

_WHY = 500  # characters of an exception that are kept


class Absent(RuntimeError):
    """A rival that cannot run here; the message says why and goes into the record."""


class Case(Protocol):
    """One size of one operation."""

    @property
    def label(self) -> str:
        """Name of the rival in records and on the command line."""


@dataclass(frozen=True)
class Rival:
    """A named implementation.

    start: product or pass -> what gives its call on a problem, or raises Absent.  promised: its
    results must keep the error bound.  ordered: its bits must repeat.  short: it is also checked on
    a short case (False: a new length is a new compilation of half a minute).
    environment, program: variables of a process of its own, for a rival that needs other ones than
    ours, and the rival that is measured there.
    op: whose contract it keeps, where that is not the op of its suite; None: no op's.
    """

    name: str
    start: Mapping[str, Start]
    promised: bool = False
    ordered: bool = False
    short: bool = True
    environment: tuple[str, ...] = ()
    program: str = ""
    op: str | None = ""


def by_name(*rivals: Rival) -> dict[str, Rival]:
    """The rivals of a system, in the order in which they take turns."""
    return {rival.name: rival for rival in rivals}


def started(
    rivals: Mapping[str, Rival], names: Iterable[str], which: str, problem: object
) -> tuple[dict[str, Call], dict[str, dict]]:
    """Calls of the rivals that have a product or pass and can run here; of each other, its status.

    A status is the fields of a record that say why there is no call.
    """
    calls, others = {}, {}
    for name in names:
        if which in rivals[name].start:
            try:
                calls[name] = rivals[name].start[which](problem)
            except Absent as error:
                others[name] = {"status": "absent", "why": str(error)}
            except Exception as error:
                # A rival that fails on the card is a result to record, with its reason.
                why = f"{type(error).__name__}: {error}"
                others[name] = {"status": "failed", "why": why[:_WHY]}
    return calls, others


def module(name: str) -> ModuleType:
    """A rival's package, or Absent."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        # A package of another toolchain fails in many ways; each is why it is not measured.
        why = f"{name} cannot be imported: {type(error).__name__}: {error}"
        raise Absent(why[:_WHY]) from None
