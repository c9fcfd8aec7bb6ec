"""The ncu CSV parser on hand-written output of the documented raw-page format, and the summary."""

from __future__ import annotations

import pytest

from perf.core import ncu
from perf.core.work import Work
from tests.perf.core.counters import CEILINGS, MAIN, UNITS, output

WORK = Work(2 * 4096 * 4096 * 12288, 2 * (4096 * 4096 + 2 * 4096 * 12288))


SMALL = {"kernel": "void add(float*, float*)", ncu.METRICS["time_ns"]: "10"}


def test_the_table_is_found_and_units_are_applied():
    main, small = ncu.parse(output([MAIN, SMALL], UNITS))
    assert main.kernel == "kernel_cutlass_gemm_o_(tile 128, 256)"
    assert main.values[ncu.METRICS["time_ns"]] == pytest.approx(1_234_500.0)
    assert main.values[ncu.METRICS["sm_clock_hz"]] == pytest.approx(1.75e9)
    assert main.values[ncu.METRICS["dram_read_bytes"]] == pytest.approx(134.5e6)
    assert main.values[ncu.METRICS["dram_write_bytes"]] == 100_663_296
    assert "sm__something_else.sum" not in main.values
    assert small.values == {ncu.METRICS["time_ns"]: 10_000.0}


def test_the_summary_names_floor_traffic_and_the_five_worst_stalls():
    body = ncu.summary(ncu.parse(output([SMALL, MAIN], UNITS)), WORK, CEILINGS)
    assert body["kernel_name"] == MAIN["kernel"]
    assert body["launches"] == 2
    assert body["time_us"] == pytest.approx(1244.5)
    assert body["floor_us"] == pytest.approx(WORK.flops / 800e12 * 1e6)
    assert body["floor_fraction"] == pytest.approx(body["floor_us"] / 1244.5)
    assert body["bytes_over_least"] == pytest.approx((134.5e6 + 100_663_296) / WORK.bytes)
    assert body["counters"]["registers"] == 168
    assert [s["reason"] for s in body["stalls"]] == [
        "gmma",
        "barrier",
        "long_scoreboard",
        "wait",
        "membar",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== no permission\n", "expected a CSV header"),
        ('"ID","Kernel Name"\n"",""\n', "expected a units row and a launch"),
        ('"ID","Kernel Name","x"\n"","",""\n"0","k"\n', "expected 3 columns, got 2"),
        (output([MAIN], UNITS | {ncu.METRICS["time_ns"]: "fortnight"}), "unknown unit"),
    ],
)
def test_other_output_is_an_error(text, message):
    with pytest.raises(ncu.ProfileError, match=message):
        ncu.parse(text)


def test_a_launch_without_its_time_is_an_error():
    launches = ncu.parse(output([{"kernel": "k"}], UNITS))
    with pytest.raises(ncu.ProfileError, match="gpu__time_duration"):
        ncu.summary(launches, WORK, CEILINGS)


def test_metrics_this_ncu_lacks_are_named_and_not_asked_for():
    listing = "Device NVIDIA H200 (GH100)\n" + "\n".join(
        f"{name.split('.')[0]:<60} Counter  about it"
        for name in ncu.METRICS.values()
        if "gmma" not in name and not name.startswith("launch__")
    )
    known, unknown = ncu.known_metrics(listing)
    assert unknown == [ncu.METRICS["stall_gmma"]]
    assert ncu.METRICS["registers"] in known
    assert len(known) == len(ncu.METRICS) - 1
    assert ncu.known_metrics("no such option\n") == (list(ncu.METRICS.values()), [])


def test_the_command_leaves_clocks_alone_and_profiles_the_bracketed_call_only():
    line = ncu.command("ncu", ["a.sum", "b.pct"], ["python", "-m", "perf"])
    text = " ".join(line)
    assert "--clock-control none" in text
    assert "--profile-from-start off" in text
    assert "--csv --page raw --metrics a.sum,b.pct python -m perf" in text
