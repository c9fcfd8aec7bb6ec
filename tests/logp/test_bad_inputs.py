"""Bad inputs of linear_logp: each names the argument, what was expected, and what came."""

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
    DtypeError,
    ShapeError,
)
from cute_kernels.logp.config import MAX_VOCAB
from cute_kernels.runtime import checking

T, V, D = 6, 10, 8
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BUFFER = torch.zeros(4 * V * D)
KIND, VALUE = ArgumentTypeError, ArgumentValueError


def t(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, device=device).to(dtype)


def ints(*shape: int, value: int = 1, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


def inside(offset: int, *shape: int) -> torch.Tensor:
    """An fp32 view into one buffer, [V, D] by default."""
    shape = shape or (V, D)
    return BUFFER[offset : offset + math.prod(shape)].view(shape)


def w(**options):
    return t(V, D, **options)


def each(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (T,), value)


def lin(hidden=..., weight=..., target=..., bias=None, dtype=BF16, **options):
    """A call of which only what is wrong is given."""
    hidden = t(T, D, dtype=dtype) if hidden is ... else hidden
    weight = w(dtype=dtype) if weight is ... else weight
    target = ints(T) if target is ... else target
    return lambda: ck.linear_logp(hidden, weight, target, bias, **options)


def log(logits=..., target=..., **options):
    logits = t(T, V) if logits is ... else logits
    target = ints(T) if target is ... else target
    return lambda: ck.log_probs(logits, target, **options)


def into(main_grad, **options):
    return lin(main_grad=main_grad, **options)


#: (A call, the exception, fragments of its message.)
CASES = [
    # shapes
    (lin(t(T, D + 1)), ShapeError, ["hidden", "[..., 8]", "[6, 9]"]),
    (lin(t()), ShapeError, ["hidden", "[..., 8]", "[]"]),
    (lin(weight=t(D)), ShapeError, ["weight", "2 dimensions [V, D]", "[8]"]),
    (lin(weight=t(0, D)), ShapeError, ["weight", "at least 1 row", "[0, 8]"]),
    (lin(t(T, 0), t(V, 0)), ShapeError, ["weight", "1 column", "[10, 0]"]),
    (lin(target=ints(T, 1)), ShapeError, ["target", "[6]", "hidden", "[6, 1]"]),
    (lin(bias=t(V + 1)), ShapeError, ["bias", "[10]", "the V of weight", "[11]"]),
    (lin(temperature=each(1.0, 1)), ShapeError, ["temperature", "[6]", "[1]"]),
    (log(t()), ShapeError, ["logits", "at least 1 dimension", "[]"]),
    (log(t(T, 0)), ShapeError, ["logits", "the last of at least 1", "[6, 0]"]),
    (log(target=ints(V)), ShapeError, ["target", "logits", "[10]"]),
    # dtypes
    (lin(weight=w(dtype=FP16)), DtypeError, ["weight", "the dtype of hidden", "float16"]),
    (log(target=ints(T).bool()), DtypeError, ["target", "torch.bool"]),
    (lin(temperature=ints(T)), DtypeError, ["temperature", "int64"]),
    # types
    (lin(target=None), KIND, ["target", "torch.Tensor", "NoneType"]),
    (log(None), KIND, ["logits", "NoneType"]),
    (lin(temperature=None), KIND, ["temperature", "a number", "NoneType"]),
    (lin(temperature=True), KIND, ["temperature", "bool"]),
    (lin(softcap=torch.tensor(3.0)), KIND, ["softcap", "0 for none", "Tensor"]),
    (lin(vocab_size=8.0), KIND, ["vocab_size", "an int, or None", "float"]),
    (log(vocab_size=True), KIND, ["vocab_size", "bool"]),
    (lin(vocab_start=None), KIND, ["vocab_start", "NoneType"]),
    # values
    (lin(target=ints(T, value=V)), VALUE, ["target", "0 to 9", "(-100)", "got 10"]),
    (lin(target=ints(T, value=-100), ignore_index=-1), VALUE, ["target", "(-1)", "got -100"]),
    (lin(target=ints(T, value=8), vocab_size=8), VALUE, ["target", "0 to 7", "got 8"]),
    (log(target=ints(T, value=-7, dtype=torch.int32)), VALUE, ["target", "got -7"]),
    (lin(order="tre"), VALUE, ["order", "'chain'", "'tree'", "'tre'"]),
    (lin(order=["chain"]), VALUE, ["order", "'chain'"]),
    (lin(temperature=0), VALUE, ["temperature", "2^-100", "got 0"]),
    (lin(temperature=math.nan), VALUE, ["temperature", "got nan"]),
    (log(temperature=math.inf), VALUE, ["temperature", "2^100", "got inf"]),
    (lin(temperature=10**400), VALUE, ["temperature", "2^100", "1000"]),
    (lin(temperature=each(0.0)), VALUE, ["temperature", "values of", "got 0.0"]),
    (log(temperature=each(math.nan)), VALUE, ["temperature", "got nan"]),
    (lin(temperature=each(1.0).requires_grad_()), VALUE, ["temperature", "requires_grad=False"]),
    (lin(softcap=-1.0), VALUE, ["softcap", "0 (none)", "got -1.0"]),
    (log(softcap=1025.0), VALUE, ["softcap", "to 1024", "got 1025.0"]),
    (lin(softcap=math.nan), VALUE, ["softcap", "got nan"]),
    (lin(ignore_index=2**63), VALUE, ["ignore_index", "64 bits", "922337"]),
    (log(vocab_size=-5), VALUE, ["vocab_size", f"1 to {MAX_VOCAB}", "got -5"]),
    (lin(vocab_size=V + 1), VALUE, ["vocab_size", "at most 10", "a group", "11"]),
    (
        lin(t(T, D, device="meta"), t(MAX_VOCAB + 1, D, device="meta"), ints(T).to("meta")),
        VALUE,
        ["vocab_size", f"1 to {MAX_VOCAB}", str(MAX_VOCAB + 1)],
    ),
    (lin(vocab_start=16), VALUE, ["vocab_start", "0 without a group", "16"]),
    (lin(vocab_start=8), VALUE, ["vocab_start", "multiple of 16", "got 8"]),
    (lin(vocab_start=-16), VALUE, ["vocab_start", "0 or more", "-16"]),
    (lin(logits_memory=-1), VALUE, ["logits_memory", "0 or more bytes", "got -1"]),
    (lin(logits_memory=2**63), VALUE, ["logits_memory", "below 2^63"]),
    (lin(logits_memory=1.5), KIND, ["logits_memory", "an int of bytes", "float"]),
    (lin(group=4), VALUE, ["group", "init_process_group", "int"]),
    # main_grad
    (into(inside(40), hidden=inside(0, T, D), dtype=FP32), AliasError, ["main_grad", "of hidden"]),
    (into(inside(0), bias=inside(0, V), dtype=FP32), AliasError, ["main_grad", "of bias"]),
    # queries
    (lambda: ck.contract_id("linear_logp", "meta"), BackendUnavailable, ["cpu"]),
    (lambda: checking.supported("log_probs", torch.device("mps")), BackendUnavailable, ["mps"]),
]


def label(value) -> str:
    return " ".join(value) if isinstance(value, list) else value.__name__


@pytest.mark.parametrize(("call", "error", "fragments"), CASES, ids=label)
def test_bad_input(call, error, fragments):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, errors.CuteKernelsError)
    assert isinstance(caught.value, ValueError | TypeError | RuntimeError)
    assert all(fragment in message for fragment in fragments), message


def test_an_alias_under_autocast_is_named_as_the_argument_is():
    with torch.autocast("cpu", BF16), pytest.raises(AliasError, match="alias of hidden"):
        ck.linear_logp(inside(0, T, D), w(dtype=FP32), ints(T), main_grad=inside(40))


def test_a_masked_target_is_not_looked_at_and_a_refused_call_writes_nothing():
    target, state = ints(T, value=-100), torch.ones(V, D)
    assert not lin(target=target)().any()
    target[3], weight = V, w(dtype=FP32).requires_grad_()
    with pytest.raises(ArgumentValueError, match="got 10"):
        ck.linear_logp(t(T, D, dtype=FP32), weight, target, main_grad=state)
    assert (state == 1).all() and weight.grad is None
