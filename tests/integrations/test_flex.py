"""``integrations.flex`` against torch's flex_attention, and its refusals."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, ShapeError
from cute_kernels.integrations import flex
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import reference
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import same_bytes
from tests.sparse_attn import cases

B, H, HKV, S, D = 2, 4, 2, 200, 64


def heads_first(dim: int = D) -> tuple[torch.Tensor, ...]:
    x = cases.inputs(B, H, HKV, S, S, dim)
    return tuple(t.detach().transpose(1, 2).contiguous() for t in x.leaves())


def windowed(b, h, q, kv):
    return (q >= kv) & (q - kv < 40 + 30 * b + h)


MASKS = {
    "none": lambda: None,
    "causal": lambda: create_block_mask(lambda b, h, q, kv: q >= kv, None, None, S, S, "cpu"),
    "by batch and head": lambda: create_block_mask(windowed, B, H, S, S, "cpu"),
}


@pytest.mark.parametrize(
    ("mask", "dim"), [*((mask, D) for mask in MASKS), ("causal", 192), ("by batch and head", 256)]
)
def test_values_and_gradients(mask, dim):
    """torch's result on the same inputs in fp32; gradients (not on its CPU) by the oracle."""
    leaves, given = [t.requires_grad_() for t in heads_first(dim)], MASKS[mask]()
    options = {"block_mask": given, "scale": 0.1, "enable_gqa": True, "return_lse": True}
    got, lse = flex.flex_attention(*leaves, **options)
    want, theirs = flex_attention(*(t.detach().float() for t in leaves), **options)
    assert got.shape == want.shape and (got - want).abs().max() < 2e-2
    assert (lse - theirs).abs().max() < 1e-4
    allowed = torch.ones(1, 1, S, S, dtype=torch.bool)
    if given is not None:
        allowed = create_mask(given.mask_mod, B, H, S, S, "cpu")
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact, _ = reference.attention(*(t.transpose(1, 2) for t in wide), allowed, scale=0.1)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    grads = torch.autograd.grad(got, leaves, dout)
    right = torch.autograd.grad(exact.transpose(1, 2), wide, dout.double())
    for mine, other in zip(grads, right, strict=True):
        assert (mine - other).norm() < 1e-2 * other.norm()


def test_bits_are_the_op_s():
    q, k, v = heads_first()
    theirs = MASKS["causal"]()
    got = flex.flex_attention(q, k, v, block_mask=theirs, enable_gqa=True)
    ours = BlockMask.causal(S, S)
    want = block_sparse_attention(*(t.transpose(1, 2) for t in (q, k, v)), ours)
    assert same_bytes(got.transpose(1, 2), want)
    again = flex.flex_attention(q, k, v, block_mask=ours, enable_gqa=True, schedule="lpt")
    assert same_bytes(again, got)


def test_a_mask_is_converted_once():
    mask = MASKS["causal"]()
    assert flex.mask_of(mask) is flex.mask_of(mask)
    assert flex.mask_of(MASKS["causal"]()) is not flex.mask_of(mask)


def test_refusals():
    q, k, v = heads_first()
    with pytest.raises(ArgumentTypeError, match="score_mod"):
        flex.flex_attention(q, k, v, lambda s, b, h, i, j: s, enable_gqa=True)
    with pytest.raises(ShapeError, match="enable_gqa"):
        flex.flex_attention(q, k, v)
    with pytest.raises(ArgumentValueError, match="kernel_options"):
        flex.flex_attention(q, k, v, enable_gqa=True, kernel_options={"BLOCK_M": 64})
