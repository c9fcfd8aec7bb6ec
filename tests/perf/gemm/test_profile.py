"""Profiles of products: what ncu is asked and what the record and the terminal say."""

from __future__ import annotations

import subprocess

import pytest

from perf.core import counters, ncu
from perf.gemm.cases import cases
from perf.gemm.rivals import SUITE
from tests.perf.core.counters import CEILINGS, MAIN, UNITS, output

CASES = cases(["qkv"], [], ["fwd"])
MARK = {"kernel": "at::cuda::(anonymous namespace)::spin_kernel(long)"}
WORDS = "perf profile gemm --shape qkv --product fwd --system ours"


def test_a_profile_becomes_a_record(monkeypatch):
    """ncu is a stand-in that answers its two calls; the rest is what runs on the card."""
    requested = []

    def answer(command, **_):
        requested.append(command)
        listing = "gpu__time_duration  Counter  ns\n"
        text = listing if "--query-metrics" in command else output([MARK, MAIN], UNITS)
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(ncu, "ncu", lambda: "ncu")
    monkeypatch.setattr(ncu.subprocess, "run", answer)
    monkeypatch.setattr(ncu.sys, "argv", WORDS.split())
    monkeypatch.setattr(counters.timing, "ceilings", lambda: CEILINGS)
    monkeypatch.setattr(counters.record, "environment", lambda commit: {"commit": commit})
    (body,) = counters.profile(SUITE, CASES, "ours", "abc")
    assert body["kind"] == "profile" and body["commit"] == "abc" and body["kernel"] == "gemm"
    assert body["kernel_name"] == MAIN["kernel"] and body["shape"] == "qkv"
    assert ncu.METRICS["stall_gmma"] in body["unknown_metrics"]
    assert " ".join(requested[1]).endswith(f"-m {WORDS} --target")
    text = "\n".join(counters.lines(body | {"unknown_metrics": ["x.sum"]}))
    assert "ours fwd qkv" in text and "gmma" in text and "x.sum" in text


def test_an_ncu_that_fails_says_what_it_said(monkeypatch):
    def answer(command, **_):
        return subprocess.CompletedProcess(command, 9, "", "==ERROR== ERR_NVGPUCTRPERM")

    monkeypatch.setattr(ncu, "ncu", lambda: "ncu")
    monkeypatch.setattr(ncu.subprocess, "run", answer)
    monkeypatch.setattr(counters.timing, "ceilings", lambda: CEILINGS)
    with pytest.raises(ncu.ProfileError, match="ended with 9: ==ERROR== ERR_NVGPUCTRPERM"):
        counters.profile(SUITE, CASES, "ours")
