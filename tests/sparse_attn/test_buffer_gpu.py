"""One query a sequence over long key buffers on SM90: public calls have the bytes of one kernel."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels import arch
from cute_kernels.runtime import dispatch, plan_cache
from cute_kernels.sparse_attn import api
from cute_kernels.sparse_attn.config import VALUE_DIMS
from cute_kernels.sparse_attn.kv_ranges import launch as key_buffer
from tests.contract import same_bytes
from tests.sparse_attn.gpu_cases import captured, one_kernel, require_on_streams


def _is_sm90() -> bool:
    device = torch.device("cuda")
    return torch.cuda.is_available() and (
        dispatch.backend("block_sparse_attention", str(device), torch.bfloat16) == arch.CUTE_SM90
    )


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _is_sm90(), reason="needs an SM90 GPU"),
]

#: (sequences, keys of each).
SIZES = [(1, 131072), (1, 4096), (1, 4097), (4, 16384), (4, 16257), (8, 5000), (16, 8192)]
PADS = (0, 1, 60, 127, 128, 300)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def drawn(
    batch: int,
    keys: int,
    heads: tuple[int, int, int] = (32, 8, 128),
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [B, 1, Hq, D], k and v [B, S, Hkv, D]."""
    (hq, hkv, width), generator = heads, torch.Generator("cuda").manual_seed(seed + keys)
    shapes = (batch, 1, hq, width), (batch, keys, hkv, width), (batch, keys, hkv, VALUE_DIMS[width])
    options = {"generator": generator, "device": "cuda"}
    q, k, v = (torch.randn(shape, **options).to(dtype) for shape in shapes)
    return q, k, v


def require(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """Out and lse have the same bytes."""
    assert all(map(same_bytes, got, want))


def attend(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """(out, lse) of the public op, of which the choice is the long path where it can be."""
    return ck.block_sparse_attention(q, k, v, causal=True, return_lse=True, **options)


@pytest.mark.parametrize("size", SIZES)
def test_all_keys(size):
    t = drawn(*size)
    assert key_buffer.is_long(*t) == (size[0] <= 8)
    require(attend(*t), one_kernel(*t))


OPTIONS = [
    {"softcap": 20.0},
    {"sinks": True},
    {"softcap": 5.0, "sinks": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(8, 2, 64), (12, 1, 96), (16, 1, 192), (3, 3, 256)])
def test_options(heads, dtype, options):
    t = drawn(2, 9000, heads, DTYPES[dtype])
    assert key_buffer.is_long(*t)
    if "sinks" in options:
        options = options | {"sinks": torch.linspace(-1.0, 1.5, heads[0], device="cuda")}
    require(attend(*t, **options), one_kernel(*t, **options))


@functools.cache
def pads_on_device() -> Tensor:
    """`PADS` [N, 1], copied once: a capture may not copy from the host."""
    return torch.tensor(PADS, device="cuda")[:, None]


def spans(columns: int, position: int | Tensor, dropped: int = 0) -> Tensor:
    """Spans of one query behind each of `PADS`, in a buffer whose oldest columns were dropped."""
    real = torch.arange(columns + dropped, device="cuda") >= pads_on_device()
    sizes = len(PADS), 1, columns
    return api.kv_ranges(None, real, position, dropped, sizes, packed=False, device="cuda")


@torch.no_grad()
@pytest.mark.parametrize("dropped", [0, 60, 640])
@pytest.mark.parametrize("width", VALUE_DIMS)
def test_spans(width, dropped):
    """A static cache with free slots, padding on the left, a cache that dropped its oldest keys."""
    q, k, v = drawn(len(PADS), 6001, (8, 2, width))
    for position in (6000 + dropped, 4097 + dropped, 700 + dropped):
        table = spans(6001, torch.tensor(position, device="cuda"), dropped)
        assert key_buffer.is_long(q, k, v)
        want, _ = one_kernel(q, k, v, table)
        assert same_bytes(api.sequence_attention(q, k, v, table), want), position


@torch.no_grad()
def test_spans_on_the_host():
    """Runs, each of which is a range of one buffer."""
    q, k, v = drawn(len(PADS), 6001, (8, 2, 128))
    table = spans(6001, torch.tensor(5990, device="cuda"))
    want, _ = one_kernel(q, k, v, table)
    assert same_bytes(api.sequence_attention(q, k, v, table.cpu()), want)


@torch.no_grad()
def test_a_graph_of_decoding():
    """Replays read other queries and positions; neither a plan nor a graph waits."""
    q, k, v = drawn(len(PADS), 6001, (8, 2, 128))
    position = torch.full((), 5000, device="cuda")
    step = lambda: api.sequence_attention(q, k, v, spans(6001, position))  # noqa: E731
    replay, (out, (dense, _)) = captured(lambda: (step(), attend(q, k, v)))
    for now in (5000, 5001, 6000, 300, 4100):
        position.fill_(now)
        q.normal_()
        replay()
        want, _ = one_kernel(q, k, v, spans(6001, position))
        assert same_bytes(out, want), now
        assert same_bytes(dense, one_kernel(q, k, v)[0]), now


def test_gradients():
    """A backward after the two kernels has the bytes of one after the one kernel."""
    results = []
    for is_long in (key_buffer.is_long, lambda *t: False):
        with mock.patch.object(key_buffer, "is_long", is_long):
            plan_cache.clear()
            leaves = [x.requires_grad_() for x in drawn(2, 5000, (8, 2, 128))]
            out, lse = attend(*leaves)
            loss = out.float().square().sum() + lse.sum()
            results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    plan_cache.clear()
    assert all(map(same_bytes, *results))


@torch.no_grad()
def test_compiled():
    """Full graphs of both ops."""
    q, k, v = drawn(len(PADS), 6001, (8, 2, 128))
    table = spans(6001, torch.tensor(5990, device="cuda"))
    compiled = torch.compile(attend, fullgraph=True)
    require(compiled(q, k, v), one_kernel(q, k, v))
    compiled = torch.compile(api.sequence_attention, fullgraph=True)
    assert same_bytes(compiled(q, k, v, table), one_kernel(q, k, v, table)[0])


def test_a_thousand_calls_on_two_streams():
    t = drawn(2, 20000)
    require_on_streams(lambda: attend(*t), one_kernel(*t))
