"""Whether the simulator's own tests passed on the simulator as it is now.

They test nothing but the simulator, so they run when its sources, those tests or what they are
compiled with are others than when they last passed, and in the nightly run.  SMOKE always runs.

    python -m ptxsim record

runs them all and, if every one passes, stores the digest; nothing else stores one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ptxsim import build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORD = HERE / "proved.txt"
#: Whole kernels under every mode, and the instructions without which none runs.
SMOKE = ("test_async_copies", "test_barriers", "test_proved", "test_modes", "test_wgmma")
#: Those that link and call host functions, and those that assemble: tests of their format are here.
_DISTRIBUTIONS = ("apache-tvm-ffi", "nvidia-cutlass-dsl", "torch")


def digest(folder: Path = HERE.parent) -> str:
    """SHA-256 over the sources in C++ and Python, tests too, and versions of what they need."""
    total = hashlib.sha256(repr(versions()).encode())
    for path in sorted([*folder.glob("csrc/*"), *folder.rglob("*.py")]):
        content = path.read_bytes()
        total.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def versions() -> dict[str, str]:
    """Of the C++ compiler and of the packages; empty where one is missing."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    try:
        command = [build.compiler(), "-dumpfullversion", "-dumpmachine"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        found["compiler"] = said.stdout
    except OSError:
        found["compiler"] = ""
    return found


def holds(record: Path = RECORD, **places: Path) -> bool:
    """Whether the tests passed on what is there now."""
    return record.is_file() and record.read_text().strip() == digest(**places)


def often(module: str, known: bool) -> bool:
    """Whether a test module here runs for every commit; ``known``: `holds`."""
    return module in SMOKE or not known


def record(run: Callable[[Sequence[str]], int] | None = None, kept: Path = RECORD, **places) -> int:
    """Runs the tests, stores the digest if they pass, and returns pytest's exit status.

    The digest is that of before the run, and the old one goes first: without one all tests run.
    """
    found = digest(**places)
    kept.unlink(missing_ok=True)
    status = (run or _pytest)([str(HERE), "-q", "-m", "not nightly"])
    if status == 0:
        kept.write_text(found + "\n")
    return status


def _pytest(arguments: Sequence[str]) -> int:
    """In a new interpreter, which has imported nothing that was edited since."""
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode
