"""Checks of the written order of each sum: its bytes, and that no schedule shows in them.

bf16 products are exact in fp32, so that torch's additions are the kernels' fmas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

from cute_kernels.mhc import launch as planners
from cute_kernels.mhc.config import (
    ProjectBackwardConfig,
    ProjectBackwardWgmmaConfig,
    ReduceConfig,
    chunk_channels,
    vector_channels,
    wgmma_configs,
)
from cute_kernels.mhc.tensors import Expand, Parts, Projected, Upstream
from ptxsim.modes import QUICK_MODES, Mode, run_modes
from tests.contract import same_bytes
from tests.mhc.launcher_cases import (
    BF16,
    FORMS,
    Given,
    Shape,
    by_stream,
    equal,
    given,
    parts_are_added,
    sites_of,
    upstream_of,
)
from tests.mhc.simulated import compiled, simulated
from tests.mhc.simulated import launchers as launch
from tests.old_memory import old_memory

WARP = 32


# ---- orders --------------------------------------------------------------------------------------


def neighbours_first(t: torch.Tensor) -> torch.Tensor:
    """Σ over the last dimension, a power of two: pairs of neighbours, then pairs of those."""
    while t.shape[-1] > 1:
        t = t[..., ::2] + t[..., 1::2]
    return t[..., 0]


def ascending(t: torch.Tensor) -> torch.Tensor:
    """Σ over the last dimension, from zero, one after the other."""
    total = torch.zeros_like(t[..., 0])
    for part in t.unbind(-1):
        total = total + part
    return total


def sums_of_reduce(g: Given) -> None:
    """dres: a thread's vectors ascending, lanes of a warp neighbours first, warps ascending."""
    n, layout = g.shape.n, g.shape.layout
    assert g.shape.dtype is BF16
    config = ReduceConfig("bf16", n, layout, *(True,) * 6)
    vector = vector_channels(n, layout)
    x, dy = (by_stream(t, g.streams).float() for t in (g.x, g.dy))
    terms = x[:, :, None] * dy[:, None]
    step = vector * config.threads
    terms = torch.nn.functional.pad(terms, (0, -g.shape.c % step))
    # [M, n, n, rounds, threads, vector] -> a chain for each thread
    chains = terms.unflatten(-1, (-1, config.threads, vector)).transpose(-3, -2).flatten(-2)
    warps = neighbours_first(ascending(chains).unflatten(-1, (-1, WARP)))
    want = ascending(warps).flatten(1)
    got = launch.reduce_channels(g.x, g.streams, Upstream(g.dy))
    assert same_bytes(got.d_res, want)


def sums_of_bias(g: Given) -> None:
    """dbias: the tokens of a CTA ascending; then the parts of a chunk, from zero."""
    tokens = ReduceConfig.tokens
    expand_operands = Expand(g.f, g.bias, g.post)
    out = launch.reduce_channels(None, g.streams, Upstream(g.dy), expand_operands)
    # df before its rounding: one fma for each stream, of which a product is exact in fp64.
    dy, total = by_stream(g.dy, g.streams), None
    for j in range(g.shape.n):
        product = dy[:, j] * g.post[:, j, None].double()
        total = product.float() if total is None else (total.double() + product).float()
    assert same_bytes(out.df, total.to(g.shape.dtype))
    parts = torch.nn.functional.pad(total, (0, 0, 0, -g.shape.m % tokens))
    want = ascending(parts.unflatten(0, (-1, tokens)).movedim(1, -1))
    assert same_bytes(out.d_bias.values, want)


def squares_of_rows(x: torch.Tensor, size: int, chained: bool = False) -> list[torch.Tensor]:
    """Σ x² of each chunk of ``size`` elements of bf16 rows.

    An octet from zero; of a row's octets each of four lanes adds every fourth, then neighbours.  A
    bf16 square is exact in fp32, so that an fma adds what an addition does.  ``chained``: a lane
    adds square after square.
    """
    sums = []
    for part in x.float().split(size, 1):
        octets = torch.nn.functional.pad(part * part, (0, -part.shape[1] % 32))
        of_lanes = octets.unflatten(1, (-1, 4, 8)).transpose(1, 2)
        own = of_lanes.flatten(2) if chained else ascending(of_lanes)
        sums.append(neighbours_first(ascending(own)))
    return sums


def squares(g: Given) -> None:
    """`squares_of_rows` of the kernel's chunks."""
    assert g.shape.layout == "cn" and g.shape.dtype is BF16
    out = launch.project(g.x, g.mapping, g.streams).squares
    size = chunk_channels(g.shape.n, g.shape.precision) * g.shape.n
    assert all(map(same_bytes, out, squares_of_rows(g.x, size)))


def chunks_of_channels(g: Given, chunks: int = 7) -> None:
    """H: chunks ascending."""
    random = torch.Generator().manual_seed(4)
    columns = len(g.mapping.phi)
    sums = torch.randn(chunks, g.shape.m, columns, generator=random)
    of_x = torch.rand(chunks, g.shape.m, generator=random)
    h, ms = launch.add_chunks(Projected(sums, of_x), 64, g.shape.n)
    assert same_bytes(h[:, :columns], ascending(sums.movedim(0, -1)))
    # A power of two divides exactly.
    assert same_bytes(ms, ascending(of_x.T) / 64)


def chunks_of_tokens(g: Given) -> None:
    """dphi: what is there, then chunks ascending; vectors likewise, of parts from zero."""
    random = torch.Generator().manual_seed(5)
    parts = torch.randn(5, *g.mapping.phi.shape, generator=random)
    start = torch.randn(g.mapping.phi.shape, generator=random)
    got, want = start.clone(), start
    launch.weights(Parts(parts), g.mapping._replace(norm_weight=None), got, None)
    for part in parts:
        want = want + part
    assert same_bytes(got, want)
    parts_are_added(launch)


def chunks_of_norm_weight(g: Given, chunks: int = 11) -> None:
    """dnorm_weight: what is there, then chunks ascending, each Σ_j dpsi_j phi_j from zero."""
    random = torch.Generator().manual_seed(6)
    phi = torch.randn(g.mapping.phi.shape, generator=random).bfloat16().float()
    weight, start = torch.rand(2, phi.shape[1], generator=random)
    parts = torch.randn(chunks, *phi.shape, generator=random).bfloat16().float()
    got = start.clone()
    mapping = g.mapping._replace(phi=phi, norm_weight=weight)
    launch.weights(Parts(parts), mapping, torch.zeros_like(phi), got)
    sums = ascending((parts * phi).movedim(1, -1))
    assert same_bytes(got, ascending(torch.cat([start[None], sums]).movedim(0, -1)))


ORDERS = {
    order.__name__: order
    for order in (
        sums_of_reduce,
        sums_of_bias,
        squares,
        chunks_of_channels,
        chunks_of_tokens,
        chunks_of_norm_weight,
    )
}


# ---- schedules -----------------------------------------------------------------------------------


def projected(g: Given) -> tuple:
    """The kernel whose CTAs keep a chunk of psi in shared memory; with and without an expand."""
    plain = launch.project(g.x, g.mapping, g.streams)
    return (*plain[:2], *launch.project(g.x, g.mapping, g.streams, g.expand))


def combined(g: Given) -> tuple:
    """The kernel that makes streams and collapses them."""
    return launch.combine(g.x, g.streams, g.pre, g.expand)


def recomputed(g: Given) -> tuple:
    """The kernel that keeps streams in registers between sites."""
    return tuple(launch.recompute(g.x, g.streams, sites_of(g)))


def projected_back(g: Given) -> tuple:
    """The kernel whose lanes have rings."""
    of = (g.x, g.h, g.ms, g.mapping, g.streams, upstream_of(g, "res and out"))
    dx, parts = launch.project_backward(*of, (True, True))
    return dx, parts.values


def reduced(g: Given) -> tuple:
    """The kernel that keeps dbias, and sums of warps."""
    by = Expand(g.f, g.bias, g.post)
    out = launch.reduce_channels(g.x, g.streams, Upstream(g.dy, res=g.res), by, True)
    return (*(t for t in out[:5] if t is not None), out.d_bias.values)


def of_coefficients(g: Given) -> tuple:
    """The kernels of a token's coefficients: sums of chunks, and of tokens, meet in CTAs."""
    n, out = g.shape.n, launch.project(g.x, g.mapping, g.streams)
    there = launch.coefficients(out, g.x.shape[1], g.gates, n, FORMS[1])
    gates = (g.h, g.ms, g.gates, n, FORMS[1], g.pre, g.post, g.res)
    *back, parts = launch.coefficients_backward(*gates)
    return (*there, *back, parts.values)


KERNELS = {
    f.__name__: f
    for f in (projected, combined, recomputed, projected_back, reduced, of_coefficients)
}


def no_schedule_shows(
    name: str,
    g: Given,
    ctas: Iterable[int] = (1, 2, 7, 132),
    modes: Iterable[Mode] = QUICK_MODES,
    kernel=compiled,
) -> None:
    """Grids of any size, under every timing of the simulator, give the same bytes."""
    out, modes = [], list(modes)
    for count in ctas:

        def run(count: int = count):
            with simulated(count, kernel), old_memory():
                return KERNELS[name](g)

        out.append(run_modes(run, modes)["default"])
    for one, two in itertools.pairwise(out):
        equal(one, two)


# ---- the projection's backward on TMA and WGMMA, and without -------------------------------------

#: Two tiles of tokens with a tail in one group, and a tail in the last panel.
TILES = Shape(83, 40, 4, "cn", BF16)
#: Two chunks of tokens, more tiles than stages, and whole groups beyond the last token.
TWO_CHUNKS = Shape(1060, 24, 2, "cn", BF16)
MATHS = ("exact", "fma", "hopper")


def gradients(g: Given, kind: str) -> tuple:
    """dx and the parts of dpsi."""
    upstream = upstream_of(g, kind)
    of = (g.x, g.h, g.ms, g.mapping, g.streams, upstream, (True, True))
    dx, parts = launch.project_backward(*of)
    return dx, parts.values


def cancelling(shape: Shape) -> Given:
    """Operands whose first terms nearly cancel in dH psi, so that the order of the sum shows.

    dx is rounded to bf16: of other operands, it shows in one of 2^15 elements.
    """
    g = given(shape)
    h, phi = g.h.clone(), g.mapping.phi.clone()
    h[:, 1::2] = -h[:, ::2]
    phi[1::2] = phi[::2] * (1 + 2.0**-9 * torch.rand(phi[::2].shape))
    return g._replace(h=h, ms=torch.zeros_like(g.ms), mapping=g.mapping._replace(phi=phi))


def with_kernel(cls: type, chosen: object = None):
    """Kernel that refuses configurations of the projection's backward of another class."""

    def kernel(config):
        assert isinstance(config, cls)
        return compiled(chosen or config)

    return kernel


def other_bytes(g: Given, kind: str, math: str = "hopper") -> tuple:
    """Gradients by the kernel that needs no TMA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planners, "by_tma", lambda *fields: False)
        with simulated(5, with_kernel(ProjectBackwardConfig), wgmma_math=math), old_memory():
            return gradients(g, kind)


def bytes_of_the_other(g: Given, kind: str, math: str = "hopper", kernel=None) -> None:
    """Every configuration for this problem has the bytes of the kernel that needs no TMA."""
    want = other_bytes(g, kind, math)
    upstream = upstream_of(g, kind)
    mode = "" if upstream.dy is None else "add" if upstream.res is None else "res"
    for chosen in wgmma_configs(g.shape.n, mode, upstream.d_out is not None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planners, "project_backward_wgmma_config", lambda *of, one=chosen: one)
            run = kernel or with_kernel(ProjectBackwardWgmmaConfig)
            with simulated(5, run, wgmma_math=math), old_memory():
                got = gradients(g, kind)
        assert all(map(same_bytes, got, want)), chosen
