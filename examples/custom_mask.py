"""Attention with a mask of your own, and a backward whose order of sums is written down.

    python examples/custom_mask.py

The mask: documents, each with a window of 64 tokens and its first 4 tokens for all.
"""

from __future__ import annotations

import sys

import torch

import cute_kernels as ck

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS, HEADS, SIZE = (150, 90, 60), 2, 64


def mask() -> ck.BlockMask:
    ends = torch.tensor(LENGTHS).cumsum(0)
    tokens = torch.arange(sum(LENGTHS))
    document = torch.bucketize(tokens, ends, right=True)
    first = (ends - torch.tensor(LENGTHS))[document]  # the first token of each one's document
    query, key = tokens[:, None], tokens[None, :]
    near = (query - key < 64) | (key - first[None, :] < 4)
    allowed = (document[:, None] == document[None, :]) & (key <= query) & near
    return ck.BlockMask.from_dense(allowed).to(DEVICE)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.contiguous().view(torch.int16) == b.contiguous().view(torch.int16)).all())


def main() -> int:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # refuses deterministic=False
    shape = (3, sum(LENGTHS), HEADS, SIZE)
    q, k, v, upstream = (torch.randn(shape).to(DEVICE, torch.bfloat16) for _ in range(4))
    own = mask()

    def run(batch: slice) -> list[torch.Tensor]:
        """out, dq, dk, dv of some sequences."""
        leaves = [t[batch].detach().requires_grad_() for t in (q, k, v)]
        out = ck.block_sparse_attention(*leaves, own, schedule="spt")
        return [out, *torch.autograd.grad(out, leaves, upstream[batch])]

    whole, again, alone = run(slice(0, 3)), run(slice(0, 3)), run(slice(1, 2))
    repeated = all(map(same_bytes, whole, again))
    single = all(same_bytes(a[1:2], b) for a, b in zip(whole, alone, strict=True))
    print(f"{DEVICE}: out, dq, dk and dv of a second run have the same bytes: {repeated}")
    print(f"a sequence alone has those that it has in the batch: {single}")
    return 0 if repeated and single else 1


if __name__ == "__main__":
    sys.exit(main())
