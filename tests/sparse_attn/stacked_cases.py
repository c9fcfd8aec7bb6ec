"""Masks by query head under GQA: the cases, and a call with its gradients; for a CPU and a card."""

from __future__ import annotations

import torch

import cute_kernels as ck
from cute_kernels.schedulers import BlockMask
from tests.sparse_attn import cases

S, HEADS, KV_HEADS = 200, 4, 2
NAMES = ("out", "lse", "dq", "dk", "dv")


def dense(batch: int, seed: int = 3) -> torch.Tensor:
    """Other blocks for each head, some of them empty, rows without keys, a causal rule in two."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.rand(batch, HEADS, S, S, generator=generator) < 0.3
    out[:, 0, :, 128:] = False
    out[:, 1] = torch.ones(S, S).tril() > 0
    out[:, 2, 30:40] = out[:, 2, 128:] = False
    out[:, 3] &= torch.ones(S, S).tril() > 0
    return out


def windows() -> BlockMask:
    """A band, in blocks that each head chose for itself."""
    count = torch.tensor([[[1, 2], [1, 1], [1, 2], [1, 1]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 0], [0, 1]], [[0, 0], [1, 0]]] * 2], dtype=torch.int32)
    blocks = BlockMask.from_blocks(count, index, S, S)
    return blocks & BlockMask.sliding_window(S, S, left=90, right=0)


MASKS = {
    "bits of one batch": lambda: BlockMask.from_dense(dense(1)),
    "bits of each batch": lambda: BlockMask.from_dense(dense(2)),
    "windows": windows,
}


def attended(x: cases.Inputs, mask: BlockMask, sinks=None, with_lse: bool = True, **options):
    """out, lse, dq, dk, dv, and dsinks of sinks."""
    leaves = (*x.leaves(), *(() if sinks is None else (sinks,)))
    out = ck.block_sparse_attention(*x.leaves(), mask, sinks=sinks, return_lse=True, **options)
    wanted = (out, (x.dout, x.dlse)) if with_lse else (out[0], x.dout)
    grads = torch.autograd.grad(wanted[0], leaves, wanted[1])
    return [t.detach() for t in (*out, *grads)]
