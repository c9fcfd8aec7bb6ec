"""`patch`: a library's own launch path on the simulator, and everything back as it was."""

import os

import pytest

import ptxsim
from ptxsim import skips

torch, cutlass, cute, samples = map(
    skips.import_module, ("torch", "cutlass", "cutlass.cute", "ptxsim.tests.samples")
)
runtime = skips.import_module("cutlass.cute.runtime")

pytestmark = pytest.mark.sim


def state():
    cuda = ["is_available", "current_device", "get_device_capability", "current_stream", "Stream"]
    tensor = [torch.Tensor.is_cuda, torch.Tensor.cuda, torch.Tensor.data_ptr]
    functions = [cute.compile, runtime.from_dlpack, torch.empty, torch.library.custom_op]
    return functions + tensor + [getattr(torch.cuda, name) for name in cuda]


def test_patch_is_undone():
    before, environment = state(), dict(os.environ)
    with ptxsim.patch({"PTXSIM_TEST_PATCH": "1"}):
        assert torch.zeros(2).is_cuda and torch.cuda.get_device_capability() == (9, 0)
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert cute.compile is not before[0] and os.environ["PTXSIM_TEST_PATCH"] == "1"
    assert state() == before and dict(os.environ) == environment
    assert not torch.zeros(2).is_cuda


def test_patch_is_undone_after_an_error():
    before = state()
    with pytest.raises(ZeroDivisionError), ptxsim.patch():
        raise ZeroDivisionError
    assert state() == before


def run_library():
    """What a library does: from_dlpack, cute.compile, a call."""
    a, b = torch.randn(200), torch.zeros(200)
    shown = [runtime.from_dlpack(t, enable_tvm_ffi=True).mark_layout_dynamic() for t in (a, b)]
    arguments = [*shown, cutlass.Float32(1.0), samples.stream()]
    run = cute.compile(samples.scale, *arguments, options="--enable-tvm-ffi")
    run(a, b, 3.0)
    assert torch.equal(b.view(torch.int32), (a * 3).view(torch.int32))
    run(*shown, 2.0)
    assert torch.equal(b.view(torch.int32), (a * 2).view(torch.int32))


def test_from_dlpack_launch_path():
    with ptxsim.patch():
        run_library()


def test_patches_nest():
    before = state()
    with ptxsim.patch():
        with ptxsim.patch():
            run_library()
        run_library()
    assert state() == before
