"""Write ``__init__.pyi`` of the packages whose names load their modules at first use.

    python tools/stubs.py [--check]

``--check`` writes nothing and exits with 1 if a stub is not what its package says.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cute_kernels", "cute_kernels.mhc", "cute_kernels.moe", "cute_kernels.schedulers")


def stub(package: str) -> str:
    """Text of a package's stub."""
    homes = importlib.import_module(package).HOMES
    lines = [
        f"from .{home} import {name} as {name}" if home else f"from . import {name} as {name}"
        for name, home in homes.items()
    ]
    lines = ["# Written by tools/stubs.py.", "", *sorted(lines, key=lambda line: line.split()[1:])]
    if package == "cute_kernels":
        lines += ["", "__version__: str"]
    return "\n".join(lines) + "\n"


def path_of(package: str) -> Path:
    return Path(importlib.import_module(package).__file__).with_suffix(".pyi")


def main(argv: list[str]) -> int:
    stale = [p for p in PACKAGES if not path_of(p).is_file() or path_of(p).read_text() != stub(p)]
    if "--check" not in argv:
        for package in stale:
            path_of(package).write_text(stub(package))
        return 0
    return int(bool(stale))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
