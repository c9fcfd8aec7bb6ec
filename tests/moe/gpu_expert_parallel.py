"""Experts cut over cards: one rank's bytes against those of all ranks, and the time of a step.

``torchrun --nproc-per-node 4 -m tests.moe.gpu_expert_parallel`` prints a line for each case: the
results that differ on some rank, with their bytes that do.  Exit code 1 on a difference.
``--cpu``: the same over gloo, small, to try the script itself.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

import cute_kernels as ck
from tests.moe.cases import BF16, FP16, FP32
from tests.moe.parallel_cases import (
    ONE,
    ROUTER,
    SKEWED,
    SOME,
    Case,
    differing,
    random_case,
    share_of,
    step,
    whole,
)
from tests.ranks import on_cards, show

RANKS, ROUNDS = 4, 20


def listed(degree: int, cpu: bool) -> list[Case]:
    """Uneven tokens, several loads, dtypes and micro-batches; small ones on a CPU."""
    size, sizes = (32, (64, 32)) if cpu else (2048, (2048, 768))
    experts = degree * (4 if cpu else 16)
    uneven = tuple(size * rank // 2 + 3 * (rank > 0) for rank in range(degree))
    even = (size,) * degree
    k = min(8, experts // 2)
    shapes = [
        ((uneven,), k, ROUTER, BF16, False),
        ((even, uneven), k, ROUTER, BF16, True),
        ((uneven,), k, SKEWED, FP16, False),
        ((even,), 1, ONE, BF16, False),
        ((even,), k, SOME, FP32, False),
    ]
    cases = [
        Case(tokens, experts, k, load, dtype, state, *sizes)
        for tokens, k, load, dtype, state in shapes
    ]
    return cases + [random_case(seed, degree) for seed in range(5)]


def compare(device: str, cases: list[Case]) -> dict[str, int]:
    """Run every case; rank 0 prints the lines.  Case -> bytes that differ on all ranks."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    totals = {}
    for case in cases:
        counts: dict[str, int] = {}
        names = differing(case, whole(case, device), dist.group.WORLD, rank, degree, counts=counts)
        reports: list = [None] * degree
        dist.all_gather_object(reports, (names, counts))
        wrong = sorted({name for names, _ in reports for name in names})
        totals[str(case)] = sum(sum(counts.values()) for _, counts in reports)
        verdict = f"DIFFER: {', '.join(wrong)}" if wrong else "same bytes"
        show(f"{case}: {totals[str(case)]} bytes differ: {verdict}")
    return totals


def timed(device: str, case: Case) -> float:
    """Median milliseconds of a forward and backward of this rank's part, ranks together."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    batches, parameters, _ = share_of(case, whole(case, device), rank, degree)
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        step(batches, parameters, case, dist.group.WORLD)
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main(device: str) -> int:
    """Run the cases and time a step; how many bytes differ."""
    world = dist.get_world_size()
    show(f"{world} ranks, {ck.contract_id('grouped_linear', device)}")
    cases = listed(world, device == "cpu")
    different = sum(compare(device, cases).values())
    case = cases[0]
    show(f"{case}: {timed(device, case):.2f} ms a step, median of {ROUNDS}")
    show(f"{len(cases)} cases, {different} bytes differ")
    return different


if __name__ == "__main__":
    on_cards(main, RANKS)
