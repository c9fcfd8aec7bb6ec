"""A step that hangs, an exception, a device that is lost."""

from __future__ import annotations

import pytest

from perf.core import watch
from perf.core.rival import Absent, module


def test_a_step_has_a_watchdog_that_ends_the_process_and_ends_with_it(monkeypatch):
    calls = []
    later = lambda seconds, exit: calls.append((seconds, exit))  # noqa: E731
    monkeypatch.setattr(watch.faulthandler, "dump_traceback_later", later)
    cancel = lambda: calls.append("cancelled")  # noqa: E731
    monkeypatch.setattr(watch.faulthandler, "cancel_dump_traceback_later", cancel)
    with pytest.raises(ZeroDivisionError), watch.watched(0.5):
        calls.append("step")
        1 / 0  # noqa: B018
    assert calls == [(0.5, True), "step", "cancelled"]


def test_a_failure_an_absent_rival_and_a_lost_device_are_told_apart():
    def lost():
        raise RuntimeError("illegal memory access")

    failed = {"status": "failed", "why": "ValueError: odd"}
    assert watch.failure(ValueError("odd"), lambda: None) == failed
    with pytest.raises(Absent, match="no_such_package cannot be imported") as missing:
        module("no_such_package")
    assert watch.failure(missing.value, lambda: None)["status"] == "absent"
    with pytest.raises(watch.Lost, match="ValueError: odd; then the device: illegal"):
        watch.failure(ValueError("odd"), lost)
