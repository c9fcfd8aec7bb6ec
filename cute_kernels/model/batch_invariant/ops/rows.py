"""Overrides of aten's functions of rows: softmax, norms, sums, activations, embeddings.

``why_...`` say what is not covered; the other functions have the signatures of aten.
"""

from __future__ import annotations

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
    return checks.tensors(x) if _in_range(x, dim) else checks.EXACT


def why_softmax_backward(dy, y, dim, dtype) -> str | None:
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


def _in_range(x: torch.Tensor, dim: int) -> bool:
    return -max(1, x.dim()) <= dim < max(1, x.dim())


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


def why_sum(x, dim=None, keepdim=False, *, dtype=None) -> str | None:
    """Why a sum or mean over dimensions (None: all) is not covered, or None."""
    return checks.summed(x, dim, dtype)


def sum_dims(x, dim=None, keepdim=False, *, dtype=None) -> torch.Tensor:
    """Compute Σ x over dimensions; None: all."""
    return _total(x, dim, keepdim, dtype, False)


def mean_dims(x, dim=None, keepdim=False, *, dtype=None) -> torch.Tensor:
    """Compute the mean over dimensions; None: all."""
    return _total(x, dim, keepdim, dtype, True)


def _total(x, dims, keepdim, dtype, mean) -> torch.Tensor:
    dtype = dtype or x.dtype
    rank = x.dim()
    if rank and dims and x.dtype in checks.DTYPES and list(dims) in ([-1], [rank - 1]):
        total = row_sum(x, float(x.shape[-1]) if mean else 1.0, dtype)
        return total.unsqueeze(-1) if keepdim else total
    x = x if x.dtype in checks.DTYPES else x.to(dtype)
    summed = sorted(d % rank for d in dims) if dims and rank else list(range(rank))
    kept_dims = [d for d in range(rank) if d not in summed]
    # The addends of one result lie in a row, in the order of its dimensions.
    rows = x.permute(*kept_dims, *summed) if summed != list(range(len(kept_dims), rank)) else x
    width = x.shape.numel() if not kept_dims else torch.Size(x.shape[d] for d in summed).numel()
    rows = rows.reshape(*(x.shape[d] for d in kept_dims), width)
    total = row_sum(rows, float(width) if mean else 1.0, dtype)
    if not keepdim:
        return total
    return total.view([1 if d in summed else x.shape[d] for d in range(rank)])


# ---- norms ---------------------------------------------------------------------------------------


def layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn=True) -> torch.Tensor:
    """Layer norm over the last dimensions."""
    if len(shape) == 1:
        return norm_api.layer_norm(x, weight, bias, eps)
    rows = (_flat(t, shape) for t in (x, weight, bias))
    return norm_api.layer_norm(*rows, eps).view(x.shape)


def rms_norm(x, shape, weight=None, eps=None) -> torch.Tensor:
    """RMS norm over the last dimensions; without an eps, fp32's epsilon as torch has it."""
    if len(shape) == 1:
        return norm_api.rms_norm(x, weight, _eps(x, eps))
    rows = (_flat(t, shape) for t in (x, weight))
    return norm_api.rms_norm(*rows, _eps(x, eps)).view(x.shape)


def native_layer_norm(x, shape, weight, bias, eps) -> tuple[torch.Tensor, ...]:
    """Return (y, mean, rstd), the last two in fp32."""
    y, mean, rstd = _norm(LAYER, (x, weight, bias), shape, eps)
    return y, *_stats(x, shape, mean, rstd)


def fused_rms_norm(x, shape, weight, eps) -> tuple[torch.Tensor, ...]:
    """Return (y, rstd), the last one in fp32."""
    y, _, rstd = _norm(RMS, (x, weight, None), shape, _eps(x, eps))
    return y, *_stats(x, shape, rstd)


def layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, needs) -> tuple:
    """Return (dx, dweight, dbias)."""
    return _norm_backward(LAYER, (dy, x, shape), (mean, rstd), (weight, bias), needs)


def fused_rms_norm_backward(dy, x, shape, rstd, weight, needs) -> tuple:
    """Return (dx, dweight)."""
    gradients = _norm_backward(
        RMS, (dy, x, shape), (rstd[:0], rstd), (weight, None), (*needs, False)
    )
    return gradients[:2]


def _norm(kind, operands, shape, eps) -> tuple[torch.Tensor, ...]:
    """Return (y, mean, rstd); the mean of an RMS norm is empty."""
    x, weight, bias = (_flat(t, shape) for t in operands)
    y, _, mean, rstd = norm_op.norm(x, None, weight, bias, None, None, kind, eps, 0.0)
    return y.view(operands[0].shape), mean, rstd


def _eps(x: torch.Tensor, eps: float | None) -> float:
    # torch computes bf16 and fp16 in fp32, and takes that dtype's epsilon.
    return torch.finfo(torch.float32).eps if eps is None else eps


def _flat(t: torch.Tensor | None, shape) -> torch.Tensor | None:
    return t if t is None or len(shape) == 1 else t.flatten(t.dim() - len(shape))


def _stats(x: torch.Tensor, shape, *stats: torch.Tensor) -> list[torch.Tensor]:
    sizes = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    return [t.view(sizes) for t in stats]


def _norm_backward(kind, operands, stats, scale, needs) -> tuple:
    dy, x, shape = operands
    needed = [need and t is not None for need, t in zip(needs, (x, *scale), strict=True)]
    statistics = [t.to(torch.float32).flatten() for t in stats]
    flat = [_flat(t, shape) for t in (dy, x)]
    scales = [_flat(t, shape) for t in scale]
    # The eps is in rstd, and a gradient does not read it.
    gradients = norm_op.norm_gradients(
        flat[0], None, flat[1], *statistics, *scales, kind, 1.0, 0.0, needed
    )
    like = (x, *scale)
    return tuple(
        g.view(t.shape) if want else None
        for g, t, want in zip(gradients, like, needed, strict=True)
    )


# ---- activations ---------------------------------------------------------------------------------


def silu_backward(dy, x) -> torch.Tensor:
    """Compute dy silu'(x)."""
    return rowwise_op.activation_backward(dy, x, "silu")


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


def why_embedding_backward(dy, ids, entries, padding, by_frequency) -> str | None:
    """Why a lookup's gradient is not covered, or None."""
    return "scale_grad_by_freq is not covered" if by_frequency else checks.tensors(dy)


def embedding(weight, ids, padding=-1, by_frequency=False, sparse=False) -> torch.Tensor:
    """Look up weight[ids]."""
    return rowwise.embedding(ids, weight, padding_idx=None if padding < 0 else padding)


def embedding_backward(dy, ids, entries, padding, by_frequency) -> torch.Tensor:
    """Sum the gradients of the tokens of each entry, in their order."""
    return rowwise_op.embedding_gradient(dy, ids, padding, entries)
