"""Whole texts that are to stay as they are: tables and pages, each in a file of tests/golden/.

    SNAPSHOTS=write python -m pytest TEST

writes them anew; read the difference before it is committed.  Numbers that are computed have checks
of their own beside it: a snapshot says that a text is the one that somebody read.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def check(name: str, text: str, folder: Path = GOLDEN) -> None:
    """Asserts that ``text`` is the stored one, of which no line ends in spaces."""
    out = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    path = folder / name
    if os.environ.get("SNAPSHOTS") == "write":
        path.write_text(out)
    snapshot = path.read_text() if path.is_file() else None
    assert snapshot is not None, f"no {path.name}: SNAPSHOTS=write python -m pytest ... writes it"
    lines = difflib.unified_diff(
        snapshot.splitlines(), out.splitlines(), name, "now", n=0, lineterm=""
    )
    assert out == snapshot, "\n".join([*lines, "if that was meant: SNAPSHOTS=write"])
