"""The backends on this CPU: torch's, and the GPU launchers with their kernels in the simulator."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from cute_kernels import arch
from cute_kernels.runtime import dispatch
from cute_kernels.runtime.plan_cache import Plan


@contextlib.contextmanager
def through(backend: str) -> Iterator[None]:
    """While it lasts, ops on CPU tensors take the launchers of ``backend``."""

    def launcher(op, device, dtype):
        return dispatch._function(dispatch._TABLE[op][backend].launcher)

    def plan(op, device, dtype, *operands):
        planner = dispatch._TABLE[op][backend].planner
        # Triton's planners look compiled kernels up, which the interpreter has none of.
        if planner and backend == arch.CUTE_SM90:
            return dispatch._function(planner)(*operands)
        return Plan(launcher(op, device, dtype), fresh=False)

    with (
        mock.patch.object(dispatch, "launcher", launcher),
        mock.patch.object(dispatch, "plan", plan),
        mock.patch.object(dispatch, "backend", lambda *asked: backend),
    ):
        yield


@contextlib.contextmanager
def sm90(system: str) -> Iterator[None]:
    """The SM90 kernels of a system, and of what its backward calls."""
    from tests.gemm.simulated import simulated as gemm

    with contextlib.ExitStack() as stack:
        stack.enter_context(through(arch.CUTE_SM90))
        stack.enter_context(gemm(tile=None))
        if system == "logp":
            from tests.logp.simulated import simulated as logp

            stack.enter_context(logp())
        elif system == "mhc":
            from tests.mhc.simulated import simulated as mhc

            stack.enter_context(mhc())
        elif system == "norm":
            from tests.norm.simulated import simulated as norm

            stack.enter_context(norm())
        elif system == "sparse_attn":
            from tests.sparse_attn.simulated import simulated as attention

            stack.enter_context(attention(ctas=4))
        yield


@contextlib.contextmanager
def triton(system: str) -> Iterator[None]:
    """The Triton kernels of a system, likewise."""
    pytest.importorskip("triton")

    def simulated(name: str):
        harness = importlib.import_module(f"tests.{name}.triton_harness")
        launch = importlib.import_module(f"cute_kernels.{name}.triton.launch")
        return harness.simulated(launch)

    with contextlib.ExitStack() as stack:
        stack.enter_context(through(arch.TRITON))
        guards, inside = [], []
        for name in ("gemm", "logp") if system == "logp" else (system,):
            stack.enter_context(simulated(name))
            guards.append(torch.cuda.device)

        @contextlib.contextmanager
        def guard(device):
            """The device guards of all harnesses: each asserts that its own is open."""
            with contextlib.ExitStack() as opened:
                for one in guards if device not in inside else ():
                    opened.enter_context(one(device))
                inside.append(device)
                yield
                inside.pop()

        stack.enter_context(mock.patch.object(torch.cuda, "device", guard))
        yield
