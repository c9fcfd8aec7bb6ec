"""Print the house: floors, rooms, lines and who imports whom (``make map``).

    python tools/map.py [--write | --check]

``--write`` makes docs/imports.md of it; ``--check`` exits with 1 if the page is another one.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "imports.md"
HEAD = """\
# The house

<!-- Written by tools/map.py from the source files and tests/test_size.py. -->

A module imports from lower floors, or from its own layer. No import goes in a circle and no system
imports another one; `tests/test_layering.py` fails with the import that goes up. Lines are the
ceilings of `tests/test_size.py`.
"""


def edges() -> dict[str, set[str]]:
    """Layer -> the other layers that its modules import."""
    from tests.import_graph import import_graph
    from tests.test_layering import layer

    imported = defaultdict(set)
    for name, targets in import_graph().items():
        named = {target for target in targets if not target.endswith("__init__")}
        imported[layer(name)] |= {layer(target) for target in named} - {layer(name)}
    return imported


def page() -> str:
    """Text of the page."""
    from tests.test_layering import FLOORS, FOLDERS
    from tests.test_size import ROOMS

    imported = edges()
    lines = [HEAD, "| floor | layer | lines | imports |", "| --- | --- | --- | --- |"]
    for name, floor in sorted(FLOORS.items(), key=lambda row: row[1]):
        below = ", ".join(sorted(imported[name], key=lambda one: (FLOORS[one], one))) or "nothing"
        room = next((r for r in (f"cute_kernels/{name}", name) if r in ROOMS), "")
        size = f"{ROOMS[room][0]:,}" if room else ""
        lines.append(f"| {floor} | `{name}` | {size} | {below} |")
    systems = [f"{name} {ROOMS[f'cute_kernels/{name}'][0]:,}" for name in sorted(FOLDERS)]
    others = ("schedulers", "ptxsim", "perf", "tests")
    totals = [f"{n} {sum(c for r, (c, _) in ROOMS.items() if r.startswith(n)):,}" for n in others]
    lines += ["", f"Systems: {', '.join(systems)}.", f"Others: {', '.join(totals)}."]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments, text = parser.parse_args(), page()
    if arguments.check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    if arguments.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
