"""Every option of every public op on every backend: each result is within its bound of float64.

And the bytes of no op, forward or backward, follow what memory held before.
"""

from __future__ import annotations

import functools
from collections import defaultdict

import pytest
import torch

from cute_kernels import arch
from cute_kernels.runtime import dispatch
from cute_kernels.systems import SYSTEMS
from ptxsim.skips import requires_core
from tests.old_memory import in_any_memory
from tests.option_table import TABLE, backends, calls

SYSTEM_OF = {op: system.package for system in SYSTEMS for op in system.ops}
KERNEL_OF = {op: kernel for system in SYSTEMS for op, kernel in system.ops.items()}
#: Ops without SM90 kernels of their own, or with Triton's between them.
NO_SM90 = {
    "log_probs",
    "linear_policy_loss",
    "write_kv_cache",
    *(f"moe.{name}" for name in ("route", "permute", "combine", "load_balance_loss", "z_loss")),
    *(op for system in SYSTEMS if not system.launcher for op in system.ops),
}
#: Kernels that compile within a second.  The others are for the nightly run; every system has SM90
#: kernels by day in its own tests.
BY_DAY = {
    (arch.TRITON, "embedding"),
    (arch.TRITON, "clip_grad_norm_"),
    (arch.TRITON, "rotary_table"),
    (arch.TRITON, "mhc.expand_from_embedding"),
}
#: Cases of threads, which share no simulator and no record of results.
CPU_ALONE = {"shards", "unverified_shards"}


def system_of(op: str) -> str:
    return SYSTEM_OF[op.split(".")[0]]


@functools.cache
def on_the_cpu(op: str) -> dict[str, dict[str, float]]:
    """The shares of all cases of an op, run once a process."""
    return {
        label: run() if label in CPU_ALONE else in_any_memory(run)
        for label, run in TABLE[op].items()
    }


def excess(shares_of: dict[str, dict[str, float]]) -> dict[tuple[str, str], float]:
    """Results beyond their bounds, and those that are not numbers, by (case, result)."""
    return {
        (label, name): value
        for label, shares in shares_of.items()
        for name, value in shares.items()
        if not value <= 1
    }


def on_gpu_backends():
    for backend in (arch.CUTE_SM90, arch.TRITON):
        for op in calls.ops():
            if backend == arch.CUTE_SM90 and op in NO_SM90:
                continue
            if set(TABLE[op]) <= CPU_ALONE:
                continue
            if (kernel := KERNEL_OF.get(op)) and backend not in dispatch._backends(kernel):
                continue
            marks = [pytest.mark.sim, requires_core]
            marks += [] if (backend, op) in BY_DAY else [pytest.mark.nightly]
            yield pytest.param(backend, op, marks=marks, id=f"{backend}-{op}")


@pytest.mark.parametrize("op", calls.ops())
def test_cpu(op):
    shares = on_the_cpu(op)
    assert all(shares.values()) and not excess(shares)


@pytest.mark.parametrize(("backend", "op"), list(on_gpu_backends()))
def test_gpu_backends(backend, op):
    simulated = {arch.CUTE_SM90: backends.sm90, arch.TRITON: backends.triton}[backend]
    shares = {}
    for label, run in TABLE[op].items():
        if label not in CPU_ALONE:
            with simulated(system_of(op)):
                shares[label] = in_any_memory(run)
    assert all(shares.values()) and not excess(shares)


def test_the_table_has_every_public_op():
    missing = set(calls.ops()) - set(TABLE)
    assert not missing, f"give these cases in tests/option_table: {sorted(missing)}"
    assert len(TABLE) == len(calls.ops())


@pytest.mark.parametrize("op", calls.ops())
def test_the_table_has_every_option(op):
    on_the_cpu(op)
    assert not calls.unused(op)


def test_an_option_without_a_case_is_seen(monkeypatch):
    monkeypatch.setattr(calls, "recorded", defaultdict(list))
    x, weight = torch.randn(2, 8), torch.randn(8)
    calls.call("rms_norm", x, weight, 1e-6, residual=x)
    assert {name.split(":")[0] for name in calls.unused("rms_norm")} == {
        "weight", "eps", "offset", "main_grad",
    }  # fmt: skip
    calls.call("rms_norm", x, None, 0.1, offset=1.0)
    calls.call("rms_norm", x, weight, main_grad=torch.zeros(8))
    assert not calls.unused("rms_norm")
