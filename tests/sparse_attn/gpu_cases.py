"""Problems of the GPU tests of attention: operands on the card, runs through the op, bounds."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import cute_kernels as ck
from cute_kernels import arch
from cute_kernels.runtime import dispatch
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import launch, lowering
from cute_kernels.sparse_attn.config import VALUE_DIMS
from cute_kernels.sparse_attn.op import NAME
from tests import contract
from tests.oracles import sparse_attn as reference
from tests.sparse_attn import against_float64

SEED = 17
DEVICE = "cuda"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
#: Marks of a case on the card.
GPU = [pytest.mark.gpu, NEEDS_GPU]


class Problem(NamedTuple):
    """Operands and gradients on the card, and a mask there."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    mask: BlockMask
    softcap: float = 0.0


def problem(
    mask: BlockMask,
    dim: int,
    heads: int = 2,
    kv_heads: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
    seed: int = SEED,
) -> Problem:
    """Random tensors; keys of different sizes, so that some rows are peaked and some are flat."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    widths = dim, VALUE_DIMS[dim]
    q, dout = (normal(batch, mask.q_len, heads, n) for n in widths)
    k, v = (normal(batch, mask.kv_len, kv_heads, n) for n in widths)
    k *= normal(batch, mask.kv_len, kv_heads, 1).exp2()
    tensors = (t.to(dtype) for t in (q, k, v, dout))
    return Problem(*tensors, normal(batch, heads, mask.q_len), mask.to(DEVICE), softcap)


def large(dim: int) -> Problem:
    """More tickets than SMs: 16 columns, 16 KV heads."""
    return problem(BlockMask.causal(2048, 2048), dim, heads=32, kv_heads=16)


def elements(*shape: int, seed: int) -> torch.Tensor:
    """Three tenths of the pairs."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.3


def with_holes() -> torch.Tensor:
    """Rows of every tile, and a whole key block, that nothing is allowed in."""
    allowed = elements(1, 1, 300, 400, seed=7)
    allowed[:, :, 50:70] = allowed[:, :, 128:256] = False
    allowed[..., 128:256] = False
    return allowed


def documents() -> torch.Tensor:
    ids = torch.randint(0, 5, (1, 400), generator=torch.Generator().manual_seed(1))
    return ids.sort(dim=1).values


#: Every form, tails on both sides, more queries than keys and fewer, empty rows and columns.
MASKS = {
    "causal": lambda: BlockMask.causal(512, 512),
    "causal, tails": lambda: BlockMask.causal(383, 300),
    "full, tails": lambda: BlockMask.full(65, 129),
    "one by one": lambda: BlockMask.full(1, 1),
    "window": lambda: BlockMask.sliding_window(500, 500, left=100, right=20),
    "window, tails": lambda: BlockMask.sliding_window(257, 511, left=10, right=0),
    "document": lambda: BlockMask.document(documents()),
    "bits": lambda: BlockMask.from_dense(elements(1, 1, 300, 333, seed=2)),
    "bits by batch": lambda: BlockMask.from_dense(elements(2, 1, 130, 200, seed=3)),
    "holes": lambda: BlockMask.from_dense(with_holes()),
    "small blocks": lambda: BlockMask.causal(200, 200, block_size=(64, 32)),
}
#: (batch, query heads, KV heads): MHA, GQA 2:1 in two batches, MQA.
HEADS = ((1, 1, 1), (2, 4, 2), (1, 3, 1))


def forward(x: Problem, mask: BlockMask | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the op."""
    with torch.no_grad():
        return ck.block_sparse_attention(
            x.q, x.k, x.v, mask or x.mask, softcap=x.softcap, return_lse=True
        )


def one_kernel(q, k, v, spans=None, *, scale=None, softcap: float = 0.0, sinks=None):
    """(out, lse) by one kernel of tiles, causal or of spans: not by two of long key buffers."""
    rule = spans
    if spans is None:
        facts = lowering.window(0)
        rule = lowering.mask_of_op([], facts, q.shape[1], k.shape[1], str(q.device))
    operands = q, k, v, rule, scale or q.shape[3] ** -0.5, softcap, sinks
    if dispatch.backend(NAME, str(q.device), q.dtype) != arch.CUTE_SM90:
        return dispatch.launcher(NAME, q.device, q.dtype)(*operands)
    return launch.plan_one_kernel(*operands).run(*operands)


def gradients(x: Problem, schedule="auto", deterministic=True, lse=False):
    """(dq, dk, dv) of the op; ``lse``: with a gradient of lse too."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    outputs = ck.block_sparse_attention(
        *leaves,
        x.mask,
        softcap=x.softcap,
        schedule=schedule,
        deterministic=deterministic,
        return_lse=True,
    )
    if lse:
        return torch.autograd.grad(outputs, leaves, (x.dout, x.dlse))
    return torch.autograd.grad(outputs[:1], leaves, x.dout)


def exact(x: Problem, lse: bool = False):
    """((out, lse, dq, dk, dv) in float64, their bounds)."""
    operands, dlse = (x.q, x.k, x.v), x.dlse if lse else None
    scores = reference.Scores(softcap=x.softcap)
    return against_float64.exact(operands, x.mask.to_dense(), x.dout, dlse, scores)


def check(name: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
    """Check values within the bound everywhere; -inf exactly where it is meant."""
    empty = want == -torch.inf
    assert (got[empty] == -torch.inf).all() and got[~empty].isfinite().all(), f"{name}: not finite"
    share = ((got.double() - want).abs() / bound)[~empty]
    assert (share <= 1).all(), f"{name}: {share.max():.2f} of its bound"


def require_same(results, wanted, label: str) -> None:
    """Tuples of tensors, byte for byte."""
    for i, (got, want) in enumerate(zip(results, wanted, strict=True)):
        contract.require_same(got, want, op=f"result {i}", transform=label, case="", seed=SEED)


def require_on_streams(call, wanted, streams: int = 2, calls: int = 1000) -> None:
    """(out, lse) of ``call()``, so often, on streams in turn: no bit differs from ``wanted``."""
    lanes = [torch.cuda.Stream() for _ in range(streams)]
    differing = torch.zeros(streams, dtype=torch.int64, device=DEVICE)
    torch.cuda.synchronize()
    for number in range(calls):
        with torch.cuda.stream(lanes[number % streams]):
            for got, want in zip(call(), wanted, strict=True):
                other = (got.view(torch.int16) != want.view(torch.int16)).any()
                differing[number % streams : number % streams + 1] += other
    torch.cuda.synchronize()
    assert differing.sum().item() == 0


def captured(call):
    """(the replay of a CUDA graph, what it writes) of ``call()``, which has run once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph.replay, out
