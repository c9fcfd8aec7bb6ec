"""CUTLASS's persistent warp-specialised Hopper GEMM on the simulator.

The example `dense_gemm_persistent.py` (examples/python/CuTeDSL/.../hopper) is not part of a wheel:
set PTXSIM_CUTLASS_EXAMPLES to the folder that holds it.
"""

import contextlib
import importlib.util
import math
import os
import re
import sys
from pathlib import Path

import pytest

import ptxsim
from ptxsim import skips

from .rivals import MARKS, SCHEDULES, bf16, relative

torch, cutlass, cute = map(skips.import_module, ("torch", "cutlass", "cutlass.cute"))

pytestmark = MARKS


@pytest.fixture(scope="module")
def example():
    """The example, as a module."""
    path = Path(os.environ.get("PTXSIM_CUTLASS_EXAMPLES", "")) / "dense_gemm_persistent.py"
    if not path.is_file():
        pytest.skip("PTXSIM_CUTLASS_EXAMPLES does not hold dense_gemm_persistent.py")
    spec = importlib.util.spec_from_file_location("cutlass_dense_gemm_persistent", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compile_gemm(example, tile, cluster, matrices):
    kernel = example.HopperWgmmaGemmPersistentKernel(cutlass.Float32, tile, cluster, 1, True)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return ptxsim.compile(kernel, *matrices, 132 // math.prod(cluster), stream)


def fake(dtype, shape, lead):
    unit = 128 // dtype.width
    strides = tuple(1 if i == lead else cute.sym_int64(divisibility=unit) for i in range(3))
    return cute.runtime.make_fake_tensor(dtype, shape, stride=strides, assumed_align=16)


@pytest.fixture(scope="module")
def plain_gemm(example):
    """A bf16 GEMM, everything contiguous along K or N; compiled once per tile and cluster."""
    made = {}

    def gemm(tile, cluster):
        if (tile, cluster) not in made:
            m, n, k, l = (cute.sym_int() for _ in range(4))
            shapes = (m, k, l), (n, k, l), (m, n, l)
            matrices = [fake(cutlass.BFloat16, shape, 1) for shape in shapes]
            made[tile, cluster] = compile_gemm(example, tile, cluster, matrices)
        return made[tile, cluster]

    return gemm


@pytest.mark.parametrize(
    "tile, cluster, shape, schedule",
    [
        ((64, 64), (1, 1), (64, 64, 64, 1), "default"),
        ((64, 64), (1, 1), (200, 136, 72, 2), "default"),
        ((64, 64), (1, 1), (200, 136, 328, 1), "random-two"),
        ((64, 64), (1, 1), (65, 8, 8, 1), "late"),
        ((128, 256), (1, 2), (128, 512, 64, 1), "default"),
        ((128, 256), (1, 2), (130, 520, 136, 1), "late"),
        ((128, 256), (1, 2), (256, 1024, 264, 1), "random"),
        ((128, 128), (2, 1), (264, 136, 200, 1), "late-descending"),
    ],
)
def test_persistent_gemm(plain_gemm, tile, cluster, shape, schedule):
    m, n, k, l = shape
    torch.manual_seed(0)
    a, b = bf16(l, m, k), bf16(l, n, k)
    c = torch.full((l, m, n), float("nan"), dtype=torch.bfloat16)
    with ptxsim.options(**SCHEDULES[schedule]):
        plain_gemm(tile, cluster)(*[t.permute(1, 2, 0) for t in (a, b, c)])
    exact = torch.einsum("lmk,lnk->lmn", a.double(), b.double())
    assert not c.isnan().any() and relative(c, exact) < 3e-3


TYPES = {
    "bf16": (cutlass.BFloat16, torch.bfloat16, 4e-3),
    "f16": (cutlass.Float16, torch.float16, 5e-4),
    "f32": (cutlass.Float32, torch.float32, 1e-5),
    "e4m3": (cutlass.Float8E4M3FN, torch.float8_e4m3fn, None),
    "e5m2": (cutlass.Float8E5M2, torch.float8_e5m2, None),
}


@pytest.mark.parametrize(
    "inputs, output, majors, tile, cluster, shape",
    [
        ("f16", "f32", "mnm", (64, 128), (2, 2), (152, 264, 200, 1)),
        ("bf16", "f16", "mkn", (128, 128), (1, 1), (136, 72, 40, 2)),
        ("bf16", "bf16", "knm", (128, 256), (1, 4), (136, 1032, 72, 1)),
        ("e4m3", "f32", "kkn", (64, 64), (1, 2), (77, 144, 208, 1)),
        ("e5m2", "bf16", "kkm", (128, 128), (2, 1), (304, 128, 80, 1)),
    ],
)
def test_types_and_majors(example, inputs, output, majors, tile, cluster, shape):
    m, n, k, l = shape
    leads = [0 if major == first else 1 for major, first in zip(majors, "mnm", strict=True)]
    names = (inputs, inputs, output)
    sm, sn, sk, sl = (cute.sym_int() for _ in range(4))
    symbols = (sm, sk, sl), (sn, sk, sl), (sm, sn, sl)
    matrices = [
        fake(TYPES[name][0], shape, lead)
        for name, shape, lead in zip(names, symbols, leads, strict=True)
    ]
    run = compile_gemm(example, tile, cluster, matrices)

    def tensor(position, rows, columns):
        dtype = TYPES[names[position]][1]
        if leads[position] == 1:
            return torch.randn(l, rows, columns).to(dtype).permute(1, 2, 0)
        return torch.randn(l, columns, rows).to(dtype).permute(2, 1, 0)

    torch.manual_seed(0)
    a, b = tensor(0, m, k), tensor(1, n, k)
    exact = torch.einsum("mkl,nkl->mnl", a.double(), b.double())
    for schedule in ("default", "late", "random"):
        c = tensor(2, m, n)
        with ptxsim.options(**SCHEDULES[schedule]):
            run(a, b, c)
        assert relative(c, exact) < TYPES[output][2], schedule


@pytest.mark.parametrize("majors", ["kkn", "mnm"])
def test_own_launch_path(example, majors, monkeypatch):
    """The example's `run`, with its own tensors, from_dlpack calls and reference check."""
    monkeypatch.setattr(example.testing, "benchmark", lambda *_, **__: 0.0)
    half = cutlass.Float16
    with ptxsim.patch():
        ptxsim.clear_launches()
        types = half, half, half, cutlass.Float32
        example.run((208, 256, 64, 1), *types, *majors, (128, 128), (1, 1), 1, True)
    assert [launch["status"] for launch in ptxsim.launches()] == [0]


@pytest.mark.parametrize(
    "instruction, kind",
    [
        ("fence.proxy.async", "missing proxy fence"),
        ("cp.async.bulk.wait_group", "exit with pending bulk store"),
    ],
)
def test_without_one_instruction(plain_gemm, instruction, kind, tmp_path):
    """Every executed proxy fence is missed when it is taken out, and so is the last wait for bulk
    stores."""
    compiled = plain_gemm((128, 128), (2, 1))
    compiled.export_to_c(str(tmp_path / "k.o"), function_name="f")
    lines = Path(compiled.ptx_paths[0]).read_text().rstrip("\0").split("\n")
    shapes = (300, 136), (264, 136), (300, 264)
    tensors = [bf16(1, *shape).permute(1, 2, 0) for shape in shapes]

    def kinds(line, new):
        text = list(lines)
        text[line] = re.sub(rf"(@!?%?\w+\s+)?{re.escape(instruction)}[^;]*;", new, text[line])
        assert text[line] != lines[line]
        (tmp_path / "k.ptx").write_text("\n".join(text))
        ptxsim.run_object(tmp_path / "k.o", tmp_path / "k.ptx", "f")(*tensors)
        return {warning["kind"] for warning in ptxsim.report()["fence_warnings"]["first"]}

    found = []
    for line in [i for i, text in enumerate(lines) if instruction in text]:
        with contextlib.suppress(ptxsim.PtxsimError):
            kinds(line, "trap;")
            continue  # never executed
        found.append(kinds(line, ""))
    assert {kind} in found
    if instruction == "fence.proxy.async":
        assert len(found) > 4 and all(each == {kind} for each in found)
    ptxsim.clear_launches()
