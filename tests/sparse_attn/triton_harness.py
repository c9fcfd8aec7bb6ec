"""The Triton attention without a GPU, dense and paged: simulated, compiled, mutated, judged."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import cute_kernels.sparse_attn.triton as package
from cute_kernels.runtime import dispatch
from cute_kernels.sparse_attn.triton import launch as triton_launch
from cute_kernels.sparse_attn.triton import paged as paged_launch
from tests import triton_copies
from tests import triton_harness as harness
from tests.old_memory import old_memory

from .. import triton_inspect as inspect
from .paged_cases import Engine

#: Every kernel, and the tensors that it may write.
KERNELS = {
    "forward_kernel": ("out_ptr", "lse_ptr"),
    "delta_kernel": ("delta_ptr",),
    "writers_kernel": ("writer_ptr", "writer_tile_ptr"),
    "dkdv_kernel": ("dk_ptr", "dv_ptr"),
    "dq_kernel": ("dq_ptr",),
}
#: Of paged caches, likewise.
PAGED = {
    "paged_forward_kernel": ("out_ptr", "lse_ptr"),
    "write_kv_kernel": ("k_ptr", "v_ptr"),
}
#: Bytes a thread on the stack that a kernel may have: what Triton 3.7.1 leaves on sm_90 at D = 96
#: under a mask of bits by head with a softcap, where 3.6.0 left none.
STACK = {"dkdv_kernel": 8}
#: The kernels with matrix products.
PRODUCTS = ("forward_kernel", "dkdv_kernel", "dq_kernel", "paged_forward_kernel")

copy_of = functools.partial(
    triton_copies.copy_of, package, files=("kernel_softmax", "kernel", "launch")
)
paged_copy_of = functools.partial(copy_of, files=("kernel_softmax", "kernel_paged", "paged"))


@contextlib.contextmanager
def through(launch: ModuleType = triton_launch, **options: bool) -> Iterator[None]:
    """While it lasts, ``block_sparse_attention`` runs on ``launch``; options: ``interpret``."""

    def launcher(op, device, dtype):
        name = "backward" if op.endswith("_backward") else "forward"
        return functools.partial(getattr(launch, name), **options)

    with mock.patch.object(dispatch, "launcher", launcher):
        yield


def engine(paged: ModuleType = paged_launch, **options: bool) -> Engine:
    """The launchers of paged caches, of ``paged`` or a copy; options: ``interpret``."""
    attend, forward = paged.paged_attention, triton_launch.forward
    parts = (functools.partial(function, **options) for function in (attend, forward))
    return Engine(*parts, paged.write_kv_cache)


def compiled(
    target: str,
    call: Callable[[], object],
    launch: ModuleType = triton_launch,
    kernels: harness.Written = KERNELS,
) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    with harness.guarded():
        return harness.compiled(launch, harness.TARGETS[target], kernels, call)


@contextlib.contextmanager
def simulated(
    launch: ModuleType = triton_launch, paged: ModuleType = paged_launch, **options: int
) -> Iterator[list]:
    """While it lasts, launches run on CPU tensors in ptxsim; yields the dense kernels launched.

    Memory that they leave unwritten holds NaN.
    """
    with old_memory(), contextlib.ExitStack() as stack:
        for module in {paged_launch, paged}:
            stack.enter_context(harness.simulated(module, PAGED, options))
        yield stack.enter_context(harness.simulated(launch, KERNELS, options))


def complaints(kernel) -> list[str]:
    """What is wrong with the code of a kernel; empty if nothing is.

    On AMD scalar registers may be kept in lanes of vector registers: that is no memory access.
    """
    out = inspect.common_complaints(kernel, stack=STACK.get(kernel.name, 0))
    matrix = inspect.matrix_instructions(kernel)
    family = "wgmma" if kernel.metadata.target.backend == "cuda" else "v_mfma"
    if family == "v_mfma" and re.search(r"\.vgpr_spill_count:\s*0\b", inspect.text(kernel)):
        out = [complaint for complaint in out if complaint != "spills"]
    right = all(name.startswith(family) for name in matrix)
    if bool(matrix) != (kernel.name in PRODUCTS) or not right:
        out.append("matrix instruction")
    if kernel.metadata.enable_fp_fusion:
        out.append("sums that the compiler may fuse")
    return out
