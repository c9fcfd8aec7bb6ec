"""The size of each room: a table of ceilings that only shrinks.

Rooms are folders of Python files; of docs, words of Markdown.  A commit that needs more lines
lowers another row by as many, or raises its own and says in ``why`` what the lines buy; one that
deletes lowers its row.  ``python tests/test_size.py`` prints the rows of this tree.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Share of a room by which its ceiling may be above it, and the least such slack.
SLACK, LEAST_SLACK = 0.02, 60

#: Room -> (ceiling, why it was raised last).
ROOMS: dict[str, tuple[int, str]] = {
    "cute_kernels": (1647, ""),
    "cute_kernels/cli": (589, ""),
    "cute_kernels/compile": (1732, ""),
    "cute_kernels/cpu": (481, ""),
    "cute_kernels/demo": (970, ""),
    "cute_kernels/dsl": (1948, ""),
    "cute_kernels/gemm": (2823, ""),
    "cute_kernels/integrations": (9356, ""),
    "cute_kernels/linear_attn": (10049, "a system"),
    "cute_kernels/logp": (5852, ""),
    "cute_kernels/mhc": (9221, "types of Triton launchers again"),
    "cute_kernels/model": (11763, ""),
    "cute_kernels/moe": (4302, ""),
    "cute_kernels/norm": (3316, ""),
    "cute_kernels/rowwise": (2531, "parameters of kernels one on a line"),
    "cute_kernels/runtime": (3473, "checks, and Triton tiles of gemm, moe and attention, once"),
    "cute_kernels/sparse_attn": (13444, ""),
    "docs": (60278, ""),
    "perf": (13525, ""),
    "ptxsim": (6366, ""),
    "schedulers": (5883, ""),
    "tests": (10400, "mutants of CPU backends are planted as texts"),
    "tests/compile": (2712, ""),
    "tests/demo": (401, ""),
    "tests/gemm": (4790, ""),
    "tests/integrations": (10441, ""),
    "tests/kernels": (373, ""),
    "tests/linear_attn": (5367, "a system"),
    "tests/logp": (5712, ""),
    "tests/mhc": (6705, ""),
    "tests/model": (11336, ""),
    "tests/moe": (3982, ""),
    "tests/norm": (1785, ""),
    "tests/option_table": (1646, ""),
    "tests/oracles": (1755, ""),
    "tests/perf": (4985, ""),
    "tests/ranks": (441, "one launcher of ranks"),
    "tests/rowwise": (2355, ""),
    "tests/runtime": (2121, ""),
    "tests/schedulers": (4447, ""),
    "tests/sparse_attn": (11559, "Ranges against their rule, query by query"),
    "tests/verify": (2751, ""),
    "verify": (2941, "code of a file once a text"),
}


def sizes() -> dict[str, int]:
    """Room -> its lines: folders of the package and of tests, each with the folders below it."""
    out: dict[str, int] = {}
    for top in ("cute_kernels", "schedulers", "verify", "perf", "ptxsim", "tests"):
        split = top in ("cute_kernels", "tests")
        for path in (ROOT / top).rglob("*.py"):
            folders = path.relative_to(ROOT).parts[:-1]
            room = "/".join(folders[: 2 if split else 1])
            out[room] = out.get(room, 0) + path.read_text(encoding="utf-8").count("\n")
    pages = (ROOT / "docs").rglob("*.md")
    out["docs"] = sum(len(path.read_text(encoding="utf-8").split()) for path in pages)
    return dict(sorted(out.items()))


@pytest.mark.parametrize("room", sorted({*ROOMS, *sizes()}))
def test_no_room_is_above_its_ceiling(room: str):
    size, (ceiling, _) = sizes().get(room, 0), ROOMS.get(room, (0, ""))
    assert size <= ceiling, f"{room}: {size} lines, ceiling {ceiling}: delete, or say why"
    slack = max(LEAST_SLACK, int(SLACK * size))
    assert ceiling <= size + slack, f"{room}: {size} lines: lower its ceiling of {ceiling}"


def main() -> None:
    for room, size in sizes().items():
        print(f'    "{room}": ({size}, "{ROOMS.get(room, (0, ""))[1]}"),')


if __name__ == "__main__":
    sys.exit(main())
