"""Sinkhorn-Knopp of wide logits, with as many iterations as are allowed."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.mhc.checks import MAX_ITERATIONS, MAX_LOG_ITERATIONS

#: 64 iterations of "log" made a row of sums 1/3 and 3 of it.
WIDE = [[169, 1, -71, 15], [22, -41, 24, -41], [161, -207, -76, 6], [96, -75, -23, -61]]


def normalised(z: torch.Tensor, iterations: int) -> torch.Tensor:
    """Float64, in the logarithm: no entry vanishes."""
    z = z.double()
    for _ in range(iterations):
        for dim in (-1, -2):
            z = z - torch.logsumexp(z, dim, keepdim=True)
    return z.exp()


@pytest.mark.parametrize("spread", [1, 30, 300, 3000])
def test_the_most_iterations_of_wide_logits(spread):
    z = spread * torch.randn(3000, 4, 4, generator=torch.Generator().manual_seed(spread))
    z[0] = torch.tensor(WIDE)
    out = ck.mhc.sinkhorn(z, iterations=MAX_LOG_ITERATIONS)
    bound = 2e-6 + 2.0**-22 * spread
    assert (out - normalised(z, MAX_LOG_ITERATIONS)).abs().max() < bound


def test_an_epsilon_allows_more():
    """DeepSeek's form: its epsilon keeps the entries of a matrix within a factor of 1 / eps."""
    z, eps = torch.tensor([WIDE], dtype=torch.float32), 1e-6
    want = torch.softmax(z.double(), -1) + eps
    want = want / (want.sum(-2, keepdim=True) + eps)
    for _ in range(MAX_ITERATIONS - 1):
        for dim in (-1, -2):
            want = want / (want.sum(dim, keepdim=True) + eps)
    out = ck.mhc.sinkhorn(z, iterations=MAX_ITERATIONS, form="epsilon", eps=eps)
    assert (out - want).abs().max() < 1e-5
