"""The Triton attention without a GPU: see tests/triton_harness.py."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from cute_kernels.sparse_attn.triton import launch as triton_launch
from cute_kernels.sparse_attn.triton import paged
from tests import triton_harness as harness

from ..gemm import triton_inspect as inspect

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


def compiled(target: str, call: Callable[[], object], launch=triton_launch) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    return harness.compiled(launch, harness.TARGETS[target], KERNELS, call)


@contextlib.contextmanager
def simulated(launch=triton_launch, **options: int) -> Iterator[list]:
    """While it lasts, launches run on CPU tensors in ptxsim; yields the kernels launched."""
    with contextlib.ExitStack() as stack:
        kernels = stack.enter_context(harness.simulated(launch, KERNELS, options))
        if launch is triton_launch:
            stack.enter_context(harness.simulated(paged, PAGED, options))
        yield kernels


def complaints(kernel) -> list[str]:
    """What is wrong with the code of a kernel; empty if nothing is.

    On AMD scalar registers may be kept in lanes of vector registers: that is no memory access.
    """
    out = inspect.common_complaints(kernel, stack=STACK.get(kernel.name, 0))
    matrix = inspect.matrix_instructions(kernel)
    family = "wgmma" if kernel.metadata.target.backend == "cuda" else "v_mfma"
    if family == "v_mfma" and re.search(r"\.vgpr_spill_count:\s*0\b", inspect.text(kernel)):
        out = [complaint for complaint in out if complaint != "spills"]
    products = kernel.name in ("forward_kernel", "dkdv_kernel", "dq_kernel")
    if bool(matrix) != products or not all(name.startswith(family) for name in matrix):
        out.append("matrix instruction")
    if kernel.metadata.enable_fp_fusion:
        out.append("sums that the compiler may fuse")
    return out
