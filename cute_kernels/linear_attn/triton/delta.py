"""Launch the Triton kernels of the gated delta rule: operands in their layout, grids.

Each function has the name and the result of one in cpu_delta.py, runs on the device of its first
tensor and its current stream, and compiles at its first launch.
"""

from __future__ import annotations

from types import ModuleType

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
    operands = loadable(operands)
    _, k, v, g, beta, _ = operands
    with torch.cuda.device(v.device):
        kernels.inner_kernel[(sequences.slots(DELTA_CHUNK), v.shape[1])](
            k, g, beta, sequences.offsets, saved.decay, saved.inner,
            *sizes_of(sequences), *k.stride()[:2], **common_of(operands, interpret),
            num_warps=TRITON.delta_warps,
        )  # fmt: skip
    results = out, last, saved
    chain_and_outputs(kernels, operands, None, sequences, scale, results, interpret)


def chain_and_outputs(
    kernels: ModuleType,
    operands: DeltaRule,
    weighted: torch.Tensor | None,
    sequences: Sequences,
    scale: float,
    results: tuple[torch.Tensor, Last | None, DeltaSaved],
    interpret: bool,
) -> None:
    """Launch what follows the matrices inside of chunks.

    weighted: None, or k with the decays by channel to a chunk's end; those from its beginning are
        in q and k then, which are [N, HV, K].
    """
    q, k, v, _, beta, initial = operands
    out, last, saved = results
    heads, values = v.shape[1:]
    common = {"V": values, "CHANNELS": weighted is not None, **common_of(operands, interpret)}
    common["num_warps"] = TRITON.delta_warps
    chain = min(values, TRITON.chain_columns)
    output = min(values, TRITON.output_columns)
    with torch.cuda.device(v.device):
        kernels.chain_kernel[(sequences.count, heads, values // chain)](
            k, v, beta, saved.decay, weighted, saved.inner, initial, sequences.offsets, saved.u,
            saved.states, None if last is None else last.states, sequences.length,
            -1 if last is None else last.lag, *k.stride()[:2], *v.stride()[:2],
            COLUMNS=chain, num_stages=TRITON.chain_stages, **common,
        )  # fmt: skip
        kernels.output_kernel[(sequences.slots(DELTA_CHUNK), heads, values // output)](
            q, k, saved.u, saved.decay, saved.scores, saved.states, sequences.offsets, out,
            *sizes_of(sequences), scale, *q.stride()[:2], *k.stride()[:2],
            COLUMNS=output, **common,
        )  # fmt: skip


def sizes_of(sequences: Sequences) -> tuple[int, int, int]:
    """(N, rows of a sequence of a batch, sequences)."""
    return sequences.rows, sequences.length, sequences.count


def common_of(operands: DeltaRule, interpret: bool) -> dict[str, int | bool]:
    """Constants of the kernels that multiply, and the compiler's option."""
    (heads, _), (k_heads, size) = operands.v.shape[1:], operands.k.shape[1:]
    fusion = {"enable_fp_fusion": TRITON.fp_fusion}
    return {"HV": heads, "GROUP": heads // k_heads, "K": size, "UPCAST": interpret, **fusion}


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
