"""Few rows: the cases, one case on the CPU, verdicts that can fail, and targets from records."""

from __future__ import annotations

import pytest

from perf.core import passes, timing
from perf.core.rival import started
from perf.gemm import decode, decode_page
from perf.gemm.decode import Case
from tests.perf.core.clocks import HostClock

CEILINGS = {"mm_tflops": 800.0, "copy_gbs": 4000.0}
SMALL = Case("fwd", "o_proj", 5, 160, 96)


def test_the_cases_are_the_issues():
    few, middle, dense = (decode.cases([group]) for group in ("few", "middle", "dense"))
    assert len(few) == len(decode.SHAPES) * len(decode.ROWS) == 70
    assert {case.m for case in middle} == {160, 256, 384, 512, 2048}
    assert {case.m for case in dense} == {4096} and len(dense) == 5
    assert len({case.label for case in (*few, *middle, *dense)}) == 88
    assert next(c for c in few if c.shape == "qkv").weight_bytes == 2 * 4096 * 12288


def test_a_case_has_a_record_of_every_system(monkeypatch):
    monkeypatch.setattr(timing, "CudaClock", HostClock)
    options = {"rounds": 50, "device": "cpu", "ceilings": CEILINGS}
    bodies = passes._run_case(decode.SUITE, SMALL, list(decode.RIVALS), **options)
    assert set(bodies) == set(decode_page.SYSTEMS)
    for name, body in bodies.items():
        assert body["status"] == "ok" and body["median_us"] > 0, body
        assert set(body["ratio"]) == set(bodies) - {name}
        gbs = SMALL.weight_bytes / body["median_us"] / 1e3
        assert body["of_copy"] == pytest.approx(gbs / 4000)
        assert set(body["bitwise"]) == (
            {"repeat", "rows"} if name in ("chain", "tree", "skinny") else set()
        )
        assert all(body["bitwise"].values())


def test_more_rows_than_skinny_takes_are_linears_alone():
    case = Case("fwd", "o_proj", 160, 8, 8)
    calls, absent = started(decode.RIVALS, decode.RIVALS, "fwd", case)
    assert set(calls) == {"chain", "tree", "cublas"} and set(absent) == {"skinny", "fast"}


def told(name, call, case) -> dict:
    """The verdict on a rival's call."""
    t = case.inputs(0, "cpu")
    return passes._verdict(decode.SUITE, decode.RIVALS[name], call, case, t)


def by_rows(t):
    """Inside the bound, but not the same for a row that is not alone."""
    y = t["x"].float() @ t["w"].float().mT
    return (y if len(y) == 1 else y * (1 + 2.0**-12)).bfloat16()


@pytest.mark.parametrize(
    ("call", "status", "bits"),
    [
        (by_rows, "ok", {"repeat": True, "rows": False}),
        (lambda t: 2 * (t["x"] @ t["w"].mT), "failed", None),
    ],
)
def test_what_is_wrong_is_told(call, status, bits):
    case = Case("fwd", "o_proj", 5, 4096, 96)
    out = told("chain", call, case)
    assert out["status"] == status
    assert bits is None or out["bitwise"] == bits


def test_what_raises_is_told():
    def raises(t):
        raise RuntimeError("no such tile")

    assert "no such tile" in told("tree", raises, SMALL)["why"]


def records(ratio: float, share: float = 0.9) -> list[dict]:
    """Records of every case and system; cuBLAS takes ``ratio`` times as long as each other one."""
    out = []
    for case in decode.cases(["few", "middle", "dense"]):
        for name in decode_page.SYSTEMS:
            if case.m > max(decode.ROWS) and name in ("skinny", "fast"):
                continue
            others = {other: ratio if other == "cublas" else 1.0 for other in decode_page.SYSTEMS}
            body = case.items() | {
                "system": name,
                "status": "ok",
                "kind": "bench",
                "kernel": "decode",
            }
            body |= {"median_us": 10.0, "tflops": 1.0, "of_copy": share, "ratio": others}
            body |= {"gpu": "NVIDIA H200", "commit": "0" * 7, "date": "2026-11-22T00:00:00"}
            out.append(body | {"bitwise": {"repeat": True, "rows": True}})
    return out


@pytest.mark.parametrize(
    ("ratio", "share", "missed"), [(1.1, 0.9, 0), (1.1, 0.7, 1), (0.7, 0.9, 5)]
)
def test_the_targets_follow_the_records(ratio, share, missed):
    words = [row[2] for row in decode_page.target_rows(records(ratio, share))]
    assert len(words) == 8 and words.count("missed") == missed and words.count("met") == 8 - missed


def test_a_case_without_a_record_is_not_run():
    some = [r for r in records(1.1) if r["shape"] != "qkv/m13"]
    words = [row[2] for row in decode_page.target_rows(some)]
    assert words.count("not run") == 4
    assert [row[2] for row in decode_page.target_rows([])] == ["not run"] * 8


def test_broken_bits_are_named():
    broken = records(1.25)
    broken[0]["bitwise"]["rows"] = False
    kept = {row[0]: row[1] for row in decode_page.bits_kept(broken)}
    assert "87 of 88 cases; broken in fwd qkv/m1" in kept["bits of `chain` at few rows"]
    assert "70 of 70" in kept["bits of `skinny_linear` at few rows"]
