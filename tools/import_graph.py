"""Write docs/imports.md: the layers of the package, and who imports whom.

    python tools/import_graph.py [--check]

``--check`` writes nothing and exits with 1 if the page is not what the source files say.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "imports.md"
HEAD = """\
# Imports

<!-- Written by tools/import_graph.py from the source files. -->

A module imports from lower floors, or from its own layer. No import goes in a circle, no system
imports another one, and nothing that runs imports `testing`; only its command imports `verify`.
`tests/test_layering.py` holds all of this, and fails with the import that goes up.
"""


def edges() -> dict[str, set[str]]:
    """Layer -> the other layers that its modules import."""
    from tests.import_graph import import_graph
    from tests.test_layering import layer

    found = defaultdict(set)
    for name, targets in import_graph().items():
        named = {target for target in targets if not target.endswith("__init__")}
        found[layer(name)] |= {layer(target) for target in named} - {layer(name)}
    return found


def page() -> str:
    """Text of the page."""
    from tests.import_graph import modules
    from tests.test_layering import FLOORS, ROLES, layer

    members = defaultdict(int)
    for name in modules():
        members[layer(name)] += 1
    imported = edges()
    lines = [HEAD, "| floor | layer | modules | imports |", "| --- | --- | --- | --- |"]
    for name, floor in sorted(FLOORS.items(), key=lambda row: row[1]):
        below = ", ".join(sorted(imported[name], key=lambda one: (FLOORS[one], one))) or "nothing"
        lines.append(f"| {floor} | `{name}` | {members[name]} | {below} |")
    lines += ["", "The folder of a system:", "", "| layer | modules |", "| --- | --- |"]
    for name, roles in ROLES.items():
        lines.append(f"| `{name}` | {', '.join(f'`{role}`' for role in roles.split())} |")
    lines.append("| `system.kernel` | `kernel_*`, `device/`, `triton/kernel*`, `triton/sums` |")
    lines += ["", "```mermaid", "graph BT"]
    for name in FLOORS:
        for target in sorted(imported[name], key=lambda one: (FLOORS[one], one)):
            if FLOORS[name] - FLOORS[target] <= 2:  # the rest is in the table
                lines.append(f"    {_node(name)} --> {_node(target)}")
    return "\n".join([*lines, "```", ""])


def _node(layer: str) -> str:
    return layer.replace(".", "_").strip("_")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    text = page()
    if parser.parse_args().check:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
