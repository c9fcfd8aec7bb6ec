"""Overrides of aten's functions of rows: softmax, norms, sums, activations, embeddings.

``why_...`` say what is not covered; the other functions have the signatures of aten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....norm import api as norm_api
from ....norm import op as norm_op
from ....norm.config import LAYER, RMS
from ....rowwise import api as rowwise
from ....rowwise import op as rowwise_op
from .. import checks
from .definitions import row_sum

# ---- softmax -------------------------------------------------------------------------------------


def why_softmax(x, dim, half_to_float) -> str | None:
    """Why a softmax over a dimension is not covered, or None."""
    rank = max(1, x.dim())
    return checks.tensors(x) if -rank <= dim < rank else checks.EXACT


def why_dy_softmax(dy, y, dim, dtype) -> str | None:
    """Why a softmax's gradient is not covered, or None."""
    return checks.tensors(dy, y) if dtype in checks.DTYPES else checks.EXACT


def softmax(x, dim, half_to_float) -> torch.Tensor:
    """Compute the softmax over ``dim``."""
    return _along_last(dim, lambda t: rowwise.softmax(t, dtype=_wide(t, half_to_float)), x)


def log_softmax(x, dim, half_to_float) -> torch.Tensor:
    """Compute the log softmax over ``dim``."""
    return _along_last(dim, lambda t: rowwise.log_softmax(t, dtype=_wide(t, half_to_float)), x)


def softmax_backward(dy, y, dim, dtype) -> torch.Tensor:
    """Compute y (dy - Σ y dy)."""
    return _along_last(dim, lambda g, p: rowwise_op.softmax_backward(g, p, dtype), dy, y)


def log_softmax_backward(dy, y, dim, dtype) -> torch.Tensor:
    """Compute dy - e^y Σ dy; e^y is the softmax of y."""
    return _along_last(dim, rowwise_op.log_softmax_backward, dy, y).to(dtype)


def _wide(x: torch.Tensor, half_to_float: bool) -> torch.dtype:
    return torch.float32 if half_to_float else x.dtype


def _along_last(dim, function, *operands: torch.Tensor) -> torch.Tensor:
    """Apply ``function`` with ``dim`` as the last dimension."""
    if operands[0].dim() == 0:
        return function(*(t.unsqueeze(0) for t in operands)).squeeze(0)
    if dim in (-1, operands[0].dim() - 1):
        return function(*operands)
    return function(*(t.movedim(dim, -1) for t in operands)).movedim(-1, dim).contiguous()


# ---- sums ----------------------------------------------------------------------------------------


def why_total(x, dim=None, keepdim=False, *, dtype=None) -> str | None:
    """Why a sum or mean over dimensions (None: all) is not covered, or None."""
    if (dtype or x.dtype) not in checks.DTYPES:
        return checks.dtype(dtype or x.dtype)
    if x.dtype.is_floating_point or x.dtype.is_complex:
        reason = checks.tensors(x)
    else:
        reason = checks.EXACT if checks.dispatches(type(x)) else None
    if reason is not None or not dim:
        return reason
    rank = max(1, x.dim())
    places = {d % rank for d in dim if -rank <= d < rank}
    return None if len(places) == len(dim) else checks.EXACT


def total(x, dim=None, keepdim=False, *, dtype=None, mean=False) -> torch.Tensor:
    """Compute the sum or mean over dimensions; None: all."""
    dtype = dtype or x.dtype
    rank = x.dim()
    if rank and dim and x.dtype in checks.DTYPES and list(dim) in ([-1], [rank - 1]):
        out = row_sum(x, float(x.shape[-1]) if mean else 1.0, dtype)
        return out.unsqueeze(-1) if keepdim else out
    x = x if x.dtype in checks.DTYPES else x.to(dtype)
    summed = sorted(d % rank for d in dim) if dim and rank else list(range(rank))
    kept_dims = [d for d in range(rank) if d not in summed]
    # The addends of one result lie in a row, in the order of its dimensions.
    rows = x.permute(*kept_dims, *summed) if summed != list(range(len(kept_dims), rank)) else x
    width = torch.Size(x.shape[d] for d in summed).numel()
    rows = rows.reshape(*(x.shape[d] for d in kept_dims), width)
    out = row_sum(rows, float(width) if mean else 1.0, dtype)
    if not keepdim:
        return out
    return out.view([1 if d in summed else x.shape[d] for d in range(rank)])


# ---- norms ---------------------------------------------------------------------------------------


def layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn=True) -> torch.Tensor:
    """Layer norm over the last dimensions."""
    out = norm_api.layer_norm(*_flat(shape, x, weight, bias), eps)
    return out if len(shape) == 1 else out.view(x.shape)


def rms_norm(x, shape, weight=None, eps=None) -> torch.Tensor:
    """RMS norm over the last dimensions; without an eps, fp32's epsilon as torch has it."""
    out = norm_api.rms_norm(*_flat(shape, x, weight), _eps(eps))
    return out if len(shape) == 1 else out.view(x.shape)


def native_layer_norm(x, shape, weight, bias, eps) -> tuple[torch.Tensor, ...]:
    """Return (y, mean, rstd), the last two in fp32."""
    return _norm(LAYER, shape, eps, x, weight, bias)


def fused_rms_norm(x, shape, weight, eps) -> tuple[torch.Tensor, ...]:
    """Return (y, rstd), the last one in fp32."""
    return _norm(RMS, shape, _eps(eps), x, weight, None)


def layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, needs) -> tuple:
    """Return (dx, dweight, dbias)."""
    return _norm_backward(LAYER, shape, dy, (mean, rstd), (x, weight, bias), needs)


def fused_rms_norm_backward(dy, x, shape, rstd, weight, needs) -> tuple:
    """Return (dx, dweight)."""
    stats, needs = (rstd[:0], rstd), (*needs, False)
    return _norm_backward(RMS, shape, dy, stats, (x, weight, None), needs)[:2]


def _norm(kind, shape, eps, x, weight, bias) -> tuple[torch.Tensor, ...]:
    """Return y and the statistics of rows, with the dimensions of x."""
    rows, *scale = _flat(shape, x, weight, bias)
    y, _, mean, rstd = norm_op.norm(rows, None, *scale, None, None, kind, eps, 0.0)
    sizes = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    stats = (mean, rstd) if kind == LAYER else (rstd,)
    return y.view(x.shape), *(t.view(sizes) for t in stats)


def _norm_backward(kind, shape, dy, stats, inputs, needs) -> tuple:
    """Return the gradients of the inputs (x, weight, bias); None where there is none to compute."""
    needed = [need and t is not None for need, t in zip(needs, inputs, strict=True)]
    dy, x, *scale = _flat(shape, dy, *inputs)
    stats = (t.to(torch.float32).flatten() for t in stats)
    # The eps is in rstd, and a gradient does not read it.
    gradients = norm_op.norm_gradients(dy, None, x, *stats, *scale, kind, 1.0, 0.0, needed)
    return tuple(
        g.view(t.shape) if need else None
        for g, t, need in zip(gradients, inputs, needed, strict=True)
    )


def _eps(eps: float | None) -> float:
    # torch computes bf16 and fp16 in fp32, and takes that dtype's epsilon.
    return torch.finfo(torch.float32).eps if eps is None else eps


def _flat(shape, *tensors: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Take the last dimensions, of this shape, as one."""
    if len(shape) == 1:
        return tensors
    return [t if t is None else t.flatten(t.dim() - len(shape)) for t in tensors]


# ---- activations ---------------------------------------------------------------------------------


def gelu_backward(dy, x, *, approximate="none") -> torch.Tensor:
    """Compute dy gelu'(x)."""
    kind = rowwise.checks.gelu_kind(approximate)
    return rowwise_op.activation_backward(dy, x, kind)


# ---- embeddings ----------------------------------------------------------------------------------

_INTEGERS = (torch.int64, torch.int32)


def why_embedding(weight, ids, padding=-1, by_frequency=False, sparse=False) -> str | None:
    """Why a lookup, whose gradient is a sum over tokens, is not covered, or None."""
    if weight.dim() != 2 or ids.dtype not in _INTEGERS:
        return checks.EXACT
    if by_frequency or sparse:
        return "scale_grad_by_freq and sparse gradients are not covered"
    return checks.tensors(weight)


def why_dy_embedding(dy, ids, entries, padding, by_frequency) -> str | None:
    """Why a lookup's gradient is not covered, or None."""
    return "scale_grad_by_freq is not covered" if by_frequency else checks.tensors(dy)


def embedding(weight, ids, padding=-1, by_frequency=False, sparse=False) -> torch.Tensor:
    """Look up weight[ids]."""
    return rowwise.embedding(ids, weight, padding_idx=None if padding < 0 else padding)


def embedding_backward(dy, ids, entries, padding, by_frequency) -> torch.Tensor:
    """Sum the gradients of the tokens of each entry, in their order."""
    return rowwise_op.embedding_gradient(dy, ids, padding, entries)
