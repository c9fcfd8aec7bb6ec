"""The host's part of a call: the launch that is timed, and turns that are spread over the time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from perf.model import host


def test_the_launch_of_a_call_is_found():
    recorded = []
    module = SimpleNamespace(bind=None)

    def run():
        module.bind(torch.device("cpu"), lambda *args: recorded.append(args))(1, "two")

    host.launch_of(module, run)()
    assert recorded == [(1, "two")] * 2 and module.bind is None
    with pytest.raises(ValueError, match="not enough"):
        host.launch_of(module, lambda: None)


def test_a_host_that_is_slow_for_a_while_does_not_show(monkeypatch):
    """A product's turns are spread over all the time: slow seconds do not cover all of them."""
    costs = iter([20.0] * 50 + [10.0] * 10_000)
    products = {name: host.Calls(lambda: None, lambda: None) for name in ("linear", "silu")}
    monkeypatch.setattr(host, "calls", lambda device: products)
    monkeypatch.setattr(host.timing, "host_cost", lambda *args, **options: next(costs))
    out = list(host.measured("cpu"))
    assert [body["product"] for body in out] == ["host linear"] * 2 + ["host silu"] * 2
    assert all(body["host_us"] == 10.0 for body in out)
