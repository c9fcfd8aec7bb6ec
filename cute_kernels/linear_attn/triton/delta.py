"""Launch the Triton kernels of the gated delta rule: operands in their layout, grids.

Each function has the name and the result of one in cpu_delta.py, runs on the device of its first
tensor and its current stream, and compiles at its first launch.  With gates [N, HV, K] the rule is
Kimi delta attention.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..config import DELTA_CHUNK, DELTA_PART
from ..tensors import DeltaRule, DeltaSaved, Last, Sequences
from . import kernel_kda as kernels
from . import launch
from .launch import FUSION, strides_of
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
    operands = loadable(operands)
    q, k, v, g, beta, initial = operands
    (heads, values), size, weighted = v.shape[1:], k.shape[2], None
    sizes, slots, offsets = sequences.sizes, sequences.slots(DELTA_CHUNK), sequences.offsets
    chain = min(values, TRITON.chain_columns)
    output = min(values, TRITON.output_columns)
    with torch.cuda.device(q.device):
        if g.dim() == 3:
            kernels.channel_decays_kernel[(slots, heads)](
                g, saved.decay, offsets, *sizes, HV=heads, K=size, **FUSION,
                num_warps=TRITON.sums_warps,
            )  # fmt: skip
            inside = saved.inner, saved.scores
            rows = decayed_rows(kernels, operands, sequences, scale, saved.decay, inside, interpret)
            (q, k, weighted), scale = rows, 1.0
        else:
            inside_chunks(operands, sequences, scale, saved, None, interpret=interpret)
        common = {"V": values, "CHANNELS": weighted is not None, **common_of(k, v, interpret)}
        common["num_warps"] = TRITON.delta_warps
        kernels.chain_kernel[(sequences.count, heads, values // chain)](
            k, v, beta, saved.decay, weighted, saved.inner, initial, offsets, saved.u,
            saved.states, None if last is None else last.states, sequences.length,
            -1 if last is None else last.lag, *strides_of(k, v),
            COLUMNS=chain, num_stages=TRITON.chain_stages, **common,
        )  # fmt: skip
        kernels.output_kernel[(slots, heads, values // output)](
            q, k, saved.u, saved.decay, saved.scores, saved.states, offsets, out,
            *sizes, scale, *strides_of(q, k), COLUMNS=output, **common,
        )  # fmt: skip


def inside_chunks(
    operands: DeltaRule,
    sequences: Sequences,
    scale: float,
    saved: DeltaSaved,
    scores: torch.Tensor | None,
    *,
    interpret: bool = False,
) -> None:
    """Write what chunks need of themselves: G and A to ``saved``, P to ``scores`` [N, HV, 64]."""
    q, k, v, g, beta, _ = operands
    with torch.cuda.device(v.device):
        kernels.inner_kernel[(sequences.slots(DELTA_CHUNK), v.shape[1])](
            q, k, g, beta, sequences.offsets, saved.decay, saved.inner, scores,
            *sequences.sizes, scale, *strides_of(q, k),
            **common_of(k, v, interpret), num_warps=TRITON.delta_warps,
        )  # fmt: skip


def decayed_rows(
    kernels: ModuleType,
    operands: DeltaRule,
    sequences: Sequences,
    scale: float,
    decay: torch.Tensor,
    inside: tuple[torch.Tensor | None, torch.Tensor | None],
    interpret: bool,
) -> list[torch.Tensor]:
    """scale 2^G q, 2^G k and 2^(G_C - G) k, [N, HV, K]; writes A and P to ``inside``, if given."""
    q, k, v, _, beta, _ = operands
    rows = [torch.empty(decay.shape, dtype=q.dtype, device=q.device) for _ in "qkw"]
    kernels.channel_inner_kernel[(sequences.slots(DELTA_CHUNK), v.shape[1])](
        q, k, beta, decay, sequences.offsets, *inside, *rows,
        *sequences.sizes, scale, *strides_of(q, k),
        PART=min(k.shape[2], DELTA_PART), **common_of(k, v, interpret),
        num_warps=TRITON.channel_warps,
    )  # fmt: skip
    return rows


def common_of(k: torch.Tensor, v: torch.Tensor, interpret: bool) -> dict[str, int | bool]:
    """Constants of the kernels that multiply, and the compiler's option."""
    heads, (k_heads, size) = v.shape[1], k.shape[1:]
    return {"HV": heads, "GROUP": heads // k_heads, "K": size, "UPCAST": interpret, **FUSION}


def loadable(operands: DeltaRule) -> DeltaRule:
    """The operands as kernels load them."""
    return launch.loadable(NAME, operands, ("q", "k", "v"))
