"""Runs the Triton attention without a GPU: compiles what it launches, or runs that PTX in ptxsim.

Everything goes through the launcher and Triton's own specialisation; only the launch is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch

from cute_kernels.sparse_attn.triton import launch as triton_launch

from ..gemm import triton_harness as base
from ..gemm import triton_inspect as inspect
from ..gemm.triton_harness import WildAccess
from ..ptxsim.native import LOCK, library

#: Every kernel, and the tensors that it may write.
KERNELS = {
    "forward_kernel": ("out_ptr", "lse_ptr"),
    "delta_kernel": ("delta_ptr",),
    "writers_kernel": ("writer_ptr", "writer_tile_ptr"),
    "dkdv_kernel": ("dk_ptr", "dv_ptr"),
    "dq_kernel": ("dq_ptr",),
}
#: Bytes a thread on the stack that a kernel may have: what Triton 3.7.1 leaves on sm_90 at D = 96
#: under a mask of bits by head with a softcap, where 3.6.0 left none.
STACK = {"dkdv_kernel": 8}
_NUMBERS = {"i32": np.int32, "i64": np.int64, "fp32": np.float32}


def compiled(target: str, call: Callable[[], object], launch=triton_launch) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    with mock.patch.object(base, "KERNELS", tuple(KERNELS)):
        return base.compiled(launch, target, call)


@contextlib.contextmanager
def simulated(launch=triton_launch, **options: int) -> Iterator[list]:
    """While it lasts, launches run on CPU tensors in ptxsim; yields the kernels launched."""
    kernels = []

    def receive(kernel, grid, values):
        kernels.append(kernel)
        _simulate(kernel, grid, values, options)

    with (
        mock.patch.object(base, "KERNELS", tuple(KERNELS)),
        base._launches(launch, "sm_90", receive),
    ):
        yield kernels


def complaints(kernel) -> list[str]:
    """What is wrong with the code of a kernel; empty if nothing is.

    On AMD scalar registers may be kept in lanes of vector registers: that is no memory access.
    """
    found = inspect.common_complaints(kernel, stack=STACK.get(kernel.name, 0))
    matrix = inspect.matrix_instructions(kernel)
    family = "wgmma" if kernel.metadata.target.backend == "cuda" else "v_mfma"
    if family == "v_mfma" and re.search(r"\.vgpr_spill_count:\s*0\b", inspect.text(kernel)):
        found = [complaint for complaint in found if complaint != "spills"]
    products = kernel.name in ("forward_kernel", "dkdv_kernel", "dq_kernel")
    if bool(matrix) != products or not all(name.startswith(family) for name in matrix):
        found.append("matrix instruction")
    if kernel.metadata.enable_fp_fusion:
        found.append("sums that the compiler may fuse")
    return found


def _simulate(kernel, grid: tuple[int, ...], values: dict, options: dict[str, int]) -> None:
    lib, name = library(), kernel.name.encode()
    with LOCK:
        module = lib.ptxsim_load(kernel.asm["ptx"].encode(), name)
        assert module, lib.ptxsim_error().decode()
        try:
            lib.ptxsim_clear_regions()
            given = list(_parameters(lib, kernel, values))
            given += [np.zeros(1, np.uint64)] * 2  # Triton's scratch and profile buffers: unused
            assert lib.ptxsim_param_count(module, name) == len(given)
            pointers = (ctypes.c_void_p * len(given))(*[value.ctypes.data for value in given])
            block = (kernel.metadata.num_warps * 32, 1, 1)
            dims = [(ctypes.c_uint32 * 3)(*d) for d in ((*grid, 1, 1)[:3], block, (1, 1, 1))]
            chosen = ctypes.byref(base._options(lib, options))
            if lib.ptxsim_launch(module, name, *dims, kernel.metadata.shared, pointers, chosen):
                raise WildAccess(lib.ptxsim_error().decode())
            report = json.loads(lib.ptxsim_report().decode())
        finally:
            lib.ptxsim_clear_regions()
            lib.ptxsim_unload(module)
    assert not report.get("races"), report["races"]


def _parameters(lib, kernel, values: dict) -> Iterator[np.ndarray]:
    """The bytes of each parameter; the storage of a tensor becomes accessible, outputs writable."""
    for name, kind in kernel.src.signature.items():
        if kind == "constexpr":
            continue
        value = values[name]
        if isinstance(value, torch.Tensor):
            storage, writable = value.untyped_storage(), int(name in KERNELS[kernel.name])
            label = name.encode()
            lib.ptxsim_register_region(storage.data_ptr(), storage.nbytes(), writable, label)
            yield np.array([value.data_ptr()], np.uint64)
        elif isinstance(kind, tuple):
            yield from (np.array([v], _NUMBERS[k]) for k, v in zip(kind, value, strict=True))
        else:
            yield np.array([value], _NUMBERS[kind])
