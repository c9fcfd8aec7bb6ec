"""Arguments that are left out, or contradict each other, mean what they mean in torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-2, 1.0])
def test_an_rms_norm_without_an_eps_has_that_of_fp32(dtype, scale):
    """At 0.01 the epsilon of bf16 would make elements of 1 smaller by a factor of 9."""
    x = (scale * torch.randn(8, 64, generator=torch.Generator().manual_seed(1))).to(dtype)
    module = torch.nn.RMSNorm(64, eps=None, dtype=dtype)
    with ck.batch_invariant():
        y = module(x)
    exact = x.double()
    mean = exact.square().mean(-1, keepdim=True)
    want = exact * (mean + torch.finfo(torch.float32).eps).rsqrt()
    bound = torch.finfo(dtype).eps * want.abs() + 1e-6
    assert ((y.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_mask_beside_is_causal_is_refused_as_torch_refuses_it(dtype):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 8, 64, generator=generator).to(dtype) for _ in range(3))
    mask = torch.rand(8, 8, generator=generator) < 0.7
    with ck.batch_invariant(), pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
