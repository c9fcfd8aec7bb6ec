"""The backends on this CPU: torch's, and the GPU launchers with their kernels in the simulator."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from unittest import mock

import pytest

from cute_kernels import arch
from cute_kernels.runtime import dispatch
from cute_kernels.runtime.plan_cache import Plan

#: Options of ``simulated`` in a system's ``tests/<system>/simulated.py``, where there are any.
SM90_OPTIONS = {"sparse_attn": {"ctas": 4, "poison": None}}
#: System -> the systems whose Triton kernels its ops launch, alone and beside SM90 kernels.
_TOGETHER = {"logp": ("gemm", "logp"), "moe": ("gemm", "rowwise", "moe")}
_BESIDE_SM90 = {"logp": ("logp",), "moe": ("rowwise", "moe")}


@contextlib.contextmanager
def through(backend: str) -> Iterator[None]:
    """Run ops on CPU tensors by the launchers of ``backend``, or of Triton where it has none."""

    def chosen(op):
        return backend if backend in dispatch._TABLE[op] else arch.TRITON

    def launcher(op, device, dtype):
        return dispatch._function(dispatch._TABLE[op][chosen(op)].launcher)

    def plan(op, device, dtype, *operands):
        planner = dispatch._TABLE[op][chosen(op)].planner
        # Triton's planners look compiled kernels up, which the interpreter has none of.
        if planner and chosen(op) == arch.CUTE_SM90:
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
    others = {} if system == "gemm" else {system: SM90_OPTIONS.get(system, {})}
    with contextlib.ExitStack() as stack:
        stack.enter_context(through(arch.CUTE_SM90))
        for name, options in {"gemm": {"tile": None}, **others}.items():
            module = importlib.import_module(f"tests.{name}.simulated")
            stack.enter_context(module.simulated(**options))
        # Gradients of kept logits, routing, sums over tokens: Triton's.
        if system in _BESIDE_SM90:
            stack.enter_context(_triton_kernels(_BESIDE_SM90[system]))
        yield


@contextlib.contextmanager
def triton(system: str) -> Iterator[None]:
    """The Triton kernels of a system, and of what its ops call."""
    with through(arch.TRITON), _triton_kernels(_TOGETHER.get(system, (system,))):
        yield


@contextlib.contextmanager
def _triton_kernels(systems: tuple[str, ...]) -> Iterator[None]:
    """Run the Triton kernels of these systems in the simulator."""
    pytest.importorskip("triton")

    engines = [importlib.import_module(f"tests.{name}.triton_engine") for name in systems]
    runners = [runner for engine in engines for runner in engine.RUNNERS]
    for runner in runners:
        assert runner.launch  # imported before kernels that modules share are replaced
    with contextlib.ExitStack() as stack:
        for runner in runners:
            stack.enter_context(runner.running("sm_90"))
        yield
