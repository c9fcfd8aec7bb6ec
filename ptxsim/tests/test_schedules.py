"""Kernels under every timing and dispatch order: TMA, WGMMA, semaphores, missing waits."""

import pytest

import ptxsim
from ptxsim import skips

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


@pytest.fixture(scope="module")
def gemm():
    signature = samples_gemm.gemm_signature(cutlass.BFloat16)
    return ptxsim.compile(samples_gemm.Gemm(cutlass.BFloat16), *signature)


@pytest.fixture(scope="module")
def chain():
    return ptxsim.compile(samples.chain, *samples.chain_signature())


def run_chain(chain, **options):
    torch.manual_seed(0)
    values, total, turn = torch.randn(9, 64), torch.zeros(64), torch.zeros(1, dtype=torch.int32)
    expected = torch.zeros(64)
    for row in values:
        expected = expected * 0.5 + row
    with ptxsim.options(**options):
        chain(values, total, turn)
    assert turn.item() == 9
    assert torch.equal(total.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"resident_ctas": 1},
        {"resident_ctas": 2, "warp_order": 1},
        {"cta_order": 2},
        {"cta_order": 1, "warp_order": 1},
    ],
    ids=str,
)
def test_semaphore_order(chain, options, seed):
    run_chain(chain, seed=seed, **options)


@pytest.mark.parametrize("more", [{}, {"warp_order": 1, "async_mode": 2}], ids=str)
def test_semaphore_deadlock_is_found_soon(chain, more):
    """CTAs that hold the device and wait for one that cannot start."""
    with pytest.raises(ptxsim.PtxsimError, match="deadlock"):
        run_chain(chain, max_steps=50_000_000, resident_ctas=2, cta_order=2, **more)


def compile_copy(dtype, box, swizzle, add=False, shift=0):
    kernel = samples_tma.TmaCopy(dtype, box, swizzle, add=add, shift=shift)
    matrices = samples.matrix(dtype, 0), samples.matrix(dtype, 0)
    return ptxsim.compile(kernel, *matrices, samples.stream())


@pytest.mark.parametrize(
    "box, swizzle",
    [((16, 8), None), ((16, 8), (1, 4, 3)), ((32, 8), (2, 4, 3)), ((64, 16), (3, 4, 3))],
)
def test_tma_round_trip(box, swizzle):
    run = compile_copy(cutlass.BFloat16, box, swizzle)
    m, n = 136, 21
    a = torch.randn(n, m).bfloat16()
    b = torch.full((n + 2, m), 7.0).bfloat16()
    run(a.T, b[:n].T)
    assert torch.equal(b[:n].view(torch.int16), a.view(torch.int16)) and (b[n:] == 7).all()


def test_tma_wraps_at_the_end_of_the_addresses():
    """A base below 0, as of ragged copies: 2^54 bytes are taken off an address and added again."""
    run = compile_copy(cutlass.BFloat16, (64, 1), (3, 4, 3), shift=1 << 20)
    a, b = torch.randn(1, 136).bfloat16(), torch.zeros(1, 136).bfloat16()
    assert a.data_ptr() < (1 << 54)
    run(a.T, b.T)
    assert torch.equal(b.view(torch.int16), a.view(torch.int16))


def test_tma_reduction():
    run = compile_copy(cutlass.Float32, (32, 8), (3, 4, 3), add=True)
    a, b = torch.randn(19, 76), torch.randn(19, 76)
    expected = a + b
    run(a.T, b.T)
    assert torch.equal(b.view(torch.int32), expected.view(torch.int32))


SCHEDULES = [
    {},
    {"resident_ctas": 1},
    {"resident_ctas": 2, "cta_order": 2},
    {"warp_order": 1, "cta_order": 1, "seed": 1},
    {"async_mode": 1, "wgmma_mode": 1},
    {"async_mode": 2, "wgmma_mode": 2, "warp_order": 1, "cta_order": 1, "seed": 2},
]


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_gemm_under_schedules(gemm, options):
    torch.manual_seed(0)
    a, b = torch.randn(130, 200).bfloat16(), torch.randn(72, 200).bfloat16()
    exact = a.double() @ b.double().T
    c = torch.full((130, 72), float("nan"))
    with ptxsim.options(**options):
        gemm(a, b, c)
    assert (c - exact).abs().max() < 1e-5 * exact.abs().max()
    report = ptxsim.report()
    assert report["ctas"] == 6 and report["wgmma"] == 6 * 4 * 4  # 4 steps of 4 instructions


@pytest.mark.parametrize("math, bound", [("exact", 1e-6), ("fma", 1e-5), ("hopper", 1e-3)])
def test_gemm_math_modes(gemm, math, bound):
    torch.manual_seed(1)
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(64, 512).bfloat16()
    exact = a.double() @ b.double().T
    c = torch.zeros(64, 64)
    with ptxsim.options(wgmma_math=math):
        gemm(a, b, c)
    assert (c - exact).abs().max() < bound * exact.abs().max()


TIMINGS = [{"async_mode": 1, "wgmma_mode": 1}]
TIMINGS += [
    {"async_mode": 2, "wgmma_mode": 2, "warp_order": 1, "cta_order": 1, "seed": seed}
    for seed in range(1, 5)
]


def gemm_fails(run, options):
    torch.manual_seed(0)
    a, b = torch.randn(128, 320).bfloat16(), torch.randn(64, 320).bfloat16()
    exact = a.double() @ b.double().T
    c = torch.full((128, 64), float("nan"))
    try:
        with ptxsim.options(**options):
            run(a, b, c)
    except ptxsim.PtxsimError:
        return True
    return not (c - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("defect", samples_gemm.DEFECTS)
def test_missing_synchronisation_is_noticed(defect):
    kernel = samples_gemm.Gemm(cutlass.BFloat16, defect=defect)
    broken = ptxsim.compile(kernel, *samples_gemm.gemm_signature(cutlass.BFloat16))
    assert any(gemm_fails(broken, options) for options in TIMINGS)


@pytest.mark.parametrize("options", TIMINGS, ids=str)
def test_the_intact_kernel_passes(gemm, options):
    assert not gemm_fails(gemm, options)
