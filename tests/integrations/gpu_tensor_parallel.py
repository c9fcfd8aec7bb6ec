"""Parallel linears over NCCL: one rank's bytes against those of all ranks, a line for each case.

``python -m tests.integrations.gpu_tensor_parallel`` starts two ranks itself; ``torchrun
--nproc-per-node 4 -m tests.integrations.gpu_tensor_parallel`` starts as many as it is told to.
Exit code 1 on a difference.  ``--cpu``: the same over gloo, small, to try the script itself.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cute_kernels as ck
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
from tests.ranks import named_on_all, on_cards, show

#: (N, K): a projection of attention, both of a feed-forward block; and, for two ranks, six leaves.
SIZES, SMALL_SIZES, SIX_LEAVES = (
    [(4096, 4096), (14336, 4096), (4096, 14336)],
    [(384, 256)],
    (192, 96),
)
ROWS = [(1,), (3,), (70,), (1000,), (2, 2048)]


def listed(device: str, degree: int) -> list[Case]:
    """bf16 everywhere; other dtypes, and sums of -0, at the first size."""
    sizes, rows = (SMALL_SIZES, ROWS[:3]) if device == "cpu" else (SIZES, ROWS)
    of_bf16 = [*sizes, SIX_LEAVES] if degree == 2 else sizes
    cases = [Case(r, n, k, BF16, bias=i % 2 == 0) for n, k in of_bf16 for i, r in enumerate(rows)]
    for dtype in (FP16, FP32):
        cases += [Case(r, *sizes[0], dtype, True) for r in rows[1:3]]
    return [*cases, Case((5,), 384, 256, BF16, False, minus_zeros=True)]


def compare(device: str, cases: list[Case]) -> int:
    """Run every case of both functions; how many results differ.  Rank 0 prints the lines."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    mesh, different = init_device_mesh(device, (degree,), mesh_dim_names=("tp",)), 0
    for case in cases:
        label = f"{list(case.rows)} x [{case.n}, {case.k}] {case.dtype}"
        results = whole(case, device)
        for function in CUTS:
            for path in paths(degree):
                with forced(path):
                    names = named_on_all(differing(function, results, mesh, degree, rank))
                different += len(names)
                verdict = "same bytes" if not names else f"DIFFER: {', '.join(names)}"
                show(f"{function.__name__} {label} {path}: {verdict}")
    return different


def main(device: str) -> int:
    """Run all cases; how many results differ."""
    degree = dist.get_world_size()
    show(f"{degree} ranks, {ck.contract_id(tp.ROW, device)}")
    cases = listed(device, degree)
    different = compare(device, cases)
    show(f"{len(cases)} cases of each function, {different} results differ")
    return different


if __name__ == "__main__":
    on_cards(main, 2)
