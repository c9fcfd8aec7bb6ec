"""Runs the Triton kernels of moe without a GPU: compiled for a target, or their PTX in ptxsim."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

from cute_kernels import arch
from cute_kernels.moe.triton import launch as products
from cute_kernels.moe.triton import routing

from .. import triton_harness as harness
from ..triton_runner import TARGETS

#: Launcher -> its kernels, and the tensors that each may write.
PRODUCTS = dict.fromkeys(
    ("grouped_gemm_kernel", "grouped_dw_kernel", "grouped_sum_kernel"), ("out_ptr",)
)
ROUTING = {
    **dict.fromkeys(
        ("select_kernel", "weights_kernel", "slot_weights_kernel", "weights_backward_kernel"),
        ("out_ptr",),
    ),
    "count_kernel": ("counts_ptr",),
    "place_kernel": ("offsets_ptr", "order_ptr", "positions_ptr"),
    **dict.fromkeys(("gather_kernel", "combine_kernel"), ("out_ptr",)),
    "combine_backward_kernel": ("d_rows_ptr", "d_weights_ptr"),
}


def compiled(launch: ModuleType, target: str, call: Callable[[], object]) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    written = ROUTING if launch is routing else PRODUCTS
    with harness.on_the_cpu(), described():
        return harness.compiled(launch, TARGETS[target], written, call)


@contextlib.contextmanager
def described() -> Iterator[None]:
    """While it lasts, every device is an H200."""
    h200 = arch.Device("cuda:0", "cuda", "sm_90a", 132)
    with mock.patch.object(arch, "describe", lambda device: h200):
        yield


@contextlib.contextmanager
def simulated(
    launch: ModuleType = products, routes: ModuleType = routing, **options: int
) -> Iterator[list]:
    """Run launches of both launchers on CPU tensors in ptxsim; yields the kernels of products.

    Memory that a launcher leaves unwritten holds NaN, and a launch outside of its device guard
    fails.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(harness.nan_memory())
        stack.enter_context(described())
        devices = stack.enter_context(harness.guarded())

        def check(values):
            assert devices, "launched outside of the device guard"

        stack.enter_context(harness.simulated(routes, ROUTING, options, check))
        yield stack.enter_context(harness.simulated(launch, PRODUCTS, options, check))
