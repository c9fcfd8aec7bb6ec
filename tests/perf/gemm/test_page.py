"""Targets of products on the status page: pure functions of the records."""

from __future__ import annotations

import pytest

from perf.core.tables import latest
from perf.gemm import page, targets
from tests.perf.gemm.records import bench, forward
from tests.perf.pages import targets as told

PROFILE = "`python -m perf profile gemm --shape"


def test_a_check_does_not_hide_a_time_but_a_failure_does():
    timed = bench("fwd", "qkv", 4096, 100.0, {"cublas": 98.0})
    later = {"date": "2026-11-23T10:00:00+00:00"}
    checked = {
        k: v for k, v in (timed | later).items() if k not in ("median_us", "ratio", "tflops")
    }
    assert latest([timed, checked], "gemm").ratio(("fwd", "qkv"), "cublas") == 0.98
    failed = checked | {"status": "failed", "why": "the result is wrong"}
    bench_of = latest([timed, failed], "gemm")
    assert bench_of.get(("fwd", "qkv"))["status"] == "failed"
    assert bench_of.ratio(("fwd", "qkv"), "cublas") is None


@pytest.mark.parametrize(
    ("records", "measured", "verdict", "step"),
    [
        (forward(0.96), "0.960x (lowest 0.960x)", "met", "none"),
        (forward(0.94, lm_head=0.93), "0.938x (lowest 0.930x)", "missed", f"{PROFILE} lm_head"),
        (forward(0.99, qkv=0.89), "0.969x (lowest 0.890x)", "missed", f"{PROFILE} qkv"),
        (forward(0.96)[:3], "not run (3 of 5 shapes)", "not run", "`python -m perf bench gemm`"),
    ],
)
def test_a_target_needs_all_five_shapes_the_mean_and_each(records, measured, verdict, step):
    cells = told(page, *records)[targets.TARGETS[0].text]
    assert cells[:2] == [measured, verdict]
    assert cells[2].startswith(step)


def test_a_miss_at_the_floor_is_the_rivals():
    """Ours within a tenth of the floor, the rival at half of it: 2.3x is out of reach."""
    target = targets.TARGETS[1]
    records = []
    for shape, (m, _, _) in targets.SHAPES.items():
        records.append(bench("fwd", shape, m, 100.0, {target.rival: 184.0}))
        rate = {"system": target.rival, "tflops": 443.0 if shape == "qkv" else 424.0}
        records.append(bench("fwd", shape, m, 184.0, {}, **rate))
    cells = told(page, *records)[target.text]
    assert cells[1] == "missed"
    assert cells[2] == (
        "none: ours is at 90% of the floor or above, the rival runs at 424 to 443 TFLOP/s"
    )
    for item in records:
        item["floor_fraction"] = 0.89
    assert told(page, *records)[target.text][2].startswith(PROFILE)


GRAD, INFERENCE = (
    f"host time of one forward call, {mode}: <= {limit:g} us"
    for mode, limit in targets.HOST_TARGETS.items()
)


def test_host_targets_read_the_worst_cost():
    slow = bench("fwd", "qkv", 4096, 1.0, {}, host_us={"grad": 14.0, "inference": 13.0})
    assert told(page, slow)[GRAD] == ["14.0 us", "met", "none"]
    assert told(page, slow)[INFERENCE] == ["13.0 us", "missed", targets.HOST_NEXT]
    torchs = bench("fwd", "qkv", 4096, 1.0, {}, system="cublas", host_us={"inference": 11.6})
    assert told(page, slow, torchs)[INFERENCE][0] == "13.0 us; torch 11.6 us"


def test_host_targets_are_of_the_newest_record_also_if_a_model_has_it():
    old = bench("fwd", "qkv", 4096, 1.0, {}, host_us={"grad": 38.0, "inference": 20.0})
    new = [
        old | {"kernel": "model", "system": system, "product": "host linear", "host_us": cost}
        for system, cost in (("ours", 7.5), ("torch", 13.0), ("ours, launch", 4.0))
    ]
    later = [r | {"date": f"{old['date'][:4]}-12-31", "commit": "f" * 10} for r in new]
    for records in ([old, *later], [*later, old]):
        out = told(page, *records)
        assert out[INFERENCE][:2] == ["7.5 us; torch 13.0 us", "met"]
        assert out[GRAD][0] == "38.0 us"
    earlier = [r | {"date": "2020-01-01", "commit": "f" * 10} for r in new]
    assert told(page, old, *earlier)[INFERENCE][0] == "20.0 us"
