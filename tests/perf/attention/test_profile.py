"""Profiles of attention: which launch is whose."""

from __future__ import annotations

import pytest

from perf.attention import profile
from perf.attention.cases import Case, Problem
from perf.core import ncu as shared
from tests.perf.core.counters import MAIN, stand_in

OPTIONS = "--mask full,causal --d 64 --pass bwd,fwd"
PREFIX = "kernel_cutlass_kernel_cute_kernelssparse_attn"


def launch(which: str, us: float = 1.0, module: str = "kernel_{}_sm90") -> dict:
    kernel = f"{PREFIX}{module.format(which)}Attention_0"
    return MAIN | {"kernel": kernel, shared.METRICS["time_ns"]: str(us)}


@pytest.fixture
def small(monkeypatch):
    """Cases of 256 tokens on this CPU."""
    monkeypatch.setattr(profile, "DEVICE", "cpu")
    out = [Case(mask, 256, 64, 2, 2, 512) for mask in ("full", "causal")]
    monkeypatch.setattr(profile, "cases", lambda masks, dims: out)
    return out


@pytest.fixture
def asked(monkeypatch, small):
    """Runs `attention` with an ncu that gives these launches; returns (bodies, command)."""

    def run(launches):
        commands = stand_in(monkeypatch, f"perf profile attention {OPTIONS}", launches)
        return profile.attention(small, ["bwd", "fwd"], "abc"), commands[1]

    return run


def test_each_launch_becomes_a_record(asked, small):
    times = {"fwd": 10.0, "bwd": 40.0}
    bodies, command = asked(
        [launch(which, us + i) for i in range(2) for which, us in times.items()]
    )
    assert command.endswith(f"-m perf profile attention {OPTIONS} --target")
    assert [(b["mask"], b["product"], b["time_us"]) for b in bodies] == [
        ("full", "fwd", 10.0),
        ("full", "bwd", 40.0),
        ("causal", "fwd", 11.0),
        ("causal", "bwd", 41.0),
    ]
    last, problem = bodies[-1], Problem(small[1], "cpu")
    assert (last["kind"], last["kernel"], last["system"]) == ("profile", "attention", "ours")
    assert last["tflops"] == pytest.approx(problem.flops("bwd") / 41.0 / 1e6)
    wide = [launch(w, 1.0, "kernel_{}_wide_sm90") for _ in range(2) for w in ("fwd", "bwd")]
    assert [b["product"] for b in asked(wide)[0]] == ["fwd", "bwd"] * 2


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        ([launch("fwd")], "expected one launch of each of 4 cases, got 1"),
        ([launch(which) for which in ("fwd", "fwd", "bwd", "bwd")], "got kernel_cutlass"),
        # What runs around a backward is not the backward.
        (
            [launch("fwd"), launch("bwd", 1.0, "kernel_{}_pre_sm90"), launch("fwd"), launch("bwd")],
            "got kernel_cutlass",
        ),
    ],
)
def test_other_launches_are_an_error(launches, message, asked):
    with pytest.raises(shared.ProfileError, match=message):
        asked(launches)
