"""A step that hangs, an exception, a device that is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from perf.core import record, watch
from perf.core.rival import Absent, module
from tests.hang import HANG_SECONDS


def test_a_step_that_hangs_ends_the_process(tmp_path):
    """In a process of its own: the watchdog ends it with its stack."""
    code = (
        "import time\n"
        "from perf.core.watch import watched\n"
        "with watched(0.5):\n"
        f"    time.sleep({HANG_SECONDS})\n"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.run(
        command, cwd=record.ROOT, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert process.returncode == 1
    assert "Timeout" in process.stderr and "watched" not in process.stdout


def test_a_step_in_time_ends_its_watch(monkeypatch):
    calls = []
    later = lambda seconds, exit: calls.append((seconds, exit))  # noqa: E731
    monkeypatch.setattr(watch.faulthandler, "dump_traceback_later", later)
    cancel = lambda: calls.append("cancelled")  # noqa: E731
    monkeypatch.setattr(watch.faulthandler, "cancel_dump_traceback_later", cancel)
    with pytest.raises(ZeroDivisionError), watch.watched(0.5):
        calls.append("step")
        1 / 0  # noqa: B018
    assert calls == [(0.5, True), "step", "cancelled"]


def test_an_exception_is_told_and_an_absent_rival_is_not_a_failure():
    assert watch.failure(ValueError("odd"), lambda: None) == {
        "status": "failed",
        "why": "ValueError: odd",
    }
    with pytest.raises(Absent, match="no_such_package cannot be imported") as missing:
        module("no_such_package")
    assert watch.failure(missing.value, lambda: None)["status"] == "absent"


def test_a_device_that_does_not_finish_is_lost():
    def finish():
        raise RuntimeError("illegal memory access")

    with pytest.raises(watch.Lost, match="ValueError: odd; then the device: illegal"):
        watch.failure(ValueError("odd"), finish)
