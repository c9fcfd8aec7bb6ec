"""The loop that benches share, on a CPU with the clock and the card of a stand-in."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from perf.core import passes, record, timing
from perf.linear_attn import cases as linear_attn_cases
from perf.linear_attn import rivals as linear_attn
from perf.logp import bench as logp
from perf.logp import cases as logp_cases
from perf.mhc import cases as mhc_cases
from perf.mhc import rivals as mhc
from perf.norm import cases as norm_cases
from perf.norm import rivals as norm
from tests.perf.core.clocks import HostClock

SUITES = {
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
    monkeypatch.setattr(timing, "CudaClock", HostClock)
    monkeypatch.setattr(timing, "ceilings", lambda: {"copy_gbs": 4000.0, "mm_tflops": 800.0})
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)


@pytest.mark.parametrize("name", SUITES)
def test_every_case_has_a_record_of_every_rival(name, tmp_path):
    suite, todo, names = SUITES[name]
    path = tmp_path / "records.jsonl"
    bodies = list(passes.bench(suite, todo, names, output=path, rounds=4, device="cpu"))
    assert record.read(path) == json.loads(json.dumps(bodies))
    assert [body["system"] for body in bodies if body["system"] == "ours"] == ["ours"] * len(todo)
    for body in bodies:
        if suite.rivals[body["system"]].promised:
            assert body["status"] == "ok" and body["contract_id"]
            assert all(body["bitwise"].values()) and body["bitwise"]["repeat"]
        elif body["system"] in ("te", "cce", "fla"):
            assert body["status"] == "absent" and body["why"]
        else:
            assert body["median_us"] > 0 and set(body["ratio"]) == {"ours", *names[1:]} - {
                body["system"], "te", "cce", "fla",
            }  # fmt: skip


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
