"""Tensors -> a Problem, or one exception that names the argument.  Works on meta tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, ShapeError, expected
from ..runtime import checking
from ..runtime import main_grad as destination
from .config import LAYER, MAX_WIDTH, RMS
from .tensors import Rule

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Below the least normal fp32 a device may take an eps for zero.
_LEAST, _MOST = 2.0**-126, 2.0**40


class Operands(NamedTuple):
    """Tensors of a call, unchecked."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    main_grad: torch.Tensor | None = None
    bias_main_grad: torch.Tensor | None = None


#: Kind of a norm -> its public op.
OPS = {RMS: "rms_norm", LAYER: "layer_norm"}


def norm(operands: Operands, kind: str, eps: object, offset: object = 0.0) -> Rule:
    """Check a call of a norm and return its rule."""
    x = operands.x
    _floats("x", x)
    if x.dim() < 1 or not 1 <= x.shape[-1] <= MAX_WIDTH:
        want = f"at least 1 dimension, the last from 1 to {MAX_WIDTH}"
        raise ShapeError(expected("x", want, list(x.shape)))
    checking.supported(OPS[kind], x.device)
    _vector("weight", operands.weight, x)
    _vector("bias", operands.bias, x)
    _residual(operands.residual, x)
    destination.check_of("main_grad", operands.main_grad, "weight", operands.weight, x)
    destination.check_of("bias_main_grad", operands.bias_main_grad, "bias", operands.bias, x)
    rule = Rule(kind, _number("eps", eps), _number("offset", offset))
    if not (rule.eps == 0 and kind == RMS) and not rule.eps >= _LEAST:
        want = "at least 2^-126" + (", or 0" if kind == RMS else "")
        raise ArgumentValueError(expected("eps", want, eps))
    return rule


def _floats(name: str, t: object) -> None:
    checking.tensor(name, t)
    checking.dtype(name, t.dtype, DTYPES)


def _vector(name: str, t: object, x: torch.Tensor) -> None:
    """Check that a weight or bias is [D], on the device of x; its dtype may differ."""
    if t is None:
        return
    if isinstance(t, (tuple, list, int)):
        want = "a torch.Tensor (there is no normalized_shape: the last dimension is normalised)"
        raise ArgumentTypeError(expected(name, want, type(t).__name__))
    _floats(name, t)
    width = x.shape[-1]
    if list(t.shape) != [width]:
        raise ShapeError(expected(name, f"shape [{width}], the D of x", list(t.shape)))
    checking.same_device(name, t, "x", x)


def _residual(t: object, x: torch.Tensor) -> None:
    if t is None:
        return
    checking.tensor("residual", t)
    checking.dtype("residual", t.dtype, (x.dtype,))
    if t.shape != x.shape:
        want = f"shape {list(x.shape)}, that of x"
        raise ShapeError(expected("residual", want, list(t.shape)))
    checking.same_device("residual", t, "x", x)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(expected(name, "a number", type(value).__name__))
    # Not math.isfinite: torch.compile may have made a symbol of the number.
    if not abs(value) <= _MOST:
        raise ArgumentValueError(expected(name, "a number of at most 2^40", value))
    return float(value)
