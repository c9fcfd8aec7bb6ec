"""Parallel linears over NCCL: one rank's bytes against those of all ranks, a line for each case.

``python -m tests.integrations.gpu_tensor_parallel`` starts two ranks itself; ``torchrun
--nproc-per-node 4 -m tests.integrations.gpu_tensor_parallel`` starts as many as it is told to.
A case that the number of ranks cannot cut is skipped, and its line says why.  Exit code 1 on a
difference, or if one of the functions ran no case.  ``--cpu``: the same over gloo, small, to try
the script itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import cute_kernels as ck
from cute_kernels.errors import ShapeError
from cute_kernels.integrations import tensor_parallel as tp
from tests.integrations.parallel_cases import (
    BF16,
    CUTS,
    FP16,
    FP32,
    Case,
    differing,
    forced,
    paths,
    whole,
)

RANKS = 2
#: (N, K): a projection of attention, both of a feed-forward block, and six leaves of 16, which two
#: ranks can cut and four cannot.
SIZES = [(4096, 4096), (14336, 4096), (4096, 14336), (192, 96)]
SMALL_SIZES = [(384, 256), (192, 96)]
ROWS = [(1,), (3,), (70,), (1000,), (2, 2048)]


class Tally(NamedTuple):
    """How many cases of each function ran, the lines of those skipped, and differing results."""

    ran: dict[str, int]
    skipped: list[str]
    different: int

    def failed(self) -> bool:
        """Whether a result differed, or a function ran no case."""
        return self.different > 0 or not all(self.ran.values())


def listed(cpu: bool) -> list[Case]:
    """bf16 everywhere; other dtypes, and sums of -0, at the first size."""
    sizes, rows = (SMALL_SIZES, ROWS[:3]) if cpu else (SIZES, ROWS)
    cases = [Case(r, n, k, BF16, bias=i % 2 == 0) for n, k in sizes for i, r in enumerate(rows)]
    for dtype in (FP16, FP32):
        cases += [Case(r, *sizes[0], dtype, True) for r in rows[1:3]]
    return [*cases, Case((5,), 384, 256, BF16, False, minus_zeros=True)]


def why_skipped(function, case: Case, degree: int) -> str | None:
    """The reason why so many ranks cannot cut the case; None if they can."""
    name, size = ("K", case.k) if function is tp.row_parallel_linear else ("N", case.n)
    try:
        tp.cut_at_leaves(name, size, degree)
    except ShapeError as error:
        return str(error)
    return None


def compare(device: str, cases: list[Case]) -> Tally:
    """Run every case of every function that the ranks can cut; rank 0 prints the lines."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (degree,), mesh_dim_names=("tp",))
    ran, skipped, different = dict.fromkeys((f.__name__ for f in CUTS), 0), [], 0
    for case in cases:
        runnable = []
        label = f"{list(case.rows)} x [{case.n}, {case.k}] {case.dtype}".replace("torch.", "")
        for function in CUTS:
            if reason := why_skipped(function, case, degree):
                skipped.append(f"{function.__name__} {label}: skipped: {reason}")
                show(rank, skipped[-1])
            else:
                runnable.append(function)
        of = whole(case, device) if runnable else None
        for function in runnable:
            for path in paths(degree):
                reports: list = [None] * degree
                with forced(path):
                    names = differing(function, of, mesh, degree, rank)
                dist.all_gather_object(reports, names)
                names = sorted({name for report in reports for name in report})
                different += len(names)
                verdict = "same bytes" if not names else f"DIFFER: {', '.join(names)}"
                show(rank, f"{function.__name__} {label} {path}: {verdict}")
            ran[function.__name__] += 1
    return Tally(ran, skipped, different)


def show(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def run(rank: int, world: int, store: str | None, cpu: bool) -> None:
    """One rank; ``store``: a file to meet at, or None under torchrun."""
    method = "env://" if store is None else f"file://{store}"
    if not cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=world)
    try:
        device = "cpu" if cpu else "cuda"
        show(rank, f"{world} ranks, {ck.contract_id(tp.ROW, device)}")
        tally = compare(device, listed(cpu))
        counts = ", ".join(f"{count} cases of {name}" for name, count in tally.ran.items())
        show(rank, f"{counts}; {len(tally.skipped)} skipped, {tally.different} results differ")
    finally:
        dist.destroy_process_group()
    if tally.failed():
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
