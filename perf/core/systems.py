"""The systems that are measured: each has a folder here, which its row in the package names; and
the whole model and the RL step, which have one each.

A system's folder has `commands` (its part of the command line) and `page` (its part of the status
page), and what these need.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Protocol

from cute_kernels.systems import SYSTEMS

from .speed import Speed

Rows = list[list[str]]

#: The folders of what all systems make together.
WHOLE = ("model", "rl")


class Page(Protocol):
    """Interface of a module `page`: functions of the records of one GPU model."""

    TITLE: str
    BENCHES: tuple[str, ...]  #: the `kernel` of its records
    SPEED: tuple[Speed, ...]  #: lines of the README's table

    def bits_kept(self, records: list[dict]) -> Rows:
        """(promise about bits, verdict) of each one."""

    def target_rows(self, records: list[dict]) -> Rows:
        """(target, measured, "met", "missed" or "not run", next step) of each target."""


def modules(name: str) -> Iterator[ModuleType]:
    """The module of this name of each system, in the order of the table, and of the whole."""
    for folder in (*(system.perf for system in SYSTEMS), *WHOLE):
        if folder:
            yield importlib.import_module(f"perf.{folder}.{name}")
