"""Few rows: the cases, one case on the CPU, verdicts that can fail."""

from __future__ import annotations

import pytest

from perf.core import passes, timing
from perf.gemm import decode, decode_page
from perf.gemm.decode import Case
from tests.perf.core.clocks import HostClock

CEILINGS = {"mm_tflops": 800.0, "copy_gbs": 4000.0}
SMALL = Case("fwd", "o_proj", 5, 160, 96)


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


def by_rows(t):
    """Inside the bound, but not the same for a row that is not alone."""
    y = t["x"].float() @ t["w"].float().mT
    return (y if len(y) == 1 else y * (1 + 2.0**-12)).bfloat16()


@pytest.mark.parametrize(
    ("call", "status", "bits"),
    [
        (by_rows, "ok", {"repeat": True, "rows": False}),
        (lambda t: 2 * (t["x"] @ t["w"].mT), "failed", {"repeat": True, "rows": True}),
        (lambda t: t["no such tile"], "failed", None),
    ],
)
def test_what_is_wrong_is_told(call, status, bits):
    case = Case("fwd", "o_proj", 5, 4096, 96)
    rival, t = decode.RIVALS["chain"], case.inputs(0, "cpu")
    out = passes._verdict(decode.SUITE, rival, call, case, t)
    assert out["status"] == status and out.get("bitwise") == bits
