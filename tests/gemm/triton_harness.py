"""Runs the Triton module without a GPU: compiles what it launches, or runs that PTX in ptxsim.

Everything goes through the system's own launcher and Triton's own specialisation: only the last
step, the launch, is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from cute_kernels import arch

from ..ptxsim.native import LOCK, Options, library

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
KERNELS = ("gemm_kernel", "column_sum_kernel", "leaves_kernel", "root_kernel")

_CACHE = tempfile.TemporaryDirectory(prefix="triton-tests-")


class WildAccess(Exception):
    """The simulator stopped a kernel; the message says where."""


def compiled(launch: ModuleType, target: str, call: Callable[[], object]) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    kernels = []
    with _launches(launch, target, lambda kernel, grid, values: kernels.append(kernel)):
        call()
    return kernels


@contextlib.contextmanager
def simulated(launch: ModuleType, **options: int) -> Iterator[list]:
    """While it lasts, launches run on CPU tensors in ptxsim; yields the list of kernels launched.

    The device is "an H200" and the launcher must be inside its device guard.  Memory that the
    launcher leaves unwritten holds NaN.
    """
    kernels, guarded = [], []

    @contextlib.contextmanager
    def guard(device):
        guarded.append(device)
        yield
        guarded.pop()

    def receive(kernel, grid, values):
        assert guarded == [values["out_ptr"].device], "launched outside the device guard"
        kernels.append(kernel)
        _simulate(kernel, grid, values, options)

    def poisoned(*shape, **kwargs):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return torch.full(shape, torch.nan, **kwargs)

    h200 = arch.Device("cuda:0", "cuda", "sm_90a", 132)
    with (
        mock.patch.object(torch, "empty", poisoned),
        mock.patch.object(arch, "describe", lambda device: h200),
        mock.patch.object(torch.cuda, "device", guard),
        _launches(launch, "sm_90", receive),
    ):
        yield kernels


class _Driver:
    """What Triton asks of a driver to compile: the target, and a device to key its cache by."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target)

    def get_current_stream(self, device: str) -> int:
        return 0


class _Redirect:
    """Stands for a jitted function: compiles instead of launching, and hands the kernel on."""

    def __init__(self, function, receive: Callable):
        self._function, self._receive = function, receive

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*args, **kwargs):
            kernel = self._function.run(*args, grid=grid, warmup=True, **kwargs)
            names = [parameter.name for parameter in self._function.params]
            self._receive(kernel, grid, dict(zip(names, args, strict=False)) | kwargs)

        return run


@contextlib.contextmanager
def _launches(launch: ModuleType, target: str, receive: Callable) -> Iterator[None]:
    chosen = TARGETS[target]
    hip = "7.0" if chosen.backend == "hip" else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, TRITON_CACHE_DIR=_CACHE.name))
        patch = mock.patch.object(triton.runtime.driver, "_active", _Driver(chosen))
        stack.enter_context(patch)
        stack.enter_context(mock.patch.object(torch.version, "hip", hip))
        for name in KERNELS:
            redirect = _Redirect(getattr(launch.kernels, name), receive)
            stack.enter_context(mock.patch.object(launch.kernels, name, redirect))
        yield


def _simulate(kernel, grid: tuple[int, ...], values: dict, options: dict[str, int]) -> dict:
    """Runs one compiled kernel; tensors but ``out_ptr`` are read-only.  The simulator's report."""
    lib = library()
    with LOCK:
        module = lib.ptxsim_load(kernel.asm["ptx"].encode(), kernel.name.encode())
        assert module, lib.ptxsim_error().decode()
        try:
            lib.ptxsim_clear_regions()
            given = [
                _parameter(lib, name, kind, values[name])
                for name, kind in kernel.src.signature.items()
                if kind != "constexpr"
            ]
            given += [np.zeros(1, np.uint64)] * 2  # Triton's scratch and profile buffers: unused
            assert lib.ptxsim_param_count(module, kernel.name.encode()) == len(given)
            pointers = (ctypes.c_void_p * len(given))(*[value.ctypes.data for value in given])
            block = (kernel.metadata.num_warps * 32, 1, 1)
            shapes = ((*grid, 1, 1)[:3], block, (1, 1, 1))
            dims = [(ctypes.c_uint32 * 3)(*shape) for shape in shapes]
            chosen = ctypes.byref(_options(lib, options))
            shared = kernel.metadata.shared
            name = kernel.name.encode()
            if lib.ptxsim_launch(module, name, *dims, shared, pointers, chosen):
                raise WildAccess(lib.ptxsim_error().decode())
            report = json.loads(lib.ptxsim_report().decode())
        finally:
            lib.ptxsim_clear_regions()
            lib.ptxsim_unload(module)
    assert not report.get("races"), report["races"]
    return report


def _parameter(lib, name: str, kind: str, value) -> np.ndarray:
    """The bytes of one kernel parameter; a tensor's whole storage becomes accessible."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        writable = int(name == "out_ptr")
        label = name.encode()
        lib.ptxsim_register_region(storage.data_ptr(), storage.nbytes(), writable, label)
        return np.array([value.data_ptr()], np.uint64)
    return np.array([value], {"i32": np.int32, "i64": np.int64}[kind])


def _options(lib, names: dict[str, int]) -> Options:
    chosen = Options()
    lib.ptxsim_default_options(ctypes.byref(chosen))
    for name, value in names.items():
        assert hasattr(chosen, name), name
        setattr(chosen, name, value)
    return chosen
