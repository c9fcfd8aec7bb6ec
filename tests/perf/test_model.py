"""A whole model on the status page: what its records say, and "not run" where there are none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from perf.model import page, shapes
from perf.model.llama import SYSTEMS, Size

HEAD = {
    "kind": "bench",
    "kernel": "model",
    "model": Size().label,
    "status": "ok",
    "gpu": "NVIDIA H200",
    "commit": "0123456789ab",
    "dtype": "bf16",
}


def record(product: str, shape: str, system: str, date: str = "2026-11-23", **more: object) -> dict:
    return HEAD | {"product": product, "shape": shape, "system": system, "date": date} | more


def training(**milliseconds: float) -> list[dict]:
    """Steps of the systems that were timed together."""
    out = []
    for name, actual in milliseconds.items():
        ratio = {other: t / actual for other, t in milliseconds.items() if other != name}
        more = {"median_us": 1000 * actual, "ratio": ratio}
        out.append(record("training", "4x2048", name, **more))
    return out


def audit(differing: int) -> dict:
    return record(
        "audit",
        shapes.AUDIT,
        "ours",
        ours={"differing": differing},
        torch={"differing": 77},
        bitwise={"audit": not differing},
    )


def verdicts(records: list[dict]) -> list[str]:
    """The verdict of each target."""
    return [row[2] for row in page.target_rows(records)]


def test_without_records_nothing_was_run():
    targets = len(page.TARGETS) + len(page.HOST_TARGETS)
    assert page.bits_kept([])[0][1] == "not run"
    assert verdicts([]) == ["not run"] * targets


@pytest.mark.parametrize(
    ("ours", "compiled", "expected"),
    [
        (101.0, 84.0, ["met", "met"]),
        (103.0, 83.9, ["missed", "met"]),
        (90.0, 85, ["met", "missed"]),
    ],
)
def test_targets_are_times_of_training(ours, compiled, expected):
    times = {"torch": 100.0, "torch_compiled": 80.0, "ours": ours, "ours_compiled": compiled}
    records = training(**times)
    assert verdicts(records)[: len(page.TARGETS)] == expected
    assert set(SYSTEMS) == set(times)


def test_targets_are_of_the_hosts_part_of_a_call():
    costs = {"host linear": 11.9, "host linear, grad": 22.1}
    records = [
        record(product, page.host.SHAPE, system, host_us=cost if system == "ours" else 7.0)
        for product, cost in costs.items()
        for system in ("ours", "torch")
    ]
    assert verdicts(records)[-3:] == ["met", "missed", "not run"]
    assert "11.9 us; torch 7.0 us" in [row[1] for row in page.target_rows(records)]


def test_a_model_of_another_size_is_no_record():
    records = [r | {"model": "Llama 2048x2"} for r in training(torch=1.0, ours=1.0)]
    assert verdicts(records)[0] == "not run"


def test_bits_are_of_the_audit_and_of_graphs():
    replays = [
        record(
            "replaying",
            f"{b}x{n}",
            "ours",
            median_us=5.0,
            ratio={},
            bitwise={"as in one pass": b != 8},
        )
        for b, n in shapes.TIMED["replaying"]
    ]
    (good,) = page.bits_kept([audit(0)])
    cases = 1 + len(replays)
    assert good[1] == f"kept in 1 of {cases} cases"
    (bad,) = page.bits_kept([audit(3), *replays])
    assert (
        bad[1].startswith(f"kept in {cases - 2} of {cases} cases; broken in audit")
        and "replaying 8x512" in bad[1]
    )


def test_each_part_has_its_step():
    from perf.model import llama

    assert all(callable(getattr(llama, part)) for part in shapes.TIMED)


def test_the_launch_of_a_call_is_found():
    recorded = []
    module = SimpleNamespace(bind=None)

    def run():
        module.bind(torch.device("cpu"), lambda *args: recorded.append(args))(1, "two")

    launch = page.host.launch_of(module, run)
    launch()
    assert recorded == [(1, "two")] * 2 and module.bind is None
    with pytest.raises(ValueError, match="not enough"):
        page.host.launch_of(module, lambda: None)


def test_a_host_that_is_slow_for_a_while_does_not_show(monkeypatch):
    """A product's turns are spread over all the time: slow seconds do not cover all of them."""
    costs = iter([20.0] * 50 + [10.0] * 10_000)
    products = {name: page.host.Calls(lambda: None, lambda: None) for name in ("linear", "silu")}
    monkeypatch.setattr(page.host, "calls", lambda device: products)
    monkeypatch.setattr(page.host.timing, "host_cost", lambda *args, **options: next(costs))
    out = list(page.host.measured("cpu"))
    assert [body["product"] for body in out] == ["host linear"] * 2 + ["host silu"] * 2
    assert all(body["host_us"] == 10.0 for body in out)
