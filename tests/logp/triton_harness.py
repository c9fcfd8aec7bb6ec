"""The Triton linear_logp without a GPU: see tests/triton_harness.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import pytest

import cute_kernels.logp.triton as package
from cute_kernels.cpu import ieee
from cute_kernels.logp.triton import launch as triton_launch
from cute_kernels.runtime import dispatch
from tests import triton_copies, triton_in_numpy, triton_runner
from tests import triton_harness as harness
from tests.triton_harness import TARGETS

from .. import triton_inspect as inspect

#: Every kernel, and the tensors that it may write.
KERNELS = dict.fromkeys(("states_kernel", "gradients_kernel", "scale_kernel"), ("out_ptr",))
KERNELS["finish_kernel"] = "logp_ptr", "lse2_ptr", "entropy_ptr"
#: Bytes a thread on the stack that a kernel may have: what Triton 3.7.1 leaves on sm_90 for the
#: states of single rows with a softcap and an entropy.
STACK = 8

copy_of = functools.partial(triton_copies.copy_of, package)
sizes_of_float_sums = inspect.sizes_of_float_sums


def compiled(target: str, call: Callable[[], object], launch: ModuleType = triton_launch) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    return harness.compiled(launch, TARGETS[target], KERNELS, call)


@contextlib.contextmanager
def simulated(launch: ModuleType = triton_launch, **options: int) -> Iterator[list]:
    """While it lasts, launches run on CPU tensors in ptxsim; yields the kernels launched.

    The device has 132 units, and the launcher must be inside its device guard.
    """
    with harness.guarded() as devices:

        def units(device):
            assert devices == [device], "launched outside the device guard"
            return 132

        with (
            mock.patch.object(launch, "most_ctas", units),
            harness.simulated(launch, KERNELS, options) as kernels,
        ):
            yield kernels


@contextlib.contextmanager
def through(launchers: dict[str, Callable]) -> Iterator[None]:
    """While it lasts, the ops run on ``launchers`` where these have one of that name."""
    others = dispatch.launcher

    def launcher(op, device, dtype):
        return launchers.get(op) or others(op, device, dtype)

    with mock.patch.object(dispatch, "launcher", launcher):
        yield


def complaints(kernel) -> list[str]:
    """What is wrong with the code of a kernel; empty if nothing is."""
    return triton_runner.complaints(kernel, STACK, triton_runner.NARROW_TILES)


@pytest.fixture(autouse=True)
def exponentials_of_the_cpu(monkeypatch):
    """2^y of the CPU backend and an fma that rounds once: its states are the kernels' states."""
    triton_in_numpy.power_of_two(monkeypatch, ieee.exp2)
    triton_in_numpy.fma_that_rounds_once(monkeypatch)
