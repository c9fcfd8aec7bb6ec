"""Launch the Triton kernels of the gated delta rule's backward; see delta.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..config import DELTA_CHUNK, DELTA_PART
from ..tensors import DeltaGradients, DeltaRule, DeltaSaved, Sequences
from . import kernel_kda_backward as kernels
from .delta import NAME, common_of, decayed_rows, loadable
from .launch import FUSION, strides_of, upstream, written
from .plan import TRITON


class Links(NamedTuple):
    """Tensors that chunks of a sequence hand on: operands as rows, and gradients of states.

    d_out, du: Of o, and of u by a chunk alone.  q, k, weighted: k to a chunk's end; of gates by
    channel all with their decays, else q and k, and None.  d_final: Of the last states, or None.
    dr: To be written, as d_states [slots, HV, K, V], after each chunk, and d_initial, or None.
    """

    d_out: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    weighted: torch.Tensor | None
    du: torch.Tensor
    d_final: torch.Tensor | None
    dr: torch.Tensor
    d_states: torch.Tensor
    d_initial: torch.Tensor | None


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
    slopes = d_out, d_final
    go_back(slopes, operands, sequences, scale, saved, gradients, _chain, interpret)


def go_back(
    slopes: tuple[torch.Tensor, torch.Tensor | None],
    operands: DeltaRule,
    sequences: Sequences,
    scale: float,
    saved: DeltaSaved,
    gradients: DeltaGradients,
    walk: Callable,
    interpret: bool,
) -> None:
    """`delta_rule_backward` of gradients of o and of the last states; ``walk``: as `_chain`."""
    (d_out, d_final), operands = upstream(NAME, *slopes), loadable(operands)
    q, k, v, g, beta, _ = operands
    (heads, values), channels = v.shape[1:], g.dim() == 3
    sizes, slots, offsets = sequences.sizes, sequences.slots(DELTA_CHUNK), sequences.offsets
    du, dr = torch.empty_like(saved.u), torch.empty_like(saved.u)
    d_states = torch.empty_like(saved.states)
    dq, dk, dv, dg, d_beta = written(operands[:5], gradients[:5])
    d1, d2 = torch.empty_like(saved.inner), torch.empty_like(saved.inner)
    part = min(k.shape[2], DELTA_PART)
    parts = k.shape[2] // part
    gates = len(v), heads
    of_q, of_z, of_u = (saved.decay.new_empty(parts, *gates) for _ in "qzu")
    of_states = saved.decay.new_empty(slots, heads, k.shape[2])
    d_decay, of_beta = (saved.decay.new_empty(gates) for _ in "db")
    with torch.cuda.device(q.device):
        rows = q, k, None
        if channels:
            nothing = None, None
            rows = decayed_rows(
                kernels, operands, sequences, scale, saved.decay, nothing, interpret
            )
        common = {"V": values, "CHANNELS": channels, **common_of(rows[1], v, interpret)}
        strides = strides_of(*rows[:2], d_out)
        kernels.local_gradient_kernel[(slots, heads)](
            d_out, *rows[:2], saved.decay, saved.scores, offsets, du, *sizes, scale, *strides,
            **common, num_warps=TRITON.delta_warps,
        )  # fmt: skip
        links = Links(d_out, *rows, du, d_final, dr, d_states, gradients.initial)
        # Decayed rows of q have the scale in them.
        walk(links, beta, sequences, 1.0 if channels else scale, saved, common)
        kernels.scores_gradient_kernel[(slots, heads)](
            d_out, *rows[:2], v, beta, saved.decay, saved.u, dr, offsets, d1, d2, dv, d_decay,
            of_beta, *sizes, scale, *strides[:4], *strides_of(v), *strides[4:],
            **common, num_warps=TRITON.gradient_warps,
        )  # fmt: skip
        common = {"V": values, "PART": part, **common_of(k, v, interpret)}
        strides = strides_of(q, k, d_out)
        if channels:
            kernels.channels_gradient_kernel[(slots, k.shape[1], parts)](
                d_out, q, k, beta, saved.decay, saved.u, dr, saved.states, d_states, d1, d2,
                offsets, dq, dk, dg, of_z, *sizes, scale, *strides,
                **common, num_warps=TRITON.channel_warps,
            )  # fmt: skip
            kernels.channel_gates_gradient_kernel[(slots, heads)](
                of_beta, of_z, offsets, dg, d_beta, *sizes, HV=heads, K=k.shape[2], PARTS=parts,
                **FUSION, num_warps=TRITON.sums_warps,
            )  # fmt: skip
            return
        kernels.queries_gradient_kernel[(slots, k.shape[1], parts)](
            d_out, q, k, saved.decay, saved.states, d1, offsets, dq, of_q, *sizes, scale,
            *strides, **common, num_warps=TRITON.part_warps,
        )  # fmt: skip
        kernels.keys_gradient_kernel[(slots, k.shape[1], parts)](
            q, k, beta, saved.decay, saved.u, dr, saved.states, d_states, d1, d2, offsets,
            dk, of_z, of_u, of_states, *sizes, *strides[:4],
            **common, num_warps=TRITON.part_warps,
        )  # fmt: skip
        kernels.gates_gradient_kernel[(slots, heads)](
            beta, saved.decay, d_decay, of_beta, of_q, of_z, of_u, of_states, offsets, dg, d_beta,
            *sizes, HV=heads, K=k.shape[2], PARTS=parts, **FUSION, num_warps=TRITON.delta_warps,
        )  # fmt: skip


def _chain(
    links: Links,
    beta: torch.Tensor,
    sequences: Sequences,
    scale: float,
    saved: DeltaSaved,
    common: dict[str, int | bool],
) -> None:
    """Write what links say, chunk after chunk."""
    d_out, q, k, weighted, du, d_final, *outputs = links
    (_, heads, values), columns = d_out.shape, min(d_out.shape[2], TRITON.chain_columns)
    kernels.chain_gradient_kernel[(sequences.count, heads, values // columns)](
        d_out, q, k, beta, saved.decay, weighted, saved.inner, du, d_final, sequences.offsets,
        *outputs, sequences.length, scale, *strides_of(q, k, d_out),
        COLUMNS=columns, **common,
        num_warps=TRITON.delta_warps, num_stages=TRITON.gradient_stages,
    )  # fmt: skip
