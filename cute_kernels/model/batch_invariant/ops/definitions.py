"""Two torch ops that aten's overrides need and that no system has.

    batched_product  alpha a_i b_i + beta base_i   a [B, M, K], b [B, K, N], base [B, M, N]
    row_sum          Σ x / divisor over the last dimension of x [..., N] -> [...]

A matrix of a batch is a product of its own: its bits are those of ``ck.matmul``, whatever the size
of the batch.  A row's sum is one tree, a function of N: the row is filled up to a power of two with
zeros and added half onto half in fp32, elementwise adds on every device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....cpu.ieee import halves, ieee_on
from ....runtime.products import product, sums
from ....runtime.torch_ops import define_op, refuse_vmap

_ORDER = "chain"


def _run_product(a, b, base, beta, alpha):
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    if 0 in out.shape:
        return out
    for i in range(a.shape[0]):
        if not a.shape[2]:
            out[i] = 0 if base is None else base[i] * beta
        elif base is None and alpha == 1:
            product(a[i], b[i].mT, order=_ORDER, out=out[i])
        else:
            out[i] = _scaled(a[i], b[i], None if base is None else base[i], beta, alpha)
    return out


def _scaled(a, b, base, beta, alpha):
    """Compute alpha a b + beta base in fp32, one operation at a time, rounded once."""
    total = sums(a, b.mT, _ORDER)
    with ieee_on(a):
        if alpha != 1:
            total = total * alpha
        if base is not None:
            wide = base.to(torch.float32)
            total = total + (wide if beta == 1 else wide * beta)
        return total.to(a.dtype)


def _setup_product(ctx, inputs, output):
    a, b, _, ctx.beta, ctx.alpha = inputs
    ctx.save_for_backward(a, b)


def _backward_product(ctx, g):
    a, b = ctx.saved_tensors
    needs_a, needs_b, needs_base = ctx.needs_input_grad[:3]
    da = batched_product(g, b.mT, None, 0.0, ctx.alpha) if needs_a else None
    db = batched_product(a.mT, g, None, 0.0, ctx.alpha) if needs_b else None
    return da, db, g * ctx.beta if needs_base else None, None, None


def _run_sum(x, divisor, dtype):
    width = x.shape[-1]
    room = 1 << max(0, width - 1).bit_length()
    with ieee_on(x):
        wide = F.pad(x.to(torch.float32), (0, room - width))
        total = halves(wide, wide.dim() - 1)
        return (total if divisor == 1 else total / divisor).to(dtype)


def _setup_sum(ctx, inputs, output):
    x, ctx.divisor, _ = inputs
    ctx.shape, ctx.dtype = x.shape, x.dtype


def _backward_sum(ctx, g):
    each = g if ctx.divisor == 1 else g.to(torch.float32) / ctx.divisor
    return each.to(ctx.dtype).unsqueeze(-1).expand(ctx.shape), None, None


batched_product = define_op(
    "batched_product(Tensor a, Tensor b, Tensor? base, float beta, float alpha) -> Tensor",
    _run_product,
    fake=lambda a, b, *_: a.new_empty(a.shape[0], a.shape[1], b.shape[2]),
    setup=_setup_product,
    backward=_backward_product,
    vmap=refuse_vmap(
        "batch_invariant",
        "over a batched product is not supported; make the mapped dimension part of the batch",
    ),
)
row_sum = define_op(
    "row_sum(Tensor x, float divisor, ScalarType dtype) -> Tensor",
    _run_sum,
    fake=lambda x, divisor, dtype: x.new_empty(x.shape[:-1], dtype=dtype),
    setup=_setup_sum,
    backward=_backward_sum,
    vmap=lambda info, in_dims, x, *rest: (row_sum(x.movedim(in_dims[0], 0), *rest), 0),
)
