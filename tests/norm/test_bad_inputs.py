"""Bad inputs, in one table: each names the argument, what was expected and what came."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    DtypeError,
    ShapeError,
)

D = 16
FP32, FP64, INT = torch.float32, torch.float64, torch.int64


def t(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> torch.Tensor:
    values = torch.arange(torch.Size(shape).numel(), dtype=FP32).reshape(shape)
    return values.to(dtype).to(device)


def meta(*shape: int) -> torch.Tensor:
    return t(*shape, device="meta")


def rms(*args, **options):
    return lambda: ck.rms_norm(*args, **options)


def layer(*args, **options):
    return lambda: ck.layer_norm(*args, **options)


X, W, R = t(4, D), t(D), t(4, D)
TABLE = [
    ("x is a list", rms([1.0], W), ArgumentTypeError, "x: expected a torch.Tensor"),
    ("x is sparse", rms(torch.eye(D).to_sparse(), W), ArgumentTypeError, "x: expected a dense"),
    ("x is double", rms(t(4, D, dtype=FP64), W), DtypeError, "x: expected one of"),
    ("x is ints", rms(t(4, D, dtype=INT), W), DtypeError, "x: expected one of"),
    ("x has no dimension", rms(t(), W), ShapeError, "x: expected at least 1 dimension"),
    ("x has no columns", rms(t(4, 0), None), ShapeError, "from 1 to 65536"),
    ("x is too wide", rms(meta(1, 65537), None), ShapeError, "from 1 to 65536"),
    ("weight is a number", rms(X, 1.0), ArgumentTypeError, "weight: expected a torch.Tensor"),
    ("weight is too long", rms(X, t(D + 1)), ShapeError, r"weight: expected shape \[16\]"),
    ("weight is a matrix", rms(X, t(1, D)), ShapeError, r"weight: expected shape \[16\]"),
    ("weight is double", rms(X, t(D, dtype=FP64)), DtypeError, "weight: expected one of"),
    ("weight is elsewhere", rms(X, meta(D)), DeviceError, "weight: expected device cpu"),
    ("bias is too short", layer(X, W, t(D - 1)), ShapeError, r"bias: expected shape \[16\]"),
    ("bias is ints", layer(X, W, t(D, dtype=INT)), DtypeError, "bias: expected one of"),
    ("bias is elsewhere", layer(X, W, meta(D)), DeviceError, "bias: expected device cpu"),
    ("residual is a number", rms(X, W, residual=0.0), ArgumentTypeError, "residual: expected a"),
    ("residual's shape", rms(X, W, residual=t(D)), ShapeError, r"residual: expected shape \[4, 16"),
    ("residual's dtype", rms(X, W, residual=t(4, D, dtype=torch.bfloat16)), DtypeError, "residual"),
    ("residual is elsewhere", rms(X, W, residual=meta(4, D)), DeviceError, "residual: expected"),
    ("eps is text", rms(X, W, "1e-6"), ArgumentTypeError, "eps: expected a number"),
    ("eps is True", rms(X, W, True), ArgumentTypeError, "eps: expected a number, got bool"),
    ("eps is a tensor", rms(X, W, t(1)), ArgumentTypeError, "eps: expected a number"),
    (
        "eps is NaN",
        rms(X, W, float("nan")),
        ArgumentValueError,
        "eps: expected a number of at most",
    ),
    ("eps is negative", rms(X, W, -1e-6), ArgumentValueError, "eps: expected at least 2"),
    ("eps is subnormal", rms(X, W, 1e-40), ArgumentValueError, "eps: expected at least 2"),
    ("eps of a layer is 0", layer(X, W, None, 0.0), ArgumentValueError, "eps: expected at least"),
    ("offset is text", rms(X, W, offset="1"), ArgumentTypeError, "offset: expected a number"),
    (
        "offset is inf",
        rms(X, W, offset=float("inf")),
        ArgumentValueError,
        "offset: expected a number of",
    ),
    ("torch's order", rms(X, (D,), W), ArgumentTypeError, "there is no normalized_shape: the last"),
    (
        "torch's order, bias",
        layer(X, [D], W, W),
        ArgumentTypeError,
        "weight: expected .*normalized",
    ),
    (
        "torch's order, int",
        layer(X, D, W),
        ArgumentTypeError,
        "weight: expected .*normalized_shape",
    ),
    (
        "torch's name",
        layer(X, normalized_shape=(D,)),
        ArgumentTypeError,
        "normalized_shape: expected no normalized_shape .*in layer_norm, got",
    ),
    ("an unknown name", rms(X, W, epsilon=1e-6), ArgumentTypeError, "epsilon: expected an arg"),
    ("main_grad is a list", rms(X, W, main_grad=[0.0]), ArgumentTypeError, "main_grad: expected"),
    ("main_grad's shape", rms(X, W, main_grad=t(4)), ShapeError, "main_grad: expected shape"),
    ("main_grad is half", rms(X, W, main_grad=t(D, dtype=torch.half)), DtypeError, "main_grad"),
    ("main_grad is elsewhere", rms(X, W, main_grad=meta(D)), DeviceError, "main_grad: expected"),
    ("main_grad without a weight", rms(X, None, main_grad=t(D)), ArgumentTypeError, "no weight"),
    ("main_grad is the weight", rms(X, W, main_grad=W), AliasError, "alias of weight"),
    ("main_grad is of x", rms(X, W, main_grad=X[1]), AliasError, "alias of x"),
    ("main_grad is of residual", rms(X, W, residual=R, main_grad=R[1]), AliasError, "of residual"),
    ("main_grad is the bias", layer(X, W, R[0], main_grad=R[0]), AliasError, "alias of bias"),
    (
        "bias_main_grad is of residual",
        layer(X, W, t(D), residual=R, bias_main_grad=R[3]),
        AliasError,
        "bias_main_grad: expected .* alias of residual",
    ),
    (
        "main_grad requires a gradient",
        rms(X, W, main_grad=t(D).requires_grad_()),
        ArgumentValueError,
        "main_grad: expected requires_grad=False",
    ),
    (
        "bias_main_grad without a bias",
        layer(X, W, bias_main_grad=t(D)),
        ArgumentTypeError,
        "bias_main_grad: expected None, as there is no bias",
    ),
    (
        "bias_main_grad's shape",
        layer(X, W, t(D), bias_main_grad=t(D, D)),
        ShapeError,
        "bias_main_grad: expected shape",
    ),
    (
        "bias_main_grad is the bias",
        layer(X, W, W, bias_main_grad=W),
        AliasError,
        "alias of",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "text"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_bad_inputs_name_what_is_wrong(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_meta_tensors_pass_the_checks():
    y, h = ck.rms_norm(meta(4, D), meta(D), residual=meta(4, D))
    assert y.shape == h.shape == (4, D) and y.device.type == "meta"
