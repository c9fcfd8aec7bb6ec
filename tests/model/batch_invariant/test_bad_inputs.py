"""Bad inputs: what is wrong with the mode's own arguments, and with calls of covered ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from tests.model.refusals import raises

BF16, FP32 = torch.bfloat16, torch.float32


def t(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


#: (a call in the mode, what is said).
CASES = [
    (
        lambda: ck.batch_invariant(strict=None).__enter__(),
        "ArgumentTypeError ... strict ... True or False ... NoneType",
    ),
    (lambda: ck.enable_batch_invariant(strict=0), "ArgumentTypeError ... strict ... int"),
    # products
    (lambda: F.linear(t(3, 7), t(4, 8)), "ShapeError ... x ... 8 ... [3, 7]"),
    (lambda: F.linear(t(3, 8), t(4, 8).float()), "DtypeError ... weight ... float32"),
    (lambda: F.linear(t(3, 8), t(4, 8), t(5)), "ShapeError ... bias ... [4] ... [5]"),
    (lambda: F.linear(t(3, 8), t(4, 8, device="meta")), "DeviceError ... weight"),
    (lambda: torch.mm(t(3, 8), t(7, 4)), "ShapeError ... b ... 8 rows ... [7, 4]"),
    (lambda: torch.mm(t(3, 8), t(2, 8, 4)), "ShapeError ... b ... 2 dimensions"),
    (lambda: torch.mm(t(3, 8), t(8, 4).half()), "DtypeError ... b ... float16"),
    (lambda: torch.mv(t(3, 8), t(7)), "ShapeError ... b ... 8 rows"),
    (lambda: torch.dot(t(8), t(7)), "ShapeError ... b ... 8 rows"),
    (lambda: torch.addmm(t(3, 4), t(3, 8), t(7, 4)), "ShapeError ... b ... 8 rows"),
    (lambda: torch.addmm(t(2, 4), t(3, 8), t(8, 4)), "ShapeError ... input ... [3, 4] ... [2, 4]"),
    (lambda: torch.addmm(t(1, 3, 4), t(3, 8), t(8, 4)), "ShapeError ... input ... [1, 3, 4]"),
    (
        lambda: torch.addmm(t(3, 4).float(), t(3, 8), t(8, 4), beta=2),
        "DtypeError ... input ... bfloat16 ... float32",
    ),
    (lambda: torch.bmm(t(3, 8), t(2, 8, 4)), "ShapeError ... a ... 3 dimensions"),
    (lambda: torch.bmm(t(3, 2, 8), t(2, 8, 4)), "ShapeError ... b ... [3, 8, N]"),
    (lambda: torch.bmm(t(2, 2, 8), t(2, 7, 4)), "ShapeError ... b ... [2, 8, N]"),
    (lambda: torch.bmm(t(2, 2, 8), t(2, 8, 4).half()), "DtypeError ... b ... bfloat16 ... float16"),
    (
        lambda: torch.baddbmm(t(3, 2, 4), t(2, 2, 8), t(2, 8, 4)),
        "ShapeError ... input ... [2, 2, 4] ... [3, 2, 4]",
    ),
    # rows
    (lambda: F.layer_norm(t(3, 8), (8,), eps=0.0), "ArgumentValueError ... eps ... 2^-126 ... 0.0"),
    (lambda: F.rms_norm(t(3, 8), (8,), eps=-1.0), "ArgumentValueError ... eps ... -1.0"),
    (
        lambda: F.embedding(torch.tensor([0, 9]), t(9, 4)),
        "ArgumentValueError ... ids ... 0 to 8 ... 9",
    ),
    # what strict refuses says what to do
    (
        lambda: F.softplus(t(3)),
        "BatchVariantError ... aten.softplus on cpu ... strict=True ... scalar tail ... float64",
    ),
    (
        lambda: F.silu(t(3, dtype=torch.float64)),
        "BatchVariantError ... aten.silu ... torch.float64 is not covered ... torch.bfloat16",
    ),
    (
        lambda: F.conv1d(t(1, 2, 8), t(3, 2, 3)),
        "BatchVariantError ... aten.convolution ... unfold",
    ),
]


@pytest.mark.parametrize(("call", "said"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_input(call, said):
    with raises(said), ck.batch_invariant(strict=True):
        call()


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
@pytest.mark.parametrize("strict", [False, True])
def test_what_torch_refuses_is_torchs_error(call, match, strict):
    """Where a call has no meaning that ours could have, the message is torch's."""
    with pytest.raises((RuntimeError, IndexError), match=match), ck.batch_invariant(strict=strict):
        call()
