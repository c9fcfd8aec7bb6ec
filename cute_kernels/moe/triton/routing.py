"""Launch the Triton kernels of routing: each function has the name and result of one in cpu.py."""

from __future__ import annotations

import torch

from ...runtime.triton_products import alignment, cdiv, least_block, next_power_of_2
from ..config import EPSILON, LANES
from . import kernel_routing as kernels
from .plan import ROUTING


def select(
    scores: torch.Tensor, bias: torch.Tensor | None, k: int, groups: int, topk_groups: int
) -> torch.Tensor:
    """The experts of the k largest scores + bias, descending; ties: the lowest index; [T, k]."""
    tokens, experts = scores.shape
    out = scores.new_empty((tokens, k), dtype=torch.int32)
    size = experts // groups
    with torch.cuda.device(scores.device):
        kernels.select_kernel[(tokens,)](
            *(scores, bias, out, groups, size, k, topk_groups),
            *(*scores.stride(), 0 if bias is None else bias.stride(0)),
            GROUPS_ROOM=next_power_of_2(groups),
            SIZE_ROOM=next_power_of_2(size),
            **_options(),
        )
    return out


def weights(
    scores: torch.Tensor, indices: torch.Tensor, normalize: bool, scale: float
) -> torch.Tensor:
    """scale s / (Σ s + ε) of the scores s of the chosen experts, or scale s; fp32 [T, k]."""
    out = scores.new_empty(indices.shape, dtype=torch.float32)
    with torch.cuda.device(scores.device):
        kernels.weights_kernel[(len(scores),)](
            *(scores, indices.contiguous(), out, scores.shape[1], indices.shape[1]),
            *(*scores.stride(), scale),
            **_weights_constants(indices, normalize),
        )
    return out


def slot_weights(
    scores: torch.Tensor, indices: torch.Tensor, normalize: bool, dtype: torch.dtype
) -> torch.Tensor:
    """s / Σ s of the scores s of the chosen experts, slots by halves, or s; [T, k] in a dtype."""
    out = scores.new_empty(indices.shape, dtype=dtype)
    with torch.cuda.device(scores.device):
        kernels.slot_weights_kernel[(len(scores),)](
            *(scores, indices.contiguous(), out, scores.shape[1], indices.shape[1]),
            *scores.stride(),
            NORMALIZE=normalize,
            K_ROOM=next_power_of_2(indices.shape[1]),
            **_options(),
        )
    return out


def weights_backward(
    dweights: torch.Tensor,
    scores: torch.Tensor,
    indices: torch.Tensor,
    normalize: bool,
    scale: float,
) -> torch.Tensor:
    """Gradient of `weights` with respect to the scores; fp32 [T, E]."""
    out = scores.new_empty(scores.shape, dtype=torch.float32)
    with torch.cuda.device(scores.device):
        kernels.weights_backward_kernel[(len(scores),)](
            *(dweights.contiguous(), scores, indices.contiguous(), out),
            *(scores.shape[1], indices.shape[1], *scores.stride(), scale),
            **_weights_constants(indices, normalize),
            EXPERTS=next_power_of_2(scores.shape[1]),
        )
    return out


def sort(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(offsets [E + 1], slots in the order of experts [T k], the place of each slot [T, k])."""
    flat = indices.contiguous()
    slots, bins = flat.numel(), next_power_of_2(experts)
    together = max(1, min(ROUTING.slots, ROUTING.compared // bins))
    blocks, span = _blocks(slots, together)
    offsets = flat.new_empty((experts + 1,), dtype=torch.int32)
    order, positions = (
        flat.new_empty(shape, dtype=torch.int32) for shape in ((slots,), flat.shape)
    )
    constants = {"SLOTS": together, "BINS": bins, **_options(ROUTING.sort_warps)}
    with torch.cuda.device(flat.device):
        counts = None
        if blocks > 1:
            counts = flat.new_empty((blocks, bins), dtype=torch.int32)
            kernels.count_kernel[(blocks,)](flat, counts, slots, experts, span, **constants)
        kernels.place_kernel[(blocks,)](
            *(flat, counts, offsets, order, positions, slots, experts, span, blocks),
            ROWS=max(1, ROUTING.added // bins),
            **constants,
        )
    return offsets, order, positions


def _blocks(slots: int, together: int) -> tuple[int, int]:
    """(blocks of the sort, slots of each: whole groups of ``together``)."""
    if slots <= ROUTING.alone:
        return 1, slots
    span = cdiv(cdiv(slots, ROUTING.blocks), together) * together
    return cdiv(slots, span), span


def gather(
    x: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """x[order // k], the row of each slot's token, 0 from row offsets[E] on: [T k, D]."""
    (tokens, k), width = positions.shape, x.shape[1]
    out = x.new_empty((tokens * k, width), dtype=x.dtype)
    columns = _columns(width)
    with torch.cuda.device(x.device):
        kernels.gather_kernel[(tokens, cdiv(width, columns))](
            *(x, offsets.contiguous(), positions.contiguous(), out),
            *(len(offsets) - 1, k, width, *x.stride()),
            ALIGN=alignment(width, x.stride(1)),
            COLUMNS=columns,
            UNROLL=min(ROUTING.unroll, k),
            **_options(),
        )
    return out


def combine(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    offsets: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Σ over a token's slots with an expert of weight · row, positions ascending, fp32: [T, D]."""
    (tokens, k), width = positions.shape, rows.shape[1]
    out = rows.new_empty((tokens, width), dtype=rows.dtype)
    columns = _columns(width)
    with torch.cuda.device(rows.device):
        kernels.combine_kernel[(tokens, cdiv(width, columns))](
            *(rows, None if weights is None else weights.contiguous()),
            *(offsets.contiguous(), positions.contiguous(), out),
            *(len(offsets) - 1, k, width, *rows.stride()),
            ALIGN=alignment(width, rows.stride(1)),
            K_ROOM=next_power_of_2(k),
            COLUMNS=columns,
            UNROLL=min(ROUTING.unroll, k),
            **_options(),
        )
    return out


def combine_backward(
    dy: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    order: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight · dy of each row, rounded once: [T k, D]; Σ row · dy in lanes: fp32 [T, k]).

    Both are 0 for slots without an expert.
    """
    (tokens, k), width = positions.shape, rows.shape[1]
    d_rows = rows.new_empty(rows.shape, dtype=rows.dtype)
    d_weights = weights.new_empty(weights.shape, dtype=torch.float32)
    slots = min(ROUTING.backward_slots, next_power_of_2(k))
    with torch.cuda.device(rows.device):
        kernels.combine_backward_kernel[(tokens, cdiv(k, slots))](
            *(dy, rows, weights.contiguous(), offsets.contiguous(), positions.contiguous()),
            *(d_rows, d_weights, len(offsets) - 1, k, width, *dy.stride(), *rows.stride()),
            ALIGN=alignment(width, dy.stride(1), rows.stride(1)),
            SLOTS=slots,
            LANES=LANES,
            UNROLL=ROUTING.backward_unroll,
            **_options(),
        )
    return d_rows, d_weights


def _weights_constants(indices: torch.Tensor, normalize: bool) -> dict[str, object]:
    constants = {
        "NORMALIZE": normalize,
        "EPSILON": EPSILON,
        "K_ROOM": next_power_of_2(indices.shape[1]),
    }
    return constants | _options()


def _columns(width: int) -> int:
    return max(min(ROUTING.columns, next_power_of_2(width)), least_block(width))


def _options(num_warps: int = ROUTING.num_warps) -> dict[str, int | bool]:
    return {"num_warps": num_warps, "enable_fp_fusion": ROUTING.fp_fusion}
