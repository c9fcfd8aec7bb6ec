"""The ncu CSV parser on hand-written output of the documented raw-page format, and the summary."""

from __future__ import annotations

import csv
import io

import pytest

from perf.core import ncu
from perf.core.work import Work

WORK = Work(2 * 4096 * 4096 * 12288, 2 * (4096 * 4096 + 2 * 4096 * 12288))
CEILINGS = {"mm_tflops": 800.0, "copy_gbs": 4300.0}
STALLS = {"gmma": 1.5, "long_scoreboard": 0.25, "barrier": 0.5, "wait": 0.125, "membar": 0.0625}


def row(cells: list[str]) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="").writerow(cells)
    return out.getvalue()


def output(launches: list[dict[str, str]], units: dict[str, str]) -> str:
    """Standard output of ncu --csv --page raw: its own lines, the program's, then the table."""
    names = list(units)
    fixed = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
    fixed += ["Block Size", "Grid Size", "Device", "CC"]
    lines = [
        "==PROF== Connected to process 4242 (/usr/bin/python3.12)",
        "warming up",
        '==PROF== Profiling "kernel_cutlass_gemm": 0%....50%....100% - 9 passes',
        "==PROF== Disconnected from process 4242",
        row([*fixed, *names]),
        row([""] * len(fixed) + [units[name] for name in names]),
    ]
    for index, launch in enumerate(launches):
        head = [str(index), "4242", "python3.12", "127.0.0.1", launch["kernel"], "1", "7"]
        head += ["(384, 1, 1)", "(132, 1, 1)", "0", "9.0"]
        lines.append(row([*head, *(launch.get(name, "n/a") for name in names)]))
    return "\n".join(lines) + "\n"


UNITS = {
    ncu.METRICS["time_ns"]: "us",
    ncu.METRICS["sm_clock_hz"]: "Ghz",
    ncu.METRICS["tensor_pct"]: "%",
    ncu.METRICS["dram_read_bytes"]: "Mbyte",
    ncu.METRICS["dram_write_bytes"]: "byte",
    ncu.METRICS["registers"]: "register/thread",
    "sm__something_else.sum": "furlong",
} | {ncu.METRICS[f"stall_{name}"]: "inst" for name in (*STALLS, "drain")}

MAIN = {
    "kernel": "kernel_cutlass_gemm_o_(tile 128, 256)",
    ncu.METRICS["time_ns"]: "1,234.5",
    ncu.METRICS["sm_clock_hz"]: "1.75",
    ncu.METRICS["tensor_pct"]: "88.25",
    ncu.METRICS["dram_read_bytes"]: "134.5",
    ncu.METRICS["dram_write_bytes"]: "100,663,296",
    ncu.METRICS["registers"]: "168",
    "sm__something_else.sum": "3",
} | {ncu.METRICS[f"stall_{name}"]: str(value) for name, value in STALLS.items()}
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
