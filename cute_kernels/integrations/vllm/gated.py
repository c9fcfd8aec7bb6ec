"""One launch of f(gate) up over rows [gate, up], in the two roundings of a patched model.

`ck.silu` would copy the half that it reads, and the product would be another launch.
"""

from __future__ import annotations

import torch

from ...rowwise.triton.kernel_gated_rows import gated_rows_kernel
from ...rowwise.triton.plan import TRITON

_COLUMNS = 1024


def gated_rows(x: torch.Tensor, kind: str) -> torch.Tensor:
    """f(x[..., :N]) x[..., N:], the bytes of two steps; kind: as in `rowwise.config.KINDS`."""
    rows = x.contiguous().view(-1, x.shape[-1])
    width = x.shape[-1] // 2
    out = torch.empty(len(rows), width, dtype=x.dtype, device=x.device)
    if out.numel():
        with torch.cuda.device_of(x):
            gated_rows_kernel[(len(rows), -(-width // _COLUMNS))](
                rows,
                out,
                width,
                KIND=kind,
                COLUMNS=_COLUMNS,
                num_warps=TRITON.num_warps,
                enable_fp_fusion=TRITON.fp_fusion,
            )
    return out.view(*x.shape[:-1], width)
