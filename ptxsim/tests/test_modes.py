"""ptxsim/modes.py: what its modes notice, on kernels that are right and kernels that are not."""

import pytest

import ptxsim
from ptxsim import skips
from ptxsim.modes import MODES, QUICK_MODES, ModeFailure, ordered, poisoned, run_modes

torch, cutlass, samples, samples_gemm, samples_tma = map(
    skips.import_module,
    (
        "torch",
        "cutlass",
        "ptxsim.tests.samples",
        "ptxsim.tests.samples_gemm",
        "ptxsim.tests.samples_tma",
    ),
)

pytestmark = pytest.mark.sim


def gemm_runner(defect=None):
    """A call of a GEMM, checked against float64."""
    kernel = samples_gemm.Gemm(cutlass.BFloat16, defect=defect)
    run = ptxsim.compile(kernel, *samples_gemm.gemm_signature(cutlass.BFloat16))
    torch.manual_seed(0)
    a, b = torch.randn(130, 200).bfloat16(), torch.randn(72, 200).bfloat16()
    exact = a.double() @ b.double().T

    def call():
        c = poisoned((130, 72), torch.float32, "nan")
        run(a, b, c)
        assert (c - exact).abs().max() < 1e-3 * exact.abs().max()
        return c

    return call


def test_modes_cover_what_they_name():
    names = [mode.name for mode in MODES]
    assert len(set(names)) == len(names) and {m.name for m in QUICK_MODES} <= set(names)
    for modes in (MODES, QUICK_MODES):
        chosen = [mode.options for mode in modes]
        assert {o.get("resident_ctas") for o in chosen} == {None, 1, 2, 132}
        assert {o.get("cta_order") for o in chosen} == {None, "random", "descending"}
        assert {o.get("wgmma_math") for o in chosen} == {None, "fma", "hopper"}
        assert {o.get("async_mode") for o in chosen} == {None, "now", "late", "random"}


def test_intact_kernel_passes_every_mode():
    found = run_modes(gemm_runner())
    assert list(found) == [mode.name for mode in MODES]
    bits = {name: found[name].view(torch.int32) for name in ("default", "fma-late", "hopper-late")}
    assert not torch.equal(bits["default"], bits["fma-late"])  # the modes reach the launches
    assert not torch.equal(bits["fma-late"], bits["hopper-late"])


@pytest.mark.parametrize("defect", samples_gemm.DEFECTS)
def test_defects_fail_in_some_mode(defect):
    with pytest.raises(ModeFailure, match="mode "):
        run_modes(gemm_runner(defect))


@pytest.fixture(scope="module")
def chain():
    run = ptxsim.compile(samples.chain, *samples.chain_signature())
    values = torch.randn(9, 64)

    def call():
        total, turn = torch.zeros(64), torch.zeros(1, dtype=torch.int32)
        run(values, total, turn)
        return total, turn

    return call


def test_turnstile_bears_the_ordered_modes_only(chain):
    assert len(run_modes(chain, ordered(MODES))) == len(MODES) - 1
    with pytest.raises(ModeFailure, match=r"(?s)mode descending-2.*deadlock"):
        run_modes(chain, MODES)


def test_bits_that_depend_on_the_schedule_fail():
    torch.manual_seed(0)
    values = torch.randn(9, 64)
    signature = samples.matrix(cutlass.Float32), samples.vector(), samples.stream()
    run = ptxsim.compile(samples.unordered_sum, *signature)

    total = torch.zeros(64)

    def call():
        total.zero_()  # the memory of the results before
        run(values, total)
        return total

    with pytest.raises(ModeFailure, match="bytes differ from those of mode default"):
        run_modes(call)
    assert len(run_modes(call, same_bits=False)) == len(MODES)


def test_one_negative_zero_is_a_difference(chain):
    zeros = iter([0.0, 0.0, -0.0])

    def call():
        chain()
        return torch.tensor([1.0, next(zeros)])

    with pytest.raises(ModeFailure, match=r"mode early-1 .*: 1 bytes differ"):
        run_modes(call)


def test_missing_fence_fails_although_the_result_is_right():
    def runner(fence):
        kernel = samples_tma.TmaFill(fence=fence)
        run = ptxsim.compile(kernel, samples.vector(align=16), samples.stream())
        return lambda: run_fill(run)

    def run_fill(run):
        b = poisoned((100,), torch.float32, "0x7f")
        run(b)
        assert torch.equal(b, torch.arange(100) % 64)
        return b

    run_modes(runner(True), QUICK_MODES)
    with pytest.raises(ModeFailure, match=r"mode default .*missing proxy fence"):
        run_modes(runner(False), QUICK_MODES)


def test_race_fails_although_the_result_is_right():
    def runner(barrier):
        kernel = samples.Reverse(barrier=barrier)
        run = ptxsim.compile(kernel, samples.vector(), samples.vector(), samples.stream())
        return lambda: run_reverse(run)

    def run_reverse(run):
        a, b = torch.randn(64), poisoned((64,), torch.float32, "nan")
        run(a, b)
        return b

    races = [mode for mode in MODES if mode.name == "races"]
    run_modes(runner(True), races)
    with pytest.raises(ModeFailure, match=r"mode races .*(read after write|write after read)"):
        run_modes(runner(False), races)


def test_mistakes_in_tests_are_not_failures_of_kernels(chain):
    with pytest.raises(RuntimeError, match="nothing was launched"):
        run_modes(lambda: torch.zeros(1))
    with pytest.raises(ValueError, match="modes: expected"):
        run_modes(chain, [])
    with pytest.raises(ZeroDivisionError):
        run_modes(lambda: 1 // 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_poison(dtype):
    nan, big = (poisoned((3, 5), dtype, kind) for kind in ("nan", "0x7f"))
    assert nan.float().isnan().all() and nan.shape == big.shape == (3, 5)
    assert (big.view(torch.uint8) == 0x7F).all() and big.dtype == nan.dtype == dtype
    assert nan.untyped_storage().nbytes() == nan.nbytes
    with pytest.raises(ValueError, match="kind"):
        poisoned((3,), dtype, "zero")
