"""Compiling host functions and calling them: arguments, streams, addresses, exported objects."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ptxsim
from ptxsim import skips
from ptxsim.build import compiler

torch, cutlass, cute, samples = map(
    skips.import_module, ("torch", "cutlass", "cutlass.cute", "ptxsim.tests.samples")
)

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def scale():
    return ptxsim.compile(samples.scale, *samples.scale_signature())


def same_bytes(a, b):
    return (a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all()


@pytest.mark.parametrize("n", [1, 127, 128, 1000])
def test_elementwise(scale, n):
    a, b = torch.randn(n), torch.full((n,), float("nan"))
    scale(a, b, 2.5)
    assert same_bytes(b, a * 2.5)


def test_keyword_arguments(scale):
    a, b = torch.randn(64), torch.zeros(64)
    scale(a, b=b, factor=-1.0)
    assert same_bytes(b, -a)


def test_wrong_argument_reaches_python_as_an_error(scale):
    with pytest.raises(Exception, match=r"(?i)mismatch|expect"):
        scale(torch.randn(8).double(), torch.zeros(8), 1.0)
    a, b = torch.randn(8), torch.zeros(8)
    scale(a, b, 1.0)
    assert same_bytes(b, a)


def test_views_and_requires_grad(scale):
    base = torch.zeros(300)
    a = torch.randn(100, requires_grad=True)
    scale(a, base[100:200], 1.0)
    assert same_bytes(base[100:200], a.detach())
    assert not base[:100].any() and not base[200:].any()


def test_two_functions_with_one_kernel_name():
    """Kernels of different functions keep to their own PTX even when their names agree."""

    class Fill:
        def __init__(self, value):
            self.value = value

        @cute.jit
        def __call__(self, a: cute.Tensor, stream: samples.cuda.CUstream):
            self.kernel(a).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, a: cute.Tensor):
            thread, _, _ = cute.arch.thread_idx()
            a[thread] = cutlass.Float32(self.value)

    one = ptxsim.compile(Fill(1.0), samples.vector(), samples.stream())
    two = ptxsim.compile(Fill(2.0), samples.vector(), samples.stream())
    a = torch.zeros(32)
    ptxsim.clear_launches()
    two(a)
    assert (a == 2).all()
    one(a)
    assert (a == 1).all()
    names = {launch["entry"] for launch in ptxsim.launches()}
    assert len(names) == 1, names


def test_optional_and_tuple_arguments():
    class Add:
        @cute.jit
        def __call__(
            self,
            a: cute.Tensor,
            more: cute.Tensor | None,
            pair: tuple,
            stream: samples.cuda.CUstream,
        ):
            self.kernel(a, more, pair).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, a: cute.Tensor, more: cute.Tensor | None, pair: tuple):
            thread, _, _ = cute.arch.thread_idx()
            value = pair[0][thread] + pair[1][thread]
            if cutlass.const_expr(more is not None):
                value += more[thread]
            a[thread] = value

    vector, stream = samples.vector(), samples.stream()
    x, y, z = torch.randn(3, 32)
    a = torch.zeros(32)
    ptxsim.compile(Add(), vector, None, (vector, vector), stream)(a, None, (x, y))
    assert same_bytes(a, x + y)
    ptxsim.compile(Add(), vector, vector, (vector, vector), stream)(a, z, (x, y))
    assert same_bytes(a, (x + y) + z)


@pytest.mark.parametrize("stream", [0, ctypes.c_void_p(0), "driver"])
def test_explicit_stream(stream):
    fake = cute.runtime.make_fake_stream()
    run = ptxsim.compile(samples.scale, *samples.scale_signature()[:3], fake)
    a, b = torch.randn(8), torch.zeros(8)
    run(a, b, 2.0, samples.cuda.CUstream(0) if stream == "driver" else stream)
    assert same_bytes(b, a * 2)


TYPES = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float64"]
TYPES += ["uint8", "int16", "uint32", "int64", "bool"]


@pytest.mark.parametrize("name", TYPES)
def test_tensors_of_every_type(name):
    import tvm_ffi

    shown = ptxsim.wrap(torch.zeros(3, dtype=getattr(torch, name)))
    assert str(shown.dtype) == name and shown.device == tvm_ffi.device("cuda", 0)


def test_tensors_elsewhere_are_refused():
    with pytest.raises(TypeError, match="CPU"):
        ptxsim.wrap(torch.zeros(3, device="meta"))


def test_memory_reached_by_address():
    fake = cute.runtime.make_fake_stream()
    poke = ptxsim.compile(samples.poke, cutlass.Int64(0), fake)
    a = torch.zeros(32)
    with pytest.raises(ptxsim.PtxsimError, match="outside"):
        poke(a.data_ptr(), 0)
    assert not a.any()
    with ptxsim.region(a):
        poke(a.data_ptr(), 0)
    assert (a == 5).all()
    a.zero_()
    with ptxsim.options(check_memory=0):
        poke(a.data_ptr(), 0)
    assert (a == 5).all()
    with ptxsim.region(a, writable=False), pytest.raises(ptxsim.PtxsimError):
        poke(a.data_ptr(), 0)


def test_run_object(tmp_path, scale):
    """An object that export_to_c wrote, with its PTX, runs the same way."""
    path = tmp_path / "scale.o"
    scale.export_to_c(str(path), function_name="scale_it")
    run = ptxsim.run_object(path, scale.ptx_paths, "scale_it")
    a, b = torch.randn(50), torch.zeros(50)
    run(a, b, 4.0)
    assert same_bytes(b, a * 4.0)
    with pytest.raises(ptxsim.PtxsimError, match="no function"):
        ptxsim.run_object(path, scale.ptx_paths, "absent")


def test_object_with_missing_runtime_symbol(tmp_path):
    source, target = tmp_path / "x.cpp", tmp_path / "x.o"
    source.write_text("""extern "C" int _cudaSomethingElse();
extern "C" int __tvm_ffi_f() { return _cudaSomethingElse(); }
""")
    subprocess.run([compiler(), "-fPIC", "-c", str(source), "-o", str(target)], check=True)
    with pytest.raises(ptxsim.PtxsimError, match="_cudaSomethingElse"):
        ptxsim.run_object(target, [], "f")


CUTLASS_FIRST = """
import cutlass, torch
import ptxsim
from ptxsim.tests import samples
run = ptxsim.compile(samples.scale, *samples.scale_signature())
a, b = torch.randn(8), torch.zeros(8)
run(a, b, 2.0)
print("right" if torch.equal(b, a * 2) else "wrong")
"""
IMPORTS_NOTHING = """
import sys, ptxsim.available as available
print(available.why_not(), sorted({"torch", "cutlass", "tvm_ffi"} & set(sys.modules)))
"""


def run_python(code, **environment):
    """In another process, with CUTE_DSL_ARCH as given only."""
    kept = {k: v for k, v in os.environ.items() if k != "CUTE_DSL_ARCH"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_cutlass_may_be_imported_first():
    done = run_python(CUTLASS_FIRST)
    assert done.stdout == "right\n", done.stderr


def test_another_architecture_is_refused():
    done = run_python(CUTLASS_FIRST, CUTE_DSL_ARCH="sm_100a")
    assert "PtxsimError: ptxsim runs sm_90a; CUTE_DSL_ARCH is sm_100a" in done.stderr


def test_import_is_cheap():
    assert run_python(IMPORTS_NOTHING).stdout == "None []\n"
