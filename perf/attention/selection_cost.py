"""Time orders on the host: python -m perf.attention.selection_cost [--heads 64] [-o FILE]

`select` for 64 masks by head of 32k tokens, a quarter of their blocks drawn: CPU seconds and the
memory that the process adds at its peak, each call on masks of its own; targets: 0.5 s, 300 MB.
Then, by case of the bench, `order_of` for a schedule seen for the first time and for one whose
words are on the host already, on the CPU, where a copy to a card and its wait are left out: the
least of many calls, as other work on the machine only adds to it.  Needs no GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import build
from cute_kernels.schedulers.model.selection import select
from cute_kernels.sparse_attn import checks, config, lowering, masks

from ..core import record
from . import targets
from .cases import BLOCK, Case, Problem

LENGTH, DENSITY = 32_768, 0.25
_CALLS = 400


def drawn(heads: int, seed: int) -> BlockMask:
    """Masks by head of whole blocks, a quarter of them."""
    count = LENGTH // BLOCK
    generator = torch.Generator().manual_seed(seed)
    head, row, col = (torch.rand(heads, count, count, generator=generator) < DENSITY).nonzero().T
    shape = (1, heads, count)
    lists = build.compact(head * count + row, col.int(), shape=shape)
    return BlockMask.from_blocks(*lists, LENGTH, LENGTH)


def memory_mb(name: str) -> float:
    """VmRSS or VmHWM of this process, MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def selection(heads: int, seed: int) -> dict:
    """Cost of one call of `select`."""
    mask = drawn(heads, seed)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = memory_mb("VmRSS"), time.process_time()
    selected = select(mask, heads=heads, machine=config.MACHINES[128])
    return {
        "select_s": time.process_time() - start,
        "select_mb": memory_mb("VmHWM") - before,
        "schedule": selected.schedule.hash,
        "name": selected.schedule.name,
    }


def lists(case: Case) -> dict:
    """Least times of `order_of`, microseconds."""
    problem = Problem(case, "cpu")
    lowered = lowering.lower(problem.mask)
    count = config.schedule_heads(problem.mask.shape[1], case.batch, case.heads, case.kv_heads)
    group = case.batch * case.heads // count
    admitted = lowering.admitted(lowered, checks.AUTO, count, case.dim, group, "cuda")

    def timed(schedule: Callable) -> float:
        least = float("inf")
        for each in (schedule() for _ in range(_CALLS)):
            start = time.perf_counter()
            masks.order_of(lowered, each)
            least = min(least, (time.perf_counter() - start) * 1e6)
        return least

    return {"first_us": timed(lambda: replace(admitted)), "again_us": timed(lambda: admitted)}


def main() -> None:
    """Print the costs; append them to a file if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    bodies = [
        {"case": f"select {arguments.heads} x {LENGTH}"} | selection(arguments.heads, seed)
        for seed in range(arguments.calls)
    ]
    bodies += [{"case": case.label} | lists(case) for case in (Case(*c) for c in targets.cases())]
    for body in bodies:
        print(
            ", ".join(
                f"{key} {value:.3g}" if isinstance(value, float) else f"{value}"
                for key, value in body.items()
            )
        )
        if arguments.output:
            record.append(arguments.output, body)


if __name__ == "__main__":
    main()
