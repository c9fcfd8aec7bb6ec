"""Runs the Triton rowwise without a GPU: compiled, in ptxsim, or in Triton's interpreter.

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
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter

import cute_kernels.rowwise.triton as package
from cute_kernels.rowwise import functions
from cute_kernels.rowwise.config import LN2
from cute_kernels.rowwise.triton import launch as triton_launch
from tests import triton_copies

from ..gemm import triton_harness as gemm
from ..gemm import triton_inspect as inspect
from ..sparse_attn import triton_harness as attention

TARGETS = gemm.TARGETS | {"sm_80": GPUTarget("cuda", 80, 32)}
#: Every kernel, and the tensors that it may write.
KERNELS = {
    "activation_kernel": ("out_ptr",),
    "activation_backward_kernel": ("out_ptr",),
    "gated_kernel": ("out_ptr",),
    "gated_backward_kernel": ("d_gate_ptr", "d_up_ptr"),
    "scale_kernel": ("out_ptr",),
    "softmax_kernel": ("out_ptr",),
    "softmax_backward_kernel": ("out_ptr",),
    "log_softmax_backward_kernel": ("out_ptr",),
    "rotary_table_kernel": ("cos_ptr", "sin_ptr"),
    "rotary_kernel": ("out_ptr",),
    "embedding_gradient_kernel": ("into_ptr",),
    "lane_sums_kernel": ("out_ptr",),
    "chain_kernel": ("out_ptr",),
}

copy_of = functools.partial(triton_copies.copy_of, package)


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """While it lasts, the launchers' device guard takes a CPU for a device."""
    with mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    """The shared harness knows these kernels and targets."""
    with (
        on_the_cpu(),
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
    """While it lasts, launches of the sm_90 code run on CPU tensors in ptxsim; yields the kernels.

    Results that a launcher leaves unwritten are NaN, and a launch outside the device guard fails.
    """
    guarded = []

    @contextlib.contextmanager
    def guard(device):
        guarded.append(device)
        yield
        guarded.pop()

    def poisoned(shape, **kwargs):
        return torch.full(shape, torch.nan, **kwargs)

    simulate = attention._simulate

    def inside(*args):
        assert guarded, "launched outside the device guard"
        simulate(*args)

    with (
        _ours(),
        mock.patch.object(torch.cuda, "device", guard),
        mock.patch.object(torch, "empty", poisoned),
        mock.patch.object(attention, "_simulate", inside),
        attention.simulated(launch, **options) as kernels,
    ):
        yield kernels


def complaints(kernel) -> list[str]:
    """What is wrong with the code of a kernel; empty if nothing is."""
    found = inspect.common_complaints(kernel)
    code, ttir = inspect.text(kernel), kernel.asm["ttir"]
    hip = kernel.metadata.target.backend == "hip"
    if hip and re.search(r"\.vgpr_spill_count:\s*0\b", code):
        # Scalar registers are kept in lanes of vector registers: no memory is touched.
        found = [complaint for complaint in found if complaint != "spills"]
    if inspect.matrix_instructions(kernel):
        found.append("matrix instruction")
    if kernel.metadata.enable_fp_fusion:
        found.append("sums that the compiler may fuse")
    if re.search(r"div\.(full|approx)|sqrt\.approx", code):
        found.append("division that is not IEEE's")
    if any(size != 2 for size in sizes_of_float_sums(ttir)):
        found.append("a sum in the order of the compiler")
    if re.search(r"tt\.addptr .*: .*, tensor<[\dx]+xi32>", ttir):
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
def device_guard():
    """Launchers take a CPU for a device."""
    with on_the_cpu():
        yield


@pytest.fixture(autouse=True)
def cpu_arithmetic(monkeypatch):
    """2^y and fma that round once, and casts that round to the nearest even, as a GPU's do.

    The interpreter's own are numpy's, a product and a sum, and a cast to bf16 that truncates.
    """

    def handle(values: np.ndarray, like):
        return interpreter.TensorHandle(values, like.dtype.scalar)

    def exp2(self, y):
        power = functions.exp(torch.from_numpy(np.array(y.data, np.float64)) * LN2)
        return handle(power.to(torch.float32).numpy(), y)

    def fma(self, x, y, z):
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data
        return handle(wide.astype(np.float32), z)

    def cast(self, given, to):
        source, target = given.dtype.scalar, to.scalar
        data = np.array(given.data)
        if source == tl.bfloat16 and target == tl.float32:
            made = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16).float().numpy()
        elif source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(data).to(torch.bfloat16)
            made = rounded.view(torch.int16).numpy().view(np.uint16)
        else:
            made = data.astype(interpreter._get_np_dtype(to))
        return interpreter.TensorHandle(made, target)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_exp2", exp2)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
