"""Packages whose public names load their modules at first use."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, homes: Mapping[str, str | None]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package with these public names.

    Args:
        package: Its ``__name__``.
        homes: Public name -> its module in the package; None: the name is a module.

    Tools read the same names in ``__init__.pyi``, which tools/stubs.py writes.
    """

    def get(name: str) -> object:
        if name not in homes:
            near = difflib.get_close_matches(name, homes, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        home = homes[name]
        module = importlib.import_module(f"{package}.{home or name}")
        value = getattr(module, name) if home else module
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(homes)

    return get, names
