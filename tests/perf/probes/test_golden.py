"""Golden vectors: what an H200 computed, against the model, the simulator and the shipped kernel.

A file that is missing is an error, not a skip: the vectors are in the repository.
"""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("cutlass")

import ptxsim
from cute_kernels.gemm import launch
from perf.probes import golden, inputs, runner
from perf.probes.wgmma_kernel import Chain
from ptxsim.skips import requires_sim
from tests.gemm.simulated import simulated
from tests.perf.probes.simulated import bits, build, differing

GOLDEN_FILES = sorted(runner.GOLDEN.glob("wgmma_*.npz"))
KINDS = sorted(inputs.ORDINARY)
by_file = pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.name)


def simulated_marks(test):
    ignored = pytest.mark.filterwarnings("ignore:This static loop")
    return requires_sim(pytest.mark.sim(ignored(test)))


@functools.cache
def vectors(path):
    return golden.read(path)[0]


def probe(n: int, block_k: int, swap: bool, a, b, c, math: str) -> torch.Tensor:
    """D of the probe's kernel in the simulator."""
    d = torch.full_like(c, float("nan"))
    with ptxsim.options(wgmma_math=math):
        build(Chain(n, block_k=block_k), with_c=True)(a, b, d, c, swap=swap)
    return d


def shipped(a, b, c, math: str) -> torch.Tensor:
    """D of `ck.linear`'s SM90 kernel in the simulator, started from C in fp32."""
    with simulated(wgmma_math=math):
        return launch.gemm(a, b, None, c.clone())


def test_the_vectors_of_the_card_are_here():
    assert [path.name for path in GOLDEN_FILES] == ["wgmma_sm90.npz"]


@by_file
def test_every_kind_is_there_with_where_it_came_from(path):
    held, about = golden.read(path)
    assert sorted(held) == KINDS
    assert about["gpu"] == "NVIDIA H200" and about["commit"] and about["date"]
    for kind, (a, b, c, d) in held.items():
        assert d.isfinite().all() and differing(c, d) > 0, kind
        assert a.dtype == b.dtype == torch.bfloat16 and c.dtype == d.dtype == torch.float32
    minus = torch.tensor(-0.0).view(torch.int32)
    assert (bits(held["zeros"][2]) == minus).any()


@by_file
def test_the_model_predicts_every_golden_bit(path):
    out = golden.verify(path)
    assert sorted(out) == KINDS
    assert all(one.differ == 0 and one.outputs == 64 * 32 for one in out.values())


@by_file
@pytest.mark.parametrize(
    ("n", "block_k", "swap"),
    [
        (32, 32, False),
        (8, 16, True),
        *(
            pytest.param(*more, marks=pytest.mark.nightly)
            for more in ((32, 32, True), (8, 16, False), (256, 64, False), (256, 64, True))
        ),
    ],
)
@simulated_marks
def test_the_simulator_makes_the_golden_bits(path, n, block_k, swap):
    """At the width the card ran, and at others: question 1 says that the width does not show."""
    for kind, (a, b, c, d) in vectors(path).items():
        assert differing(probe(n, block_k, swap, a, b, c, "hopper"), d) == 0, kind


@by_file
@simulated_marks
def test_the_shipped_kernel_makes_the_golden_bits(path):
    for kind, (a, b, c, d) in vectors(path).items():
        assert differing(shipped(a, b, c, "hopper"), d) == 0, kind


@by_file
@pytest.mark.parametrize("math", ["exact", "fma"])
@simulated_marks
def test_another_adder_does_not(path, math):
    """Mutants of the arithmetic: both kernels must show each."""
    for kind, (a, b, c, d) in vectors(path).items():
        if kind == "zeros":  # few products a group: little to cut off
            continue
        assert differing(probe(32, 32, False, a, b, c, math), d) > 0, kind
        assert differing(shipped(a, b, c, math), d) > 0, kind


@by_file
@simulated_marks
def test_another_order_does_not(path):
    """A mutant of the order: k16 groups backwards."""

    def backwards(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (-1, 16)).flip(1).flatten(1).contiguous()

    for kind, (a, b, c, d) in vectors(path).items():
        assert differing(shipped(backwards(a), backwards(b), c, "hopper"), d) > 0, kind
