"""The Triton gemm without a GPU: see tests/triton_harness.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

from cute_kernels import arch
from tests import triton_harness as harness
from tests.old_memory import old_memory
from tests.triton_harness import WildAccess  # noqa: F401  (what tests of gemm expect)

TARGETS = {name: harness.TARGETS[name] for name in ("sm_90", "gfx942", "gfx950")}
KERNELS = dict.fromkeys(
    ("gemm_kernel", "column_sum_kernel", "leaves_kernel", "root_kernel"), ("out_ptr",)
)


def compiled(launch: ModuleType, target: str, call: Callable[[], object]) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    return harness.compiled(launch, TARGETS[target], KERNELS, call)


@contextlib.contextmanager
def simulated(launch: ModuleType, **options: int) -> Iterator[list]:
    """Run launches on CPU tensors in ptxsim; yields the list of kernels launched.

    The device is "an H200" and the launcher must be inside its device guard.  Memory that the
    launcher leaves unwritten holds NaN.
    """
    h200 = arch.Device("cuda:0", "cuda", "sm_90a", 132)
    with (
        old_memory(),
        mock.patch.object(arch, "describe", lambda device: h200),
        harness.guarded() as devices,
    ):

        def check(values):
            assert devices == [values["out_ptr"].device], "launched outside the device guard"

        with harness.simulated(launch, KERNELS, options, check) as kernels:
            yield kernels
