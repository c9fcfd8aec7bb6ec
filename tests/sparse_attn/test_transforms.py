"""Transforms of torch.func and traces: what they refuse, and that masks and bytes stay."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cute_kernels.errors import UnsupportedTransformError
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import lowering
from cute_kernels.sparse_attn.api import (
    block_sparse_attention,
    block_sparse_attention_varlen,
    paged_attention,
)
from tests.contract import same_bytes


@pytest.mark.parametrize("trace", [lambda call: call, make_fx], ids=["call", "make_fx"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_is_whole_behind_functionalize(causal, trace):
    """Neither its hash nor the lists of its first use hold a transform's wrappers."""
    q = torch.randn(1, 201, 2, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    mask, other = (BlockMask.sliding_window(201, 201, left=9, right=2) for _ in range(2))
    attend = functools.partial(block_sparse_attention, q, q, causal=causal)
    lowering.cache.clear()
    inside = trace(torch.func.functionalize(lambda v: attend(v, mask)))(q)
    if trace is not make_fx:
        assert same_bytes(inside, attend(q, other))
    assert same_bytes(attend(q, mask), attend(q, other))
    assert mask.hash() == other.hash()


def test_masks_that_are_made_inside_a_transform():
    """One of numbers is a mask like others; one of tensors that the transform wraps is refused."""
    q = torch.randn(1, 60, 2, 64).bfloat16()
    masks_made = []

    def attend(q):
        masks_made.append(BlockMask.causal(60, 60))
        return block_sparse_attention(q, q, q, masks_made[-1])

    inside = torch.func.functionalize(attend)(q)
    assert same_bytes(inside, block_sparse_attention(q, q, q, masks_made[0]))
    assert masks_made[0].hash() == BlockMask.causal(60, 60).hash()
    dense = torch.ones(60, 60, dtype=torch.bool)
    with pytest.raises(UnsupportedTransformError, match="BlockMask: tensors computed"):
        torch.func.functionalize(lambda t: BlockMask.from_dense(t.tril()).kv_count)(dense)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "jacrev", "hessian", "vmap"])
def test_gradients_of_torch_func_are_refused(name, masked):
    q = torch.randn(1, 60, 2, 64).bfloat16()
    mask = BlockMask.causal(60, 60) if masked else None
    transform = getattr(torch.func, name)
    attend = lambda q: block_sparse_attention(q, q, q, mask).float().sum()  # noqa: E731
    calls = {
        "vjp": lambda: transform(attend, q)[1](torch.ones(())),
        "jvp": lambda: transform(attend, (q,), (q,)),
        "vmap": lambda: transform(attend)(q[None]),
    }
    with pytest.raises(UnsupportedTransformError, match="not supported"):
        calls.get(name, lambda: transform(attend)(q))()
    # Of another tensor they may hold an attention that is constant to them.
    scaled = torch.func.grad(lambda w: (w * attend(q)).sum())(torch.ones(2))
    assert same_bytes(scaled, attend(q).expand(2).contiguous())


def _dense(q):
    return block_sparse_attention(q, q, q, causal=True)


def _varlen(q, bounds):
    return block_sparse_attention_varlen(q, q, q, bounds)


TRACED = {
    "dense": lambda n: (_dense, (torch.randn(1, n, 2, 64).bfloat16(),)),
    "varlen": lambda n: (
        _varlen,
        (torch.randn(n, 2, 64).bfloat16(), torch.tensor([0, 2, n], dtype=torch.int32)),
    ),
    "paged": lambda n: (
        lambda *tensors: paged_attention(*tensors),
        (
            *(torch.randn(s).bfloat16() for s in ((n, 2, 64), (8, 16, 2, 64), (8, 16, 2, 64))),
            torch.randperm(8)[None].int(),
            torch.tensor([100], dtype=torch.int32),
            torch.tensor([0, n], dtype=torch.int32),
        ),
    ),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("trace", ["jit", "fx"])
@pytest.mark.parametrize("name", TRACED)
def test_traces(name, trace):
    """torch.jit.trace and make_fx with symbolic sizes have the bytes of eager calls."""
    call, inputs = TRACED[name](40)
    if trace == "jit":
        traced = torch.jit.trace(call, inputs, check_trace=False)
    else:
        traced = make_fx(call, tracing_mode="symbolic")(*inputs)
    assert same_bytes(traced(*inputs), call(*inputs))
    # The graph of jit keeps numbers; of symbolic sizes another length is another call.
    call, inputs = TRACED[name](40 if trace == "jit" else 55)
    assert same_bytes(traced(*inputs), call(*inputs))
