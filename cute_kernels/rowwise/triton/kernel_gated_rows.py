"""f(gate) up over rows [gate, up], with the roundings of two steps: of f(gate), and of the product.

An inference engine's linear of gate and up leaves both in one row.  The functions are those of
kernel.py, so the bytes are those of an activation and of a product that torch rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel import _value


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
