"""The public op over the SM90 launchers, in the simulator: autograd, copies, empty lists."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import launch
from ptxsim import skips
from tests import certified, contract
from tests.sparse_attn import cases
from tests.sparse_attn.against_float64 import attended
from tests.sparse_attn.battery import LAYOUTS
from tests.sparse_attn.pack_cases import launched

simulated = skips.import_module("tests.sparse_attn.simulated")
#: What runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_nothing_is_allowed test_the_schedule_reaches_the_kernel test_sizes_of_zero_never_launch "
    "test_tensors_that_tma_can_address_are_not_copied"
)
pytestmark = certified.marks("sparse_attn", EACH_COMMIT)

SQ, SK = 150, 200


@pytest.fixture(autouse=True)
def on_sm90():
    """The SM90 launchers take CPU tensors."""
    with launched(launch.forward, launch.backward):
        yield


def test_strides_that_tma_cannot_address():
    """Odd strides, odd pointers, stride 0, dimensions of size 1: the bits of packed tensors."""
    x = cases.inputs(1, 2, 1, SQ, SK, 64)
    with simulated.simulated():
        want = attended(x, causal=True, with_lse=False)
        for change in (LAYOUTS["row stride + 1"], odd_pointer, odd_single):
            views = [change(t.detach()).requires_grad_() for t in x.leaves()]
            assert all(launch.addressable(t, "attention", "q") is not t for t in views)
            moved = cases.Inputs(*views, change(x.dout), x.dlse)
            got = attended(moved, causal=True, with_lse=False)
            assert all(map(contract.same_bytes, got, want))
        # Keys and a gradient that are one row, repeated.
        k = x.k.detach()[:, :1].expand(-1, SK, -1, -1).requires_grad_()
        dout = x.dout[:, :1].expand(-1, SQ, -1, -1)
        same = cases.Inputs(x.q, k, x.v, dout, x.dlse)
        copies = cases.Inputs(x.q, k.detach().clone().requires_grad_(), x.v, dout.clone(), x.dlse)
        assert all(map(contract.same_bytes, attended(same), attended(copies)))


def test_nothing_is_allowed():
    """Lists without an entry: the launcher hands on one that is not read."""
    x = cases.inputs(1, 2, 1, SQ, SK, 64)
    mask = BlockMask.from_dense(torch.zeros(1, 1, SQ, SK, dtype=torch.bool))
    with simulated.simulated():
        out, lse, *grads = attended(x, mask)
    assert (lse == -torch.inf).all()
    assert all((contract.bits(t) == 0).all() for t in (out, *grads))


def test_no_gradient_of_lse_is_none():
    """Not a tensor of zeros: another compiled kernel, and the same bits."""
    x = cases.inputs(1, 2, 1, SQ, SK, 64)
    recorded = []

    def pre(config):
        recorded.append(config.dlse)
        return simulated.kernel(config)

    with simulated.simulated(pre=pre):
        plain = attended(x, causal=True, with_lse=False)
        zeros = cases.Inputs(*x.leaves(), x.dout, torch.zeros_like(x.dlse))
        with_zeros = attended(zeros, causal=True)
    assert recorded == [False, True]
    assert all(map(contract.same_bytes, plain, with_zeros))


def test_the_schedule_reaches_the_kernel():
    """Another write order, other bits of dq; the tickets of another launch order, the same."""
    x = cases.inputs(1, 2, 2, 256, 512, 64)
    with simulated.simulated(ctas=3):
        one, two = (attended(x, schedule=order) for order in ([0, 1, 2, 3], [2, 0, 3, 1]))
    assert not contract.same_bytes(one[2], two[2])
    for index in (0, 1, 3, 4):
        assert contract.same_bytes(one[index], two[index])


def test_sizes_of_zero_never_launch():
    def none(*key):
        raise AssertionError("a launch")

    with simulated.simulated(forward=none, pre=none, backward=none, post=none):
        for batch, q_len, kv_len in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
            out = attended(cases.inputs(batch, 2, 1, q_len, kv_len, 64))
            assert [len(t) for t in out] == [batch] * 5


def odd_pointer(t: torch.Tensor) -> torch.Tensor:
    """The second element of its memory is the first of the tensor."""
    storage = torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    return storage.copy_(t)


def odd_single(t: torch.Tensor) -> torch.Tensor:
    """A batch of one whose stride, which nothing reads, is no multiple of 16 bytes."""
    return t.as_strided(t.shape, (3, *t.stride()[1:]))


def test_tensors_that_tma_can_address_are_not_copied():
    packed = torch.zeros(2, 30, 8, 64, dtype=torch.bfloat16)
    by_head = torch.zeros(2, 8, 30, 64, dtype=torch.bfloat16).transpose(1, 2)
    for t in (packed, packed[:, 3:], packed[:, :, 4:6], by_head):
        assert launch.addressable(t, "attention", "q") is t
