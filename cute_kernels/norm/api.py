"""``ck.rms_norm`` and ``ck.layer_norm``: the public functions of norm."""

from __future__ import annotations

from typing import NoReturn, overload

import torch

from ..runtime import checking
from . import op
from .config import LAYER, RMS


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = ...,
    *,
    residual: None = ...,
    offset: float = ...,
    main_grad: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = ...,
    *,
    residual: torch.Tensor,
    offset: float = ...,
    main_grad: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = h / √(mean(h²) + eps) · (weight + offset), h = x + residual, row by row.

    All of a row is computed in fp32 and rounded once; the sum over its D elements is one tree, a
    function of D.  h is rounded to the dtype of x, and it is the rounded h that is normalised: the
    result has the bytes of ``rms_norm(x + residual, ...)``.

    Args:
        x: [..., D]; bf16, fp16 or fp32; any strides; D from 1 to 65536.  Rows are what the last
            dimension holds: tokens, or heads of tokens.
        weight: [D] or None (1); bf16, fp16 or fp32, of the dtype of x or another one.
        eps: Added to the mean of the squares, inside the root.
        residual: [..., D] as x, or None.  If given, h is returned as well.
        offset: Added to the weight, in fp32; 1.0 for Gemma's norms.  Without a weight, h is
            multiplied by 1 + offset.
        main_grad: fp32 [D] or None.  If given, backward adds dweight into it in place and
            ``weight.grad`` stays None, as in `linear`.

    Returns:
        y [..., D], contiguous, the dtype of x; (y, h) if there is a residual.

    Guarantees:
        ``run_to_run``, ``batch_invariant`` for y, h and dx, and ``schedule_invariant`` on GPUs.
        dweight is a sum over rows in parts of `config.part_rows(D)` (64 for D > 256), added one by
        one: ``split_invariant`` into ``main_grad`` for micro-batches cut there.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError, ArgumentValueError, AliasError,
        UnsupportedTransformError, BackendUnavailable: as `linear`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.

    Example:
        >>> x, weight = torch.randn(5, 64), torch.ones(64)
        >>> ck.rms_norm(x, weight).shape
        torch.Size([5, 64])
    """
    if others:
        checking.no_other_arguments("rms_norm", others)
    y, h, _, _ = op.norm(x, residual, weight, None, main_grad, None, RMS, eps, offset)
    return y if residual is None else (y, h)


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    residual: None = ...,
    main_grad: torch.Tensor | None = ...,
    bias_main_grad: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    residual: torch.Tensor,
    main_grad: torch.Tensor | None = ...,
    bias_main_grad: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
    bias_main_grad: torch.Tensor | None = None,
    **others: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = (h - mean(h)) / √(var(h) + eps) · weight + bias, h = x + residual, row by row.

    The mean first, then the mean of the squared differences from it, each one tree, a function of
    D; fp32, one rounding.

    Args:
        x, residual, main_grad: As in `rms_norm`.
        weight, bias: [D] or None (1, 0); bf16, fp16 or fp32.
        eps: Added to the variance (that of the row, divided by D), inside the root.
        bias_main_grad: fp32 [D] or None; for dbias, as ``main_grad`` for dweight.

    Returns, Guarantees, Raises: as `rms_norm`.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, equations 3 and 4.

    Example:
        >>> x, weight, bias = torch.randn(5, 64), torch.ones(64), torch.zeros(64)
        >>> ck.layer_norm(x, weight, bias).shape
        torch.Size([5, 64])
    """
    if others:
        checking.no_other_arguments("layer_norm", others)
    y, h, _, _ = op.norm(x, residual, weight, bias, main_grad, bias_main_grad, LAYER, eps, 0.0)
    return y if residual is None else (y, h)
