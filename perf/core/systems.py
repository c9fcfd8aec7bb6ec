"""The systems that are measured: each has a folder here, which its row in the package names; and
the whole model, which has one too.

A system's folder has `commands` (its part of the command line), `stages` (of a lent machine) and
`page` (its part of the status page), and what these need.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Protocol

from cute_kernels.systems import SYSTEMS

from .counts import Count
from .speed import Speed

Rows = list[list[str]]

#: The folder of what all systems make together.
WHOLE = "model"


class Page(Protocol):
    """What a module `page` has; all of it is a function of the records alone."""

    KERNELS: tuple[str, ...]  #: as their certificates name them
    COUNTS: tuple[Count, ...]
    SPEED: tuple[Speed, ...]  #: lines of the README's table

    def bits_kept(self, records: list[dict]) -> Rows:
        """(link, verdict) of every promise about bits."""

    def target_verdicts(self, records: list[dict]) -> tuple[str, list[str]]:
        """(link, "held", "missed" or "not run" of each target of speed)."""

    def images(self, records: list[dict]) -> list[str]:
        """Lines that show the first plot, if there is one."""

    def render(self, records: list[dict]) -> list[str]:
        """The lines of this system."""

    def plots(self, records: list[dict], folder: Path) -> list[Path]:
        """Draws what the records support; the paths written."""


def modules(name: str) -> Iterator[ModuleType]:
    """The module of this name of each system, in the order of the table, and of the model."""
    for folder in (*(system.perf for system in SYSTEMS), WHOLE):
        if folder:
            yield importlib.import_module(f"perf.{folder}.{name}")
