"""The tests that need packages which `make setup` does not install: ``python -m tests.extras``.

`make nightly-extras` runs it in an environment of its own.  There nothing may be skipped for want
of a package: a test that never runs finds nothing.  Arguments are pytest's.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Of the extras `trl` and `deepspeed`.
PACKAGES = ("trl", "peft", "accelerate", "datasets", "deepspeed")
_GUARD = re.compile(rf"(?:importorskip|find_spec)\(\s*\"({'|'.join(PACKAGES)})\"")
_MISSING = re.compile(r"not installed|could not import|No module named|^needs \w+: pip")


def files() -> list[Path]:
    """The test modules that run some tests only where one of the packages is installed."""
    return [
        file.relative_to(ROOT)
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if _GUARD.search(file.read_text())
    ]


class Skips:
    """A plugin of pytest: the tests and modules skipped as a package is missing."""

    def __init__(self):
        self.missing: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._keep(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._keep(report)

    def _keep(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        reason = reason.removeprefix("Skipped: ")
        if report.skipped and _MISSING.search(reason):
            self.missing.append(f"{report.nodeid}: {reason}")


def run(arguments: list[str]) -> int:
    """Run pytest; returns its exit status, 1 also where a package is missing for a test."""
    skips = Skips()
    status = pytest.main(arguments, plugins=[skips])
    for line in skips.missing:
        print(f"not run: {line}")
    return int(status) or bool(skips.missing)


def main(arguments: list[str]) -> int:
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        print(f"not installed: {', '.join(lacking)} (make nightly-extras makes an environment)")
        return 2
    return run([*map(str, files()), "-q", "-m", "not gpu", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
