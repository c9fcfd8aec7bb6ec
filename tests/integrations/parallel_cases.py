"""Parallel linears against one rank's, byte for byte: for threads, processes and GPUs as ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import torch

import cute_kernels as ck
from cute_kernels.gemm import cpu
from cute_kernels.integrations import grouped_tensor_parallel as gtp
from cute_kernels.integrations import leaf_exchange
from cute_kernels.integrations import tensor_parallel as tp
from tests import contract
from tests.moe import cases as experts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """x [*rows, k], weight [n, k]."""

    rows: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype
    bias: bool
    #: Products underflow, so that every leaf, and so every sum, is -0: within `signed_zeros` on a
    #: CPU, where a BLAS may lose the sign.
    minus_zeros: bool = False


class GroupedCase(NamedTuple):
    """Experts: a load of tests/moe/cases.py, their weight [experts, n, k]."""

    load: str
    dtype: torch.dtype
    bias: bool = True
    main_grad: bool = False
    n: int = 256
    k: int = 384


class Whole(NamedTuple):
    """Operands of a case, and one rank's results, of which all ranks must have parts."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dy: torch.Tensor
    y: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor
    db: torch.Tensor | None
    offsets: torch.Tensor | None = None  # of experts
    main_grad: bool = False


#: (N, K) that 1, 2, 4 and 8 ranks cut at edges of leaves, in either dimension.
SIZES = [(384, 256), (128, 1152)]
#: (N, K) that 1 and 2 ranks cut (six leaves), and 1, 2 and 4 (four leaves).
FEWER = {2: [(192, 96)], 4: [(64, 64)]}
ROWS = [(), (0,), (3,), (70,), (2, 35)]


def cases(degree: int):
    """Cases of a degree: each pair of rows, sizes, dtypes, with and without bias."""
    sizes = SIZES + [size for most, s in FEWER.items() if degree <= most for size in s]
    for (i, (n, k)), (j, rows) in itertools.product(enumerate(sizes), enumerate(ROWS)):
        yield Case(rows, n, k, (BF16, FP32)[(i + j) % 2], bias=(i // 2 + j // 2) % 2 == 0)
    yield Case((70,), *SIZES[0], BF16, True)
    yield Case((3,), *SIZES[0], FP16, False)
    yield Case((5,), *SIZES[0], BF16, False, minus_zeros=True)


def operands(case: Case, device: str = "cpu") -> tuple:
    """x, weight, bias, dy of a case, drawn on the device: equal on equal cards."""
    shapes = (*case.rows, case.k), (case.n, case.k), (case.n,), (*case.rows, case.n)
    generator = torch.Generator(device).manual_seed(case.n * 7919 + case.k + sum(case.rows))
    drawn = [torch.randn(s, generator=generator, device=device) for s in shapes]
    # Terms of other magnitudes make more of the orders differ.
    drawn[0] *= 2.0 ** torch.arange(case.k, device=device).remainder(7)
    drawn[3] *= 2.0 ** torch.arange(case.n, device=device).remainder(7)
    if case.minus_zeros:
        drawn = [torch.full(s, sign * 1e-30) for s, sign in zip(shapes, (1, -1, 1, 1), strict=True)]
    x, weight, bias, dy = (t.to(device=device, dtype=case.dtype) for t in drawn)
    return x, weight, bias if case.bias else None, dy


@contextlib.contextmanager
def signed_zeros() -> Iterator[None]:
    """Inside, a product on the CPU that is zero is -0, as that of any sum of negative underflows.

    Some BLAS start their sums from the first product, some from +0 (MKL on AMD's processors).
    """
    true = cpu.mm

    def mm(*args, **options):
        out = true(*args, **options)
        out[out == 0] = -0.0
        return out

    with mock.patch.object(cpu, "mm", mm):
        yield


def paths(degree: int) -> list[str]:
    """Paths of `leaf_exchange` for so many ranks: a chain has two."""
    return [p for p in leaf_exchange.PATHS if p != leaf_exchange.CHAINED or degree == 2]


@contextlib.contextmanager
def forced(path: str) -> Iterator[None]:
    """Inside, leaves are exchanged on this path of `leaf_exchange`, whatever the sizes."""
    with mock.patch.object(leaf_exchange, "choose", lambda *sizes: path):
        yield


def whole(case: Case | GroupedCase, device: str = "cpu") -> Whole:
    """The results of ``ck.linear(order="tree")`` or of the grouped one; a main_grad is its dW."""
    if isinstance(case, Case):
        x, weight, bias, dy = operands(case, device)
        offsets, into = None, None
    else:
        x, weight, offsets, bias, dy = experts.operands(case.load, case.dtype, case.n, case.k)
        bias, into = bias if case.bias else None, start_of(weight) if case.main_grad else None
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    if offsets is None:
        y = ck.linear(*leaves, order="tree")
    else:
        y = ck.grouped_linear(*leaves[:2], offsets, leaves[2], order="tree", main_grad=into)
    y.backward(dy)
    dx, dw, db = (None if t is None else t.grad for t in leaves)
    dw = dw if into is None else into
    return Whole(x, weight, bias, dy, y.detach(), dx, dw, db, offsets, into is not None)


def start_of(weight: torch.Tensor) -> torch.Tensor:
    return experts.drawn(*weight.shape, seed=7)


def part(t: torch.Tensor | None, axis: int | None, degree: int, rank: int):
    """A rank's part along ``axis``; all of it for None."""
    return t if t is None or axis is None else t.chunk(degree, axis)[rank].contiguous()


#: function -> the axis that ranks cut of: x, weight, bias, dy, y, dx, dW, dbias.
CUTS = {
    tp.row_parallel_linear: (-1, 1, None, None, None, -1, 1, None),
    tp.column_parallel_linear: (None, 0, 0, -1, -1, None, 0, 0),
}

#: The axes of experts' operands and results.
GROUPED_CUTS = {
    gtp.row_parallel_grouped_linear: (-1, 2, None, None, None, -1, 2, None),
    gtp.column_parallel_grouped_linear: (None, 1, 1, -1, -1, None, 1, 1),
}


def differing(function, results: Whole, mesh, degree: int, rank: int, **options) -> list[str]:
    """The results of a rank that are not, byte for byte, its parts of the whole's."""
    axes, into = (CUTS | GROUPED_CUTS)[function], None
    mine = [part(t, axis, degree, rank) for t, axis in zip(results[:8], axes, strict=True)]
    x, weight, bias, dy, *want = mine
    if results.main_grad:
        options["main_grad"] = into = part(start_of(results.weight), axes[1], degree, rank)
    given = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    arguments = given if results.offsets is None else [*given[:2], results.offsets, given[2]]
    y = function(*arguments, mesh=mesh, **options)
    y.backward(dy)
    got = [y.detach(), *(None if t is None else t.grad for t in given)]
    if results.main_grad:
        assert got[2] is None
        got[2] = into
    return unlike(got, want)


def unlike(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> list[str]:
    """Names of the results (y, dx, dW, dbias) that differ in a byte, or are on one side alone."""
    return [
        name
        for name, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True)
        if (a is None) != (b is None) or (a is not None and not contract.same_bytes(a, b))
    ]
