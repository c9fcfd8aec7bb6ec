"""Drawn rows of norm, their oracle, and what a backend's functions must give back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.norm.config import LAYER, RMS, part_rows
from cute_kernels.norm.tensors import Rule, Scale, Upstream
from tests.contract import same_bytes
from tests.oracles import norm as reference
from tests.oracles.error_bounds import Near

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """Case of m rows of ``width``, and which of the optional tensors there are."""

    m: int
    width: int
    rule: Rule = Rule(RMS, 1e-6)
    dtype: torch.dtype = BF16
    weight: torch.dtype | None = BF16
    bias: bool = False
    residual: bool = False
    seed: int = 0


class Inputs(NamedTuple):
    """Tensors of a case; dh is the gradient of h, where there is a residual."""

    x: torch.Tensor
    residual: torch.Tensor | None
    scale: Scale
    upstream: Upstream


class Results(NamedTuple):
    """All that is made of them."""

    y: torch.Tensor
    h: torch.Tensor
    dx: torch.Tensor
    d_weight: torch.Tensor
    d_bias: torch.Tensor | None


def inputs_of(case: Case) -> Inputs:
    """Rows of N(offset, 1) times a magnitude of their own, as activations have."""
    g = torch.Generator().manual_seed(case.seed + 7919 * case.m + case.width)

    def rows() -> torch.Tensor:
        values = torch.randn(case.m, case.width, generator=g) + 0.3
        return (values * torch.randn(case.m, 1, generator=g).exp2()).to(case.dtype)

    def vector() -> torch.Tensor:
        return (1 + 0.3 * torch.randn(case.width, generator=g)).to(case.weight)

    weight = None if case.weight is None else vector()
    bias = vector() if case.bias else None
    residual = rows() if case.residual else None
    dh = rows() if case.residual else None
    return Inputs(rows(), residual, Scale(weight, bias), Upstream(rows(), dh))


def run(backend, case: Case, given: Inputs) -> Results:
    """Forward and backward by the functions of ``backend``; gradients of vectors in fp32."""
    out = backend.forward(given.x, given.residual, given.scale, case.rule)
    h = given.x if out.h is None else out.h
    stats = (out.mean, out.rstd)
    dx, parts = backend.backward(given.upstream, h, stats, given.scale, case.rule, True)
    like = given.x.new_empty(case.width, dtype=FP32)
    apart = [p for p in parts if p is not None]
    count = len(apart)
    sums = backend.add_parts(apart, [None] * count, [like] * count)
    return Results(out.y, h, dx, sums[0], sums[1] if case.bias else None)


def check(results: Results, case: Case, given: Inputs) -> float:
    """Asserts that every element is within its bound; returns the largest share of one."""
    residual = given.residual
    h = given.x if residual is None else (given.x.double() + residual.double()).to(case.dtype)
    assert torch.equal(results.h, h)
    y, _ = reference.forward(h, given.scale, case.rule)
    dx, d_weight, d_bias = reference.backward(given.upstream, h, given.scale, case.rule)
    pairs = [
        (results.y, y.stored(case.dtype)),
        (results.dx, dx.stored(case.dtype)),
        (results.d_weight, d_weight),
    ]
    if results.d_bias is not None:
        pairs.append((results.d_bias, d_bias))
    shares = [share(got, want) for got, want in pairs]
    assert max(shares) <= 1, shares
    return max(shares)


def share(got: torch.Tensor, want: Near) -> float:
    """The largest error of an element, in parts of its bound."""
    assert got.shape == want.value.shape and got.isfinite().all()
    # What is exact may be exact: 0 of 0.
    error = (got.double() - want.value).abs()
    return float((error / (want.error + 2.0**-149)).max())


def kinds() -> list[Case]:
    """Every kind, dtype and optional tensor, of one odd and one even width."""
    layer = Rule(LAYER, 1e-5)
    return [
        Case(5, 96),
        Case(5, 96, weight=FP32, residual=True),
        Case(70, 72, Rule(RMS, 1e-5, 1.0), FP16, FP16),
        Case(3, 100, Rule(RMS, 0.0), FP32, FP32, residual=True),
        Case(9, 65, weight=None),
        Case(5, 96, layer, bias=True),
        Case(66, 129, layer, FP32, FP32, bias=True, residual=True),
        Case(4, 264, layer, FP16, FP32, bias=True),
        Case(7, 100, layer, weight=None),
        Case(7, 64, layer, residual=True),
    ]


def widths() -> list[Case]:
    """Every number of threads and units of a row, of one more than a power of two and of less."""
    cases = [Case(3, (1 << i) + 8, seed=i) for i in range(5, 14)]
    return [*cases, Case(2, 7168, Rule(LAYER, 1e-5), bias=True), Case(130, 128, residual=True)]


# ---- what must not show --------------------------------------------------------------------------


def same(a: Results, b: Results) -> None:
    """Every byte of all that there is."""
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        assert x is None or same_bytes(x, y)


def rows(given: Inputs, keep: slice) -> Inputs:
    """Some rows of a case, copied."""

    def of(t):
        return None if t is None else t[keep].clone()

    upstream = Upstream(*map(of, given.upstream))
    return Inputs(of(given.x), of(given.residual), given.scale, upstream)


def few_rows(launch, case: Case) -> None:
    """A row alone, among the first ones, and among NaN, has the bytes that it has among all."""
    inputs = inputs_of(case)
    want = run(launch, case, inputs)
    for keep in (slice(0, 1), slice(0, 8), slice(case.m // 2, None)):
        some = rows(inputs, keep)
        got = run(launch, case._replace(m=len(some.x)), some)
        for name in ("y", "h", "dx"):
            assert same_bytes(getattr(got, name), getattr(want, name)[keep]), name
    index = case.m // 2
    around = rows(inputs, slice(None))
    for t in (around.x, around.residual, *around.upstream):
        if t is not None:
            t[:index], t[index + 1 :] = torch.nan, torch.nan
    got = run(launch, case, around)
    for name in ("y", "h", "dx"):
        assert same_bytes(getattr(got, name)[index], getattr(want, name)[index]), name


def a_part_is_the_same_anywhere(launch, case: Case, always: bool = False) -> None:
    """Rows behind a part have the sums that they have alone; dx needs no parts.

    ``always``: parts are made where they are not asked for.
    """
    inputs, index = inputs_of(case), part_rows(case.width)
    assert case.m > index
    out = launch.forward(inputs.x, inputs.residual, inputs.scale, case.rule)
    h = inputs.x if out.h is None else out.h
    stats = (out.mean, out.rstd)
    dx, whole = launch.backward(inputs.upstream, h, stats, inputs.scale, case.rule, True)
    late = rows(inputs, slice(index, None)).upstream
    behind = [None if t is None else t[index:] for t in stats]
    _, one = launch.backward(late, h[index:], behind, inputs.scale, case.rule, True)
    early = [None if t is None else t[:index] for t in stats]
    first = rows(inputs, slice(0, index)).upstream
    _, begun = launch.backward(first, h[:index], early, inputs.scale, case.rule, True)
    for a, b, c in zip(whole, begun, one, strict=True):
        assert (a is None) == (b is None) == (c is None)
        assert a is None or same_bytes(a, torch.cat([b, c]))
    alone, nothing = launch.backward(inputs.upstream, h, stats, inputs.scale, case.rule, False)
    assert (nothing is not None) == always and same_bytes(alone, dx)


def no_address_shows(launch, case: Case, hows=((1, 1), (8, 1), (0, 2))) -> None:
    """Rows that begin anywhere, with anything behind them; columns apart; vectors likewise."""
    inputs = inputs_of(case)
    want = run(launch, case, inputs)

    def moved(t, offset, step):
        if t is None:
            return None
        holder = t.new_full((*t.shape[:-1], t.shape[-1] * step + offset + 8), torch.nan)
        return holder[..., offset : offset + t.shape[-1] * step : step].copy_(t)

    for how in hows:
        other = Inputs(
            moved(inputs.x, *how),
            moved(inputs.residual, *how),
            Scale(*(moved(t, *how) for t in inputs.scale)),
            Upstream(*(moved(t, *how) for t in inputs.upstream)),
        )
        same(run(launch, case, other), want)
