"""Launches the Triton kernels of norm: outputs, parts, grids, compiler options.

The functions are those of `cpu`, with their arguments.  Each runs on the device of its tensors and
that device's current stream; the first launch of a (dtype, room, alignment) class compiles, so do
that before a CUDA graph is captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...log import contiguous, copied
from ...runtime.operands import flat_rows
from ...runtime.triton_products import cdiv
from ..config import LAYER, part_rows, room
from ..tensors import Normed, Parts, Rule, Scale, Upstream
from . import kernel as kernels
from .plan import SIZES, TRITON


def forward(x: torch.Tensor, residual: torch.Tensor | None, scale: Scale, rule: Rule) -> Normed:
    """Triton implementation of `cpu.forward`."""
    m, width = x.shape[:-1].numel(), x.shape[-1]
    scale = scale.with_weight(rule.offset, x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, residual = _rows(x, "x"), _rows(residual, "residual")
    h = None if residual is None else torch.empty_like(y)
    rstd = x.new_empty(m, dtype=torch.float32)
    mean = torch.empty_like(rstd) if rule.kind == LAYER else None
    weight, bias = _vector(scale.weight, "weight"), _vector(scale.bias, "bias")
    lanes = forward_lanes(width)
    rows = max(1, SIZES.forward_tile // lanes)
    with torch.cuda.device(x.device):
        kernels.forward_kernel[(cdiv(m, rows),)](
            *(x, residual, weight, bias, h, y, mean, rstd),
            *(m, width, x.stride(0), _stride(residual)),
            *(float(width), rule.eps, rule.offset),
            ALIGN=_alignment(width, x, residual),
            ROWS=rows,
            BLOCK=lanes,
            WHOLE=lanes == room(width),
            **_options(rows * lanes, SIZES.forward_elements),
        )
    return Normed(y, h, mean, rstd)


def backward(
    upstream: Upstream,
    h: torch.Tensor,
    stats: tuple[torch.Tensor | None, torch.Tensor],
    scale: Scale,
    rule: Rule,
    parts: bool,
) -> tuple[torch.Tensor, Parts | None]:
    """Triton implementation of `cpu.backward`."""
    m, width = h.shape[:-1].numel(), h.shape[-1]
    scale = scale.with_weight(rule.offset, h)
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    h, dy, dh = _rows(h, "h"), _rows(upstream.dy, "dy"), _rows(upstream.dh, "dh")
    count, weight = cdiv(m, part_rows(width)), _vector(scale.weight, "weight")
    of_weight = h.new_empty(count, width, dtype=torch.float32) if parts else None
    of_bias = torch.empty_like(of_weight) if parts and scale.bias is not None else None
    lanes = backward_lanes(width)
    operands = dy, dh, h, *stats, weight, dx
    sizes = m, width, dy.stride(0), _stride(dh), h.stride(0), float(width), rule.offset
    align = _alignment(width, dy, dh, h)
    with torch.cuda.device(h.device):
        if lanes == room(width):
            kernels.backward_kernel[(count,)](
                *(*operands, of_weight, of_bias, *sizes),
                ALIGN=align,
                PART=part_rows(width),
                ROWS=part_lanes(width),
                BLOCK=lanes,
                **_options(part_lanes(width) * lanes, SIZES.backward_elements),
            )
        else:
            # Registers do not hold a row: dx row by row, the parts column by column.
            options = _options(lanes, SIZES.backward_elements)
            kernels.dx_kernel[(m,)](*operands, *sizes, ALIGN=align, BLOCK=lanes, **options)
            if parts:
                _launch_parts(dy, h, stats, of_weight, of_bias)
    return dx, Parts(of_weight, of_bias) if parts else None


def _launch_parts(
    dy: torch.Tensor,
    h: torch.Tensor,
    stats: tuple[torch.Tensor | None, torch.Tensor],
    of_weight: torch.Tensor,
    of_bias: torch.Tensor | None,
) -> None:
    """The parts of rows that registers do not hold."""
    m, width = h.shape
    blocks = cdiv(width, SIZES.part_columns)
    kernels.parts_kernel[(len(of_weight) * blocks,)](
        *(dy, h, *stats, of_weight, of_bias, m, width, dy.stride(0), h.stride(0)),
        ALIGN=_alignment(width, dy, h),
        PART=part_rows(width),
        BLOCK=SIZES.part_columns,
        **_options(SIZES.part_columns, SIZES.part_elements),
    )


def add_parts(
    parts: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Triton implementation of `cpu.add_parts`."""
    return [_added(*one) for one in zip(parts, into, like, strict=True)]


def _added(
    parts: torch.Tensor, into: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    count, width = len(parts), like.shape[0]
    target = torch.empty_like(like) if into is None else into
    flat = target.contiguous()
    with torch.cuda.device(parts.device):
        kernels.add_parts_kernel[(cdiv(width, SIZES.sum_columns),)](
            *(parts, flat, count, width, parts.stride(0)),
            ACCUMULATE=into is not None,
            AHEAD=SIZES.sum_ahead,
            BLOCK=SIZES.sum_columns,
            **_options(SIZES.sum_columns, SIZES.sum_columns),
        )
    if flat is not target:
        target.copy_(flat)
    return target if into is None else None


def forward_lanes(width: int) -> int:
    """Lanes of a row in the forward: its padded width, or a block's."""
    return room(width) if room(width) <= TRITON.forward_whole else TRITON.lanes


def backward_lanes(width: int) -> int:
    """Lanes of a row in the backward."""
    return room(width) if room(width) <= TRITON.backward_whole else TRITON.lanes


def part_lanes(width: int) -> int:
    """Rows of a part that are added beside one another."""
    return max(1, TRITON.tile // backward_lanes(width))


# ---- pieces --------------------------------------------------------------------------------------


def _rows(t: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """[..., D] as [M, D] whose neighbours lie side by side."""
    t = None if t is None else flat_rows(t, "norm")
    if t is None or t.stride(1) == 1:
        return t
    copied("norm", name, t, "a last stride of 1")
    return t.contiguous()


def _vector(t: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """A vector [D] whose elements are neighbours."""
    return None if t is None else contiguous("norm", name, t, "a stride of 1")


def _stride(rows: torch.Tensor | None) -> int:
    """Stride between rows; 0 without rows."""
    return 0 if rows is None else rows.stride(0)


def _alignment(width: int, *rows: torch.Tensor | None) -> int:
    """A known factor of D and of strides between rows; it widens loads only."""
    return 8 if all(size % 8 == 0 for size in (width, *map(_stride, rows))) else 1


def _options(tile: int, elements: int) -> dict[str, int | bool]:
    """The compiler options that every launch names; ``elements`` of the tile are a thread's."""
    warps = min(SIZES.most_warps, max(1, tile // (32 * elements)))
    return {"num_warps": warps, "enable_fp_fusion": TRITON.fp_fusion}
