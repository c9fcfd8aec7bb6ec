"""Tensors without memory of their own: mapped, fake, on meta; and gradients that are batched."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels as ck
from cute_kernels.errors import AliasError, UnsupportedTransformError
from cute_kernels.gemm import cpu
from tests.contract import same_bytes

M, N, K = 5, 24, 40


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_autocast(x, weight, main_grad):
    with torch.autocast("cpu"):
        return ck.linear(x, weight, main_grad=main_grad)


def test_main_grad_inside_vmap_under_autocast():
    """torch has no address for what is mapped, and said so in an error of its own."""
    rows, weight, state = drawn(3, M, K), drawn(N, K, seed=1).requires_grad_(), torch.zeros(N, K)
    got = torch.func.vmap(lambda x: with_autocast(x, weight, state))(rows)
    assert same_bytes(got, torch.stack([with_autocast(x, weight, state) for x in rows]))
    got.float().sum().backward()
    assert weight.grad is None and state.any()


def test_an_alias_is_found_inside_vmap():
    whole, weight = drawn(3 * M + N - 1, K), drawn(N, K)
    rows, state = whole[: 3 * M].view(3, M, K), whole[3 * M - 1 :]
    for run in (with_autocast, lambda x, w, state: ck.linear(x, w, main_grad=state)):
        with pytest.raises(AliasError, match=r"main_grad: .*an alias of x"):
            torch.func.vmap(torch.func.vmap(lambda x, f=run: f(x, weight, state)))(rows)


@pytest.mark.parametrize("dims", [(0, None, 0), (None, None, 0), (0, 0, None)])
def test_what_is_shared_cannot_be_mapped_under_autocast(dims):
    sizes = (M, K), (N, K), (N, K)
    tensors = [
        drawn(*size) if dim is None else drawn(3, *size)
        for dim, size in zip(dims, sizes, strict=True)
    ]
    with pytest.raises(UnsupportedTransformError, match=r"may map x .* only"):
        torch.func.vmap(with_autocast, dims)(*tensors)


def test_main_grad_of_tensors_without_memory():
    """Meta tensors have no autocast to ask about; fake ones took address 0 for an alias."""
    tensors = drawn(M, K), drawn(N, K), torch.zeros(N, K)
    mode = FakeTensorMode()
    for make in (lambda t: t.to("meta"), mode.from_tensor):
        x, weight, state = map(make, tensors)
        assert with_autocast(x, weight, state).shape == (M, N)
        assert ck.linear(x, weight.requires_grad_(), main_grad=state).shape == (M, N)


def test_a_batch_of_gradients_of_a_size_that_is_new():
    """The proof at a size's first product draws numbers, which torch refuses meanwhile."""
    x = drawn(M, K).requires_grad_()
    y, dy = ck.linear(x, drawn(N, K)), drawn(4, M, N, seed=2)
    want = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in dy]
    for cached in (cpu._prove_row_position, cpu._wide_is_same):
        cached.cache_clear()
    (got,) = torch.autograd.grad(y, x, dy, is_grads_batched=True)
    assert same_bytes(got, torch.stack(want))
