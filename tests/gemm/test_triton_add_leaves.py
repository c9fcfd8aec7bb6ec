"""The Triton kernel that adds leaves: its bytes, its code on every target, and who launches it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch

import cute_kernels.gemm.triton as package
from cute_kernels import arch
from cute_kernels.gemm import op
from cute_kernels.gemm.triton import launch
from ptxsim.skips import requires_core
from tests import interpreted
from tests.triton_copies import copy_of
from tests.triton_runner import Runner, complaints

from . import triton_root_cases as cases
from .triton_harness import WildAccess
from .triton_inspect import text

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RUNNER = Runner(package, {"root_kernel": ("out_ptr",)})
CHECKS = cases.bytes_of_torch, cases.in_place, cases.minus_zeros, cases.nothing_else_is_written


def test_in_the_interpreter():
    """And its mutants there."""
    file = Path(__file__).with_name("triton_root_interpreted.py")
    assert interpreted.check([file]).total() >= 13


# ---- the sm_90 code, in the simulator -----------------------------------------------------------


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize("check", CHECKS)
def test_sm90_bytes(check):
    with RUNNER.simulated():
        check(launch.add_leaves)


@pytest.mark.sim
@requires_core
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_sm90_rounds_once_as_torch_does(dtype):
    with RUNNER.simulated():
        cases.bytes_of_torch(launch.add_leaves, dtype)


ROUNDED_TWICE = (
    "        bias_ptrs = bias_ptr + row * bias_m + columns * bias_n\n",
    "        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)\n"
    "        bias_ptrs = bias_ptr + row * bias_m + columns * bias_n\n",
)


@pytest.mark.sim
@requires_core
def test_a_second_rounding_is_noticed(tmp_path):
    mutant = copy_of(package, tmp_path, ROUNDED_TWICE)
    with RUNNER.simulated(mutant), pytest.raises(AssertionError):
        cases.bytes_of_torch(mutant.add_leaves, BF16)


def far_apart(file: Path) -> torch.Tensor:
    """Leaves 2³⁰ elements apart, in a sparse file: from the third on, beyond 32 bits."""
    parts = cases.leaves_of(3, 2, 40)
    size = 2 * 2**30 + parts[0].numel()
    storage = torch.from_file(str(file), shared=True, size=size, dtype=FP32)
    return storage.as_strided(parts.shape, (2**30, 40, 1)).copy_(parts)


@pytest.mark.sim
@requires_core
def test_sm90_leaves_that_lie_far_apart(tmp_path):
    far = far_apart(tmp_path / "leaves")
    out, want = torch.empty(2, 40), op.add_leaves(far.clone(), None, FP32)
    with RUNNER.simulated():
        cases.same(launch.add_leaves(out, [far], None), want)
    # LLVM may widen sums of 32 bits, but not these of 31.
    narrow = "sum_ptrs + leaf * size", "sum_ptrs + (leaf * size & 0x7FFFFFFF)"
    mutant = copy_of(package, tmp_path, narrow)
    with RUNNER.simulated(mutant), pytest.raises((AssertionError, WildAccess)):
        cases.same(mutant.add_leaves(out, [far], None), want)


# ---- the code of every target -------------------------------------------------------------------

DEVICES = {
    "sm_90": arch.Device("cuda:0", "cuda", "sm_90a", 132),
    "gfx942": arch.Device("cuda:0", "hip", "gfx942", 304),
    "gfx950": arch.Device("cuda:0", "hip", "gfx950", 256),
}


def kernels(monkeypatch, target: str, n: int, module=launch) -> list:
    """The kernels of an exchange: eight leaves of four ranks, and a running sum and two leaves."""
    monkeypatch.setattr(arch, "describe", lambda device: DEVICES[target])
    parts, bias = torch.empty(8, 5, n), torch.empty(n, dtype=BF16)
    out, running = torch.empty(5, n, dtype=BF16), torch.empty(1, 5, n)

    def launches():
        module.add_leaves(out, parts.split((2, 2, 4)), bias)
        module.add_leaves(running[0], (running, parts[:2]), None)

    return RUNNER.compiled(target, launches, module)


@pytest.mark.parametrize("n", [4096, 97])
@pytest.mark.parametrize("target", DEVICES)
def test_code(monkeypatch, target, n):
    """Adds as they are written, nothing fused, flushed or spilled, offsets of 64 bits."""
    for kernel, adds in zip(kernels(monkeypatch, target, n), (8, 2), strict=True):
        assert complaints(kernel) == []
        assert kernel.asm["ttir"].count("arith.addf") == adds
        assert "ftz" not in text(kernel)


@pytest.mark.parametrize("target", DEVICES)
def test_whole_rows_are_loaded_by_16_bytes(monkeypatch, target):
    wide = "ld.global.v4" if target == "sm_90" else "buffer_load_dwordx4"
    for n, found in ((4096, True), (97, False)):
        for kernel in kernels(monkeypatch, target, n):
            assert (wide in text(kernel)) == found, n


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (("enable_fp_fusion=False", "enable_fp_fusion=True"), "sums that the compiler may fuse"),
        (("    size = tl.cast(sums_l, tl.int64)", "    size = tl.cast(sums_l, tl.int32)"),
         "offsets of 32 bits"),
        (("offsets = row * N + columns", "offsets = (row * N + columns).to(tl.int32)"),
         "offsets of 32 bits"),
    ],
)  # fmt: skip
def test_code_is_noticed(monkeypatch, tmp_path, edit, complaint):
    mutant = copy_of(package, tmp_path, edit)
    assert complaint in complaints(kernels(monkeypatch, "sm_90", 97, mutant)[0])


def test_one_binary_for_every_number_of_rows(monkeypatch):
    """M is not specialised on, nor what follows from it."""
    monkeypatch.setattr(arch, "describe", lambda device: DEVICES["sm_90"])
    hashes = set()
    for m in (1, 2, 16, 37):
        parts, bias = torch.empty(8, m, 70), torch.empty(70)
        for addend in (None, bias):
            call = lambda: launch.add_leaves(torch.empty(m, 70), [parts], addend)  # noqa: B023, E731
            hashes |= {(addend is None, k.hash) for k in RUNNER.compiled("sm_90", call)}
    assert len(hashes) == 2


# ---- who launches it ----------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Calls of the launcher, as the sizes and strides of what it takes."""
    calls = []

    def add_leaves(out, sums, bias):
        calls.append([(tuple(part.shape), part.stride()) for part in sums])
        return out

    monkeypatch.setattr(op, "_triton_launcher", lambda: SimpleNamespace(add_leaves=add_leaves))
    return calls


def test_a_gpu_adds_in_one_launch(launched, monkeypatch):
    monkeypatch.setattr(op, "_adds_by_triton", lambda device: True)  # for tensors of a CPU
    parts, out = torch.empty(8, 6, 32), torch.empty(3, 32, dtype=BF16)
    # The middle rows of each leaf, as a rank's own leaves lie, are taken as they are.
    op.add_leaves_into(out, (parts[:2, :3], parts[2:2, :3], parts[2:, 1:4]), None)
    # Leaves that are not contiguous are copied.
    op.add_leaves_into(out, (parts[:, ::2],), None)
    first, second = launched
    assert first == [((2, 3, 32), (192, 32, 1)), ((6, 3, 32), (192, 32, 1))]
    assert second == [((8, 3, 32), (96, 32, 1))]
    op.add_leaves(parts, None, BF16)
    assert launched[2:] == [[((8, 6, 32), (192, 32, 1))]]
    op.add_leaves_into(out[:0], (parts[:, :0],), None)
    assert len(launched) == 3


def test_who_adds_by_triton(launched):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert op._adds_by_triton(gpu) and not op._adds_by_triton(cpu)
    with mock.patch.object(importlib.util, "find_spec", lambda name: None):
        op._triton_installed.cache_clear()
        try:
            assert not op._adds_by_triton(gpu)
        finally:
            op._triton_installed.cache_clear()
    op.add_leaves_into(torch.empty(3, 32), (torch.zeros(8, 3, 32),), None)
    assert launched == []
