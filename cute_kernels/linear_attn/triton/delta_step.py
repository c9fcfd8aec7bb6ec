"""Launch the Triton kernels of decoding for the gated delta rule."""

from __future__ import annotations

import torch

from ...log import contiguous
from ..tensors import DeltaRecord, DeltaRule
from . import kernel_delta_step as kernels
from .delta import NAME
from .plan import TRITON


def delta_step(
    operands: DeltaRule,
    length: int,
    offsets: torch.Tensor | None,
    slots: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    record: DeltaRecord,
    *,
    interpret: bool = False,
) -> None:
    """Write o of new rows to out [N, HV, V], and keep them; see `cache.LinearAttentionCache`.

    length: Rows of each sequence of a batch.  offsets: Of a pack.  slots: Of its sequences.
    """
    dense = {
        name: contiguous(NAME, name, t, "a last stride of 1")
        for name, t in zip(("q", "k", "v"), operands[:3], strict=True)
        if t.stride(2) != 1
    }
    q, k, v, g, beta, _ = operands._replace(**dense)
    g, beta = (contiguous(NAME, name, t, "no gaps") for name, t in (("g", g), ("beta", beta)))
    heads = v.shape[1]
    count = len(v) // length if offsets is None else len(offsets) - 1
    offsets, slots = (t if t is None else t.contiguous() for t in (offsets, slots))
    values = v.shape[2]
    columns = min(values, TRITON.step_columns)
    with torch.cuda.device(q.device):
        kernels.step_kernel[(count, heads, values // columns)](
            q, k, v, g, beta, offsets, slots, record.grid, record.length, record.made,
            *record.tensors, *record.derived, out, length, record.drafts, scale,
            *(s for t in (q, k, v) for s in t.stride()[:2]),
            R=record.rows, HV=heads, GROUP=heads // k.shape[1], K=k.shape[2], V=values,
            COLUMNS=columns, UPCAST=interpret, enable_fp_fusion=TRITON.fp_fusion,
            num_warps=TRITON.step_warps,
        )  # fmt: skip
    advance(count, length, offsets, slots, record, rounded=False)


def advance(
    count: int,
    length: int,
    offsets: torch.Tensor | None,
    slots: torch.Tensor | None,
    record: DeltaRecord,
    rounded: bool,
) -> None:
    """Count the new rows of ``count`` sequences; rounded: whether the step kept that of states."""
    with torch.cuda.device(record.grid.device):
        kernels.advance_kernel[(count,)](
            offsets, slots, record.grid, record.length, record.made, record.rounded_at, length,
            record.drafts, ROUNDED=rounded, enable_fp_fusion=TRITON.fp_fusion, num_warps=1,
        )  # fmt: skip
