"""The part of products on the status page: a pure function of the records."""

from __future__ import annotations

import pytest

from perf.core.tables import where
from perf.gemm import targets
from perf.probes.questions import QUESTIONS
from tests.perf.gemm.records import bench, forward
from tests.perf.pages import facts, made, row

PROFILE = "`python -m perf profile gemm --shape"


def rates(page: str, product: str, shape: str) -> dict[str, str]:
    return facts(page, "## Products", product, shape)


def test_without_records_every_row_says_not_run():
    page = made("gemm")
    assert len(targets.cases()) == 30
    for product, name, m in targets.cases():
        case = (product, targets.label(name, m))
        out = rates(page, *case)
        assert out.pop("next step").startswith("`python -m perf bench gemm")
        assert (out.pop("product"), out.pop("shape")) == case
        assert len(out) == 4 and set(out.values()) == {"not run"}
        ratios = list(facts(page, "## Rivals", *case).values())[2:]
        assert ratios == ["not run"] * len(targets.RIVAL_TEXT)
    for target in targets.TARGETS:
        assert row(page, target.text)[1:3] == ["not run", "not run"]
        assert row(page, target.text)[3].startswith("`python -m perf bench gemm`")
    hardware = made("probes")
    for question in QUESTIONS:
        assert row(hardware, f"{question.number}. {question.text}")[1] == "not run"


def test_a_record_fills_its_row_and_the_latest_counts():
    old = bench("dx", "qkv", 512, 100.0, {"cublas": 70.0})
    new = bench("dx", "qkv", 512, 100.0, {"cublas": 98.0}, dirty=True)
    new["date"] = "2026-11-22T10:00:00+00:00"
    page = made("gemm", new, old)
    out, ratios = rates(page, "dx", "qkv/m512"), facts(page, "## Rivals", "dx", "qkv/m512")
    assert out["ran on"] == "NVIDIA H200, 0123456789+, 2026-11-22"
    assert (out["TFLOP/s"], out["of floor"]) == ("700", "90%")
    assert (ratios["cuBLAS"], ratios["quack, tuned"]) == ("0.98x", "not run")
    assert (out["bits"], out["next step"]) == ("same", "none")
    old_only = rates(made("gemm", old), "dx", "qkv/m512")
    assert old_only["next step"] == "`python -m perf profile gemm --shape qkv --product dx`"


def test_a_check_does_not_hide_a_time_but_a_failure_does():
    timed = bench("fwd", "qkv", 4096, 100.0, {"cublas": 98.0})
    later = {"date": "2026-11-23T10:00:00+00:00"}
    checked = {
        k: v for k, v in (timed | later).items() if k not in ("median_us", "ratio", "tflops")
    }
    page = made("gemm", timed, checked)
    assert facts(page, "## Rivals", "fwd", "qkv")["cuBLAS"] == "0.98x"
    failed = checked | {"status": "failed", "why": "the result is wrong"}
    out = rates(made("gemm", timed, failed), "fwd", "qkv")
    assert out["ran on"].startswith("failed NVIDIA H200")
    assert out["next step"] == "fix: the result is wrong"


def test_differing_bits_are_the_next_step():
    item = bench("fwd", "qkv", 4096, 100.0, {"cublas": 120.0})
    item["bitwise"]["rows"] = False
    page = made("gemm", item)
    out = rates(page, "fwd", "qkv")
    assert (out["bits"], out["next step"]) == ("differ: rows", "fix the bits")
    message = row(page, "bits")[2]
    assert message == "kept in 0 of 30 cases; broken in fwd qkv"


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
    cells = row(made("gemm", *records), targets.TARGETS[0].text)
    assert cells[1:3] == [measured, verdict]
    assert cells[3].startswith(step)


def test_a_miss_at_the_floor_is_the_rivals():
    """Ours within a tenth of the floor, the rival at half of it: 2.3x is out of reach."""
    target = targets.TARGETS[1]
    records = []
    for shape, (m, _, _) in targets.SHAPES.items():
        records.append(bench("fwd", shape, m, 100.0, {target.rival: 184.0}))
        rate = {"system": target.rival, "tflops": 443.0 if shape == "qkv" else 424.0}
        records.append(bench("fwd", shape, m, 184.0, {}, **rate))
    cells = row(made("gemm", *records), target.text)
    assert cells[2] == "missed"
    assert cells[3] == (
        "none: ours is at 90% of the floor or above, the rival runs at 424 to 443 TFLOP/s"
    )
    for item in records:
        item["floor_fraction"] = 0.89
    assert row(made("gemm", *records), target.text)[3].startswith(PROFILE)


def test_host_targets_read_the_worst_cost():
    slow = bench("fwd", "qkv", 4096, 1.0, {}, host_us={"grad": 14.0, "inference": 13.0})
    page = made("gemm", slow)
    grad, inference = (f"host time of one forward call, {mode}" for mode in ("grad", "inference"))
    assert row(page, f"{grad}: <= 22 us")[1:] == [f"14.0 us ({where(slow)})", "met", "none"]
    assert row(page, f"{inference}: <= 12 us")[1:] == [
        f"13.0 us ({where(slow)})",
        "missed",
        targets.HOST_NEXT,
    ]
    torchs = bench("fwd", "qkv", 4096, 1.0, {}, system="cublas", host_us={"inference": 11.6})
    cells = row(made("gemm", slow, torchs), f"{inference}: <= 12 us")
    assert cells[1] == f"13.0 us; torch 11.6 us ({where(slow)})"


def test_host_targets_are_of_the_newest_record_also_if_a_model_has_it():
    old = bench("fwd", "qkv", 4096, 1.0, {}, host_us={"grad": 38.0, "inference": 20.0})
    new = [
        old | {"kernel": "model", "system": system, "product": "host linear", "host_us": cost}
        for system, cost in (("ours", 7.5), ("torch", 13.0), ("ours, launch", 4.0))
    ]
    later = [r | {"date": f"{old['date'][:4]}-12-31", "commit": "f" * 10} for r in new]
    grad, inference = (f"host time of one forward call, {mode}" for mode in ("grad", "inference"))
    for records in ([old, *later], [*later, old]):
        page = made("gemm", *records)
        cells = row(page, f"{inference}: <= 12 us")
        assert cells[1:3] == [f"7.5 us; torch 13.0 us ({where(later[0])})", "met"]
        assert row(page, f"{grad}: <= 22 us")[1] == f"38.0 us ({where(old)})"
    earlier = [r | {"date": "2020-01-01", "commit": "f" * 10} for r in new]
    assert "20.0 us" in row(made("gemm", old, *earlier), f"{inference}: <= 12 us")[1]


def test_absent_rivals_are_listed():
    item = bench("fwd", "qkv", 4096, 1.0, {}, system="quack", status="absent", why="no quack")
    assert "- quack: no quack" in made("gemm", item)
