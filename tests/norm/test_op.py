"""Tests of norm as torch ops: shapes, special values."""

from __future__ import annotations

import torch

import cute_kernels as ck
from tests.contract import same_bytes

BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_shapes():
    """Any leading dimensions, heads among them, and none; no rows at all."""
    weight = normal(64, seed=1)
    x = normal(2, 3, 4, 64, dtype=BF16)
    flat = ck.rms_norm(x.view(24, 64), weight)
    assert same_bytes(ck.rms_norm(x, weight).view(24, 64), flat)
    heads = x.transpose(1, 2)
    assert same_bytes(ck.rms_norm(heads, weight), ck.rms_norm(x, weight).transpose(1, 2))
    assert same_bytes(ck.rms_norm(x[0, 0, 0], weight), flat[0])
    empty = torch.empty(0, 64, dtype=BF16, requires_grad=True)
    parameter = weight.clone().requires_grad_()
    y = ck.rms_norm(empty, parameter)
    y.backward(torch.empty_like(y))
    assert y.shape == (0, 64) and empty.grad.shape == (0, 64)
    assert same_bytes(parameter.grad, torch.zeros(64))


def test_one_element():
    x = torch.tensor([[3.0], [-0.5], [0.0]], dtype=FP32)
    want = torch.tensor([[1.0], [-1.0], [0.0]])
    torch.testing.assert_close(ck.rms_norm(x, None, 1e-12), want)
    assert same_bytes(ck.layer_norm(x), torch.zeros(3, 1))


def test_large_rows_do_not_overflow_where_fp32_does_not():
    x = normal(2, 40) * 2.0**60
    y = ck.rms_norm(x, None, 0.0)
    want = x.double() / x.double().pow(2).mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=0)


def test_contract():
    kept = {"run_to_run", "batch_invariant", "split_invariant"}
    for name in ("rms_norm", "layer_norm"):
        assert ck.guarantees(name) == kept
        assert ck.contract_id(name).startswith(f"{name}/cpu/")
