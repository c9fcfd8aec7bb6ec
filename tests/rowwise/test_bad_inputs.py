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
    BackendUnavailable,
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

CASES = [
    # embedding
    ("ids a list", emb([1, 2], weight()), ArgumentTypeError, ["ids", "torch.Tensor", "list"]),
    ("ids fp32", emb(t(2), weight()), DtypeError, ["ids", "int64 or int32", "float32"]),
    ("ids int16", emb(ids(1, dtype=torch.int16), weight()), DtypeError, ["ids", "int16"]),
    ("ids too large", emb(ids(1, 5), weight()), ArgumentValueError, ["ids", "0 to 4", "got 5"]),
    ("ids negative", emb(ids(-1), weight()), ArgumentValueError, ["ids", "0 to 4", "got -1"]),
    ("weight 1-D", emb(ids(1), t(5)), ShapeError, ["weight", "2 dimensions [V, D]"]),
    ("weight fp64", emb(ids(1), t(5, 3, dtype=FP64)), DtypeError, ["weight", "float64"]),
    ("weight None", emb(ids(1), None), ArgumentTypeError, ["weight", "NoneType"]),
    ("weight on meta", emb(ids(1), t(5, 3, device="meta")), DeviceError, ["weight", "cpu", "meta"]),
    ("padding 5", emb(ids(1), weight(), padding_idx=5), ArgumentValueError,
        ["padding_idx", "-5 to 4", "got 5"]),
    ("padding -6", emb(ids(1), weight(), padding_idx=-6), ArgumentValueError, ["padding_idx"]),
    ("padding True", emb(ids(1), weight(), padding_idx=True), ArgumentTypeError,
        ["padding_idx", "bool"]),
    ("padding 1.0", emb(ids(1), weight(), padding_idx=1.0), ArgumentTypeError, ["an int", "float"]),
    ("main_grad bf16", emb(ids(1), weight(), main_grad=t(5, 3, dtype=BF16)), DtypeError,
        ["main_grad", "float32", "bfloat16"]),
    ("main_grad shape", emb(ids(1), weight(), main_grad=t(3, 5)), ShapeError,
        ["main_grad", "[5, 3]", "[3, 5]"]),
    ("main_grad requires grad", emb(ids(1), weight(), main_grad=weight().requires_grad_()),
        ArgumentValueError, ["main_grad", "requires_grad"]),
    ("main_grad expanded", emb(ids(1), weight(), main_grad=t(1, 3).expand(5, 3)), AliasError,
        ["main_grad", "distinct addresses"]),
    ("main_grad in weight", emb(ids(1), SHARED[:15].view(5, 3), main_grad=SHARED[5:20].view(5, 3)),
        AliasError, ["main_grad", "weight"]),
    ("sparse", emb(ids(1), weight(), sparse=True), ArgumentTypeError, ["sparse", "embedding"]),
    # softmax
    ("dim 0", soft(t(2, 3), dim=0), ArgumentValueError, ["dim", "-1, the last", "got 0"]),
    ("dim -2", soft(t(2, 3), -2), ArgumentValueError, ["dim", "-1, the last", "got -2"]),
    ("dim a dtype", soft(t(2, 3), BF16), ArgumentTypeError, ["dim", "an int", "dtype"]),
    ("dim of log_softmax", lambda: ck.log_softmax(t(2, 3), dim=0), ArgumentValueError, ["dim"]),
    ("out", soft(t(2, 3), out=t(2, 3)), ArgumentTypeError, ["no out", "softmax", "out=Tensor"]),
    ("inplace", lambda: ck.silu(t(2), inplace=True), ArgumentTypeError, ["no inplace", "in silu"]),
    ("input", lambda: ck.tanh(t(2), input=t(2)), ArgumentTypeError, ["input", "x=", "in tanh"]),
    ("x scalar", soft(t()), ShapeError, ["x", "at least 1 dimension", "scalar"]),
    ("x int", soft(ids(1)), DtypeError, ["x", "int64"]),
    ("x fp64", soft(t(2, dtype=FP64)), DtypeError, ["x", "float64"]),
    ("x sparse", soft(torch.eye(3).to_sparse()), ArgumentTypeError, ["x", "sparse"]),
    ("dtype fp64", soft(t(2), dtype=FP64), DtypeError, ["dtype", "float64"]),
    ("dtype a string", soft(t(2), dtype="float32"), ArgumentTypeError, ["dtype", "str"]),
    ("log_softmax of a list", lambda: ck.log_softmax([1.0]), ArgumentTypeError, ["x", "list"]),
    # activations
    ("silu of None", lambda: ck.silu(None), ArgumentTypeError, ["x", "NoneType"]),
    ("tanh of fp64", lambda: ck.tanh(t(2, dtype=FP64)), DtypeError, ["x", "float64"]),
    ("sigmoid of bool", lambda: ck.sigmoid(torch.ones(2).bool()), DtypeError, ["x", "bool"]),
    ("gelu's form", lambda: ck.gelu(t(2), approximate="erf"), ArgumentValueError,
        ["approximate", "'none', 'tanh'", "'erf'"]),
    ("gelu's form None", lambda: ck.gelu(t(2), approximate=None), ArgumentValueError, ["None"]),
    ("up's shape", lambda: ck.silu_mul(t(2, 3), t(3)), ShapeError, ["up", "[2, 3]", "[3]"]),
    ("up's dtype", lambda: ck.silu_mul(t(2), t(2, dtype=BF16)), DtypeError, ["up", "bfloat16"]),
    ("up's device", lambda: ck.gelu_mul(t(2), t(2, device="meta")), DeviceError, ["up", "meta"]),
    ("gelu_mul's form", lambda: ck.gelu_mul(t(2), t(2), approximate=1), ArgumentValueError,
        ["approximate"]),
    # rotary
    ("positions fp32", table(t(3), t(4)), DtypeError, ["positions", "int64 or int32"]),
    ("inv_freq bf16", table(ids(1), t(4, dtype=BF16)), DtypeError, ["inv_freq", "bfloat16"]),
    ("inv_freq 2-D", table(ids(1), t(4, 1)), ShapeError, ["inv_freq", "1 dimension [D / 2]"]),
    ("inv_freq learnt", table(ids(1), t(4).requires_grad_()), ArgumentValueError, ["inv_freq"]),
    ("scaling None", table(ids(1), t(4), None), ArgumentTypeError, ["scaling", "NoneType"]),
    ("table in fp64", table(ids(1), t(4), dtype=FP64), DtypeError, ["dtype", "float64"]),
    ("table in None", table(ids(1), t(4), dtype=None), ArgumentTypeError, ["dtype", "NoneType"]),
    ("q 2-D", turn(q=t(3, 8)), ShapeError, ["q", "3 or 4 dimensions", "[3, 8]"]),
    ("k 5-D", turn(k=t(1, 2, 1, 3, 8)), ShapeError, ["k", "3 or 4 dimensions"]),
    ("k's dtype", turn(k=t(2, 1, 3, 8, dtype=BF16)), DtypeError, ["k", "float32", "bfloat16"]),
    ("cos of a list", turn(cos=[1.0]), ArgumentTypeError, ["cos", "list"]),
    ("sin's shape", turn(sin=t(2, 3, 6)), ShapeError, ["sin", "[2, 3, 8]", "[2, 3, 6]"]),
    ("sin's dtype", turn(sin=t(2, 3, 8, dtype=BF16)), DtypeError, ["sin", "bfloat16"]),
    ("cos learnt", turn(cos=t(2, 3, 8).requires_grad_(), sin=t(2, 3, 8)), ArgumentValueError,
        ["cos", "requires_grad"]),
    ("cos too wide", turn(cos=t(2, 3, 10)), ShapeError, ["cos", "2 to 8", "got 10"]),
    ("cos a number", turn(cos=t()), ShapeError, ["[..., R]"]),
    ("cos odd", turn(cos=t(2, 3, 7)), ShapeError, ["cos", "even", "got 7"]),
    ("cos of other tokens", turn(cos=t(2, 5, 8)), ShapeError, ["q", "[2, 1, 5]", "[2, 4, 3]"]),
    ("cos of another batch", turn(k=t(3, 1, 3, 8)), ShapeError, ["k", "[2, 1, 3]", "[3, 1, 3]"]),
    ("unsqueeze_dim 3", turn(unsqueeze_dim=3), ArgumentValueError, ["unsqueeze_dim", "0 to 2"]),
    ("unsqueeze_dim -2", turn(unsqueeze_dim=-2), ArgumentValueError, ["unsqueeze_dim", "got -2"]),
    ("unsqueeze_dim None", turn(unsqueeze_dim=None), ArgumentTypeError, ["unsqueeze_dim"]),
    ("pos_emb of a 2-D q", pos_emb(q=t(3, 8)), ShapeError, ["q", "3 or 4 dimensions", "[3, 8]"]),
    ("pos_emb of fp64", pos_emb(q=t(2, 4, 3, 8, dtype=FP64)), DtypeError, ["q", "float64"]),
    ("pos_emb of None", lambda: ck.apply_rotary_pos_emb(None, t(3), t(3), t(3)), ArgumentTypeError,
        ["q", "NoneType"]),
    ("pos_emb of fp16 in bf16", pos_emb(q=t(2, 4, 3, 8, dtype=BF16), cos=t(2, 3, 8, dtype=FP16)),
        DtypeError, ["cos", "bfloat16", "float32", "float16"]),
    ("pos_emb to fp16", pos_emb(dtype=FP16), DtypeError, ["dtype", "float32", "float16"]),
    ("pos_emb to a string", pos_emb(dtype="fp32"), ArgumentTypeError, ["dtype", "str"]),
    ("pos_emb beyond the batch", pos_emb(cos=t(3, 3, 8)), ShapeError, ["q", "[3, 1, 3]"]),
    ("pos_emb, dim 1.0", pos_emb(unsqueeze_dim=1.0), ArgumentTypeError, ["unsqueeze_dim", "float"]),
    # clip_grad_norm_
    ("parameters a number", clip(3), ArgumentTypeError, ["parameters", "iterable", "int"]),
    ("parameters a string", clip("weight"), ArgumentTypeError, ["parameters", "str"]),
    ("a parameter a list", clip([[1.0]]), ArgumentTypeError, ["parameters[0]", "list"]),
    ("max_norm None", clip([], None), ArgumentTypeError, ["max_norm", "NoneType"]),
    ("max_norm negative", clip([], -1.0), ArgumentValueError, ["max_norm", "0 or more", "-1.0"]),
    ("max_norm NaN", clip([], math.nan), ArgumentValueError, ["max_norm", "nan"]),
    ("norm_type 1", clip([], norm_type=1.0), ArgumentValueError, ["norm_type", "2.0 or inf"]),
    ("norm_type a string", clip([], norm_type="inf"), ArgumentTypeError, ["norm_type", "str"]),
    ("error_if_nonfinite 1", clip([], error_if_nonfinite=1), ArgumentTypeError,
        ["error_if_nonfinite", "int"]),
    ("main_grad None", clip([], main_grad=None), ArgumentTypeError, ["main_grad", "NoneType"]),
    ("DTensor", clip([parameter(), parameter(DTensor)]), ArgumentTypeError,
        ["parameters[1]", "whole", "DTensor"]),
    ("DTensor in main_grad", clip([sharded_gradient()], main_grad=True), ArgumentTypeError,
        ["parameters[0].main_grad", "DTensor"]),
    ("foreach", clip([], foreach=True), ArgumentTypeError, ["no foreach", "clip_grad_norm_"]),
    ("ZeRO-3", clip([parameter(ds_id=3)]), ArgumentTypeError, ["whole", "DeepSpeed"]),
    ("sparse gradient", clip([sparse_gradient()]), ArgumentTypeError, ["parameters[0]", "sparse"]),
    ("gradients on two devices", clip([parameter(), elsewhere()]), DeviceError,
        ["parameters[1]", "cpu", "meta"]),
    ("the same twice", clip(twice()), AliasError, ["parameters[1]", "once"]),
    ("two gradients", clip([parameter(main_grad=t(4))], main_grad=True), ArgumentValueError,
        ["parameters[0]", "both"]),
    ("main_grad a list", clip([parameter(main_grad=[1.0], grad=None)], main_grad=True),
        ArgumentTypeError, ["parameters[0].main_grad", "list"]),
    ("fp64 gradient", clip(gradient_of_fp64()), DtypeError, ["parameters[0]", "float64"]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_refused(case):
    _, call, kind, words = case
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind and issubclass(kind, errors.CuteKernelsError)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "expected" in message and "got" in message


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


def test_there_are_many_and_of_every_op():
    assert len(CASES) >= 60 and len({c[0] for c in CASES}) == len(CASES)


def test_a_device_without_a_backend(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "triton")
    for name, call in (
        ("silu", lambda: ck.silu(t(3))),
        ("softmax", lambda: ck.softmax(t(3))),
        ("embedding", emb(ids(1), weight())),
        ("apply_rotary", turn()),
        ("apply_rotary_pos_emb", pos_emb()),
        ("rotary_table", table(ids(1), t(4))),
        ("clip_grad_norm_", clip([parameter()])),
    ):
        with pytest.raises(BackendUnavailable, match=name):
            call()
