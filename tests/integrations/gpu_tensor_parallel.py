"""Parallel linears on two cards over NCCL: one rank's bytes against two ranks', a line each.

``python -m tests.integrations.gpu_tensor_parallel`` starts both ranks itself; ``torchrun
--nproc-per-node 2 -m tests.integrations.gpu_tensor_parallel`` starts as many as it is told to.
Exit code 1 on a difference.  ``--cpu``: the same over gloo, small, to try the script itself.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import cute_kernels as ck
from cute_kernels.integrations import tensor_parallel as tp
from tests.integrations.parallel_cases import BF16, CUTS, FP16, FP32, Case, differing, whole

RANKS = 2
#: (N, K): a projection of attention, both of a feed-forward block, and six leaves of 16.
SIZES = [(4096, 4096), (14336, 4096), (4096, 14336), (192, 96)]
ROWS = [(1,), (3,), (70,), (1000,), (2, 2048)]


def listed(cpu: bool) -> list[Case]:
    """bf16 everywhere; other dtypes, and sums of -0, at the first size."""
    sizes, rows = (SIZES[-1:], ROWS[:3]) if cpu else (SIZES, ROWS)
    found = [Case(r, n, k, BF16, bias=i % 2 == 0) for n, k in sizes for i, r in enumerate(rows)]
    for dtype in (FP16, FP32):
        found += [Case(r, *sizes[0], dtype, True) for r in rows[1:3]]
    return [*found, Case((5,), 384, 256, BF16, False, minus_zeros=True)]


def compared(device: str) -> int:
    """How many results differ, over all cases and ranks."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (degree,), mesh_dim_names=("tp",))
    count = 0
    for case in listed(device == "cpu"):
        of = whole(case, device)
        for function in CUTS:
            for exchange, most in (("gathered", 1 << 62), ("scattered", 0)):
                tp.GATHER_BYTES = most
                found: list = [None] * degree
                dist.all_gather_object(found, differing(function, of, mesh, degree, rank))
                names = sorted({name for one in found for name in one})
                count += len(names)
                if rank == 0:
                    what = f"{list(case.rows)} x [{case.n}, {case.k}] {case.dtype}".replace(
                        "torch.", ""
                    )
                    said = "same bytes" if not names else f"DIFFER: {', '.join(names)}"
                    print(f"{function.__name__} {what} {exchange}: {said}", flush=True)
    return count


def run(rank: int, world: int, store: str | None, cpu: bool) -> None:
    """One rank; ``store``: a file to meet at, or None under torchrun."""
    method = "env://" if store is None else f"file://{store}"
    if not cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=world)
    try:
        device = "cpu" if cpu else "cuda"
        if rank == 0:
            print(f"{world} ranks, {ck.contract_id(tp.ROW, device)}", flush=True)
        different = compared(device)
    finally:
        dist.destroy_process_group()
    if different:
        sys.exit(1)


def main() -> None:
    cpu = "--cpu" in sys.argv[1:]
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, cpu)
        return
    if not cpu and torch.cuda.device_count() < RANKS:
        sys.exit(f"needs {RANKS} GPUs, here are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(run, (RANKS, f"{folder}/store", cpu), nprocs=RANKS)
        except mp.ProcessExitedException as error:
            sys.exit(error.exit_code or 1)


if __name__ == "__main__":
    main()
