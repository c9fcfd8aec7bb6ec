"""Parallel linears over NCCL: one rank's bytes against those of all ranks, a line for each case.

``python -m tests.integrations.gpu_tensor_parallel`` starts two ranks itself; ``torchrun
--nproc-per-node 4 -m tests.integrations.gpu_tensor_parallel`` starts as many as it is told to.
A case that the number of ranks cannot cut is skipped, and its line says why.  Exit code 1 on a
difference, or if one of the functions ran no case.  ``--cpu``: the same over gloo, small, to try
the script itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
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
from tests.ranks import named_on_all, on_cards, show

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
        label = f"{list(case.rows)} x [{case.n}, {case.k}] {case.dtype}".replace("torch.", "")
        reasons = {function: why_skipped(function, case, degree) for function in CUTS}
        of = None if all(reasons.values()) else whole(case, device)
        for function, reason in reasons.items():
            if reason:
                skipped.append(f"{function.__name__} {label}: skipped: {reason}")
                show(skipped[-1])
                continue
            for path in paths(degree):
                with forced(path):
                    names = named_on_all(differing(function, of, mesh, degree, rank))
                different += len(names)
                verdict = "same bytes" if not names else f"DIFFER: {', '.join(names)}"
                show(f"{function.__name__} {label} {path}: {verdict}")
            ran[function.__name__] += 1
    return Tally(ran, skipped, different)


def main(device: str) -> bool:
    """Run all cases; whether they failed."""
    show(f"{dist.get_world_size()} ranks, {ck.contract_id(tp.ROW, device)}")
    tally = compare(device, listed(device == "cpu"))
    counts = ", ".join(f"{count} cases of {name}" for name, count in tally.ran.items())
    show(f"{counts}; {len(tally.skipped)} skipped, {tally.different} results differ")
    return tally.failed()


if __name__ == "__main__":
    on_cards(main, 2)
