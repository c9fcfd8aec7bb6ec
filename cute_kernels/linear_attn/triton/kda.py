"""Launch the Triton kernels of Kimi delta attention; see delta.py."""

from __future__ import annotations

import torch

from ..config import DELTA_CHUNK, DELTA_PART
from ..tensors import DeltaRule, DeltaSaved, Last, Sequences
from . import kernel_kda as kernels
from .delta import chain_and_outputs, common_of, loadable, sizes_of
from .plan import TRITON


def delta_rule(
    operands: DeltaRule,
    sequences: Sequences,
    scale: float,
    out: torch.Tensor,
    last: Last | None,
    saved: DeltaSaved,
    *,
    interpret: bool = False,
) -> None:
    """Triton implementation of `cpu_delta.delta_rule`, with gates [N, HV, K]."""
    operands = loadable(operands)
    q, k, v, g, beta, _ = operands
    heads, size = g.shape[1:]
    sizes, slots = sizes_of(sequences), sequences.slots(DELTA_CHUNK)
    queries, keys, weighted = (torch.empty(g.shape, dtype=q.dtype, device=q.device) for _ in "qkw")
    common = common_of(operands, interpret)
    with torch.cuda.device(v.device):
        kernels.channel_decays_kernel[(slots, heads)](
            g, saved.decay, sequences.offsets, *sizes, HV=heads, K=size,
            num_warps=TRITON.sums_warps, enable_fp_fusion=TRITON.fp_fusion,
        )  # fmt: skip
        kernels.channel_inner_kernel[(slots, heads)](
            q, k, beta, saved.decay, sequences.offsets, saved.inner, saved.scores,
            queries, keys, weighted, *sizes, scale, *q.stride()[:2], *k.stride()[:2],
            PART=min(size, DELTA_PART), **common, num_warps=TRITON.channel_warps,
        )  # fmt: skip
    decayed, results = operands._replace(q=queries, k=keys), (out, last, saved)
    chain_and_outputs(kernels, decayed, weighted, sequences, 1.0, results, interpret)
