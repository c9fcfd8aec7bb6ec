"""Launch the Triton kernels of the gated delta rule's backward; see delta.py."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch

from ...log import contiguous
from ..config import DELTA_CHUNK, DELTA_PART
from ..tensors import DeltaGradients, DeltaRule, DeltaSaved, Sequences
from . import kernel_delta_backward as kernels
from .delta import NAME, common_of, loadable, sizes_of
from .plan import TRITON


class Rule(NamedTuple):
    """A rule as `chunk_gradients` takes it.

    operands, weighted: As `delta.chain_and_outputs` has them.
    """

    operands: DeltaRule
    weighted: torch.Tensor | None
    sequences: Sequences
    scale: float


class ChunkGradients(NamedTuple):
    """What `chunk_gradients` makes, as kernel_delta_backward.py names it."""

    dr: torch.Tensor
    d_states: torch.Tensor
    d1: torch.Tensor
    d2: torch.Tensor
    d_decay: torch.Tensor
    of_beta: torch.Tensor


def delta_rule_backward(
    d_out: torch.Tensor,
    d_final: torch.Tensor | None,
    operands: DeltaRule,
    sequences: Sequences,
    scale: float,
    saved: DeltaSaved,
    gradients: DeltaGradients,
    *,
    interpret: bool = False,
) -> None:
    """Triton implementation of `cpu_delta.delta_rule_backward`."""
    operands = loadable(operands)
    q, k, v, _, beta, _ = operands
    heads, sizes, d_out = v.shape[1], sizes_of(sequences), dense(d_out)
    gradients = whole(operands, gradients)
    dq, dk, _, dg, d_beta, _ = gradients
    common = {"V": v.shape[2], **common_of(operands, interpret)}
    slots, offsets = sequences.slots(DELTA_CHUNK), sequences.offsets
    rule = Rule(operands, None, sequences, scale)
    made = chunk_gradients(kernels, (d_out, d_final), rule, saved, gradients, interpret)
    dr, d_states, d1, d2, d_decay, of_beta = made
    part = min(k.shape[2], DELTA_PART)
    parts = k.shape[2] // part
    of_q, of_z, of_u = (saved.decay.new_empty(parts, *saved.decay.shape) for _ in "qzu")
    of_states = saved.decay.new_empty(slots, heads, k.shape[2])
    strides = [s for t in (q, k) for s in t.stride()[:2]]
    with torch.cuda.device(q.device):
        kernels.queries_gradient_kernel[(slots, k.shape[1], parts)](
            d_out, q, k, saved.decay, saved.states, d1, offsets, dq, of_q, *sizes, scale,
            *strides, *d_out.stride()[:2], **common, PART=part, num_warps=TRITON.part_warps,
        )  # fmt: skip
        kernels.keys_gradient_kernel[(slots, k.shape[1], parts)](
            q, k, beta, saved.decay, saved.u, dr, saved.states, d_states, d1, d2, offsets,
            dk, of_z, of_u, of_states, *sizes, *strides,
            **common, PART=part, num_warps=TRITON.part_warps,
        )  # fmt: skip
        kernels.gates_gradient_kernel[(slots, heads)](
            beta, saved.decay, d_decay, of_beta, of_q, of_z, of_u, of_states, offsets, dg, d_beta,
            *sizes, HV=heads, K=k.shape[2], PARTS=parts,
            num_warps=TRITON.delta_warps, enable_fp_fusion=TRITON.fp_fusion,
        )  # fmt: skip


def dense(d_out: torch.Tensor) -> torch.Tensor:
    """d_out with neighbours of a head side by side."""
    return d_out if d_out.stride(2) == 1 else contiguous(NAME, "d_out", d_out, "no gaps")


def whole(operands: DeltaRule, gradients: DeltaGradients) -> DeltaGradients:
    """The gradients, with memory for those of rows that nobody needs: the kernels make them all."""
    rows = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if into is None else into
        for t, into in zip(operands[:5], gradients[:5], strict=True)
    )
    return DeltaGradients(*rows, gradients.initial)


def chunk_gradients(
    kernels: ModuleType,
    slopes: tuple[torch.Tensor, torch.Tensor | None],
    rule: Rule,
    saved: DeltaSaved,
    gradients: DeltaGradients,
    interpret: bool,
) -> ChunkGradients:
    """Launch what both rules share; the gradients of v and of the initial states are written."""
    d_out, d_final = slopes
    operands, weighted, sequences, scale = rule
    q, k, v, _, beta, _ = operands
    d_final = None if d_final is None else contiguous(NAME, "d_final", d_final, "no gaps")
    (heads, values), channels = v.shape[1:], weighted is not None
    common = {"V": values, "CHANNELS": channels, **common_of(operands, interpret)}
    sizes, slots = sizes_of(sequences), sequences.slots(DELTA_CHUNK)
    strides = [s for t in (q, k, d_out) for s in t.stride()[:2]]
    columns, offsets = min(values, TRITON.chain_columns), sequences.offsets
    du, dr = torch.empty_like(saved.u), torch.empty_like(saved.u)
    d_states = torch.empty_like(saved.states)
    d1, d2 = torch.empty_like(saved.inner), torch.empty_like(saved.inner)
    d_decay, of_beta = (saved.decay.new_empty(len(v), heads) for _ in "db")
    with torch.cuda.device(q.device):
        kernels.local_gradient_kernel[(slots, heads)](
            d_out, q, k, saved.decay, saved.scores, offsets, du, *sizes, scale, *strides,
            **common, num_warps=TRITON.delta_warps,
        )  # fmt: skip
        # Decayed rows of q have the scale in them.
        kernels.chain_gradient_kernel[(sequences.count, heads, values // columns)](
            d_out, q, k, beta, saved.decay, weighted, saved.inner, du, d_final, offsets,
            dr, d_states, gradients.initial, sequences.length, 1.0 if channels else scale, *strides,
            COLUMNS=columns, **common, num_warps=TRITON.delta_warps,
            num_stages=TRITON.chain_stages,
        )  # fmt: skip
        kernels.scores_gradient_kernel[(slots, heads)](
            d_out, q, k, v, beta, saved.decay, saved.u, dr, offsets,
            d1, d2, gradients.v, d_decay, of_beta,
            *sizes, scale, *strides[:4], *v.stride()[:2], *strides[4:],
            **common, num_warps=TRITON.gradient_warps,
        )  # fmt: skip
    return ChunkGradients(dr, d_states, d1, d2, d_decay, of_beta)
