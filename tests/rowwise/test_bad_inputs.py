"""Bad inputs, in one table: each names the argument, what was expected and what came."""

from __future__ import annotations

import math

import pytest
import torch

import cute_kernels as ck
from cute_kernels import errors
from cute_kernels.errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    DtypeError,
    ShapeError,
)
from tests.contract import same_bytes

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def t(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, device=device).to(dtype)


def ids(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def weight() -> torch.Tensor:
    return t(5, 3)


def emb(*args, **options):
    return lambda: ck.embedding(*args, **options)


def soft(*args, **options):
    return lambda: ck.softmax(*args, **options)


def table(*args, **options):
    return lambda: ck.rotary_table(*args, **options)


def turn(q=None, k=None, cos=None, sin=None, **options):
    q = t(2, 4, 3, 8) if q is None else q
    k = t(2, 1, 3, 8) if k is None else k
    cos = t(2, 3, 8) if cos is None else cos
    sin = cos if sin is None else sin
    return lambda: ck.apply_rotary(q, k, cos, sin, **options)


def pos_emb(q=None, cos=None, **options):
    q = t(2, 4, 3, 8) if q is None else q
    cos = t(2, 3, 8) if cos is None else cos
    return lambda: ck.apply_rotary_pos_emb(q, q, cos, cos, **options)


class DTensor(torch.nn.Parameter):
    """Has the name of torch.distributed's, which needs a group to be made."""


def parameter(kind: type = torch.nn.Parameter, **attributes) -> torch.Tensor:
    made = kind(t(4))
    made.grad = t(4)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def elsewhere() -> torch.Tensor:
    made = torch.nn.Parameter(t(4, device="meta"))
    made.grad = t(4, device="meta")
    return made


def sharded_gradient() -> torch.Tensor:
    made = torch.nn.Parameter(t(4))
    made.main_grad = DTensor(t(4))
    return made


def sparse_gradient() -> torch.Tensor:
    layer = torch.nn.Embedding(5, 3, sparse=True)
    layer(ids(1, 2)).sum().backward()
    return layer.weight


def twice() -> list[torch.Tensor]:
    one, other = parameter(), torch.nn.Parameter(t(4))
    other.grad = one.grad
    return [one, other]


def gradient_of_fp64() -> list[torch.Tensor]:
    made = torch.nn.Parameter(t(4, dtype=FP64))
    made.grad = t(4, dtype=FP64)
    return [made]


def clip(parameters, max_norm=1.0, **options):
    return lambda: ck.clip_grad_norm_(parameters, max_norm, **options)


SHARED = torch.zeros(40)

CASES = {
    ArgumentTypeError: [
        (emb(ids(1), weight(), padding_idx=True), "padding_idx|bool"),
        (emb(ids(1), weight(), sparse=True), "sparse|embedding"),
        (soft(t(2, 3), BF16), "dim|an int|dtype"),
        (soft(t(2, 3), out=t(2, 3)), "no out|softmax|out=Tensor"),
        (lambda: ck.silu(t(2), inplace=True), "no inplace|in silu"),
        (lambda: ck.tanh(t(2), input=t(2)), "input|x=|in tanh"),
        (soft(t(2), dtype="float32"), "dtype|str"),
        (table(ids(1), t(4), dtype=None), "dtype|NoneType"),
        (pos_emb(dtype="fp32"), "dtype|str"),
        (clip(3), "parameters|iterable|int"),
        (clip("weight"), "parameters|str"),
        (clip([[1.0]]), "parameters[0]|list"),
        (clip([], None), "max_norm|NoneType"),
        (clip([], norm_type="inf"), "norm_type|str"),
        (clip([], error_if_nonfinite=1), "error_if_nonfinite|int"),
        (clip([], main_grad=None), "main_grad|NoneType"),
        (clip([parameter(), parameter(DTensor)]), "parameters[1]|whole|DTensor"),
        (clip([sharded_gradient()], main_grad=True), "parameters[0].main_grad|DTensor"),
        (clip([], foreach=True), "no foreach|clip_grad_norm_"),
        (clip([parameter(ds_id=3)]), "whole|DeepSpeed"),
        (clip([sparse_gradient()]), "parameters[0]|sparse"),
        (
            clip([parameter(main_grad=[1.0], grad=None)], main_grad=True),
            "parameters[0].main_grad|list",
        ),
    ],
    DtypeError: [
        (soft(t(2), dtype=FP64), "dtype|float64"),
        (lambda: ck.silu_mul(t(2), t(2, dtype=BF16)), "up|bfloat16"),
        (table(ids(1), t(4, dtype=BF16)), "inv_freq|bfloat16"),
        (table(ids(1), t(4), dtype=FP64), "dtype|float64"),
        (turn(k=t(2, 1, 3, 8, dtype=BF16)), "k|float32|bfloat16"),
        (turn(sin=t(2, 3, 8, dtype=BF16)), "sin|bfloat16"),
        (
            pos_emb(q=t(2, 4, 3, 8, dtype=BF16), cos=t(2, 3, 8, dtype=FP16)),
            "cos|bfloat16|float32|float16",
        ),
        (pos_emb(dtype=FP16), "dtype|float32|float16"),
        (clip(gradient_of_fp64()), "parameters[0]|float64"),
    ],
    ArgumentValueError: [
        (emb(ids(1, 5), weight()), "ids|0 to 4|got 5"),
        (emb(ids(-1), weight()), "ids|0 to 4|got -1"),
        (emb(ids(1), weight(), padding_idx=5), "padding_idx|-5 to 4|got 5"),
        (soft(t(2, 3), dim=0), "dim|-1, the last|got 0"),
        (lambda: ck.gelu(t(2), approximate="erf"), "approximate|'none', 'tanh'|'erf'"),
        (lambda: ck.gelu_mul(t(2), t(2), approximate=1), "approximate"),
        (table(ids(1), t(4).requires_grad_()), "inv_freq"),
        (turn(cos=t(2, 3, 8).requires_grad_(), sin=t(2, 3, 8)), "cos|requires_grad"),
        (turn(unsqueeze_dim=3), "unsqueeze_dim|0 to 2"),
        (clip([], -1.0), "max_norm|0 or more|-1.0"),
        (clip([], math.nan), "max_norm|nan"),
        (clip([], norm_type=1.0), "norm_type|2.0 or inf"),
        (clip([parameter(main_grad=t(4))], main_grad=True), "parameters[0]|both"),
    ],
    ShapeError: [
        (emb(ids(1), t(5)), "weight|2 dimensions [V, D]"),
        (soft(t()), "x|at least 1 dimension|scalar"),
        (lambda: ck.silu_mul(t(2, 3), t(3)), "up|[2, 3]|[3]"),
        (table(ids(1), t(4, 1)), "inv_freq|1 dimension [D / 2]"),
        (turn(q=t(3, 8)), "q|3 or 4 dimensions|[3, 8]"),
        (turn(sin=t(2, 3, 6)), "sin|[2, 3, 8]|[2, 3, 6]"),
        (turn(cos=t(2, 3, 10)), "cos|2 to 8|got 10"),
        (turn(cos=t()), "[..., R]"),
        (turn(cos=t(2, 3, 7)), "cos|even|got 7"),
        (turn(cos=t(2, 5, 8)), "q|[2, 1, 5]|[2, 4, 3]"),
        (turn(k=t(3, 1, 3, 8)), "k|[2, 1, 3]|[3, 1, 3]"),
        (pos_emb(q=t(3, 8)), "q|3 or 4 dimensions|[3, 8]"),
        (pos_emb(cos=t(3, 3, 8)), "q|[3, 1, 3]"),
    ],
    DeviceError: [
        (clip([parameter(), elsewhere()]), "parameters[1]|cpu|meta"),
    ],
    AliasError: [
        (
            emb(ids(1), SHARED[:15].view(5, 3), main_grad=SHARED[5:20].view(5, 3)),
            "main_grad|weight",
        ),
        (clip(twice()), "parameters[1]|once"),
    ],
}


ROWS = [(error, *row) for error, rows in CASES.items() for row in rows]


@pytest.mark.parametrize(("kind", "call", "words"), ROWS, ids=[words for *_, words in ROWS])
def test_refused(kind, call, words):
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind and issubclass(kind, errors.CuteKernelsError)
    message = str(caught.value)
    assert all(word in message for word in (*words.split("|"), "expected", "got")), message


def test_the_order_of_torchs_arguments():
    """Where torch takes an argument by position, so does the function of the same name."""
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    for function in (ck.softmax, ck.log_softmax):
        for dim in (-1, 2):
            assert same_bytes(function(x, dim, dtype=BF16), function(x, dtype=BF16))
    grown = x[0, 0, :, None].clone().requires_grad_()
    ck.embedding(ids(1, 3), grown, 3).sum().backward()
    assert grown.grad.flatten().tolist() == [0, 1, 0, 0]
    for norm_type in (2.0, math.inf):
        assert ck.clip_grad_norm_([parameter()], 1.0, norm_type, True) == (
            2 if norm_type == 2 else 1
        )
