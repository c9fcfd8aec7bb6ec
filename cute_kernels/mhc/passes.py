"""Sequences of launchers that make up the ops of mhc, on rows [M, K].

A pass reads the streams once.  Forward of a site: project, coefficients, collapse.  Backward of
one: reduce (d_pre, d_res), coefficients, project_backward.  Sums over tokens come as parts, which
`finish` adds to what they belong to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..runtime import dispatch
from ..runtime.plan_cache import Plan
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


def launcher(name: str, like: torch.Tensor) -> Callable:
    """Launcher of an mhc kernel for the device and dtype of ``like``."""
    return dispatch.launcher(name, like.device, like.dtype)


def plan(name: str, like: torch.Tensor, *operands: object) -> Plan:
    """Launch plan of one of mhc's launchers for these operands."""
    return dispatch.plan(name, like.device, like.dtype, *operands)


def project(
    x: torch.Tensor, site: Site, expand: Expand | None = None
) -> tuple[Projected, Coefficients]:
    """Project x, or the streams that ``expand`` makes of it, and compute the coefficients."""
    projected = launcher("mhc_project", x)(x, site.mapping, site.streams, expand)
    make = launcher("mhc_coefficients", x)
    return projected, make(projected, x.shape[1], site.gates, site.streams.n, site.form)


def collapse(x: torch.Tensor, streams: Streams, pre: torch.Tensor) -> torch.Tensor:
    """Compute Σ_i x_i pre_i: [M, C]."""
    return launcher("mhc_combine", x)(x, streams, pre, None).out


def expand_and_collapse(
    x: torch.Tensor, streams: Streams, expand: Expand, pre: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make streams y [M, K] of x, and compute Σ_i y_i pre_i [M, C], in one pass."""
    return launcher("mhc_combine", x)(x, streams, pre, expand)


def recompute(x: torch.Tensor, streams: Streams, sites: list[Expand]) -> list[torch.Tensor]:
    """Make the streams after each site, [M, K], several sites a pass.

    Sites of a pass all have a bias, or none.
    """
    ys: list[torch.Tensor] = []
    for _, group in itertools.groupby(sites, lambda site: site.bias is not None):
        alike = tuple(group)
        for first in range(0, len(alike), MOST_SITES):
            batch = alike[first : first + MOST_SITES]
            if len(batch) == 1:
                ys.append(launcher("mhc_combine", x)(x, streams, None, batch[0]).y)
            else:
                ys += launcher("mhc_recompute", x)(x, streams, batch)
            x = ys[-1]
    return ys


def reduce(
    x: torch.Tensor | None,
    streams: Streams,
    upstream: Upstream,
    expand: Expand | None = None,
    want_dx: bool = False,
) -> Reduced:
    """Run one pass over the streams and the upstream gradients (`cpu.reduce_channels`)."""
    like = x if x is not None else upstream.dy
    return launcher("mhc_reduce", like)(x, streams, upstream, expand, want_dx)


def site_backward(
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
    nothing = reduce_upstream.dy is None and reduce_upstream.d_out is None
    reduced = Reduced() if nothing else reduce(x, site.streams, reduce_upstream)
    d_pre, d_post, d_res = coefficient_grads
    d_pre = _add_optional(d_pre, reduced.d_pre if collapsed_by_own else None, coefficients.pre)
    d_post = _add_optional(d_post, None, coefficients.post)
    d_res = _add_optional(d_res, reduced.d_res, coefficients.res)
    d_h, d_ms, d_gates = launcher("mhc_coefficients_backward", x)(
        coefficients.h, coefficients.ms, site.gates, site.streams.n, site.form, d_pre, d_post, d_res
    )
    dx = d_psi = None
    if any(want):
        launch = launcher("mhc_project_backward", x)
        dx, d_psi = launch(x, d_h, d_ms, site.mapping, site.streams, upstream, want)
    return Gradients(dx, d_psi, d_gates), None if collapsed_by_own else reduced.d_pre


def zeros_like_rows(t: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape of ``t`` [M, c], expanded from one row."""
    return t.new_zeros(1, t.shape[1]).expand(len(t), -1)


def _add_optional(
    first: torch.Tensor | None, second: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    if first is not None and second is not None:
        return first + second
    single = first if first is not None else second
    return zeros_like_rows(like) if single is None else single
