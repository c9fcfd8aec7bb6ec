"""One launch of f(gate) up over rows [gate, up], in the two roundings of a patched model.

vLLM's linear of gate and up leaves both in one row.  `ck.silu` would copy the half that it reads,
and the product is another launch; this kernel reads both halves where they lie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...rowwise.triton.kernel import _value
from ...rowwise.triton.plan import TRITON

_COLUMNS = 1024


@triton.jit(do_not_specialize=["N"])
def gated_rows_kernel(x_ptr, out_ptr, N, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    """out[t, n] = round(round(f(x[t, n])) x[t, N + n])."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < N
    gate_ptr = x_ptr + row * 2 * N + column
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + N, mask=mask, other=0.0).to(tl.float32)
    value = _value(gate, KIND).to(out_ptr.dtype.element_ty).to(tl.float32)
    product = (value * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * N + column, product, mask=mask)


def gated_rows(x: torch.Tensor, kind: str) -> torch.Tensor:
    """f(x[..., :N]) x[..., N:], the bytes of two steps; kind: as in `rowwise.config.KINDS`."""
    rows = x.contiguous().view(-1, x.shape[-1])
    width = x.shape[-1] // 2
    out = torch.empty(len(rows), width, dtype=x.dtype, device=x.device)
    if out.numel():
        with torch.cuda.device_of(x):
            gated_rows_kernel[(len(rows), triton.cdiv(width, _COLUMNS))](
                rows,
                out,
                width,
                KIND=kind,
                COLUMNS=_COLUMNS,
                num_warps=TRITON.num_warps,
                enable_fp_fusion=TRITON.fp_fusion,
            )
    return out.view(*x.shape[:-1], width)
