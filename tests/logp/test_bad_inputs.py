"""Bad inputs of linear_logp, in one table: each names the argument, what was expected, what came.

Every row is (what is wrong, a call, the exception, fragments of its message).
"""

from __future__ import annotations

import math
import warnings

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
from cute_kernels.logp.config import MAX_VOCAB

T, V, D = 6, 10, 8
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BUFFER = torch.zeros(4 * V * D)
KIND, VALUE = ArgumentTypeError, ArgumentValueError


def t(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, device=device).to(dtype)


def ints(*shape: int, value: int = 1, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


def nested(width: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: "is in prototype stage"
        return torch.nested.nested_tensor([t(3, width), t(2, width)], dtype=BF16)


def inside(offset: int) -> torch.Tensor:
    """A [V, D] fp32 view into one buffer."""
    return BUFFER[offset : offset + V * D].view(V, D)


def h(**options):
    return t(T, D, **options)


def w(**options):
    return t(V, D, **options)


def each(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (T,), value)


def lin(hidden=None, weight=None, target=None, bias=None, **options):
    """A call of which only what is wrong is given."""
    hidden = h() if hidden is None else hidden
    weight = w() if weight is None else weight
    target = ints(T) if target is None else target
    return lambda: ck.linear_logp(hidden, weight, target, bias, **options)


def lin32(*given, **options):
    """The same in fp32."""
    hidden, weight, bias = (*given, *[None] * 3)[:3]
    hidden = h(dtype=FP32) if hidden is None else hidden
    return lin(hidden, w(dtype=FP32) if weight is None else weight, None, bias, **options)


def log(logits=None, target=None, **options):
    logits = t(T, V) if logits is None else logits
    target = ints(T) if target is None else target
    return lambda: ck.log_probs(logits, target, **options)


def none(name: str, call=ck.linear_logp):
    """A call with None in place of an argument that has no default."""
    given = {"hidden": h(), "weight": w(), "target": ints(T)}
    if call is ck.log_probs:
        given = {"logits": t(T, V), "target": ints(T)}
    return lambda: call(**given | {name: None})


CASES = [
    # shapes
    ("D differs", lin(t(T, D + 1)), ShapeError, ["hidden", "[..., 8]", "[6, 9]"]),
    ("D differs, 3-D", lin(t(2, 3, D - 1), None, ints(2, 3)), ShapeError, ["hidden", "[2, 3, 7]"]),
    ("hidden a scalar", lin(t()), ShapeError, ["hidden", "[..., 8]", "[]"]),
    ("weight 1-D", lin(None, t(D)), ShapeError, ["weight", "2 dimensions [V, D]", "[8]"]),
    ("weight 3-D", lin(None, t(1, V, D)), ShapeError, ["weight", "2 dimensions", "[1, 10, 8]"]),
    ("weight transposed", lin(None, t(D, V)), ShapeError, ["hidden", "[..., 10]", "[8, 10]"]),
    ("V = 0", lin(None, t(0, D)), ShapeError, ["weight", "at least 1 row", "[0, 8]"]),
    ("D = 0", lin(t(T, 0), t(V, 0)), ShapeError, ["weight", "1 column", "[10, 0]"]),
    ("target [T, 1]", lin(target=ints(T, 1)), ShapeError, ["target", "[6]", "hidden", "[6, 1]"]),
    ("target too short", lin(target=ints(T - 1)), ShapeError, ["target", "[6]", "[5]"]),
    ("target flat", lin(t(2, 3, D), None, ints(6)), ShapeError, ["target", "[2, 3]", "[6]"]),
    ("bias [V+1]", lin(bias=t(V + 1)), ShapeError, ["bias", "[10]", "[11]"]),
    ("bias [1, V]", lin(bias=t(1, V)), ShapeError, ["bias", "the V of weight", "[1, 10]"]),
    ("bias a scalar", lin(bias=t()), ShapeError, ["bias", "[10]", "[]"]),
    ("temperature [1]", lin(temperature=each(1.0, 1)), ShapeError, ["temperature", "[6]", "[1]"]),
    ("temperature 0-D", lin(temperature=torch.tensor(1.0)), ShapeError, ["temperature", "[]"]),
    ("temperature 2-D", lin(temperature=each(1.0, T, 1)), ShapeError, ["temperature", "[6, 1]"]),
    ("logits a scalar", log(t()), ShapeError, ["logits", "at least 1 dimension", "[]"]),
    ("logits of nothing", log(t(T, 0)), ShapeError, ["logits", "the last of at least 1", "[6, 0]"]),
    ("logits' target", log(target=ints(V)), ShapeError, ["target", "logits", "[10]"]),
    # dtypes
    ("fp64", lin(h(dtype=torch.float64)), DtypeError, ["hidden", "torch.float64"]),
    ("hidden int", lin(h(dtype=torch.int64)), DtypeError, ["hidden", "torch.int64"]),
    ("hidden fp8", lin(h(dtype=torch.float8_e4m3fn)), DtypeError, ["hidden", "float8_e4m3fn"]),
    ("hidden complex", lin(h(dtype=torch.complex64)), DtypeError, ["hidden", "complex64"]),
    ("weight bool", lin(None, w(dtype=torch.bool)), DtypeError, ["weight", "torch.bool"]),
    ("fp16 weight", lin(None, w(dtype=FP16)), DtypeError, ["weight", "bfloat16", "float16"]),
    ("fp32 weight", lin(None, w(dtype=FP32)), DtypeError, ["weight", "the dtype of hidden"]),
    ("fp32 bias", lin(bias=t(V, dtype=FP32)), DtypeError, ["bias", "bfloat16", "float32"]),
    ("int bias", lin(bias=ints(V)), DtypeError, ["bias", "torch.int64"]),
    ("float target", lin(target=t(T, dtype=FP32)), DtypeError, ["target", "int64 or int32"]),
    ("bool target", lin(target=ints(T).bool()), DtypeError, ["target", "torch.bool"]),
    ("int16 target", lin(target=ints(T).short()), DtypeError, ["target", "torch.int16"]),
    ("uint8 target", log(target=ints(T).byte()), DtypeError, ["target", "torch.uint8"]),
    ("int temperatures", lin(temperature=ints(T)), DtypeError, ["temperature", "int64"]),
    ("fp64 temperatures", lin(temperature=each(1.0).double()), DtypeError, ["temperature", "64"]),
    ("fp64 logits", log(t(T, V).double()), DtypeError, ["logits", "float64"]),
    # types
    ("hidden a list", lin([[1.0] * D] * T), KIND, ["hidden", "torch.Tensor", "list"]),
    ("hidden None", none("hidden"), KIND, ["hidden", "NoneType"]),
    ("weight None", none("weight"), KIND, ["weight", "NoneType"]),
    ("weight a module", lin(None, torch.nn.Linear(D, V)), KIND, ["weight", "Linear"]),
    ("target None", none("target"), KIND, ["target", "torch.Tensor", "NoneType"]),
    ("target a list", lin(target=[1] * T), KIND, ["target", "list"]),
    ("target a number", log(target=3), KIND, ["target", "int"]),
    ("bias 0.0", lin(bias=0.0), KIND, ["bias", "float"]),
    ("logits None", none("logits", ck.log_probs), KIND, ["logits", "NoneType"]),
    ("hidden sparse", lin(h(dtype=FP32).to_sparse()), KIND, ["hidden", "dense", "sparse_coo"]),
    ("weight sparse", lin(None, w().to_sparse()), KIND, ["weight", "dense"]),
    ("target sparse", lin(target=ints(T).to_sparse()), KIND, ["target", "dense"]),
    ("temperature sparse", lin(temperature=each(1.0).to_sparse()), KIND, ["temperature", "dense"]),
    ("hidden nested", lin(nested(D)), KIND, ["hidden", "a nested tensor"]),
    ("temperature None", lin(temperature=None), KIND, ["temperature", "a number", "NoneType"]),
    ("temperature True", lin(temperature=True), KIND, ["temperature", "bool"]),
    ("temperature a string", lin(temperature="1"), KIND, ["temperature", "str"]),
    ("softcap None", lin(softcap=None), KIND, ["softcap", "0 for none", "NoneType"]),
    ("softcap a tensor", lin(softcap=torch.tensor(3.0)), KIND, ["softcap", "Tensor"]),
    ("ignore_index None", lin(ignore_index=None), KIND, ["ignore_index", "an int", "NoneType"]),
    ("ignore_index -1.0", lin(ignore_index=-1.0), KIND, ["ignore_index", "float"]),
    ("return_entropy 1", lin(return_entropy=1), KIND, ["return_entropy", "True or False", "int"]),
    ("return_entropy None", log(return_entropy=None), KIND, ["return_entropy", "NoneType"]),
    ("vocab_size 8.0", lin(vocab_size=8.0), KIND, ["vocab_size", "an int, or None", "float"]),
    ("vocab_size True", log(vocab_size=True), KIND, ["vocab_size", "bool"]),
    ("vocab_start None", lin(vocab_start=None), KIND, ["vocab_start", "NoneType"]),
    ("main_grad True", lin(main_grad=True), KIND, ["main_grad", "torch.Tensor", "bool"]),
    # values
    ("target V", lin(target=ints(T, value=V)), VALUE, ["target", "0 to 9", "(-100)", "got 10"]),
    ("target -1", lin(target=ints(T, value=-1)), VALUE, ["target", "0 to 9", "got -1"]),
    (
        "-100 is not ignored",
        lin(target=ints(T, value=-100), ignore_index=-1),
        VALUE,
        ["target", "ignore_index (-1)", "got -100"],
    ),
    (
        "a target of padding",
        lin(target=ints(T, value=8), vocab_size=8),
        VALUE,
        ["target", "0 to 7", "got 8"],
    ),
    ("log_probs' target", log(target=ints(T, value=V)), VALUE, ["target", "0 to 9", "got 10"]),
    (
        "int32 target",
        log(target=ints(T, value=-7, dtype=torch.int32)),
        VALUE,
        ["target", "got -7"],
    ),
    ("order tre", lin(order="tre"), VALUE, ["order", "'chain'", "'tree'", "'tre'"]),
    ("order None", lin(order=None), VALUE, ["order", "None"]),
    ("order a list", lin(order=["chain"]), VALUE, ["order", "'chain'"]),
    ("temperature 0", lin(temperature=0), VALUE, ["temperature", "2^-100", "got 0"]),
    ("temperature -1", lin(temperature=-1.0), VALUE, ["temperature", "got -1.0"]),
    ("temperature nan", lin(temperature=math.nan), VALUE, ["temperature", "got nan"]),
    ("temperature inf", log(temperature=math.inf), VALUE, ["temperature", "2^100", "got inf"]),
    ("temperature tiny", lin(temperature=1e-39), VALUE, ["temperature", "2^-100", "1e-39"]),
    ("temperature huge", lin(temperature=10**400), VALUE, ["temperature", "2^100", "1000"]),
    ("temperatures 0", lin(temperature=each(0.0)), VALUE, ["temperature", "values of", "got 0.0"]),
    ("temperatures nan", lin(temperature=each(math.nan)), VALUE, ["temperature", "got nan"]),
    ("temperatures inf", log(temperature=each(math.inf)), VALUE, ["temperature", "got inf"]),
    (
        "temperature's gradient",
        lin(temperature=each(1.0).requires_grad_()),
        VALUE,
        ["temperature", "requires_grad=False"],
    ),
    ("softcap -1", lin(softcap=-1.0), VALUE, ["softcap", "0 (none)", "got -1.0"]),
    ("softcap 1025", lin(softcap=1025.0), VALUE, ["softcap", "to 1024", "got 1025.0"]),
    ("softcap 1e8 of logits", log(softcap=1e8), VALUE, ["softcap", "to 1024"]),
    ("softcap nan", lin(softcap=math.nan), VALUE, ["softcap", "got nan"]),
    ("softcap inf", log(softcap=math.inf), VALUE, ["softcap", "got inf"]),
    ("ignore_index 2^63", lin(ignore_index=2**63), VALUE, ["ignore_index", "64 bits", "922337"]),
    ("vocab_size 0", lin(vocab_size=0), VALUE, ["vocab_size", f"1 to {MAX_VOCAB}", "got 0"]),
    ("vocab_size -5", log(vocab_size=-5), VALUE, ["vocab_size", "got -5"]),
    ("vocab_size 11", lin(vocab_size=V + 1), VALUE, ["vocab_size", "at most 10", "a group", "11"]),
    ("log_probs' size", log(vocab_size=V + 1), VALUE, ["vocab_size", "at most 10", "got 11"]),
    (
        "too many entries",
        lin(t(T, D, device="meta"), t(MAX_VOCAB + 1, D, device="meta"), ints(T).to("meta")),
        VALUE,
        ["vocab_size", f"1 to {MAX_VOCAB}", str(MAX_VOCAB + 1)],
    ),
    ("vocab_start 16", lin(vocab_start=16), VALUE, ["vocab_start", "0 without a group", "16"]),
    ("vocab_start 8", lin(vocab_start=8), VALUE, ["vocab_start", "multiple of 16", "got 8"]),
    ("vocab_start -16", lin(vocab_start=-16), VALUE, ["vocab_start", "0 or more", "-16"]),
    ("no group at all", lin(group=4), VALUE, ["group", "init_process_group", "int"]),
    # main_grad
    (
        "main_grad [D, V]",
        lin(main_grad=t(D, V, dtype=FP32)),
        ShapeError,
        ["main_grad", "[10, 8]", "[8, 10]"],
    ),
    ("main_grad bf16", lin(main_grad=w()), DtypeError, ["main_grad", "float32", "bfloat16"]),
    (
        "main_grad's gradient",
        lin(main_grad=w(dtype=FP32).requires_grad_()),
        VALUE,
        ["main_grad", "requires_grad=False"],
    ),
    (
        "main_grad meta",
        lin(main_grad=w(dtype=FP32, device="meta")),
        DeviceError,
        ["main_grad", "cpu of hidden", "meta"],
    ),
    (
        "main_grad expanded",
        lin(main_grad=t(1, D, dtype=FP32).expand(V, D)),
        AliasError,
        ["main_grad", "distinct addresses"],
    ),
    (
        "main_grad negated",
        lin(main_grad=torch._neg_view(w(dtype=FP32))),
        VALUE,
        ["main_grad", "a negated view"],
    ),
    (
        "main_grad is weight",
        lin32(None, inside(0), main_grad=inside(0)),
        AliasError,
        ["main_grad", "alias of weight"],
    ),
    (
        "main_grad overlaps hidden",
        lin32(BUFFER[: T * D].view(T, D), main_grad=inside(40)),
        AliasError,
        ["main_grad", "alias of hidden"],
    ),
    (
        "main_grad overlaps bias",
        lin32(None, None, BUFFER[:V], main_grad=inside(0)),
        AliasError,
        ["main_grad", "alias of bias"],
    ),
    # devices
    ("weight on meta", lin(None, w(device="meta")), DeviceError, ["weight", "cpu", "meta"]),
    ("hidden on meta", lin(h(device="meta")), DeviceError, ["weight", "meta", "cpu"]),
    ("target on meta", lin(target=ints(T).to("meta")), DeviceError, ["target", "hidden", "meta"]),
    ("bias on meta", lin(bias=t(V, device="meta")), DeviceError, ["bias", "cpu", "meta"]),
    (
        "temperature on meta",
        lin(temperature=each(1.0).to("meta")),
        DeviceError,
        ["temperature", "target", "meta"],
    ),
    ("target of logits", log(target=ints(T).to("meta")), DeviceError, ["target", "logits"]),
    # queries
    ("id on meta", lambda: ck.contract_id("linear_logp", "meta"), BackendUnavailable, ["cpu"]),
]  # fmt: skip


def test_the_table_is_long_enough():
    assert len(CASES) >= 60
    assert len({case[0] for case in CASES}) == len(CASES)


@pytest.mark.parametrize(("label", "call", "error", "fragments"), CASES, ids=lambda v: str(v)[:24])
def test_bad_input(label, call, error, fragments):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, errors.CuteKernelsError)
    assert isinstance(caught.value, ValueError | TypeError | RuntimeError)
    assert all(fragment in message for fragment in fragments), message


def test_an_alias_under_autocast_is_named_as_the_argument_is():
    hidden = BUFFER[: T * D].view(T, D)
    with torch.autocast("cpu", BF16), pytest.raises(AliasError, match="alias of hidden"):
        ck.linear_logp(hidden, w(dtype=FP32), ints(T), main_grad=inside(40))


def test_a_masked_target_is_not_looked_at_and_others_are():
    target = ints(T, value=-100)
    assert not ck.linear_logp(h(), w(), target).any()
    target[3] = V
    with pytest.raises(ArgumentValueError, match="got 10"):
        ck.linear_logp(h(), w(), target)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_devices_without_a_backend_are_refused(device, monkeypatch):
    """No such device is here, so the check is told of one."""
    from cute_kernels.runtime import checking

    with pytest.raises(BackendUnavailable, match=f"no backend for {device}"):
        checking.supported("linear_logp", torch.device(device))


def test_a_forced_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "cute_sm90")
    for call in (lin(), log()):
        with pytest.raises(BackendUnavailable):
            call()


def test_nothing_is_written_by_a_refused_call():
    state, weight = torch.ones(V, D), w(dtype=FP32).requires_grad_()
    with pytest.raises(ArgumentValueError):
        ck.linear_logp(h(dtype=FP32), weight, ints(T, value=99), main_grad=state)
    assert (state == 1).all() and weight.grad is None
