"""Builds probe kernels for the simulator, once for each chain, and reads bits."""

from __future__ import annotations

import functools

import torch

import ptxsim
from perf.probes import wgmma_kernel


@functools.cache
def build(chain: wgmma_kernel.Chain, *, with_c: bool = False):
    """`wgmma_kernel.build` with the simulator's compiler."""
    return wgmma_kernel.build(chain, with_c=with_c, compiler=ptxsim.compile)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The raw bits of an fp32 tensor."""
    return t.contiguous().view(torch.int32)


def differing(x: torch.Tensor, y: torch.Tensor) -> int:
    """How many elements have other raw bits."""
    return int((bits(x) != bits(y)).sum())
