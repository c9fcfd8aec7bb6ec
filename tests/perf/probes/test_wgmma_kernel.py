"""The probe kernel in the simulator: every bit is the chain's, under late and random timing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

import ptxsim
from cute_kernels.compile.kernel import Expect
from perf.probes import inputs, truncation, wgmma_kernel
from perf.probes.wgmma_kernel import Chain
from ptxsim.skips import requires_sim
from tests.perf.probes.simulated import build, differing
from verify.certificate import certify

pytestmark = [
    pytest.mark.sim,
    requires_sim,
    pytest.mark.filterwarnings("ignore:This static loop"),
]

HOPPER = {"wgmma_math": "hopper"}
LATE = HOPPER | {"async_mode": "late", "wgmma_mode": "late", "check_races": 1}
RANDOM = HOPPER | {"async_mode": "random", "wgmma_mode": "random", "warp_order": "random"}


def result(chain: Chain, a, b, c=None, swap=False, **options) -> torch.Tensor:
    d = torch.full((a.shape[0], b.shape[0]), float("nan"))
    with ptxsim.options(**(options or HOPPER)):
        build(chain, with_c=c is not None)(a, b, d, c, swap=swap)
    return d


CHAINS = [
    (Chain(64), False),
    (Chain(8, block_k=16), True),
    (Chain(24), True),
    (Chain(256, warpgroups=2, block_k=32), False),
    (Chain(128, block_k=128), True),
]
#: Each way round, with C and without, at every commit.
OFTEN = [(CHAINS[2], False), (CHAINS[3], True)]


@pytest.mark.parametrize(
    ("chain", "with_c", "swap"),
    [
        pytest.param(*chosen, swap, marks=() if (chosen, swap) in OFTEN else pytest.mark.nightly)
        for chosen in CHAINS
        for swap in (False, True)
    ],
)
def test_the_bits_are_those_of_one_ascending_chain(chain, with_c, swap):
    """Tails in M and N, operands swapped, every k block width, C or zero."""
    a, b, c = inputs.make("ratio", 72, 136, 256, device="cpu")
    c = c if with_c else None
    want = truncation.chain(a, b, c)
    assert differing(result(chain, a, b, c, swap), want) == 0


@pytest.mark.parametrize(
    "options",
    [LATE, RANDOM | {"seed": 1}, pytest.param(RANDOM | {"seed": 2}, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("chain", [Chain(24), Chain(64, block_k=32, promote_every=4)])
def test_no_wait_is_missing(chain, options):
    a, b, c = inputs.make("wide", 72, 72, 192, device="cpu")
    got = result(chain, a, b, c, **options)
    report = ptxsim.report()
    assert differing(got, truncation.chain(a, b, c, promote_every=chain.promote_every)) == 0
    assert report.get("races", 0) == 0
    assert report["fence_warnings"]["count"] == 0


@pytest.mark.parametrize(("period", "block_k"), [(1, 16), (4, 32)])
def test_promoted_sums_are_leaves_added_in_order(period, block_k):
    """K = 192 is 12 groups: whole leaves, and with 5 groups more a short last one."""
    chain = Chain(64, block_k=block_k, promote_every=period)
    for groups in (12, 4 * 4 + 2 * block_k // 16):
        a, b, c = inputs.make("cancel", 64, 64, groups * 16, device="cpu")
        got = result(chain, a, b, c)
        assert differing(got, truncation.chain(a, b, c, promote_every=period)) == 0
        assert differing(got, truncation.chain(a, b, c)) > 0
        assert differing(got, truncation.chain(a, b, c, promote_every=2 * period)) > 0


def test_a_resident_block_is_multiplied_again_and_again():
    chain = Chain(64, warpgroups=2, promote_every=8, resident=True)
    a, b, _ = inputs.make("normal", 128, 64, 64, device="cpu")
    many_a, many_b = (t.repeat(1, 5) for t in (a, b))
    want = truncation.chain(many_a, many_b, promote_every=8)
    noise_a, noise_b = many_a.clone(), many_b.clone()
    noise_a[:, 64:] = 7.0
    noise_b[:, 64:] = -3.0
    assert differing(result(chain, noise_a, noise_b), want) == 0


def test_the_comparison_sees_an_order_that_differs():
    """Mutants of the chain: groups reversed; zero first and C added last; k16 groups regrouped."""
    a, b, c = inputs.make("ratio", 64, 64, 128, device="cpu")
    got = result(Chain(64), a, b, c)

    def reordered(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (-1, 16)).flip(1).flatten(1).contiguous()

    shifted = [t.roll(8, 1).contiguous() for t in (a, b)]
    assert differing(got, truncation.chain(reordered(a), reordered(b), c)) > 0
    assert differing(got, truncation.chain(a, b) + c) > 0
    assert differing(got, truncation.chain(*shifted, c)) > 0


def test_bad_calls_are_refused():
    a, b, c = inputs.make("normal", 64, 64, 96, device="cpu")
    d = torch.empty(64, 64)
    with pytest.raises(ValueError, match="K a multiple of 64, got 96"):
        build(Chain(64), with_c=True)(a, b, d, c)
    with pytest.raises(ValueError, match="with_c=True, got none"):
        build(Chain(64), with_c=True)(a[:, :64], b[:, :64], d)


@pytest.mark.parametrize(
    ("chain", "with_c", "mma"),
    [
        pytest.param(Chain(256), True, "64x256x16", marks=pytest.mark.nightly),
        (Chain(192, warpgroups=2, promote_every=4, resident=True), False, "64x192x16"),
    ],
)
def test_the_machine_code_has_the_instruction_meant_and_no_spill(chain, with_c, mma):
    """A spill or a float atomic would falsify what the promotion probe times."""
    import cutlass.cute as cute

    certificate = certify(
        lambda: cute.compile(wgmma_kernel.WgmmaChain(chain), *wgmma_kernel.signature(with_c)),
        name="probe",
        constexpr={"chain": str(chain)},
        kind="A",
        expect=Expect(mma=mma, max_registers=255),
    )
    assert certificate.ok, certificate.findings
    assert certificate.spills == 0
