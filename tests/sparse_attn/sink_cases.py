"""Attention sinks: the cases, and how far results are from float64; for a CPU and for a card."""

from __future__ import annotations

import torch

from cute_kernels.schedulers import BlockMask
from tests.oracles import sparse_attn as reference
from tests.sparse_attn import against_float64, cases

S = 200


def bits() -> BlockMask:
    """A fifth of the pairs; rows 40 to 49 and 128 to 199 see nothing."""
    dense = torch.rand(S, S, generator=torch.Generator().manual_seed(2)) < 0.2
    dense[40:50] = dense[128:] = False
    return BlockMask.from_dense(dense)


MASKS = {
    "none": lambda: BlockMask.full(S, S),
    "band": lambda: BlockMask.sliding_window(S, S, left=50, right=0),
    "bits": bits,
}


def drawn_sinks(heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """From one that hardly counts to one that outweighs every key."""
    return torch.linspace(-4, 6, heads).to(dtype).requires_grad_()


def excess(results, x: cases.Inputs, mask, sinks, with_lse: bool = True, softcap: float = 0.0):
    """Result -> its largest error as a multiple of its bound."""
    dlse = x.dlse if with_lse else None
    scores = reference.Scores(softcap=softcap, sinks=sinks.detach())
    exact = against_float64.exact(x.leaves(), mask.to_dense(), x.dout, dlse, scores)
    return against_float64.excess(results, *exact)


CASES = [
    (64, torch.bfloat16, "band", 0.0),
    (64, torch.float16, "bits", 3.0),
    (96, torch.bfloat16, "none", 0.0),
    (128, torch.bfloat16, "bits", 0.0),
    (128, torch.float16, "band", 2.0),
]
#: Of head sizes that the kernels of SM90 lack.
WIDE = [(192, torch.bfloat16, "bits", 0.0), (256, torch.float16, "band", 2.0)]
