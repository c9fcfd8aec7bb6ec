"""Sequences of launchers that make up the ops of mhc, on rows [M, K].

A pass reads the streams once.  Forward of a site: project, coefficients, collapse.  Backward of
one: reduce (d_pre, d_res), coefficients, project_backward.  Sums over tokens come as parts, which
`finish` adds to what they belong to.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from ..runtime.dispatch import Launches
from .config import MOST_SITES
from .tensors import (
    Coefficients,
    Expand,
    Gates,
    Mapping,
    Parts,
    Projected,
    Reduced,
    Sinkhorn,
    Streams,
    Upstream,
)


class Site(NamedTuple):
    """Weights and options of a site of hyper-connections."""

    streams: Streams
    mapping: Mapping
    gates: Gates
    form: Sinkhorn


class Gradients(NamedTuple):
    """Gradients of a site: dx [M, K], parts of dpsi, dalpha and dbeta; None if not requested."""

    dx: torch.Tensor | None
    d_psi: Parts | None
    d_gates: Parts


def project(
    launch: Launches, x: torch.Tensor, site: Site, expand: Expand | None = None
) -> tuple[Projected, Coefficients]:
    """Project x, or the streams that ``expand`` makes of it, and compute the coefficients."""
    streams, mapping, gates, form = site
    projected = launch("mhc_project", x, x, mapping, streams, expand)
    made = launch("mhc_coefficients", x, projected, x.shape[1], gates, streams.n, form)
    return projected, made


def recompute(
    launch: Launches, x: torch.Tensor, streams: Streams, sites: list[Expand]
) -> list[torch.Tensor]:
    """Make the streams after each site, [M, K], several sites a pass.

    Sites of a pass all have a bias, or none.
    """
    ys: list[torch.Tensor] = []
    for _, group in itertools.groupby(sites, lambda site: site.bias is not None):
        alike = tuple(group)
        for first in range(0, len(alike), MOST_SITES):
            batch = alike[first : first + MOST_SITES]
            if len(batch) == 1:
                ys.append(launch("mhc_combine", x, x, streams, None, batch[0]).y)
            else:
                ys += launch("mhc_recompute", x, x, streams, batch)
            x = ys[-1]
    return ys


def site_backward(
    launch: Launches,
    x: torch.Tensor,
    site: Site,
    coefficients: Coefficients,
    upstream: Upstream,
    coefficient_grads: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    want: tuple[bool, bool] = (True, True),
) -> tuple[Gradients, torch.Tensor | None]:
    """Return the gradients of a site, and d_pre of a collapse with a pre of another site.

    Args:
        coefficients: Those of the site.
        upstream: Further gradients of x.  With ``res``, the site's own, dy is that of the streams
            after the site.  ``pre`` is what x was collapsed with: the site's own, or another.
        coefficient_grads: (d_pre, d_post, d_res) of the coefficients themselves, or None each.
        want: (dx, dpsi).
    """
    mixed, collapsed_by_own = (
        upstream.res is not None,
        upstream.pre is None or upstream.pre is coefficients.pre,
    )
    reduce_upstream = upstream if mixed else upstream._replace(dy=None)
    reduced = Reduced()
    if reduce_upstream.dy is not None or reduce_upstream.d_out is not None:
        reduced = launch("mhc_reduce", x, x, site.streams, reduce_upstream, None, False)
    d_pre, d_post, d_res = coefficient_grads
    d_pre = _add_optional(d_pre, reduced.d_pre if collapsed_by_own else None, coefficients.pre)
    d_post = _add_optional(d_post, None, coefficients.post)
    d_res = _add_optional(d_res, reduced.d_res, coefficients.res)
    streams, mapping, gates, form = site
    of_site = (coefficients.h, coefficients.ms, gates, streams.n, form)
    d_h, d_ms, d_gates = launch("mhc_coefficients_backward", x, *of_site, d_pre, d_post, d_res)
    dx = d_psi = None
    if any(want):
        operands = (x, d_h, d_ms, mapping, streams, upstream, want)
        dx, d_psi = launch("mhc_project_backward", x, *operands)
    return Gradients(dx, d_psi, d_gates), None if collapsed_by_own else reduced.d_pre


def _add_optional(
    first: torch.Tensor | None, second: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    if first is not None and second is not None:
        return first + second
    single = first if first is not None else second
    return like.new_zeros(1, like.shape[1]).expand(len(like), -1) if single is None else single
