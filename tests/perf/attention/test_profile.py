"""Profiles of attention: what ncu is asked, which launch is whose, and what the target runs."""

from __future__ import annotations

import subprocess

import pytest
import torch

from perf.attention import profile
from perf.attention.cases import Case, Problem
from perf.core import ncu as shared
from tests.perf.core.counters import CEILINGS, MAIN, STALLS, UNITS, output

OPTIONS = "--mask full,causal --d 64 --pass bwd,fwd"
PREFIX = "kernel_cutlass_kernel_cute_kernelssparse_attn"
TIME = shared.METRICS["time_ns"]


def launch(which: str, us: float, module: str = "kernel_{}_sm90") -> dict:
    return MAIN | {"kernel": f"{PREFIX}{module.format(which)}Attention_0", TIME: str(us)}


@pytest.fixture
def small(monkeypatch):
    """Cases of 256 tokens on this CPU."""
    monkeypatch.setattr(profile, "DEVICE", "cpu")
    out = [Case(mask, 256, 64, 2, 2, 512) for mask in ("full", "causal")]
    monkeypatch.setattr(profile, "cases", lambda masks, dims: out)
    return out


@pytest.fixture
def asked(monkeypatch):
    """Runs `attention` with an ncu that gives these launches; returns (bodies, command)."""

    def run(launches, todo):
        commands = []

        def ncu(command, **_):
            commands.append(command)
            text = "none\n" if "--query-metrics" in command else output(launches, UNITS)
            return subprocess.CompletedProcess(command, 0, text, "")

        monkeypatch.setattr(shared, "ncu", lambda: "ncu")
        words = f"perf profile attention {OPTIONS}"
        monkeypatch.setattr(shared.sys, "argv", words.split())
        monkeypatch.setattr(shared.subprocess, "run", ncu)
        monkeypatch.setattr(profile.timing, "ceilings", lambda: CEILINGS)
        monkeypatch.setattr(profile.record, "environment", lambda commit: {"commit": commit})
        return profile.attention(todo, ["bwd", "fwd"], "abc"), commands[1]

    return run


def test_each_launch_becomes_a_record(asked, small):
    times = {"fwd": 10.0, "bwd": 40.0}
    launches = [launch(which, us + i) for i in range(2) for which, us in times.items()]
    bodies, command = asked(launches, small)
    text = " ".join(command)
    assert "--clock-control none" in text
    assert (
        "--kernel-name regex:kernel_fwd_(no_overlap_|wide_)?sm90|kernel_bwd_(wide_)?sm90 " in text
    )
    assert text.endswith(f"-m perf profile attention {OPTIONS} --target")
    assert [(b["mask"], b["product"], b["time_us"]) for b in bodies] == [
        ("full", "fwd", 10.0),
        ("full", "bwd", 40.0),
        ("causal", "fwd", 11.0),
        ("causal", "bwd", 41.0),
    ]
    first, last = bodies[0], bodies[-1]
    assert (first["kind"], first["kernel"], first["system"]) == ("profile", "attention", "ours")
    assert [s["reason"] for s in first["stalls"]] == sorted(STALLS, key=STALLS.get)[::-1]
    problem = Problem(small[1], "cpu")
    assert last["tflops"] == pytest.approx(problem.flops("bwd") / 41.0 / 1e6)
    least = small[1].bytes("bwd")
    floor = max(problem.flops("bwd") / 800.0 / 1e6, least / 4300.0 / 1e3)
    assert last["floor_us"] == pytest.approx(floor)
    assert last["bytes_over_least"] == pytest.approx((134.5e6 + 100_663_296) / least)
    assert next(shared.lines(last)).startswith("ours bwd causal/s256/d64/h2/kv2: kernel_cutlass")


def test_wide_heads_have_kernels_of_their_own(asked, small):
    launches = [launch(w, 1.0, "kernel_{}_wide_sm90") for _ in range(2) for w in ("fwd", "bwd")]
    assert [b["product"] for b in asked(launches, small)[0]] == ["fwd", "bwd"] * 2


def test_what_runs_around_a_backward_is_not_the_backward(asked, small):
    before = launch("bwd", 1.0, "kernel_{}_pre_sm90")
    with pytest.raises(shared.ProfileError, match="got kernel_cutlass"):
        asked([launch("fwd", 1.0), before, launch("fwd", 1.0), launch("bwd", 1.0)], small)


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        ([launch("fwd", 1.0)], "expected one launch of each of 4 cases, got 1"),
        (
            [launch(which, 1.0) for which in ("fwd", "fwd", "bwd", "bwd")],
            r"expected kernel_bwd_\(wide_\)\?sm90 for full/s256/d64/h2/kv2, got kernel_cutlass",
        ),
    ],
)
def test_other_launches_are_an_error(launches, message, asked, small):
    with pytest.raises(shared.ProfileError, match=message):
        asked(launches, small)


def test_the_target_opens_the_profiler_for_one_call(monkeypatch, small):
    recorded = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: recorded.append(name))
    starts = dict(profile.RIVALS["ours"].start)

    def counted(which):
        def start(problem):
            call = starts[which](problem)

            def run(t):
                recorded.append(which)
                return call(t)

            return run

        return start

    monkeypatch.setitem(
        profile.RIVALS,
        "ours",
        type("Ours", (), {"start": {which: counted(which) for which in starts}}),
    )
    profile.target(small[:1], ["bwd", "fwd"])
    assert recorded == [
        "fwd",
        *["fwd"] * 3,
        *("start", "fwd", "stop"),
        *["bwd"] * 3,
        *("start", "bwd", "stop"),
    ]


def test_the_cases_are_those_of_the_bench():
    cases = profile.cases(["full", "document"], [64, 128])
    assert [case.label for case in cases] == [
        f"{mask}/s8192/d{dim}/h16/kv16" for dim in (64, 128) for mask in ("full", "document")
    ]
