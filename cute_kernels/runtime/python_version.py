"""The oldest Python that this library runs on; older ones are refused by name.

``__init__`` imports this module before any other of the package.  Both files, and ``__main__``,
keep to the syntax of Python 3.7, so that an older Python reads them.
"""

from __future__ import annotations

import sys

#: As ``requires-python`` in pyproject.toml.
OLDEST = (3, 10)


def check(version: tuple, arguments: list) -> None:
    """Refuse a version of Python that is too old.

    Args:
        version: As ``sys.version_info``.
        arguments: As ``sys.argv``; ["-m", ...] while Python looks for the module of ``python -m``.

    Raises:
        ImportError: the version is too old.
        SystemExit: the same under ``python -m``: one line instead of a traceback.
    """
    if tuple(version[:2]) < OLDEST:
        need, current = (".".join(map(str, release[:2])) for release in (OLDEST, version))
        message = f"cute_kernels needs Python >= {need}, found {current}"
        raise SystemExit(message) if arguments[:1] == ["-m"] else ImportError(message)


check(sys.version_info, sys.argv)
