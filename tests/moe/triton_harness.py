"""Runs the Triton kernels of moe without a GPU: compiled for a target, or their PTX in ptxsim."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from cute_kernels import arch
from cute_kernels.moe.triton import launch as products
from cute_kernels.moe.triton import routing

from .. import triton_harness as harness
from ..old_memory import old_memory
from ..triton_runner import TARGETS
from . import cases

#: Options of the simulator: the truncating adder; everything as late and as odd as it may be.
HOPPER = {"wgmma_math": 2}
LATE = {"async_mode": 1, "wgmma_mode": 1, "warp_order": 1, "cta_order": 1, "seed": 9}
DTYPES = [
    cases.BF16,
    *(pytest.param(d, marks=pytest.mark.nightly) for d in (cases.FP16, cases.FP32)),
]
#: Launcher -> its kernels, and the tensors that each may write.
PRODUCTS = dict.fromkeys(
    ("grouped_gemm_kernel", "grouped_leaves_kernel", "grouped_dw_kernel", "grouped_sum_kernel"),
    ("out_ptr",),
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
        stack.enter_context(old_memory())
        stack.enter_context(described())
        devices = stack.enter_context(harness.guarded())

        def check(values):
            assert devices, "launched outside of the device guard"

        stack.enter_context(harness.simulated(routes, ROUTING, options, check))
        yield stack.enter_context(harness.simulated(launch, PRODUCTS, options, check))


def far(t: torch.Tensor, file: Path) -> torch.Tensor:
    """The values of a 2-D tensor with a row stride of 2³⁰, in a sparse file."""
    stride = 2**30
    size = stride * (t.shape[0] - 1) + t.shape[1]
    storage = torch.from_file(str(file), shared=True, size=size, dtype=t.dtype)
    return storage.as_strided(t.shape, (stride, 1)).copy_(t)
