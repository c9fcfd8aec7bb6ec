"""Launch the Triton kernels of Kimi delta attention's backward; see delta.py."""

from __future__ import annotations

import torch

from ..config import DELTA_CHUNK, DELTA_PART
from ..tensors import DeltaGradients, DeltaRule, DeltaSaved, Sequences
from . import kernel_kda_backward as kernels
from .delta import common_of, loadable, sizes_of
from .delta_backward import Rule, chunk_gradients, dense, whole
from .plan import TRITON


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
    """Triton implementation of `cpu_delta.delta_rule_backward`, with gates [N, HV, K]."""
    operands = loadable(operands)
    q, k, v, g, beta, _ = operands
    (heads, size), d_out = g.shape[1:], dense(d_out)
    gradients = whole(operands, gradients)
    dq, dk, _, dg, d_beta, _ = gradients
    common = {"PART": min(size, DELTA_PART), **common_of(operands, interpret)}
    parts, slots, offsets = size // common["PART"], sequences.slots(DELTA_CHUNK), sequences.offsets
    sizes, strides = sizes_of(sequences), [s for t in (q, k) for s in t.stride()[:2]]
    queries, keys, weighted = (torch.empty(g.shape, dtype=q.dtype, device=q.device) for _ in "qkw")
    of_z = saved.decay.new_empty(parts, *g.shape[:2])
    with torch.cuda.device(v.device):
        kernels.decayed_rows_kernel[(slots, heads)](
            q, k, saved.decay, offsets, queries, keys, weighted, *sizes, scale, *strides,
            **common, num_warps=TRITON.channel_warps,
        )  # fmt: skip
    rule = Rule(operands._replace(q=queries, k=keys), weighted, sequences, scale)
    made = chunk_gradients(kernels, (d_out, d_final), rule, saved, gradients, interpret)
    with torch.cuda.device(v.device):
        kernels.channels_gradient_kernel[(slots, k.shape[1], parts)](
            d_out, q, k, beta, saved.decay, saved.u, made.dr, saved.states, made.d_states,
            made.d1, made.d2, offsets, dq, dk, dg, of_z,
            *sizes, scale, *strides, *d_out.stride()[:2],
            V=v.shape[2], **common, num_warps=TRITON.channel_warps,
        )  # fmt: skip
        kernels.channel_gates_gradient_kernel[(slots, heads)](
            made.of_beta, of_z, offsets, dg, d_beta, *sizes, HV=heads, K=size, PARTS=parts,
            num_warps=TRITON.sums_warps, enable_fp_fusion=TRITON.fp_fusion,
        )  # fmt: skip
