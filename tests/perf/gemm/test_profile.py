"""Profiles of products: what ncu is asked and what the record and the terminal say."""

from __future__ import annotations

import subprocess

import pytest

from perf.core import ncu
from perf.gemm import profile
from perf.gemm.cases import cases
from tests.perf.core.counters import CEILINGS, MAIN, UNITS, output

CASE = cases(["qkv"], [], ["fwd"])[0]


def test_the_terminal_shows_the_record():
    body = CASE.items() | {"kernel": "gemm", "system": "ours", "unknown_metrics": ["x.sum"]}
    body |= ncu.summary(ncu.parse(output([MAIN], UNITS)), CASE.work, CEILINGS)
    text = "\n".join(profile.lines(body))
    assert "y = x W^T" in text and "gmma" in text and "x.sum" in text


def test_a_profile_becomes_a_record(monkeypatch):
    """ncu is a stand-in that answers its two calls; the rest is what runs on the card."""
    requested = []

    def answer(command, **_):
        requested.append(command)
        listing = "gpu__time_duration  Counter  ns\n"
        text = listing if "--query-metrics" in command else output([MAIN], UNITS)
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(ncu, "ncu", lambda: "ncu")
    monkeypatch.setattr(ncu.subprocess, "run", answer)
    monkeypatch.setattr(profile.timing, "ceilings", lambda: CEILINGS)
    monkeypatch.setattr(profile.record, "environment", lambda commit: {"commit": commit})
    words = "perf profile gemm --shape qkv --product fwd --system ours"
    monkeypatch.setattr(ncu.sys, "argv", words.split())
    body = profile.gemm("qkv", "fwd", "ours", "abc")
    assert body["kind"] == "profile" and body["commit"] == "abc"
    assert body["kernel_name"] == MAIN["kernel"]
    assert ncu.METRICS["stall_gmma"] in body["unknown_metrics"]
    assert " ".join(requested[1]).endswith(
        "-m perf profile gemm --shape qkv --product fwd --system ours --target"
    )


def test_an_ncu_that_fails_says_what_it_said(monkeypatch):
    def answer(command, **_):
        return subprocess.CompletedProcess(command, 9, "", "==ERROR== ERR_NVGPUCTRPERM")

    monkeypatch.setattr(ncu, "ncu", lambda: "ncu")
    monkeypatch.setattr(ncu.subprocess, "run", answer)
    with pytest.raises(ncu.ProfileError, match="ended with 9: ==ERROR== ERR_NVGPUCTRPERM"):
        profile.gemm("qkv", "fwd", "ours")
