"""Refitting the schedule model to attention records."""

from __future__ import annotations

import pytest

from cute_kernels.schedulers import machine, simulate
from cute_kernels.schedulers.order import kinds
from perf.attention import refit
from tests.perf.records import attention
from tests.schedulers.usual import usual_masks

SIZES = [("window", 2048, 128, 2, 2), ("causal", 2048, 128, 1, 1), ("full", 4096, 128, 2, 2)]


def measured(size, truth, **more) -> dict:
    """A record of a case, timed by the model itself with other constants."""
    item = attention(size, predicted={"machine": "h200_d128", "ratio": 1.0}, **more)
    out = refit.schedule_of(item)
    simulation = simulate(out, truth)
    item["schedule"] = {"name": out.name, "hash": out.hash, "group": 1}
    return item | {
        "ordered_us": simulation.makespan_ns / 1e3,
        "unordered_us": simulation.unordered_ns / 1e3,
    }


@pytest.fixture(scope="module")
def records():
    truth = machine("h200_d128", full_ns=2800, partial_ns=2800, handoff_ns=1000)
    return [measured(size, truth) for size in SIZES]


def test_only_right_records_of_both_orders_count(records):
    failed = records[0] | {"status": "failed", "shape": "a"}
    grouped = records[0] | {"schedule": {"group": 4}, "shape": "b"}
    ordered = {k: v for k, v in records[0].items() if k != "unordered_us"} | {"shape": "c"}
    gemm = records[0] | {"kernel": "gemm", "shape": "d"}
    later = records[1] | {"ordered_us": 1.0}
    assert refit.usable([*records, failed, grouped, ordered, gemm, later]) == [
        records[0],
        later,
        records[2],
    ]


def test_a_record_of_another_schedule_is_left_out(records):
    other = records[0] | {"schedule": records[0]["schedule"] | {"hash": "0" * 64}}
    first, second, *_ = refit.lines([other])
    assert first.startswith("h200_d128: 1 records of another schedule")
    assert second == "h200_d128: no record to fit to"


def test_refit_finds_the_machine_that_the_times_came_from():
    truth = machine(full_ns=1900, partial_ns=2600, handoff_ns=3100, slots=12)
    masks = usual_masks(1024)
    recorded = []
    for name, kind in (("full", "spt"), ("causal", "left_to_right"), ("window 1024", "spt")):
        schedule = kinds.KINDS[kind](masks[name], heads=4, heads_in_flight=2)
        simulation = simulate(schedule, truth)
        recorded.append(
            refit.Observation(schedule, simulation.makespan_ns, simulation.unordered_ns, name)
        )
    fitted = refit.refit(machine(slots=12), recorded)
    assert fitted.machine.full_ns == pytest.approx(1900, rel=0.03)
    assert fitted.machine.partial_ns == pytest.approx(2600, rel=0.1)
    assert fitted.machine.handoff_ns == pytest.approx(3100, rel=0.05)
    assert fitted.machine.reduce_ns == 1200 and fitted.error < 0.01
    assert fitted.source == "fitted to 3 records: causal; full; window 1024"
