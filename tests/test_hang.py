"""No test has a limit of time that a loaded machine could meet: tests of GPUs alone may."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.hang import HANG_SECONDS

TESTS = Path(__file__).parent
PTXSIM = TESTS.parent / "ptxsim"
#: Clocks that may be read: what prints times, a fake clock, and hosts of cards.
READS_CLOCKS = {
    "hang.py",
    "integrations/vllm/card.py",
    "perf/core/clocks.py",
    "ptxsim/__main__.py",
    "test_hang.py",
}
#: Names of arguments that are limits, and of calls whose numbers are.
LIMITS = {"timeout", "timeout_s", "timeout_seconds", "deadline"}
CALLS = {"wait", "communicate", "join", "Timer", "dump_traceback_later", "alarm"}
#: What is parsed: most files have none of these.
MAY_HAVE_LIMITS = re.compile(
    r"timeout|deadline|timedelta|\b(wait|communicate|Timer|dump_traceback_later|alarm)\("
    r"|\bjoin\([\dA-Z]"
)
#: Waits in vain: tests pass if they end by their limit.
PAUSES = {"left.wait(0.1)"}
CLOCKS = re.compile(r"\b(perf_counter|monotonic|process_time|thread_time)(_ns)?\b")


def is_of_gpus(path: Path, text: str) -> bool:
    marked = re.search(r"^pytestmark = (\[\s*)?pytest\.mark\.gpu\b", text, re.MULTILINE)
    return path.name.startswith("gpu_") or bool(marked)


def sources() -> list[tuple[str, str]]:
    """(name, text) of every file that may run without a GPU."""
    files = [(p, p.relative_to(TESTS)) for p in sorted(TESTS.rglob("*.py"))]
    files += [(p, p.relative_to(TESTS.parent)) for p in sorted(PTXSIM.rglob("*.py"))]
    found = [(p, name, p.read_text()) for p, name in files]
    return [(str(name), text) for p, name, text in found if not is_of_gpus(p, text)]


def limits(text: str) -> list[tuple[int, float]]:
    """(line, seconds) of the limits in a source, and in scripts that its strings hold."""
    if not MAY_HAVE_LIMITS.search(text):
        return []
    tree = ast.parse(text)
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def number(node: ast.expr) -> float | None:
        """The value of an expression of numbers and of the module's constants."""
        if isinstance(node, ast.Name) and node.id in names:
            node = names[node.id]
        if isinstance(node, ast.Constant):
            good = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
            return node.value if good else None
        if isinstance(node, ast.BinOp):
            out = [n for n in (number(node.left), number(node.right)) if n is not None]
            return min(out, default=None)
        return None

    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            values = [k.value for k in node.keywords if k.arg in LIMITS]
            if name in CALLS:
                values += node.args
            if name == "timedelta":
                values += [k.value for k in node.keywords if k.arg == "seconds"]
            if ast.unparse(node) not in PAUSES:
                out += [(node.lineno, n) for n in map(number, values) if n]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for match in re.finditer(r"\btimeout(?:_s)?=\s*([\d.]+)", node.value):
                out.append((node.lineno, float(match[1])))
    return out


def test_no_limit_is_near():
    near = {
        f"{name}:{line}": seconds
        for name, text in sources()
        for line, seconds in limits(text)
        if seconds < HANG_SECONDS and name != "test_hang.py"
    }
    assert not near


def test_no_test_reads_a_clock():
    names = {name for name, text in sources() if CLOCKS.search(text)}
    assert names <= READS_CLOCKS


@pytest.mark.parametrize(
    "text",
    [
        "subprocess.run(command, timeout=60)",
        "SECONDS = 30\nprocess.communicate(timeout=SECONDS)",
        "WAIT = 30\nthread.join(WAIT // 2)",
        "datetime.timedelta(seconds=5)",
        "threading.Timer(20, stop)",
        "code = 'run(x, timeout=5)'",
    ],
)
def test_a_near_limit_is_seen(text):
    assert [seconds < HANG_SECONDS for _, seconds in limits(text)] == [True]


def test_a_far_limit_is_none():
    assert limits("process.wait(HANG_SECONDS)\nthread.join()\n','.join(['1'])") == []
