"""Every kind of keys of attention: its op, its operands, its call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import api, lowering, op
from cute_kernels.sparse_attn.api import (
    block_sparse_attention,
    block_sparse_attention_varlen,
)
from tests.contract import same_bytes
from tests.sparse_attn import cases

B, H, HKV, SQ, SK, D = 2, 4, 2, 150, 200, 64
OPS = torch.ops.cute_kernels


def tensors(dtype=torch.bfloat16, seed=0, dim=D) -> cases.Inputs:
    return cases.inputs(B, H, HKV, SQ, SK, dim, dtype, seed)


def same(one, other) -> bool:
    return all(same_bytes(a, b) for a, b in zip(one, other, strict=True))


# ---- every kind of keys --------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A way to say where keys are.

    sizes: Of `cases.inputs` but for the head size.  call: ``(q, k, v, **options)`` -> (out, lse),
    or (out,).  op: Its torch op.  keys: What stands there between v and scale, by head size.
    """

    sizes: tuple[int, ...]
    call: Callable
    op: str
    keys: Callable[[int], tuple]

    def leaves(self, dim: int) -> cases.Inputs:
        return cases.inputs(*self.sizes, dim, seed=dim)


def documents() -> BlockMask:
    """Bits, for two batches."""
    q, kv = torch.arange(SQ)[:, None], torch.arange(SK)
    return BlockMask.from_dense(torch.stack([q // 40 == kv // 40, q // 70 == kv // 70])[:, None])


MASKS = {
    "none": lambda: BlockMask.full(SQ, SK),
    "band": lambda: BlockMask.causal(SQ, SK),
    "bits": documents,
}


def of_lists(mask: BlockMask) -> Form:
    def keys(dim: int) -> tuple:
        sizes = B, SQ, SK, H, HKV, dim
        return *lowering.build_lists(mask.handle, False, "spt", True, sizes, "cpu"), True

    call = functools.partial(block_sparse_attention, block_mask=mask, return_lse=True)
    return Form((B, H, HKV, SQ, SK), call, op.NAME, keys)


OFFSETS = torch.tensor([0, 30, 30, 71], dtype=torch.int32)
#: Of a batch of two, of which the first has three columns of padding.
PADDING = torch.arange(40)[None] >= torch.tensor([[3], [0]])
RANGES = api.kv_ranges(None, PADDING, 0, 0, (2, 40, 40))


def varlen(q, k, v, **options):
    rows = (t[0] for t in (q, k, v))
    out, lse = block_sparse_attention_varlen(*rows, OFFSETS, return_lse=True, **options)
    return out[None], lse[None]


def ranges(q, k, v, **options):
    return (api.sequence_attention(q, k, v, RANGES, **options),)


FORMS = {name: of_lists(make()) for name, make in MASKS.items()} | {
    "causal": Form(
        (1, 4, 2, 40, 70),
        functools.partial(block_sparse_attention, causal=True, return_lse=True),
        op.NAME,
        lambda dim: ([], lowering.CAUSAL, [], lowering.OF_SEQUENCES, True),
    ),
    "varlen": Form(
        (1, 4, 2, 71, 71),
        varlen,
        "varlen_attention",
        lambda dim: (op.varlen_offsets(OFFSETS, 71), None, 0),
    ),
    "ranges": Form((2, 4, 2, 40, 40), ranges, "sequence_attention", lambda dim: (RANGES,)),
}
RULES = ("causal", "varlen", "ranges")


def sinks_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 2, H).to(dtype).requires_grad_()


def results(form: Form, dim: int, run=None, sinks=None, **options) -> list[torch.Tensor]:
    """out, perhaps lse, and the gradients of q, k, v and sinks."""
    x = form.leaves(dim)
    leaves = [*x.leaves(), *([] if sinks is None else [sinks])]
    out = (run or form.call)(*x.leaves(), sinks=sinks, **options)
    upstream = (x.dout, x.dlse)[: len(out)]
    return [t.detach() for t in (*out, *torch.autograd.grad(out, leaves, upstream))]


def compiled(function, backend: str = "aot_eager", **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)
