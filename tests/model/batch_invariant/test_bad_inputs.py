"""Bad inputs: what is wrong with the mode's own arguments, and with calls of covered ops.

Every row is (what is wrong, a call in the mode, the exception, fragments of its message).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels import errors
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BatchVariantError,
    DeviceError,
    DtypeError,
    ShapeError,
)

BF16, FP32 = torch.bfloat16, torch.float32


def t(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def enter(strict: object):
    def call():
        with ck.batch_invariant(strict=strict):
            pass

    return call


IDS = torch.tensor([0, 9])
CASES = [
    # the mode's own arguments
    ("strict None", enter(None), ArgumentTypeError, ["strict", "True or False", "NoneType"]),
    ("strict 1", enter(1), ArgumentTypeError, ["strict", "True or False", "int"]),
    ("strict text", enter("yes"), ArgumentTypeError, ["strict", "str"]),
    (
        "enable, strict 0",
        lambda: ck.enable_batch_invariant(strict=0),
        ArgumentTypeError,
        ["strict", "int"],
    ),
    # products
    ("linear, K", lambda: F.linear(t(3, 7), t(4, 8)), ShapeError, ["x", "8", "[3, 7]"]),
    (
        "linear, dtype",
        lambda: F.linear(t(3, 8), t(4, 8).float()),
        DtypeError,
        ["weight", "float32"],
    ),
    ("linear, bias", lambda: F.linear(t(3, 8), t(4, 8), t(5)), ShapeError, ["bias", "[4]", "[5]"]),
    ("linear, device", lambda: F.linear(t(3, 8), t(4, 8, device="meta")), DeviceError, ["weight"]),
    ("mm, inner", lambda: torch.mm(t(3, 8), t(7, 4)), ShapeError, ["b", "8 rows", "[7, 4]"]),
    ("mm, rank", lambda: torch.mm(t(3, 8), t(2, 8, 4)), ShapeError, ["b", "2 dimensions"]),
    ("mm, dtype", lambda: torch.mm(t(3, 8), t(8, 4).half()), DtypeError, ["b", "float16"]),
    ("matmul, inner", lambda: t(3, 8) @ t(9, 4), ShapeError, ["b", "8 rows", "[9, 4]"]),
    ("mv, inner", lambda: torch.mv(t(3, 8), t(7)), ShapeError, ["b", "8 rows"]),
    ("dot, lengths", lambda: torch.dot(t(8), t(7)), ShapeError, ["b", "8 rows"]),
    ("addmm, inner", lambda: torch.addmm(t(3, 4), t(3, 8), t(7, 4)), ShapeError, ["b", "8 rows"]),
    (
        "addmm, input",
        lambda: torch.addmm(t(2, 4), t(3, 8), t(8, 4)),
        ShapeError,
        ["input", "[3, 4]", "[2, 4]"],
    ),
    (
        "addmm, input's rank",
        lambda: torch.addmm(t(1, 3, 4), t(3, 8), t(8, 4)),
        ShapeError,
        ["input", "[3, 4]", "[1, 3, 4]"],
    ),
    (
        "addmm, input's dtype",
        lambda: torch.addmm(t(3, 4).float(), t(3, 8), t(8, 4), beta=2),
        DtypeError,
        ["input", "bfloat16", "float32"],
    ),
    ("bmm, rank", lambda: torch.bmm(t(3, 8), t(2, 8, 4)), ShapeError, ["a", "3 dimensions"]),
    ("bmm, batch", lambda: torch.bmm(t(3, 2, 8), t(2, 8, 4)), ShapeError, ["b", "[3, 8, N]"]),
    ("bmm, inner", lambda: torch.bmm(t(2, 2, 8), t(2, 7, 4)), ShapeError, ["b", "[2, 8, N]"]),
    (
        "bmm, dtype",
        lambda: torch.bmm(t(2, 2, 8), t(2, 8, 4).half()),
        DtypeError,
        ["b", "bfloat16", "float16"],
    ),
    (
        "baddbmm, input",
        lambda: torch.baddbmm(t(3, 2, 4), t(2, 2, 8), t(2, 8, 4)),
        ShapeError,
        ["input", "[2, 2, 4]", "[3, 2, 4]"],
    ),
    # rows
    (
        "layer_norm, eps",
        lambda: F.layer_norm(t(3, 8), (8,), eps=0.0),
        ArgumentValueError,
        ["eps", "2^-126", "0.0"],
    ),
    (
        "rms_norm, eps",
        lambda: F.rms_norm(t(3, 8), (8,), eps=-1.0),
        ArgumentValueError,
        ["eps", "-1.0"],
    ),
    (
        "embedding, ids",
        lambda: F.embedding(IDS, t(9, 4)),
        ArgumentValueError,
        ["ids", "0 to 8", "9"],
    ),
    # what strict refuses says what to do
    (
        "softplus",
        lambda: F.softplus(t(3)),
        BatchVariantError,
        ["aten.softplus on cpu", "strict=True", "scalar tail", "float64"],
    ),
    (
        "float64",
        lambda: F.silu(t(3, dtype=torch.float64)),
        BatchVariantError,
        ["aten.silu", "torch.float64 is not covered", "torch.bfloat16"],
    ),
    (
        "conv1d",
        lambda: F.conv1d(t(1, 2, 8), t(3, 2, 3)),
        BatchVariantError,
        ["aten.convolution", "unfold"],
    ),
]


@pytest.mark.parametrize(("label", "call", "error", "fragments"), CASES, ids=lambda v: str(v)[:24])
def test_bad_input(label, call, error, fragments):
    with pytest.raises(error) as caught, ck.batch_invariant(strict=True):
        call()
    message = str(caught.value)
    assert isinstance(caught.value, errors.CuteKernelsError)
    assert all(fragment in message for fragment in fragments), message


def attend(dtype: torch.dtype = BF16, both: bool = False):
    """Attention with a mask of a wrong shape; ``both``: with a mask and is_causal."""
    q = t(1, 2, 5, 24, dtype=dtype)
    mask = t(5, 5 if both else 4, dtype=torch.bool)
    return lambda: F.scaled_dot_product_attention(q, q, q, mask, is_causal=both)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: F.layer_norm(t(3, 8), (7,)), "normalized_shape"),
        (lambda: t(3, 8).sum(2), "out of range"),
        (lambda: t(3, 8).mean((0, 0)), "multiple times"),
        (lambda: F.softmax(t(3, 8), 5), "out of range"),
        (lambda: torch.mv(t(3, 8), t(8, 2)), "vector"),
        *((call, "mask") for call in (attend(both=True), attend(FP32, both=True))),
        *((call, "size|expand") for call in (attend(), attend(FP32))),
    ],
)
def test_what_torch_refuses_is_torchs_error(call, match):
    """Where a call has no meaning that ours could have, the message is torch's."""
    for strict in (False, True):
        with (
            pytest.raises((RuntimeError, IndexError), match=match),
            ck.batch_invariant(strict=strict),
        ):
            call()
