"""Launches: what is recorded, what a device would refuse, options, and errors while running."""

import ctypes

import pytest

import ptxsim
from ptxsim import skips

torch, cutlass, cute, samples = map(
    skips.import_module, ("torch", "cutlass", "cutlass.cute", "ptxsim.tests.samples")
)

pytestmark = pytest.mark.sim


def launcher(grid, block, **more):
    """A kernel whose CTAs write 1 to their element, launched with this shape."""

    class Launch:
        @cute.jit
        def __call__(self, a: cute.Tensor, stream: samples.cuda.CUstream):
            self.kernel(a).launch(grid=list(grid), block=list(block), stream=stream, **more)

        @cute.kernel
        def kernel(self, a: cute.Tensor):
            thread, _, _ = cute.arch.thread_idx()
            block_x, _, _ = cute.arch.block_idx()
            if thread == 0:
                a[block_x] = cutlass.Float32(1.0)

    return ptxsim.compile(Launch(), samples.vector(), samples.stream())


def test_launch_is_recorded():
    ptxsim.clear_launches()
    launcher((4, 1, 1), (64, 1, 1), cluster=[2, 1, 1])(torch.zeros(4))
    (launch,) = ptxsim.launches()
    assert launch["grid"] == [4, 1, 1] and launch["block"] == [64, 1, 1]
    assert launch["cluster"] == [2, 1, 1] and launch["status"] == 0
    assert launch["report"]["ctas"] == 4
    assert len(ptxsim.launches(clear=True)) == 1 and ptxsim.launches() == []


@pytest.mark.parametrize(
    "grid, more, says",
    [
        ((3, 1, 1), {"cluster": [2, 1, 1]}, "not a multiple of cluster"),
        ((0, 1, 1), {}, "grid"),
        ((1, 1, 1), {"smem": 240 * 1024}, "shared memory"),
        ((32, 1, 1), {"cluster": [32, 1, 1]}, "cluster"),
    ],
)
def test_launches_the_device_would_refuse(grid, more, says):
    with pytest.raises(ptxsim.PtxsimError, match=says):
        launcher(grid, (32, 1, 1), **more)(torch.zeros(64))


def test_device_attributes_reach_host_code():
    lib = ptxsim.library()
    value = ctypes.c_int()

    def ask(number):
        status = lib.ptxsim_rt_cudaDeviceGetAttribute(ctypes.byref(value), number, 0)
        return value.value if status == 0 else None

    assert ask(16) == 132 and ask(97) == 232448 and ask(999) is None
    ptxsim.set_device_attribute(16, 78)
    try:
        assert ask(16) == 78
    finally:
        ptxsim.set_device_attribute(16, 132)


def test_options_nest():
    before = ptxsim.current_options()
    with ptxsim.options(seed=7, warp_order="random"):
        with ptxsim.options(seed=8):
            now = ptxsim.current_options()
            assert now["seed"] == 8 and now["warp_order"] == 1
            with ptxsim.options(seed=7, warp_order="random"):  # equal to the outermost
                pass
            assert ptxsim.current_options()["seed"] == 8
        assert ptxsim.current_options()["seed"] == 7
    assert ptxsim.current_options() == before


def test_options_that_stay():
    before = ptxsim.current_options()
    ptxsim.set_options(resident_ctas=3)
    try:
        assert ptxsim.current_options() == before | {"resident_ctas": 3}
    finally:
        ptxsim.set_options(resident_ctas=before["resident_ctas"])


def test_options_are_checked():
    with pytest.raises(TypeError, match="no option"), ptxsim.options(sed=1):
        pass
    with pytest.raises(ValueError, match="cta_order"), ptxsim.options(cta_order="sideways"):
        pass


def test_store_past_the_end():
    run = ptxsim.compile(samples.overrun, samples.vector(), cutlass.Int32(0), samples.stream())
    a = torch.zeros(64)
    run(a, 0)
    assert a[:32].all() and not a[32:].any()
    with pytest.raises(ptxsim.PtxsimError, match="overrun"):
        run(a, 1)
    a.zero_()
    run(a, 0)  # the next launch is unaffected
    assert a[:32].all()


def test_deadlock():
    run = ptxsim.compile(samples.stuck, samples.vector(), samples.stream())
    with pytest.raises(ptxsim.PtxsimError, match=r"(?s)deadlock.*stuck"):
        run(torch.zeros(32))


def test_hang_limit():
    run = ptxsim.compile(samples.scale, *samples.scale_signature())
    with ptxsim.options(max_steps=10), pytest.raises(ptxsim.PtxsimError, match="hang"):
        run(torch.randn(4096), torch.zeros(4096), 1.0)
