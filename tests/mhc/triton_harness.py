"""Runs the Triton mhc without a GPU: compiled for a target, in ptxsim, or in the interpreter.

Everything goes through the launchers and Triton's own specialisation; only the launch is replaced.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter

import cute_kernels.mhc.triton as package
from cute_kernels.cpu import ieee
from cute_kernels.mhc.triton import launch as triton_launch

from ..anchors import replaced
from ..gemm import triton_harness as gemm
from ..gemm import triton_inspect as inspect
from ..sparse_attn import triton_harness as attention

TARGETS = gemm.TARGETS | {"sm_80": GPUTarget("cuda", 80, 32)}
#: The launcher's name of a module of kernels -> that module's kernels.
KERNELS = {
    "kernels": ("project_kernel", "project_backward_kernel", "combine_kernel", "reduce_kernel"),
    "token_kernels": (
        "add_chunks_kernel",
        "weights_kernel",
        "add_parts_kernel",
        "gate_kernel",
        "gate_backward_kernel",
        "sinkhorn_kernel",
        "sinkhorn_backward_kernel",
    ),
}
#: The tensors that kernels may write, by kernel.
WRITTEN = {
    "project_kernel": ("sums_ptr", "squares_ptr"),
    "project_backward_kernel": ("dx_ptr", "d_psi_ptr"),
    "combine_kernel": ("y_ptr", "out_ptr"),
    "reduce_kernel": ("df_ptr", "dx_ptr", "d_pre_ptr", "d_post_ptr", "d_res_ptr", "d_bias_ptr"),
    "add_chunks_kernel": ("h_ptr", "ms_ptr"),
    "weights_kernel": ("into_phi_ptr", "into_weight_ptr"),
    "add_parts_kernel": ("out_ptr",),
    "gate_kernel": ("pre_ptr", "post_ptr", "res_ptr"),
    "gate_backward_kernel": ("d_h_ptr", "d_ms_ptr", "parts_ptr"),
    "sinkhorn_kernel": ("out_ptr",),
    "sinkhorn_backward_kernel": ("out_ptr",),
}
PRODUCTS = ("project_kernel", "project_backward_kernel")
#: Bytes a thread on the stack that the projection's backward may have where x is fp32: what Triton
#: 3.7.1 leaves on sm_80 for four streams of the layout "nc" whose channels are no multiple of 16.
FP32_BACKWARD_STACK = 208
_FILES = ("kernel", "kernel_tokens", "launch")
_NUMBERS = itertools.count()


def copy_of(folder: Path, *edits: tuple[str, str]) -> ModuleType:
    """A copy of the launcher that launches copies of the kernels, importable beside them.

    Each (old, new) is replaced; old must occur exactly once, in one of the files.
    """
    home, number = Path(package.__file__).parent, next(_NUMBERS)
    texts = {name: (home / f"{name}.py").read_text() for name in _FILES}
    for old, new in edits:
        texts = replaced(texts, old, new)
    modules = []
    for name, text in texts.items():
        path = folder / f"{name}_copy_{number}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        modules.append(module)
    kernels, token_kernels, launch = modules
    launch.kernels, launch.token_kernels = kernels, token_kernels
    return launch


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """While it lasts, the launchers' device guard takes a CPU for a device."""
    with mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()):
        yield


def compiled(target: str, call: Callable[[], object], launch: ModuleType = triton_launch) -> list:
    """The kernels that ``call`` would launch, compiled for ``target``; nothing runs."""
    kernels = []

    def receive(kernel, grid, values):
        kernels.append(kernel)

    with contextlib.ExitStack() as stack:
        _redirected(stack, launch, TARGETS[target], receive)
        call()
    return kernels


@contextlib.contextmanager
def simulated(launch: ModuleType = triton_launch) -> Iterator[list]:
    """While it lasts, launches of the sm_90 code run on CPU tensors in ptxsim; yields the kernels.

    Sums and coefficients that a launcher leaves unwritten are NaN.
    """
    kernels = []

    def receive(kernel, grid, values):
        kernels.append(kernel)
        attention._simulate(kernel, grid, values, {})

    def poisoned(shape, **kwargs):
        return torch.full(shape, torch.nan, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(attention, "KERNELS", WRITTEN))
        stack.enter_context(mock.patch.object(torch, "empty", poisoned))
        _redirected(stack, launch, TARGETS["sm_90"], receive)
        yield kernels


def _redirected(
    stack: contextlib.ExitStack, launch: ModuleType, target: GPUTarget, receive: Callable
) -> None:
    """Hands what is launched, compiled for ``target``, to ``receive``."""
    hip = "7.0" if target.backend == "hip" else None
    stack.enter_context(on_the_cpu())
    stack.enter_context(mock.patch.dict(os.environ, TRITON_CACHE_DIR=gemm._CACHE.name))
    driver = gemm._Driver(target)
    stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
    stack.enter_context(mock.patch.object(torch.version, "hip", hip))
    for attribute, names in KERNELS.items():
        module = getattr(launch, attribute)
        for name in names:
            redirect = gemm._Redirect(getattr(module, name), receive)
            stack.enter_context(mock.patch.object(module, name, redirect))


def made_small(launch: ModuleType, monkeypatch) -> None:
    """A launcher with chunks of 32 channels and of 64 tokens, in Triton's interpreter."""
    monkeypatch.setattr(launch, "chunk_channels", lambda n, precision: 32)
    monkeypatch.setattr(launch, "TOKENS", 64)
    monkeypatch.setattr(launch.kernels, "TOKENS", tl.constexpr(64))


def complaints(kernel) -> list[str]:
    """What is wrong with the code of a kernel; empty if nothing is."""
    hip = kernel.metadata.target.backend == "hip"
    on_fma_units = kernel.name in PRODUCTS and not hip
    stack = inspect.FP32_STACK if on_fma_units else 0
    if kernel.name == "project_backward_kernel" and kernel.src.signature["x_ptr"] == "*fp32":
        stack = FP32_BACKWARD_STACK
    found = inspect.common_complaints(kernel, stack)
    code, ttir = inspect.text(kernel), kernel.asm["ttir"]
    if hip and re.search(r"\.vgpr_spill_count:\s*0\b", code):
        # Scalar registers are kept in lanes of vector registers: no memory is touched.
        found = [complaint for complaint in found if complaint != "spills"]
    if on_fma_units and "fma.rn.f32" not in code:
        found.append("no fma")
    matrix = {"v_mfma_f32_16x16x4_f32"} if hip and kernel.name in PRODUCTS else set()
    if set(inspect.matrix_instructions(kernel)) != matrix:
        found.append("matrix instruction")
    if kernel.metadata.enable_fp_fusion:
        found.append("sums that the compiler may fuse")
    if re.search(r"div\.(full|approx)|sqrt\.approx", code):
        found.append("division or root that is not IEEE's")
    if any(size != 2 for size in sizes_of_float_sums(ttir)):
        found.append("a sum in the order of the compiler")
    if re.search(r"tt\.addptr .*: .*\bi32|tt\.addptr .*xi32>", ttir):
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
    """The CPU backend's 2^y, and casts that round to the nearest even, as a GPU's do.

    The interpreter's 2^y is numpy's, and its cast to bf16 truncates.
    """

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

    def exp2(self, y):
        made = ieee.exp2(torch.from_numpy(np.array(y.data))).numpy()
        return interpreter.TensorHandle(made, y.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_exp2", exp2)
