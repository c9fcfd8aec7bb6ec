"""Checks that no row and no cut shows, for the launchers of the Triton mhc."""

from __future__ import annotations

from types import ModuleType

import torch

from cute_kernels.mhc import nodes
from cute_kernels.mhc.config import mappings
from cute_kernels.mhc.tensors import Expand, Sinkhorn, Upstream

from .. import contract
from .launcher_cases import FP32, Given, Shape, given

FORM = Sinkhorn(3, "log", 1e-6)


def _columns(rows: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Pieces of rows, with the strides that coefficients may have."""
    return [nodes.rows(t) for t in rows.split(sizes, 1)]


def forward(launch: ModuleType, shape: Shape) -> contract.RowOp:
    """Everything that a site's forward gives for a row of x, f and coefficients."""
    g, n, c = given(shape), shape.n, shape.c
    sizes = [n * c, c, n, n * n, n]

    def run(rows):
        x, f, post, res, pre = _columns(rows, sizes)
        x, f = (t.to(shape.dtype).contiguous() for t in (x, f))
        expand = Expand(f, g.bias, post, res)
        out = launch.project(x, g.mapping, g.streams, expand)
        both = launch.combine(x, g.streams, pre, expand)
        coefficients_out = launch.coefficients(out, n * c, g.gates, n, FORM)
        *_, collapsed = launch.combine(x, g.streams, pre, None)
        sums = out.sums.permute(1, 0, 2).flatten(1)
        all_of = (sums, out.squares.mT, out.y, *both, collapsed, coefficients_out.ms[:, None])
        return torch.cat(
            [
                t.float()
                for t in (
                    *all_of,
                    coefficients_out.h,
                    coefficients_out.pre,
                    coefficients_out.post,
                    coefficients_out.res,
                )
            ],
            1,
        )

    return contract.RowOp("mhc forward", run, sum(sizes), FP32)


def backward(launch: ModuleType, shape: Shape) -> contract.RowOp:
    """Everything that a site's backward gives for a row, sums over tokens aside."""
    g, n, c = given(shape), shape.n, shape.c
    sizes = [n * c, n * c, c, c, n, n * n, n, mappings(n), 1, n, n, n * n]

    def run(rows):
        *streams, post, res, pre, h, ms, d_pre, d_post, d_res = _columns(rows, sizes)
        x, dy, f, d_out = (t.to(shape.dtype).contiguous() for t in streams)
        upstream = Upstream(dy, res=res)
        ended = launch.reduce_channels(x, g.streams, upstream, Expand(f, g.bias, post), True)
        both = Upstream(dy, d_out, res, pre)
        begun = launch.reduce_channels(x, g.streams, both)
        ms = ms[:, 0].abs() + 0.1
        d_h, d_ms, _ = launch.coefficients_backward(
            h, ms, g.gates, n, FORM, d_pre, d_post, begun.d_res + d_res
        )
        dx, _ = launch.project_backward(x, d_h, d_ms, g.mapping, g.streams, both, (True, True))
        out = (ended.df, ended.dx, ended.d_post, ended.d_res, begun.d_pre, begun.d_res)
        return torch.cat([t.float() for t in (*out, d_h, d_ms[:, None], dx)], 1)

    return contract.RowOp("mhc backward", run, sum(sizes), FP32)


def sums_over_tokens(launch: ModuleType, g: Given, cut: int) -> contract.SumOp:
    """dphi, dnorm_weight, dalpha, dbeta and dbias of a stream of tokens."""
    n, phi = g.shape.n, g.mapping.phi
    gates = 3 + mappings(n)
    sizes = [phi.numel(), phi.shape[1], gates, g.shape.c]

    def run(start, pieces):
        state = start.clone()
        into_phi, into_weight, of_gates, of_bias = state.split(sizes)
        for piece in pieces:
            x, dy, f, h, ms, pre, post, res = (
                t[piece] for t in (g.x, g.dy, g.f, g.h, g.ms, g.pre, g.post, g.res)
            )
            *_, d_gates = launch.gate_backward(h, ms, g.gates, n, pre, post, res)
            launch.add_parts(d_gates, of_gates)
            of = (x, h, ms, g.mapping, g.streams, Upstream())
            _, d_psi = launch.project_backward(*of, (False, True))
            launch.weights(d_psi, g.mapping, into_phi.view_as(phi), into_weight)
            by = Expand(f, g.bias, post)
            launch.add_parts(
                launch.reduce_channels(None, g.streams, Upstream(dy), by).d_bias, of_bias
            )
        return state

    random = torch.Generator().manual_seed(8)
    start = torch.randn(sum(sizes), generator=random)
    return contract.SumOp("mhc sums over tokens", run, g.shape.m, start, cut)


def no_row_shows(launch: ModuleType, shape: Shape, rows: int = 40) -> None:
    """The battery, on both directions."""
    for make in (forward, backward):
        assert contract.check_rows(make(launch, shape), rows, seed=3) > 50


def few_rows(launch: ModuleType, shape: Shape) -> None:
    """A part of the battery: the first rows alone, and rows around NaN."""
    for make in (forward, backward):
        op = make(launch, shape)
        contract.check_population(op, 20, 4, (1, 9))
        inputs = op.rows(9, 5)
        contract.check_transform(op, "T3 neighbour content", inputs, op.run(inputs), 5)


def no_cut_shows(launch: ModuleType, g: Given, cut: int) -> None:
    """Any consecutive micro-batches that are cut at multiples of ``cut`` tokens."""
    assert contract.check_splits(sums_over_tokens(launch, g, cut), seed=9) > 3
