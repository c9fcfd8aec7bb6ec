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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.contract import same_bytes
from tests.integrations import tiny
from tests.integrations.fsdp_rank import differing, gathered

STEPS = 5


def compared(device: str, dtype: torch.dtype, tied: bool) -> list[str]:
    """What differs between this rank of two and one process that takes both parts."""
    rank = dist.get_rank()
    single = tiny.llama(tied).to(device, dtype)
    model, reference = copy.deepcopy(single), copy.deepcopy(single)
    mesh = init_device_mesh(device, (tiny.RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, wrong = tiny.optimizer(model), []
    for step, (logps, gradients, after) in enumerate(tiny.alone(single, STEPS)):
        batch = tiny.batch(step)
        count = int(tiny.learnt(batch).sum())
        scored, loss = tiny.scored(model, reference, tiny.part(batch, rank), count)
        (loss * tiny.RANKS).backward()
        reduced = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        if not same_bytes(scored, logps[rank]):
            wrong.append(f"step {step}: log-probs")
        wrong += [f"step {step}: dW {n}" for n in differing(reduced, gradients)]
        wrong += [f"step {step}: {n}" for n in differing(gathered(model), _named(after))]
    return wrong


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


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
