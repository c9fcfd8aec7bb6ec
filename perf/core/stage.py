"""A stage of a lent machine: one process with a time limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import record

_GPU_TESTS = ("tests/**/test_gpu.py", "tests/**/test_*_gpu.py")


@dataclass(frozen=True)
class Stage:
    """A command line after `python`, and the seconds it may take.

    early: comes before probes and tests, which tell little about kernels that are wrong.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    early: bool = False


@dataclass(frozen=True)
class Place:
    """The folder that records go to, and the commit that they name."""

    out: Path
    commit: str | None = None

    def perf(self, *arguments: str, file: str) -> tuple[str, ...]:
        """`python -m perf ARGUMENTS`, which appends to a file of the folder."""
        mark = ("--commit", self.commit) if self.commit else ()
        return ("-m", "perf", *arguments, "-o", str(self.out / file), *mark)


def pytest(files: list[str]) -> tuple[str, ...]:
    """Tests by file: collecting the others would import what that machine may lack."""
    return ("-m", "pytest", *files, "-q", "-p", "no:cacheprovider")


def gpu_tests(folder: str = "tests") -> list[str]:
    """The files of tests for a GPU in a folder, relative to the root."""
    paths = {
        str(p.relative_to(record.ROOT)) for pattern in _GPU_TESTS for p in record.ROOT.glob(pattern)
    }
    return sorted(path for path in paths if path.startswith(f"{folder}/"))
