"""The sums of the Triton norm in plain torch: the orders that kernel.py writes down."""

from __future__ import annotations

import torch

from cute_kernels.norm.config import LAYER, part_rows
from cute_kernels.norm.triton import launch

from .cases import FP32, Case, Inputs, Results


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c by way of fp64, where the product is exact and the sum all but always is enough."""
    return (a.double() * b.double() + c.double()).float()


def _lanes(a: torch.Tensor, b: torch.Tensor | None, lanes: int) -> torch.Tensor:
    """Σ a b, or Σ a, over the rows of [M, D]: lane by lane ascending, then lanes in pairs."""
    padded = [torch.nn.functional.pad(t, (0, -t.shape[1] % lanes)) for t in (a, b) if t is not None]
    total = torch.zeros(len(a), lanes)
    for blocks in zip(*(t.split(lanes, 1) for t in padded), strict=True):
        total = total + blocks[0] if b is None else _fma(*blocks, total)
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return total


def _part_sums(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """Σ a b, or Σ a, [P, D] over the rows of parts: lanes of rows ascending, then halves."""
    width = a.shape[1]
    rows, lanes = part_rows(width), launch.part_lanes(width)
    shape = (-1, rows // lanes, lanes, width)
    a, b = (
        None if t is None else torch.nn.functional.pad(t, (0, 0, 0, -len(t) % rows)).view(shape)
        for t in (a, b)
    )
    total = torch.zeros_like(a[:, 0])
    for step in range(a.shape[1]):
        total = total + a[:, step] if b is None else _fma(a[:, step], b[:, step], total)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _added(parts: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(parts.shape[1])
    for part in parts:
        total = total + part
    return total


def run(case: Case, given: Inputs) -> Results:
    """Run a case as `cases.run` does."""
    (weight, bias), width = given.scale, case.width
    h = given.x
    if given.residual is not None:
        h = (h.float() + given.residual.float()).to(h.dtype)
    own, size = h.float(), torch.tensor(float(width), dtype=FP32)
    lanes = launch.forward_lanes(width)
    layer = case.rule.kind == LAYER
    if layer:
        own = own - _lanes(own, None, lanes) / size
    variance = _lanes(own, own, lanes) / size
    rstd = 1 / (variance + case.rule.eps).double().sqrt().float()
    x_hat = own * rstd
    w = None if weight is None else weight.float() + case.rule.offset
    y = x_hat
    if w is not None:
        y = x_hat * w if bias is None else _fma(x_hat, w.expand_as(x_hat), bias.float())

    lanes = launch.backward_lanes(width)
    dy = given.upstream.dy.float()
    g = dy if w is None else dy * w
    of_products = _lanes(g, x_hat, lanes) / size
    inner = _fma(-x_hat, of_products.expand_as(g), g)
    if layer:
        inner = inner - _lanes(g, None, lanes) / size
    dh = given.upstream.dh
    dx = inner * rstd if dh is None else _fma(inner, rstd.expand_as(inner), dh.float())
    d_weight = _added(_part_sums(dy, x_hat))
    d_bias = None if bias is None else _added(_part_sums(dy, None))
    return Results(y.to(case.dtype), h, dx.to(case.dtype), d_weight, d_bias)
