"""A step that hangs, an exception, a device that is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from perf.core import record, watch
from perf.core.rival import Absent, module


def test_a_step_that_hangs_ends_the_process(tmp_path):
    """In a process of its own: the watchdog ends it with its stack."""
    code = (
        "import time\n"
        "from perf.core.watch import watched\n"
        "with watched(0.5):\n"
        "    pass\n"
        "time.sleep(1.0)\n"
        "print('done in time', flush=True)\n"
        "with watched(0.5):\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=record.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stdout == "done in time\n"
    assert "Timeout" in done.stderr and "watched" not in done.stdout


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
