"""Problems of the SM90 kernels of grouped products, and the bytes that they must give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import torch

import ptxsim
from cute_kernels.moe import launch, tiles
from tests import contract
from tests.oracles import gemm as reference
from tests.oracles import moe as oracle

from . import cases
from .simulated import simulated

BF16 = cases.BF16


def problem(load: str, n: int, k: int, dtype=BF16, major: str = "k", bias: bool = False):
    """(x, weight, offsets, bias or None) with the weights of experts row- or column-major."""
    x, weight, offsets, bias_rows, _ = cases.operands(load, dtype, n, k)
    weight = weight if major == "k" else weight.mT.contiguous().mT
    return x, weight, offsets, bias_rows if bias else None


def chain(x, weight, offsets, bias=None) -> torch.Tensor:
    """Rows by ``chain``, expert by expert."""
    out = torch.empty(len(x), weight.shape[1], dtype=x.dtype)
    for expert, rows in oracle.experts(offsets):
        bias_e = None if bias is None else bias[expert]
        out[rows] = reference.chain(x[rows], weight[expert], bias_e).to(x.dtype)
    return out


def neighbours(run: Callable[..., torch.Tensor], major: str) -> None:
    """NaN in rows and weights of other experts, and behind the last k, reaches no row of ours.

    run(x, weight, offsets, bias): the kernel.
    """
    x, weight, offsets, _ = problem("uneven", 40, 56, major=major)
    want = chain(x, weight, offsets)
    for expert, rows in oracle.experts(offsets):
        dirty_x, dirty_weight = torch.full_like(x, float("nan")), weight.clone()
        dirty_x[rows] = x[rows]
        dirty_weight[[e for e in range(len(weight)) if e != expert]] = float("nan")
        got = run(dirty_x, dirty_weight, offsets, None)
        assert contract.same_bytes(got[rows], want[rows])


def by_content(weight: torch.Tensor, **options) -> contract.RowOp:
    """Each row by the expert that its first two numbers choose."""

    def run(rows):
        chosen = 2 * (rows[:, 0] > 0).int() + (rows[:, 1] > 0).int()
        offsets, order, positions = oracle.permutation(chosen[:, None], len(weight))
        with simulated(**options):
            out = launch.grouped_gemm(rows[order.long()], weight, offsets, None)
        return out[positions[:, 0].long()]

    return contract.RowOp("grouped_gemm", run, weight.shape[2], BF16)


@contextlib.contextmanager
def poisoned(fill: torch.Tensor):
    """While it lasts, results begin as ``fill``; yields the list of their memory."""
    out = []

    def allocator(shape, dtype, device):
        def new():
            out.append(torch.empty(shape, dtype=dtype).copy_(fill))
            return out[-1]

        return new

    with mock.patch.object(launch, "allocator", allocator):
        yield out


def far_apart(kernel) -> bool:
    """Whether ``kernel`` is right where offsets of weights, biases and results pass 2^31 elements.

    The memory between them is neither touched nor there.
    """
    rows, n, k, apart = 3, 72, 64, 2**30 + 8192

    def spread(t: torch.Tensor) -> torch.Tensor:
        memory = torch.empty((len(t) - 1) * apart + t[0].numel(), dtype=BF16)
        return torch.as_strided(memory, t.shape, (apart, *t.stride()[1:])).copy_(t)

    x, weight, bias = (
        cases.drawn(*shape, seed=i, dtype=BF16)
        for i, shape in enumerate(((rows, k), (rows, n, k), (rows, n)))
    )
    operands = x, spread(weight), cases.offsets_of([1] * rows), spread(bias)
    out = spread(torch.zeros(rows, n, dtype=BF16))
    try:
        with (
            mock.patch.object(launch, "allocator", lambda *_: lambda: out),
            simulated(few=tiles.FEW[0], few_kernel=kernel),
        ):
            got = launch.grouped_gemm(*operands)
    except ptxsim.PtxsimError:
        return False
    return contract.same_bytes(got, chain(x, weight, operands[2], bias))
