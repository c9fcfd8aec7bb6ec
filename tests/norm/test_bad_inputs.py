"""Bad inputs, in one table: each names the argument, what was expected and what came."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
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
TABLE = {
    ArgumentTypeError: [
        (rms(X, W, True), "eps: expected a number, got bool"),
        (rms(X, (D,), W), "there is no normalized_shape: the last"),
        (layer(X, [D], W, W), "weight: expected .*normalized"),
        (
            layer(X, normalized_shape=(D,)),
            "normalized_shape: expected no normalized_shape .*in layer_norm, got",
        ),
        (rms(X, W, epsilon=1e-6), "epsilon: expected an arg"),
        (rms(X, None, main_grad=t(D)), "no weight"),
        (layer(X, W, bias_main_grad=t(D)), "bias_main_grad: expected None, as there is no bias"),
    ],
    DtypeError: [
        (rms(X, W, residual=t(4, D, dtype=torch.bfloat16)), "residual"),
    ],
    ShapeError: [
        (rms(t(), W), "x: expected at least 1 dimension"),
        (rms(t(4, 0), None), "from 1 to 65536"),
        (rms(meta(1, 65537), None), "from 1 to 65536"),
        (rms(X, t(D + 1)), r"weight: expected shape \[16\]"),
        (layer(X, W, t(D - 1)), r"bias: expected shape \[16\]"),
        (rms(X, W, residual=t(D)), r"residual: expected shape \[4, 16"),
        (layer(X, W, t(D), bias_main_grad=t(D, D)), "bias_main_grad: expected shape"),
    ],
    ArgumentValueError: [
        (rms(X, W, float("nan")), "eps: expected a number of at most"),
        (rms(X, W, -1e-6), "eps: expected at least 2"),
        (layer(X, W, None, 0.0), "eps: expected at least"),
        (rms(X, W, offset=float("inf")), "offset: expected a number of"),
    ],
    AliasError: [
        (rms(X, W, main_grad=X[1]), "alias of x"),
        (rms(X, W, residual=R, main_grad=R[1]), "of residual"),
        (layer(X, W, R[0], main_grad=R[0]), "alias of bias"),
        (
            layer(X, W, t(D), residual=R, bias_main_grad=R[3]),
            "bias_main_grad: expected .* alias of residual",
        ),
        (layer(X, W, W, bias_main_grad=W), "alias of"),
    ],
}


ROWS = [(error, *row) for error, rows in TABLE.items() for row in rows]


@pytest.mark.parametrize(("error", "call", "text"), ROWS, ids=[text for *_, text in ROWS])
def test_bad_inputs_name_what_is_wrong(error, call, text):
    with pytest.raises(error, match=text):
        call()
