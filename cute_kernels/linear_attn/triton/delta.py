"""Launch the Triton kernels of the gated delta rule: operands in their layout, grids.

Each function has the name and the result of one in cpu_delta.py, runs on the device of its first
tensor and its current stream, and compiles at its first launch.
"""

from __future__ import annotations

import torch

from ...log import contiguous
from ..config import DELTA_CHUNK
from ..tensors import DeltaRule, DeltaSaved, Last, Sequences
from . import kernel_delta as kernels
from .plan import TRITON

NAME = "chunk_gated_delta_rule"


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
    """Triton implementation of `cpu_delta.delta_rule`."""
    q, k, v, g, beta, initial = loadable(operands)
    heads, values = v.shape[1:]
    common = {"HV": heads, "GROUP": heads // k.shape[1], "K": k.shape[2], "UPCAST": interpret}
    options = {"num_warps": TRITON.delta_warps, "enable_fp_fusion": TRITON.fp_fusion}
    sizes = sequences.rows, sequences.length, sequences.count
    slots = sequences.slots(DELTA_CHUNK)
    chain = min(values, TRITON.chain_columns)
    output = min(values, TRITON.output_columns)
    with torch.cuda.device(q.device):
        kernels.inner_kernel[(slots, heads)](
            k, g, beta, sequences.offsets, saved.decay, saved.inner,
            *sizes, *k.stride()[:2], **common, **options,
        )  # fmt: skip
        kernels.chain_kernel[(sequences.count, heads, values // chain)](
            k, v, beta, saved.decay, saved.inner, initial, sequences.offsets, saved.u, saved.states,
            None if last is None else last.states, sequences.length,
            -1 if last is None else last.lag, *k.stride()[:2], *v.stride()[:2],
            V=values, COLUMNS=chain, num_stages=TRITON.chain_stages, **common, **options,
        )  # fmt: skip
        kernels.output_kernel[(slots, heads, values // output)](
            q, k, saved.u, saved.decay, saved.states, sequences.offsets, out,
            *sizes, scale, *q.stride()[:2], *k.stride()[:2],
            V=values, COLUMNS=output, **common, **options,
        )  # fmt: skip


def loadable(operands: DeltaRule) -> DeltaRule:
    """The operands with neighbours of a head side by side, gates and states without gaps."""
    dense = {
        name: contiguous(NAME, name, getattr(operands, name), "a last stride of 1")
        for name in ("q", "k", "v")
        if getattr(operands, name).stride(2) != 1
    }
    for name in ("g", "beta", "initial"):
        if (t := getattr(operands, name)) is not None:
            dense[name] = contiguous(NAME, name, t, "no gaps")
    return operands._replace(**dense)
