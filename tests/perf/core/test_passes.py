"""The loop that benches share, on a CPU with the clock and the card of a stand-in."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from perf.core import passes, record, timing
from perf.gemm import decode
from perf.gemm.decode import Case as Product
from perf.linear_attn import cases as linear_attn_cases
from perf.linear_attn import rivals as linear_attn
from perf.logp import bench as logp
from perf.logp import cases as logp_cases
from perf.mhc import cases as mhc_cases
from perf.mhc import rivals as mhc
from perf.moe import cases as moe_cases
from perf.moe import rivals as moe
from perf.moe.cases import Case as Grouped
from perf.norm import cases as norm_cases
from perf.norm import rivals as norm
from tests.perf.core.clocks import HostClock

SMALL = Product("fwd", "o_proj", 5, 160, 96)
GROUPED = [
    Grouped(product, "small", *size)
    for product in moe_cases.PRODUCTS + moe_cases.MOVES
    for size in ((16, "zipf"), (150, "balanced"))
]
#: Suite, its cases, and names of rivals, "ours" or those of our orders first.
SUITES = {
    "decode": (decode.SUITE, [SMALL], list(decode.RIVALS)),
    "moe": (moe.SUITE, GROUPED, moe.DEFAULT.split(",")),
    "logp": (logp.SUITE, [logp_cases.Case("bwd", "tiny", 32)], ["ours", "torch", "cce"]),
    "norm": (norm.SUITE, norm_cases.cases(["rms_norm"], [(24, 64)]), ["ours", "torch", "copy"]),
    "linear_attn": (
        linear_attn.SUITE,
        [linear_attn_cases.Case(name, "fwd", 1, 24, 1, 2, 16) for name in ("conv", "delta")],
        ["ours", "fla", "copy"],
    ),
    "mhc": (mhc.SUITE, mhc_cases.cases(["expand"], [(16, 64)]), ["ours", "te", "copy"]),
}


@pytest.fixture(autouse=True)
def card(monkeypatch):
    monkeypatch.setitem(logp_cases.SHAPES, "tiny", (32, 64, 512))
    monkeypatch.setitem(moe_cases.SHAPES, "small", (12, 3, 64, 32))
    monkeypatch.setattr(timing, "CudaClock", HostClock)
    monkeypatch.setattr(timing, "ceilings", lambda: {"copy_gbs": 4000.0, "mm_tflops": 800.0})
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)


#: Rivals that a CPU, or this machine's packages, do not have.
ABSENT = {"te", "cce", "fla", "many_rows", "deepgemm"}


@pytest.mark.parametrize("name", SUITES)
def test_every_case_has_a_record_of_every_rival(name, tmp_path):
    suite, todo, names = SUITES[name]
    path = tmp_path / "records.jsonl"
    bodies = list(passes.bench(suite, todo, names, output=path, rounds=4, device="cpu"))
    assert record.read(path) == json.loads(json.dumps(bodies)) and all(map(passes.line, bodies))
    by_case: dict[tuple[str, str], dict[str, dict]] = {}
    for body in bodies:
        by_case.setdefault((body["product"], body["shape"]), {})[body["system"]] = body
    assert list(by_case) == [(case.product, case.label) for case in todo]
    for case, of_case in zip(todo, by_case.values(), strict=True):
        assert list(of_case) == suite.fitting(case, [n for n in names if n in of_case])
        assert {n for n, b in of_case.items() if b["status"] != "ok"} == ABSENT & set(of_case)
        timed = set(of_case) - ABSENT
        for system, body in of_case.items():
            rival = suite.rivals[system]
            if system in ABSENT:
                assert body["status"] == "absent" and body["why"]
                continue
            assert body["median_us"] > 0 and set(body["ratio"]) == timed - {system}
            assert all(body["bitwise"].values())
            assert body["bitwise"].get("repeat", False) == rival.ordered
            assert ("contract_id" in body) == (rival.promised and rival.op is not None)


def test_a_case_that_the_time_does_not_reach_is_named(tmp_path):
    suite, todo, names = SUITES["norm"]
    options = {"output": tmp_path / "r.jsonl", "rounds": 4, "device": "cpu", "seconds": -1.0}
    (text,) = passes.bench(suite, todo, names, **options)
    assert text == "not run, the time is spent: 24x64, 24x64"


def test_few_rows_are_a_share_of_a_copys_bandwidth():
    assert decode.facts(SMALL, 2.0, {"copy_gbs": 100.0}) == {
        "weight_gbs": SMALL.weight_bytes / 2e3,
        "of_copy": SMALL.weight_bytes / 2e5,
    }


def test_bits_that_change_and_a_rival_that_raises_are_found():
    suite, (case, *_), _ = SUITES["norm"]
    calls = iter(range(100))

    def raises(t):
        raise RuntimeError("no such tile")

    rival, t = suite.rivals["ours"], case.inputs(0, "cpu")
    body = passes._verdict(suite, rival, lambda t: (t["x"] + next(calls),), case, t)
    assert body == {"status": "ok", "bitwise": {"repeat": False}}
    assert passes._verdict(suite, rival, raises, case, t)["why"] == "RuntimeError: no such tile"


def test_rows_alone_that_have_other_bytes_are_found():
    case = logp_cases.Case("fwd", "tiny", 32)
    ours, t = logp.SUITE.rivals["ours"], case.inputs(0, "cpu")
    start = ours.start["fwd"]

    def depends(case):
        call = start(case)
        return lambda t: tuple(out * (1 + 2.0**-12 * len(t["target"])) for out in call(t))

    other = SimpleNamespace(start={"fwd": depends}, ordered=True)
    assert logp.check(ours, start(case), case, t)["bitwise"] == {"repeat": True, "rows": True}
    assert logp.check(other, depends(case), case, t)["bitwise"] == {"repeat": True, "rows": False}
