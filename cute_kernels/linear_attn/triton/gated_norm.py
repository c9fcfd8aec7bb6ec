"""Launch the Triton kernels of gated_rms_norm.  Functions are those of cpu_gated_norm.py."""

from __future__ import annotations

import torch

from ...runtime.triton_products import cdiv
from ..config import group_part_rows, padded_group
from ..tensors import Gated, GatedGradients, GatedRule
from . import kernel_gated_norm as kernels
from .launch import FUSION, add_sums, adjacent, loadable
from .plan import GATED_NORM

_OP, _ROWS = "gated_norm", ("x", "gate")


def gated_norm(operands: Gated, rule: GatedRule, y: torch.Tensor, rstd: torch.Tensor) -> None:
    """Triton implementation of `cpu_gated_norm.gated_norm`."""
    operands = loadable(_OP, operands, _ROWS)
    x, gate = operands.x, operands.gate
    block = padded_group(rule.group_size)
    rows = max(1, GATED_NORM.forward_tile // block)
    programs = cdiv(x.shape[0], rows) * (x.shape[1] // rule.group_size)
    with torch.cuda.device(x.device):
        kernels.gated_norm_kernel[(programs,)](
            *operands, y, rstd,
            x.shape[0], x.stride(0), gate.stride(0), 1.0 / rule.group_size, rule.eps,
            **_constants(rule, x, gate),
            ROWS=rows, BLOCK=block, **_options(rows * block, GATED_NORM.forward_elements),
        )  # fmt: skip


def gated_norm_backward(
    dy: torch.Tensor,
    operands: Gated,
    rule: GatedRule,
    rstd: torch.Tensor,
    gradients: GatedGradients,
) -> None:
    """Triton implementation of `cpu_gated_norm.gated_norm_backward`."""
    operands = loadable(_OP, operands, _ROWS)
    x, gate = operands.x, operands.gate
    dy = adjacent(_OP, "dy", dy)
    (m, width), padded = x.shape, padded_group(rule.group_size)
    rows, fold = GATED_NORM.rows(padded), GATED_NORM.fold(padded)
    piece = group_part_rows(rule.group_size) // fold
    dx, into, d_gate = gradients
    count = cdiv(m, piece)
    pieces = None if into is None else x.new_empty(count, width, dtype=torch.float32)
    with torch.cuda.device(x.device):
        kernels.gated_norm_gradient_kernel[(count * (width // rule.group_size),)](
            dy, *operands, rstd, dx, d_gate, pieces,
            m, dy.stride(0), x.stride(0), gate.stride(0), 1.0 / rule.group_size,
            **_constants(rule, dy, x, gate),
            PIECE=piece, ROWS=rows, BLOCK=padded,
            **_options(rows * padded, GATED_NORM.elements(padded)),
        )  # fmt: skip
        if into is not None:
            add_sums(kernels, pieces[:, None], into, 0, fold)


def _constants(rule: GatedRule, *rows: torch.Tensor) -> dict[str, object]:
    # A known factor of D and of strides between rows; it widens loads only.
    sizes = rule.group_size, *(t.stride(0) for t in rows)
    return {
        "KIND": rule.activation,
        "NORM_FIRST": rule.norm_before_gate,
        "D": rows[0].shape[1],
        "GROUP": rule.group_size,
        "ALIGN": 8 if all(size % 8 == 0 for size in sizes) else 1,
    }


def _options(tile: int, elements: int) -> dict[str, int | bool]:
    """Compiler options; ``elements`` of the tile are a thread's."""
    warps = max(1, tile // (32 * elements))
    return {"num_warps": warps, **FUSION}
