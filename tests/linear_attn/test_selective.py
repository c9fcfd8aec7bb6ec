"""What Mamba's selective scan refuses, and its layouts; test_ssd.py has its values and bytes."""

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
from tests.contract import same_bytes
from tests.runtime.cached_calls import drawn

scan = ck.selective_scan
U, BC, A = drawn(2, 6, 3), drawn(2, 8, 3), -torch.ones(6, 8)
RIGHT = {"u": U, "delta": U.float(), "A": A, "B": BC, "C": BC, "D": torch.ones(6)}
OFFSETS, STATE, MAIN = torch.tensor([0, 2, 3]), torch.zeros(2, 6, 8), torch.zeros(6)
#: Arguments of one sequence of 3 rows.
ONE = {n: t[:1] if t.dim() > 2 else t for n, t in RIGHT.items()}
#: Wrong arguments -> (error, the message's beginning).
REFUSED = {
    "two dimensions": ({"u": U[0]}, ShapeError, "u: expected 3 dimensions [B, D, T]"),
    "no channels": ({"u": U[:, :0]}, ShapeError, "u: expected D, channels,"),
    "steps of a channel": ({"delta": U[:, :1]}, ShapeError, "delta: expected shape [2, 6, 3]"),
    "A in bf16": ({"A": A.bfloat16()}, DtypeError, "A: expected one of torch.float32"),
    "A of heads": ({"A": A[:, 0]}, ShapeError, "A: expected 2 dimensions [D, N]"),
    "A of one channel": ({"A": A[:1]}, ShapeError, "A: expected shape [6, 8], D of u, and N"),
    "a complex A": ({"A": A.to(torch.complex64)}, DtypeError, "A: expected one of torch.float32"),
    "an N of 300": ({"A": -torch.ones(6, 300)}, ShapeError, "A: expected N a multiple of 1"),
    "B of no tokens": ({"B": BC[0, :, :1]}, ShapeError, "B: expected 3 dimensions [B, N, T]"),
    "another N": ({"B": BC[:, :4]}, ShapeError, "B: expected shape [2, 8, 3], B and T of u"),
    "another dtype of B": ({"B": BC.float()}, DtypeError, "B: expected one of torch.bfloat16"),
    "four groups": (
        {n: BC[:, None].repeat(1, 4, 1, 1) for n in "BC"}, ShapeError,
        "B: expected G, groups, a divisor of D = 6",
    ),
    "groups of B": ({"B": BC[:, None]}, ShapeError, "C: expected 4 dimensions [B, G, N, T]"),
    "another C": ({"C": BC[..., :2]}, ShapeError, "C: expected shape [2, 8, 3], that of B"),
    "D of two dimensions": ({"D": A}, ShapeError, "D: expected 1 dimension [D]"),
    "z in fp32": ({"z": U.float()}, DtypeError, "z: expected one of torch.bfloat16"),
    "a long bias": ({"delta_bias": torch.ones(7)}, ShapeError, "delta_bias: expected shape [6]"),
    "one state": ({"initial_state": STATE[:1]}, ShapeError, "initial_state: expected shape [2,"),
    "a state in bf16": (
        {"initial_state": STATE.bfloat16()}, DtypeError, "initial_state: expected one of",
    ),
    "softplus in words": (
        {"delta_softplus": "yes"}, ArgumentTypeError, "delta_softplus: expected True",
    ),
    "a batch and offsets": ({"cu_seqlens": OFFSETS}, ShapeError, "cu_seqlens: expected batch 1"),
    "offsets beyond u": (
        ONE | {"cu_seqlens": OFFSETS * 2}, ArgumentValueError, "cu_seqlens: expected numbers",
    ),
    "a main_grad of no bias": (
        {"delta_bias_main_grad": MAIN}, ArgumentTypeError, "delta_bias_main_grad: expected None",
    ),
    "a main_grad that is read": (
        {"D_main_grad": RIGHT["D"]}, AliasError, "D_main_grad: expected memory of its own",
    ),
    "another argument": ({"x": U}, ArgumentTypeError, "x: expected an argument"),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_refused(which):
    changed, error, message = REFUSED[which]
    with pytest.raises(error) as caught:
        scan(**RIGHT | changed)
    assert str(caught.value).startswith(message)


def test_layouts():
    """Channel-last or not, one group or none: the same bytes, in channel-last memory."""
    rows = {n: t.mT.contiguous().mT if t.dim() > 2 else t for n, t in RIGHT.items()}
    groups = {n: rows[n][:, None] for n in "BC"}
    want = scan(**RIGHT)
    for out in (scan(**rows), scan(**rows | groups)):
        assert out.mT.is_contiguous() and same_bytes(out, want)
