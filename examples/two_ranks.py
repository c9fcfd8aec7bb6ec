"""A linear and an LM head cut over two ranks, with the bytes of one: gloo on a CPU, NCCL on GPUs.

python examples/two_ranks.py
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import cute_kernels as ck
from cute_kernels.integrations.tensor_parallel import row_parallel_linear

RANKS, TOKENS, WIDTH, VOCAB = 2, 48, 256, 1000
GPUS = torch.cuda.device_count() >= RANKS


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


def run(rank: int, store: str) -> None:
    device = torch.device("cuda", rank) if GPUS else torch.device("cpu")
    if GPUS:
        torch.cuda.set_device(device)
    backend, method = "nccl" if GPUS else "gloo", f"file://{store}"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=RANKS)
    torch.manual_seed(0)  # every rank makes the whole, and keeps its part
    x, w, head = (torch.randn(n, WIDTH).to(device, torch.bfloat16) for n in (TOKENS, WIDTH, VOCAB))
    target = torch.randint(VOCAB, (TOKENS,)).to(device)

    columns = slice(rank * WIDTH // RANKS, (rank + 1) * WIDTH // RANKS)
    y = row_parallel_linear(x[:, columns], w[:, columns], mesh=dist.group.WORLD)
    linear = same_bytes(y, ck.linear(x, w, order="tree"))

    # An LM head is cut at multiples of 16 ceil(V / 128) entries where there are gradients.
    rows = slice(0, 512) if rank == 0 else slice(512, VOCAB)
    place = {"group": dist.group.WORLD, "vocab_start": rows.start, "vocab_size": VOCAB}
    parts, whole = (y.detach().requires_grad_() for _ in range(2))
    logp = ck.linear_logp(parts, head[rows], target, order="tree", **place)
    want = ck.linear_logp(whole, head, target, order="tree")
    logp.sum().backward()
    want.sum().backward()
    scores = same_bytes(logp, want) and same_bytes(parts.grad, whole.grad)
    if rank == 0:
        print(f"{backend}: row_parallel_linear on {RANKS} ranks has one rank's bytes: {linear}")
        print(f"so have log p and dhidden of a vocabulary cut in two: {scores}", flush=True)
    dist.destroy_process_group()
    sys.exit(0 if linear and scores else 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (f"{folder}/store",), nprocs=RANKS)
