"""The SM90 kernels in the simulator: every configuration and tail class, bit for bit.

With ``wgmma_math="exact"`` each k16 group is one exact product rounded once, so the kernel must
give the bytes of ``reference.chain``; with ``"hopper"`` (the truncating adder) it must stay in the
bound.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import ptxsim
from cute_kernels.gemm import config, launch, tiles
from ptxsim.skips import requires_sim
from tests import contract
from tests.gemm.simulated import WIDE, simulated
from tests.kernels.operands import operand
from tests.oracles import gemm as reference

pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("gemm")]

#: (M, N, K): one tile; every kind of tail; several tiles and k blocks; K below one group.
SHAPES = [(128, 256, 64), (200, 300, 200), (1, 7, 3), (130, 264, 80), (257, 520, 144), (64, 8, 16)]
#: Of those, what the narrower tile runs: the tails, and more K blocks than its ring has stages.
NARROW = [(200, 300, 200), (1, 7, 3), (130, 136, 456)]
DTYPES = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}


def case(chosen: config.Config, m: int, n: int, k: int):
    """Operands, bias and start of one configuration at one shape."""
    dtype = DTYPES[chosen.dtype]
    a = operand(m, k, dtype, chosen.a_major, seed=m)
    b = operand(n, k, dtype, chosen.b_major, seed=n + 1)
    generator = torch.Generator().manual_seed(k)
    bias = torch.randn(n, generator=generator).to(dtype) if chosen.epilogue == "bias" else None
    start = torch.randn(m, n, generator=generator) if chosen.epilogue == "accumulate" else None
    return a, b, bias, start


def chosen_of(epilogue: str) -> config.Config:
    return launch.dense_config(torch.bfloat16, "k", "k", epilogue, WIDE)


def run(a, b, bias, start, order=config.ORDER, **options):
    state = None if start is None else start.clone()
    with simulated(**options):
        return launch.gemm(a, b, bias, state, order)


def oracle(order, a, b, bias, start):
    return reference.tree(a, b, bias) if order == "tree" else reference.chain(a, b, bias, start)


def every_configuration():
    """Nightly: fp16, which differs in the type of its instructions, but for the widest tile; and of
    two widths and the tree all but one layout and epilogue."""
    for kernel_config in launch.configs():
        both_k = (kernel_config.a_major, kernel_config.b_major) == ("k", "k")
        if kernel_config.tile_n in (256, 128) and kernel_config.order == config.ORDER:
            often = kernel_config.dtype == "bf16" or (
                both_k and kernel_config.tile_n == config.Config.tile_n
            )
        else:
            often = kernel_config.dtype == "bf16" and both_k and kernel_config.epilogue == "bias"
        label = "-".join(map(str, vars(kernel_config).values()))
        yield pytest.param(kernel_config, id=label, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize("chosen", list(every_configuration()))
def test_every_configuration(chosen):
    for m, n, k in SHAPES if chosen.tile_n == config.Config.tile_n else NARROW:
        a, b, bias, start = case(chosen, m, n, k)
        want = oracle(chosen.order, a, b, bias, start)
        want = want if start is not None else want.to(a.dtype)
        got = run(a, b, bias, start, chosen.order, tile=tiles.Dense(chosen.tile_n))
        assert contract.same_bytes(got, want), (m, n, k)
        report = ptxsim.report()
        assert report["fence_warnings"]["count"] == 0


@pytest.mark.parametrize("epilogue", ["plain", "bias", "accumulate"])
def test_against_float64_with_the_truncating_adder(epilogue):
    kernel_config = chosen_of(epilogue)
    a, b, bias, start = case(kernel_config, 130, 264, 1000)
    exact = reference.gemm(a, b, bias, start)
    bound = reference.error_bound(a, b)
    if start is not None:
        bound = bound + 5.25 * 63 * 2.0**-23 * start.double().abs()
    got = run(a, b, bias, start, wgmma_math="hopper")
    contract.check_accuracy(got, exact, bound, 1.0 if start is not None else 0.02)


def test_the_output_is_written_everywhere():
    """Poisoned outputs: NaN and 0x7f bytes must all be gone, and nothing beyond N touched."""
    a, b, _, _ = case(chosen_of("plain"), 200, 300, 72)
    want = reference.chain(a, b).bfloat16()
    for fill in (
        torch.tensor(float("nan")).bfloat16(),
        torch.tensor([0x7F7F]).short().view(torch.bfloat16),
    ):
        out = []

        def allocator(shape, dtype, device, fill=fill, made=out):
            def new():
                made.append(torch.empty(shape, dtype=dtype).copy_(fill))
                return made[-1]

            return new

        with mock.patch.object(launch, "allocator", allocator):
            got = run(a, b, None, None)
        assert contract.same_bytes(got, want)
        assert (contract.bits(out[0][:, 300:]) == contract.bits(fill.view(1))).all()


def test_negative_zero_survives_the_k_tail():
    """Groups wholly beyond K are skipped: a start of -0 and products of -0 stay -0.

    In the simulator's ``fma`` arithmetic, which keeps -0 + -0; what the card does is not run.
    """
    m, n = 16, 16
    start = torch.full((m, n), -0.0)
    for k in (16, 48, 80, 112):
        a = torch.full((m, k), -0.0).bfloat16()
        b = torch.full((n, k), 1.0).bfloat16()
        got = run(a, b, None, start, wgmma_math="fma")
        assert contract.same_bytes(got, start), k


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("m", "n"), [(1, 2), (31, 64), (300, 130), (1025, 7), (64, 65)])
def test_column_sum(dtype, m, n):
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(m)).to(DTYPES[dtype])
    with simulated():
        got = launch.column_sum(x)
    lanes = torch.zeros(config.COLUMN_SUM.lanes, n)
    for row in range(m):
        lanes[row % config.COLUMN_SUM.lanes] += x[row].float()
    total = torch.zeros(n)
    for lane in lanes:
        total = total + lane
    assert contract.same_bytes(got, total.to(x.dtype))


def test_what_the_compiled_entry_refuses():
    """The second place of checks: TVM-FFI refuses dims, dtypes and strides that disagree."""
    from tests.gemm.simulated import gemm_kernel

    kernel = gemm_kernel(torch.bfloat16, "k", "k", "plain", WIDE)
    good = operand(16, 16, torch.bfloat16, "k", 0)
    out = torch.empty(16, 16, dtype=torch.bfloat16)
    kernel(good, good, out, None, 1)
    wrong = {
        "K differs": (good[:, :8], good, out),
        "M differs": (good[:8], good, out),
        "dtype": (good.half(), good, out),
        "out dtype": (good, good, out.float()),
        "rank": (good[None], good, out),
        "stride": (good.mT, good, out),
        "row stride": (torch.empty(16, 17, dtype=torch.bfloat16)[:, :16], good, out),
        "alignment": (torch.empty(264, dtype=torch.bfloat16)[1:257].view(16, 16), good, out),
    }
    for label, (a, b, d) in wrong.items():
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            kernel(a, b, d, None, 1)
            pytest.fail(label)
