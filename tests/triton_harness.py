"""Runs Triton kernels without a GPU: compiles what launchers launch, or runs that PTX in ptxsim.

Everything goes through a system's own launcher and Triton's own specialisation: only the last step,
the launch, is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from ptxsim.native import LOCK, Options, library
from tests import kernel_store

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_80": GPUTarget("cuda", 80, 32),
}
#: Kernel -> the names of the tensors that it may write.
Written = Mapping[str, tuple[str, ...]]
#: Devices whose guards are open, inside of `guarded`.
_DEVICES: list = []
_NUMBERS = {"i32": np.int32, "i64": np.int64, "fp32": np.float32}


class WildAccess(Exception):
    """The simulator stopped a kernel; the message says where."""


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

    def warmup(self, *args, grid: tuple[int, ...], **options):
        """As a compiled kernel that takes all arguments of its function."""
        return {grid: lambda *values: self[grid](*values, **options)}


@contextlib.contextmanager
def launches(
    launch: ModuleType, target: GPUTarget, written: Written, receive: Callable
) -> Iterator[None]:
    """While it lasts, what is launched is compiled for ``target`` and handed to ``receive``.

    The kernels are found in the modules ``kernels`` and ``token_kernels`` of the launcher.
    """
    hip = "7.0" if target.backend == "hip" else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, TRITON_CACHE_DIR=kernel_store.triton_folder())
        )
        driver = mock.patch.object(triton.runtime.driver, "_active", _Driver(target))
        stack.enter_context(driver)
        stack.enter_context(mock.patch.object(torch.version, "hip", hip))
        tokens = getattr(launch, "token_kernels", None)
        for name in written:
            module = launch.kernels if hasattr(launch.kernels, name) else tokens
            redirect = _Redirect(getattr(module, name), receive)
            stack.enter_context(mock.patch.object(module, name, redirect))
        yield


def compiled(
    launch: ModuleType, target: GPUTarget, written: Written, call: Callable[[], object]
) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    kernels = []
    with launches(launch, target, written, lambda kernel, grid, values: kernels.append(kernel)):
        call()
    return kernels


@contextlib.contextmanager
def simulated(
    launch: ModuleType,
    written: Written,
    options: Mapping[str, int],
    check: Callable[[dict], object] = lambda values: None,
) -> Iterator[list]:
    """While it lasts, launches of the sm_90 code run on CPU tensors in ptxsim.

    Yields the list of kernels launched.

    Args:
        options: the simulator's.
        check: takes the arguments of a launch, by name, before it runs.
    """
    kernels = []

    def receive(kernel, grid, values):
        check(values)
        kernels.append(kernel)
        simulate(kernel, grid, values, written, options)

    with launches(launch, TARGETS["sm_90"], written, receive):
        yield kernels


def simulate(kernel, grid: tuple, values: dict, written: Written, options: Mapping) -> None:
    """Run one compiled kernel; tensors that are not ``written`` are read-only."""
    lib, name = library(), kernel.name.encode()
    with LOCK:
        module = lib.ptxsim_load(kernel.asm["ptx"].encode(), name)
        assert module, lib.ptxsim_error().decode()
        try:
            lib.ptxsim_clear_regions()
            inputs = list(_parameters(lib, kernel, values, written[kernel.name]))
            inputs += [np.zeros(1, np.uint64)] * 2  # Triton's scratch and profile buffers: unused
            assert lib.ptxsim_param_count(module, name) == len(inputs)
            pointers = (ctypes.c_void_p * len(inputs))(*[value.ctypes.data for value in inputs])
            block = (kernel.metadata.num_warps * 32, 1, 1)
            dims = [(ctypes.c_uint32 * 3)(*d) for d in ((*grid, 1, 1)[:3], block, (1, 1, 1))]
            chosen = ctypes.byref(_options(lib, options))
            if lib.ptxsim_launch(module, name, *dims, kernel.metadata.shared, pointers, chosen):
                raise WildAccess(lib.ptxsim_error().decode())
            report = json.loads(lib.ptxsim_report().decode())
        finally:
            lib.ptxsim_clear_regions()
            lib.ptxsim_unload(module)
    assert not report.get("races"), report["races"]


def _parameters(lib, kernel, values: dict, written: tuple[str, ...]) -> Iterator[np.ndarray]:
    """The bytes of each parameter; the storage of a tensor becomes accessible, outputs writable."""
    for name, kind in kernel.src.signature.items():
        if kind == "constexpr":
            continue
        value = values[name]
        if isinstance(value, torch.Tensor):
            storage, label = value.untyped_storage(), name.encode()
            region = storage.data_ptr(), storage.nbytes(), int(name in written), label
            lib.ptxsim_register_region(*region)
            yield np.array([value.data_ptr()], np.uint64)
        elif isinstance(kind, tuple):
            yield from (np.array([v], _NUMBERS[k]) for k, v in zip(kind, value, strict=True))
        else:
            yield np.array([value], _NUMBERS[kind])


def _options(lib, names: Mapping[str, int]) -> Options:
    chosen = Options()
    lib.ptxsim_default_options(ctypes.byref(chosen))
    for name, value in names.items():
        assert hasattr(chosen, name), name
        setattr(chosen, name, value)
    return chosen


@contextlib.contextmanager
def guarded() -> Iterator[list]:
    """While it lasts, launchers' device guards take a CPU; yields the devices of open guards."""
    with (
        mock.patch.object(torch.cuda, "device", _guard),
        mock.patch.object(torch.cuda, "device_of", lambda t: _guard(t.device)),
    ):
        yield _DEVICES


@contextlib.contextmanager
def _guard(device) -> Iterator[None]:
    is_open = device in _DEVICES  # by a launcher that calls this one
    if not is_open:
        _DEVICES.append(device)
    try:
        yield
    finally:
        if not is_open:
            _DEVICES.remove(device)
