"""FSDP2 on two cards over NCCL against one process, byte for byte: ``python -m`` this module.

Five steps of the tiny Llama through linear_logp (tests/integrations/tiny.py), bf16 (SM90 kernels)
and fp32 (Triton): log-probs, gradients and weights after each.  Exit code 1 on a difference.
``--cpu``: the same over gloo, to try the script itself.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.integrations import tiny
from tests.integrations.fsdp_rank import sharded

STEPS = 5


def compared(device: str, dtype: torch.dtype, tied: bool) -> list[str]:
    """What differs between this rank of two and one process that takes both parts."""
    single = tiny.llama(tied).to(device, dtype)
    shard = sharded(copy.deepcopy(single), "layers", device)
    return tiny.trained(shard, single, dist.get_rank(), STEPS)["differing"]


def run(rank: int, store: str, cpu: bool) -> None:
    if not cpu:
        torch.cuda.set_device(rank)
    backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=tiny.RANKS
    )
    device, drawn, different = "cpu" if cpu else "cuda", tiny.batch, 0

    @functools.wraps(drawn)
    def batch(*arguments):
        return {name: t.to(device) for name, t in drawn(*arguments).items()}

    tiny.batch = batch
    for dtype in (torch.bfloat16, torch.float32):
        for tied in (False, True):
            found: list = [None] * tiny.RANKS
            dist.all_gather_object(found, compared(device, dtype, tied))
            names = sorted({name for one in found for name in one})
            different += len(names)
            if rank == 0:
                said = f"DIFFER: {names}" if names else f"{STEPS} steps, same bytes"
                print(f"FSDP2, {dtype}, tied {tied}: {said}", flush=True)
    gc.collect()
    dist.destroy_process_group()
    if different:
        sys.exit(1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = os.path.join(folder, "store"), "--cpu" in sys.argv[1:]
        mp.spawn(run, arguments, nprocs=tiny.RANKS)
