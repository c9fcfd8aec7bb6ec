"""A main_grad shares no memory with what a backward reads, nor with another main_grad."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import AliasError
from cute_kernels.runtime import main_grad
from tests.contract import same_bytes


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def square(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """(a parameter, a main_grad of its shape)."""
    return randn(n, n).requires_grad_(), torch.zeros(n, n)


def linear():
    weight, total = square()
    return ck.linear(randn(32, 32), weight, main_grad=total), total


def grouped_linear():
    weight, total = square()
    offsets = torch.tensor([0, 32], dtype=torch.int32)
    y = ck.grouped_linear(randn(32, 32), weight[None], offsets, main_grad=total[None])
    return y, total


def embedding():
    weight, total = square()
    return ck.embedding(torch.arange(32), weight, main_grad=total), total


def norm():
    weight, total = randn(32).requires_grad_(), torch.zeros(32)
    return ck.rms_norm(randn(1, 32), weight, main_grad=total), total


def logp():
    weight, total = square()
    return ck.linear_logp(randn(32, 32), weight, torch.arange(32), main_grad=total), total


CALLS = {
    "linear": linear,
    "grouped_linear": grouped_linear,
    "embedding": embedding,
    "rms_norm": norm,
    "linear_logp": logp,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_upstream_gradient_that_is_a_view_of_main_grad_is_refused(name):
    y, total = CALLS[name]()
    aliased = total.view(-1)[: y.numel()].view(y.shape)
    with pytest.raises(AliasError, match="upstream gradient"):
        y.backward(aliased)
    assert not total.any()
    y, total = CALLS[name]()
    y.backward(randn(*y.shape))
    assert total.any()


def norm_backward(dy, dh, main):
    saved = randn(4, 32), None, randn(4).abs(), randn(32), None
    rule = "rms", 1e-6, 0.0, [True, True, False]
    return torch.ops.cute_kernels.norm_backward(dy, dh, *saved, main, None, *rule)


def logp_backward(d_logp, d_entropy, main):
    tokens = randn(4, 32), randn(8, 32), None, torch.arange(4), None, randn(4), randn(4)
    options = 1.0, 0, 8, -100, 0.0, "chain", [True, True, False]
    return torch.ops.cute_kernels.linear_logp_backward(
        d_logp, d_entropy, None, *tokens, main, *options
    )


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize(
    ("call", "shape", "main"),
    [(norm_backward, (4, 32), (32,)), (logp_backward, (4,), (8, 32))],
    ids=["norm", "linear_logp"],
)
def test_the_op_of_a_backward_refuses_it_too(call, shape, main, position):
    """A compiled graph calls the op, without the node that looks at upstream gradients."""
    buffer = torch.zeros(512)
    into, upstream = buffer[: torch.Size(main).numel()].view(main), [randn(*shape), randn(*shape)]
    call(*upstream, into)
    assert into.any()
    before = into.clone()
    upstream[position] = buffer[: torch.Size(shape).numel()].view(shape)
    with pytest.raises(AliasError, match="an alias of d"):
        call(*upstream, into)
    assert same_bytes(into, before)


def test_mhc_refuses_it_too():
    n, c, total = 4, 8, torch.zeros(24, 32)
    phi = randn(24, n * c).requires_grad_()
    h, ms = ck.mhc.projection(randn(6, c, n), phi, main_grads={"phi": total})
    with pytest.raises(AliasError, match="upstream gradient"):
        torch.autograd.backward([h, ms], [total.view(-1)[: h.numel()].view(h.shape), randn(6)])
    assert not total.any()


BASE = torch.arange(64.0).view(8, 8)
PAIRS = {
    "the same": (BASE, BASE),
    "halves": (BASE[:4], BASE[4:]),
    "rows that meet": (BASE[:5], BASE[4:]),
    "columns side by side": (BASE[:, :4], BASE[:, 4:]),
    "columns that meet": (BASE[:, :5], BASE[:, 4:]),
    "even and odd": (BASE.view(-1)[::2], BASE.view(-1)[1::2]),
    "a column and its transpose": (BASE[1:3].T, BASE.T[1]),
    "another tensor": (BASE, BASE.clone()),
}


@pytest.mark.parametrize("name", PAIRS)
def test_shared_elements_are_those_of_one_address(name):
    one, other = (
        {t[tuple(index)].data_ptr() for index in torch.ones_like(t).nonzero().tolist()}
        for t in PAIRS[name]
    )
    assert main_grad.shares_elements(*PAIRS[name]) == bool(one & other)
    assert main_grad.shares_elements(*PAIRS[name][::-1]) == bool(one & other)


def test_an_expanded_tensor_shares_elements_with_itself():
    assert main_grad.shares_elements(torch.zeros(1).expand(300))
    assert not main_grad.shares_elements(BASE.T)
    assert main_grad.shares_elements(BASE.as_strided((3, 3), (2, 1)))
    assert not main_grad.shares_elements(BASE.as_strided((3, 2), (2, 1)))
