"""Whole models cut over GPUs, against one GPU, byte for byte.

    torchrun --nproc-per-node 4 -m tests.model.parallel.gpu_parallel [FAMILY ...] [--device cpu]

Rank 0 prints a line for each family and degree, and how many results differ on any rank; the exit
code is 1 if one does.  Degrees that the number of processes cannot cut are skipped.
"""

from __future__ import annotations

import argparse
import gc
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.model.parallel import cases

FAMILIES = ("llama", "qwen3", "gemma3", "mixtral", "qwen3_moe")
DEGREES = (1, 2, 4, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    backend = "gloo" if arguments.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    rank, world, failed = dist.get_rank(), dist.get_world_size(), 0
    if arguments.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    for degree in DEGREES:
        if world % degree:
            continue
        names = {"mesh_dim_names": ("dp", "tp")}
        mesh = init_device_mesh(arguments.device, (world // degree, degree), **names)["tp"]
        for family in arguments.families:
            wrong = cases.differing(family, mesh, **heads)
            every: list[list[str]] = [[] for _ in range(world)]
            dist.all_gather_object(every, wrong)
            named = sorted({name for names in every for name in names})
            failed += bool(named)
            if rank == 0:
                count = len(cases.of_one(family, arguments.device, **heads))
                print(f"{family} {degree}: {len(named)} of {count} differ {named[:5]}", flush=True)
    gc.collect()
    dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
