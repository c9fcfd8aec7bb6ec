"""compile.call: a kernel runs with the device of its inputs current, whichever was."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from cute_kernels.compile import extension
from cute_kernels.compile.call import call, prepared


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

    # Where C launches, likewise; CPU tensors are a simulator's, which has no such kernels.
    log.clear()
    kernel = types.SimpleNamespace(__chandle__=None)
    calls = types.SimpleNamespace(launch=lambda kernel, rows, *args: log.append((rows, *args)))
    monkeypatch.setattr(extension, "calls", lambda: calls)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    if device != "cpu":
        prepared(torch.device(device), kernel, rows=(0, 2))(1, "x")
        assert log == [*entered, (0b101, 1, "x"), *["left" for _ in entered]]
