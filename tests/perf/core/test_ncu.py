"""Profiles by Nsight Compute: its CSV, the summary, which launch is whose, and what it is asked."""

from __future__ import annotations

import pytest

from perf.core import counters, ncu
from perf.core.work import Work
from perf.gemm.bench import SUITE
from perf.gemm.cases import cases
from tests.perf.core.counters import CEILINGS, MAIN, STALLS, UNITS, output, stand_in

WORK = Work(2 * 4096 * 4096 * 12288, 2 * (4096 * 4096 + 2 * 4096 * 12288))
SMALL = {"kernel": "void add(float*, float*)", ncu.METRICS["time_ns"]: "10"}
MARK = {"kernel": "at::cuda::(anonymous namespace)::spin_kernel(long)"}


def test_the_table_is_found_and_units_are_applied():
    main, small = ncu.parse(output([MAIN, SMALL], UNITS))
    assert main.kernel == MAIN["kernel"] and "sm__something_else.sum" not in main.values
    names = ("time_ns", "sm_clock_hz", "dram_read_bytes", "dram_write_bytes")
    values = [main.values[ncu.METRICS[name]] for name in names]
    assert values == pytest.approx([1_234_500.0, 1.75e9, 134.5e6, 100_663_296])
    assert small.values == {ncu.METRICS["time_ns"]: 10_000.0}


def test_the_summary_has_floor_traffic_and_the_five_worst_stalls():
    body = ncu.summary(ncu.parse(output([SMALL, MAIN], UNITS)), WORK, CEILINGS)
    assert (body["kernel_name"], body["launches"]) == (MAIN["kernel"], 2)
    assert body["time_us"] == pytest.approx(1244.5)
    assert body["floor_us"] == pytest.approx(WORK.flops / 800e12 * 1e6)
    assert body["floor_fraction"] == pytest.approx(body["floor_us"] / 1244.5)
    assert body["bytes_over_least"] == pytest.approx((134.5e6 + 100_663_296) / WORK.bytes)
    assert body["counters"]["registers"] == 168
    assert [s["reason"] for s in body["stalls"]] == sorted(STALLS, key=STALLS.get)[::-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== no permission\n", "expected a CSV header"),
        ('"ID","Kernel Name"\n"",""\n', "expected a units row and a launch"),
        ('"ID","Kernel Name","x"\n"","",""\n"0","k"\n', "expected 3 columns, got 2"),
        (output([MAIN], UNITS | {ncu.METRICS["time_ns"]: "fortnight"}), "unknown unit"),
        (output([{"kernel": "k"}], UNITS), "gpu__time_duration"),
    ],
)
def test_other_output_is_an_error(text, message):
    with pytest.raises(ncu.ProfileError, match=message):
        ncu.summary(ncu.parse(text), WORK, CEILINGS)


def test_metrics_this_ncu_lacks_are_named_and_not_asked_for():
    names = [n.split(".")[0] for n in ncu.METRICS.values() if "gmma" not in n]
    listing = "\n".join(f"{name} Counter about it" for name in names if "launch__" not in name)
    known, unknown = ncu.known_metrics(listing)
    assert unknown == [ncu.METRICS["stall_gmma"]] and ncu.METRICS["registers"] in known
    assert ncu.known_metrics("no such option\n") == (list(ncu.METRICS.values()), [])


def test_cases_of_several_launches_are_told_apart_by_their_marks():
    def launch(name: str) -> ncu.Launch:
        return ncu.Launch(name, {ncu.METRICS["time_ns"]: 1e3})

    mark, a, b, c = map(launch, (MARK["kernel"], "project", "add", "combine"))
    assert counters.by_case([mark, a, b, mark, c, mark]) == [[a, b], [c], []]
    with pytest.raises(ncu.ProfileError, match="expected spin_kernel first, got project"):
        counters.by_case([a, mark])


@pytest.mark.parametrize("code", [0, 9])
def test_a_profile_becomes_a_record(code, monkeypatch):
    words = "perf profile gemm --shape qkv --product fwd --system ours"
    listing = "gpu__time_duration  Counter  ns\n"
    requested = stand_in(monkeypatch, words, [MARK, MAIN], listing, code)
    if code:
        with pytest.raises(ncu.ProfileError, match=r"(?s)ended with 9: .*NVGPUCTRPERM"):
            counters.profile(SUITE, cases(["qkv"], [], ["fwd"]), "ours")
        return
    (body,) = counters.profile(SUITE, cases(["qkv"], [], ["fwd"]), "ours", "abc")
    facts = ("kind", "commit", "kernel", "kernel_name", "shape")
    want = ["profile", "abc", "gemm", MAIN["kernel"], "qkv"]
    assert [body[name] for name in facts] == want
    assert ncu.METRICS["stall_gmma"] in body["unknown_metrics"] and list(counters.lines(body))
    assert "--clock-control none" in requested[1] and "--profile-from-start off" in requested[1]
    assert requested[1].endswith(f"-m {words} --target")
