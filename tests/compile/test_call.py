"""compile.call: a kernel runs with the device of its inputs current, whichever was."""

from __future__ import annotations

import contextlib

import pytest
import torch

from cute_kernels.compile.call import call


@pytest.mark.parametrize(
    ("device", "current", "entered"),
    [("cuda:1", 0, [torch.device("cuda:1")]), ("cuda:1", 1, []), ("cuda:0", 0, []), ("cpu", 3, [])],
)
def test_the_inputs_device_is_current(monkeypatch, device, current, entered):
    log = []

    @contextlib.contextmanager
    def make_current(which):
        log.append(which)
        yield
        log.append("left")

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", make_current)
    call(torch.device(device), lambda *args: log.append(args), 1, "x")
    assert log == [*entered, (1, "x"), *["left" for _ in entered]]
