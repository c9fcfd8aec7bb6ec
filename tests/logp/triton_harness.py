"""Runs the Triton linear_logp without a GPU: compiled, in ptxsim, or in Triton's interpreter.

Everything goes through the launcher and Triton's own specialisation; only the launch is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter

import cute_kernels.logp.triton as package
from cute_kernels.cpu import ieee
from cute_kernels.logp.triton import launch as triton_launch
from cute_kernels.runtime import dispatch
from tests import triton_copies

from ..gemm import triton_harness as gemm
from ..gemm import triton_inspect as inspect
from ..sparse_attn import triton_harness as attention

TARGETS = gemm.TARGETS | {"sm_80": GPUTarget("cuda", 80, 32)}
#: Every kernel, and the tensors that it may write.
KERNELS = {"states_kernel": ("out_ptr",), "gradients_kernel": ("out_ptr",)}

#: Bytes a thread on the stack that a kernel may have: what Triton 3.7.1 leaves on sm_90 for the
#: states of single rows with a softcap and an entropy.
STACK = 8

copy_of = functools.partial(triton_copies.copy_of, package)


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    """The shared harness knows these kernels and targets."""
    with (
        mock.patch.object(attention, "KERNELS", KERNELS),
        mock.patch.object(gemm, "TARGETS", TARGETS),
    ):
        yield


def compiled(target: str, call: Callable[[], object], launch: ModuleType = triton_launch) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    with _ours():
        return attention.compiled(target, call, launch)


@contextlib.contextmanager
def simulated(launch: ModuleType = triton_launch, **options: int) -> Iterator[list]:
    """While it lasts, launches run on CPU tensors in ptxsim; yields the kernels launched.

    The device has 132 units, and the launcher must be inside its device guard.
    """
    guarded = []

    @contextlib.contextmanager
    def guard(device):
        guarded.append(device)
        yield
        guarded.pop()

    def units(device):
        assert guarded == [device], "launched outside the device guard"
        return 132

    with (
        _ours(),
        mock.patch.object(torch.cuda, "device", guard),
        mock.patch.object(launch, "most_ctas", units),
        attention.simulated(launch, **options) as kernels,
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
    found = inspect.common_complaints(kernel, stack=STACK)
    if inspect.matrix_instructions(kernel):
        found.append("matrix instruction")
    if kernel.metadata.enable_fp_fusion:
        found.append("sums that the compiler may fuse")
    if re.search(r"div\.(full|approx)", inspect.text(kernel)):
        found.append("division that is not IEEE's")
    ttir = kernel.asm["ttir"]
    if any(size != 2 for size in sizes_of_float_sums(ttir)):
        found.append("a sum in the order of the compiler")
    if re.search(r"tt\.addptr .*: .*, tensor<\d+x\d+x(\d+x)?i32>", ttir):
        found.append("offsets of 32 bits")
    return found


def sizes_of_float_sums(ttir: str) -> list[int]:
    """The length of the axis of every sum of floats that the compiler is to order."""
    reduce = re.compile(
        r'"tt\.reduce"\(%[\w#]+\) <\{axis = (\d+) : i32\}> \(\{(.*?)\}\) : \(tensor<([\dx]+)x\w+>',
        re.DOTALL,
    )
    found = [
        int(shape.split("x")[int(axis)])
        for axis, body, shape in reduce.findall(ttir)
        if "arith.addf" in body
    ]
    assert ttir.count('"tt.reduce"') == len(reduce.findall(ttir)), "a form that is not read"
    return found


@pytest.fixture(autouse=True)
def exponentials_of_the_cpu(monkeypatch):
    """2^y of the CPU backend and an fma that rounds once: then its states are the kernels' states.

    The interpreter's own are numpy's, and a product and a sum.
    """

    def handle(values: np.ndarray, like):
        return interpreter.TensorHandle(values, like.dtype.scalar)

    def exp2(self, y):
        return handle(ieee.exp2(torch.from_numpy(np.ascontiguousarray(y.data))).numpy(), y)

    def fma(self, x, y, z):
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data
        return handle(wide.astype(np.float32), z)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_exp2", exp2)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
