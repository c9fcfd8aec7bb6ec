"""Tensors and options passed between the parts of mhc.

M tokens, n streams, C channels; K = n C and N = 2 n + n².
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .. import log
from .config import vector_channels


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


class Combined(NamedTuple):
    """y [M, K] of an `Expand`, and the collapse out [M, C]; None where not requested."""

    y: torch.Tensor | None
    out: torch.Tensor | None


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


class ProjectionGradients(NamedTuple):
    """Results of a projection's backward: dx [M, K] and parts of dpsi; None if not requested."""

    dx: torch.Tensor | None
    d_psi: Parts | None


# ---- rows that vectors fit -----------------------------------------------------------------------

#: Bytes of the widest access.
ALIGN = 16
#: Bundle -> its rows, and whether those have the K elements of streams, or else C.
_ROWS: dict[type, dict[str, bool]] = {
    Mapping: {"phi": True, "norm_weight": True},
    Expand: {"f": False, "bias": False},
    Upstream: {"dy": True, "d_out": False},
    Projected: {"y": True},
    Combined: {"y": True, "out": False},
    Reduced: {"dx": True, "df": False, "d_bias": False},
    ProjectionGradients: {"dx": True, "d_psi": True},
}


class Padding(NamedTuple):
    """Rows of C = ``channels``, copied into rows of ``width`` channels, and results cut back.

    Vectors of the copies are whole and aligned; zeros follow the last channel.  A kernel that adds
    over channels adds the zeros that a masked last vector would have, in the same places.
    """

    streams: Streams
    channels: int
    width: int

    @classmethod
    def needed(cls, x: torch.Tensor | None, *operands: object) -> Padding | None:
        """Padding of a launcher's operands; None if all vectors are whole and aligned."""
        rows = [] if x is None else [("x", x, True)]
        rows += _rows_of(operands)
        streams = next(value for value in operands if isinstance(value, Streams))
        k = next(t.shape[-1] for _, t, of_streams in rows if of_streams)
        channels, vector = k // streams.n, vector_channels(*streams)
        if channels % vector == 0 and all(t.data_ptr() % ALIGN == 0 for _, t, _ in rows):
            return None
        return cls(streams, channels, -(-channels // vector) * vector)

    def pad(self, x: torch.Tensor | None, *operands: object) -> tuple:
        """Return a launcher's operands with copies of the rows; x: [M, K] or None."""
        copied = None if x is None else self._padded("x", x, True)
        return copied, *_with_rows(operands, self._padded)

    def cut(self, results: object) -> Any:
        """Return a launcher's results without padding; tensors of a list are [M, K]."""
        if isinstance(results, list):
            return [self._cut("y", rows, True) for rows in results]
        return _with_rows(results, self._cut)

    def _padded(self, name: str, rows: torch.Tensor, of_streams: bool) -> torch.Tensor:
        log.copied("mhc", name, rows, "whole vectors of channels, at multiples of 16 bytes")
        return self._resized(rows, of_streams, self.channels, self.width)

    def _cut(self, name: str, rows: Any, of_streams: bool) -> Any:
        if isinstance(rows, Parts):
            return rows._replace(values=self._cut(name, rows.values, of_streams))
        return self._resized(rows, of_streams, self.width, self.channels)

    def _resized(self, rows: torch.Tensor, of_streams: bool, old: int, new: int) -> torch.Tensor:
        """Copy rows of ``old`` channels without the last ones, or with zeros behind them."""
        n, layout = self.streams if of_streams else (1, "cn")
        blocks, each = (1, n) if layout == "cn" else (n, 1)
        split = rows.view(*rows.shape[:-1], blocks, old * each)
        return torch.nn.functional.pad(split, (0, (new - old) * each)).flatten(-2)


def _rows_of(value: object) -> Iterator[tuple[str, Any, bool]]:
    """Yield (field, rows, whether of K elements) of a bundle, or of a sequence of bundles."""
    if type(value) in (list, tuple):
        for one in value:
            yield from _rows_of(one)
    for field, of_streams in _ROWS.get(type(value), {}).items():
        if (rows := getattr(value, field)) is not None:
            yield field, rows, of_streams


def _with_rows(value: Any, convert: Callable) -> Any:
    """Return the bundle or bundles with ``convert(field, rows, of_streams)`` of their rows."""
    if type(value) in (list, tuple):
        return tuple(_with_rows(one, convert) for one in value)
    if type(value) not in _ROWS:
        return value
    return value._replace(**{field: convert(field, *rest) for field, *rest in _rows_of(value)})
