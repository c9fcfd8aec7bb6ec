"""Checks of the machine code of compiled Triton kernels, of products above all."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import torch

from cute_kernels.gemm import config
from ptxsim.tests.harness import find_tool

from .unwritten import unwritten

#: Bytes a workgroup, by architecture: LDS on AMD.  CUDA is held to the 99 KiB of sm_86 and sm_89.
SHARED_LIMIT = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
SHARED_LIMIT |= dict.fromkeys(("80", "86", "89", "90"), 99 * 1024)
#: Bytes a thread on the stack that fp32 on the fma units may have: ptxas aims at 128 registers, and
#: Triton 3.6.0's keeps 0 bytes of some layout there, 3.7.1's 8, 3.9.0's 24.
FP32_STACK = 32
_MATRIX = re.compile(r"\b(wgmma\.mma_async|mma\.sync|v_s?w?mfma\w*|v_mfma\w*|v_smfmac\w*)([.\w]*)")
_ATOMIC = re.compile(r"\b(atom|red)\.|\b\w+_atomic_|\bds_(add|cmpst|max|min)_")
_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def text(kernel) -> str:
    """The assembly: PTX, or AMDGCN."""
    return kernel.asm["ptx"] if kernel.metadata.target.backend == "cuda" else kernel.asm["amdgcn"]


def matrix_instructions(kernel) -> Counter[str]:
    """How often each matrix instruction occurs."""
    return Counter("".join(out) for out in _MATRIX.findall(text(kernel)))


def expected_instruction(target: str, dtype: torch.dtype, epilogue: str) -> tuple[str, int] | None:
    """The one matrix instruction of a kernel, and how many of it one `tl.dot` needs per warp (or
    warp group); None where fp32 runs on the fma units."""
    fp32 = dtype == torch.float32
    plan = config.TRITON_FP32 if fp32 else config.TRITON
    block_k = plan.accumulate_k if epilogue == "accumulate" else plan.block_k
    if target == "90":
        name = f"wgmma.mma_async.sync.aligned.m64n128k16.f32.{_NAMES[dtype]}.{_NAMES[dtype]}"
        return None if fp32 else (name, block_k // 16)
    depth = 4 if fp32 else 32 if target == "gfx950" and block_k >= 32 else 16
    tiles = plan.block_m * plan.block_n // 256 // plan.num_warps
    return f"v_mfma_f32_16x16x{depth}_{_NAMES[dtype]}", tiles * block_k // depth


def complaints(kernel, dtype: torch.dtype, epilogue: str) -> list[str]:
    """Complaints about the code of a gemm kernel; empty if there are none."""
    target = kernel.metadata.target
    expected = expected_instruction(str(target.arch), dtype, epilogue)
    out = common_complaints(kernel, stack=0 if expected else FP32_STACK)
    counts = matrix_instructions(kernel)
    if expected is None:
        if counts or "fma.rn.f32" not in text(kernel):
            out.append("matrix instruction")
    elif set(counts) != {expected[0]} or counts[expected[0]] % expected[1]:
        out.append("matrix instruction")
    return out


def common_complaints(kernel, stack: int = 0) -> list[str]:
    """Atomics, TF32, spills beyond so many bytes of stack, too much shared memory; on CUDA, what
    ptxas makes of it.
    """
    code = text(kernel)
    out = []
    if _ATOMIC.search(code):
        out.append("atomics")
    if re.search(r"tf32|xf32", code):
        out.append("tf32")
    if kernel.metadata.shared > SHARED_LIMIT[str(kernel.metadata.target.arch)]:
        out.append("shared memory")
    if _spilled(kernel) > stack:
        out.append("spills")
    if kernel.metadata.target.backend == "cuda" and unwritten(kernel.asm["cubin"]):
        out.append("a register that nothing wrote")
    return out


def code_complaints(kernel, stack: int, offsets: str) -> list[str]:
    """Those, and sums that the compiler may fuse or orders, inexact division, narrow offsets.

    On AMD scalar registers may be kept in lanes of vector registers: that is no memory access.

    Args:
        offsets: pattern of the types of offsets that are too narrow.
    """
    out, code = common_complaints(kernel, stack), text(kernel)
    hip = kernel.metadata.target.backend == "hip"
    if hip and re.search(r"\.vgpr_spill_count:\s*0\b", code):
        out = [complaint for complaint in out if complaint != "spills"]
    if kernel.metadata.enable_fp_fusion:
        out.append("sums that the compiler may fuse")
    if re.search(r"div\.(full|approx)|(r?sqrt|rcp)\.approx", code):
        out.append("division or root that is not IEEE's")
    if any(size != 2 for size in sizes_of_float_sums(kernel.asm["ttir"])):
        out.append("a sum in the order of the compiler")
    if re.search(offsets, kernel.asm["ttir"]):
        out.append("offsets of 32 bits")
    return out


def sizes_of_float_sums(ttir: str) -> list[int]:
    """The length of the axis of every sum of floats that the compiler is to order."""
    reduce = re.compile(
        r'"tt\.reduce"\(%[\w#]+\) <\{axis = (\d+) : i32\}> \(\{(.*?)\}\) : \(tensor<([\dx]+)x\w+>',
        re.DOTALL,
    )
    out = [
        int(shape.split("x")[int(axis)])
        for axis, body, shape in reduce.findall(ttir)
        if "arith.addf" in body
    ]
    assert ttir.count('"tt.reduce"') == len(reduce.findall(ttir)), "a form that is not read"
    return out


def _spilled(kernel) -> int:
    """Bytes a thread on the stack; on AMD, registers."""
    if kernel.metadata.target.backend == "hip":
        counts = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", text(kernel))
        assert len(counts) == 2
        return sum(map(int, counts))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        command = [find_tool("cuobjdump"), "--dump-resource-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    out = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert out, usage
    return sum(map(int, out.groups()))


def tree_complaints(kernel, dtype: torch.dtype, stage: str) -> list[str]:
    """Complaints about the code of a leaves kernel, or of a root kernel (stage ``"root"``)."""
    expected = takes_k(str(kernel.metadata.target.arch), dtype) if stage != "root" else None
    fma = stage != "root" and expected is None
    out = common_complaints(kernel, stack=FP32_STACK if fma else 0)
    if stage == "unordered":
        out = out + ["no atomics"] if "atomics" not in out else out[1:]
    if matrix_of(kernel) != (set() if expected is None else {expected}):
        out.append("matrix instruction")
    if fma and "fma.rn.f32" not in text(kernel):
        out.append("no fma")
    layouts = re.findall(r"#mma\d* = #ttg\.amd_mfma<(.*?)>", kernel.asm["ttgir"])
    if any("isTransposed = true" not in layout for layout in layouts):
        out.append("operands swapped")
    if re.search(r"tt\.addptr .*: .*\bi32|tt\.addptr .*xi32>", kernel.asm["ttir"]):
        out.append("offsets of 32 bits")
    return out


def takes_k(target: str, dtype: torch.dtype) -> str | None:
    """The matrix instruction of a leaf without its width; None where fp32 runs on the fma units."""
    name = _NAMES[dtype]
    if target.startswith("gfx"):
        depth = 4 if dtype == torch.float32 else 32 if target == "gfx950" else 16
        return f"v_mfma_f32_16x16x{depth}_{name}"
    if dtype == torch.float32:
        return None
    if target in ("80", "86", "89"):
        return f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"
    return f"wgmma.mma_async.sync.aligned.m64nTk16.f32.{name}.{name}"


def matrix_of(kernel) -> set[str]:
    """The matrix instructions of a kernel, of wgmma's without their widths."""
    return {re.sub(r"(?<=m64n)\d+", "T", name) for name in matrix_instructions(kernel)}
