"""Tensors and options passed between the parts of mhc.

M tokens, n streams, C channels; K = n C and N = 2 n + n².
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Streams(NamedTuple):
    """Number of streams in a row of K elements, and their layout."""

    n: int
    layout: str


class Mapping(NamedTuple):
    """Weights of the projection: psi = phi ⊙ norm_weight.

    phi: fp32 [N, K], contiguous.  norm_weight: fp32 [K], or None.  precision: of `PRECISIONS`.
    """

    phi: torch.Tensor
    norm_weight: torch.Tensor | None
    precision: str


class Gates(NamedTuple):
    """Weights of the gates that make pre, post and res of H.

    alpha: fp32 [3], of pre, post, res.  beta: fp32 [N].  eps: under the root of r.
    pre_eps: added to pre.  post_scale: of post.
    """

    alpha: torch.Tensor
    beta: torch.Tensor
    eps: float
    pre_eps: float
    post_scale: float


class Sinkhorn(NamedTuple):
    """Options of Sinkhorn-Knopp: iterations (rows, then columns), one of `FORMS`, and its eps."""

    iterations: int
    form: str
    eps: float


class Expand(NamedTuple):
    """Operands of y_j = (f + bias) post_j + Σ_i x_i res[i, j].

    f: [M, C].  bias: [C] of its dtype, or None.  post: fp32 [M, n].  res: fp32 [M, n²], or None in
    a backward, which takes it from `Upstream`.
    """

    f: torch.Tensor
    bias: torch.Tensor | None
    post: torch.Tensor
    res: torch.Tensor | None = None


class Projected(NamedTuple):
    """Sums over chunks of channels: x psiᵀ and x², fp32 [S, M, N] and [S, M]; S chunks.

    y: [M, K], the streams that were projected, if they were made by an `Expand`.
    """

    sums: torch.Tensor
    squares: torch.Tensor
    y: torch.Tensor | None = None


class Coefficients(NamedTuple):
    """Coefficients of every token, fp32: h [M, W], ms [M], pre [M, n], post [M, n], res [M, n²]."""

    h: torch.Tensor
    ms: torch.Tensor
    pre: torch.Tensor
    post: torch.Tensor
    res: torch.Tensor


class Upstream(NamedTuple):
    """Upstream gradients, or None, and the coefficients by which they reach x.

    dy: [M, K], of y.  d_out: [M, C], of a collapse.
    dx_i gets Σ_j dy_j res[i, j] (or dy_i itself, without a res) and d_out pre_i.
    """

    dy: torch.Tensor | None = None
    d_out: torch.Tensor | None = None
    res: torch.Tensor | None = None
    pre: torch.Tensor | None = None


class Parts(NamedTuple):
    """Sums over ``TOKENS`` tokens each, in ``group`` consecutive parts: fp32 [T group, ...].

    A chunk's parts are added from zero, ascending; then chunks are, ascending.
    """

    values: torch.Tensor
    group: int = 1


class Reduced(NamedTuple):
    """Results of one pass over the streams; None where not requested.

    df: [M, C].  dx: [M, K].  d_pre, d_post: fp32 [M, n].  d_res: fp32 [M, n²].  d_bias: its parts.
    """

    df: torch.Tensor | None = None
    dx: torch.Tensor | None = None
    d_pre: torch.Tensor | None = None
    d_post: torch.Tensor | None = None
    d_res: torch.Tensor | None = None
    d_bias: Parts | None = None
