"""Backward times of attention by stages of ``select``: python -m perf.attention.select_parts FILE

Backward times of attention under the schedule of the whole search, of the search without its last
stages, and of each named kind as users name it.  One JSON line a mask.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from unittest import mock

import torch

import cute_kernels as ck
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import build
from cute_kernels.schedulers.model import selection
from cute_kernels.sparse_attn import config, lowering

from .cases import BLOCK, Case, Problem

MASKS = ("full", "causal", "window", "document", "prefix", "random")
CASES = (
    [Case(mask, 8192, 128, 16, 16) for mask in MASKS]
    + [Case(mask, 8192, 128, 32, 8) for mask in MASKS]
    + [Case(mask, 8192, 64, 16, 16) for mask in MASKS]
    + [Case(mask, 8192, 64, 32, 8) for mask in MASKS]
    + [
        Case(mask, 8192, dim, 16, 16)
        for dim in (192, 256)
        for mask in ("causal", "document", "random")
    ]
    + [Case("document", 16384, 128, 16, 16), Case("random", 2048, 128, 16, 16)]
)
#: The same blocks drawn anew for each head.
BY_HEAD = [Case("random", s, 128, 16, 16) for s in (4096, 8192, 16384)]
#: Variant -> the stages of `selection` that are left out.
LEFT_OUT = {
    "all": (),
    "without turns": ("_turns", "_turns_alone"),
    "named, best by model": ("_turns", "_turns_alone", "_tails"),
}
KINDS = ("spt", "left_to_right", "shortest_first", "lpt")
_REPEATS = 24


def by_head(case: Case) -> Problem:
    """A problem whose mask has a quarter of the blocks, and the diagonal, drawn for each head."""
    problem = Problem(case, "cuda")
    count = case.s // BLOCK
    generator = torch.Generator().manual_seed(20261129)
    blocks = torch.rand((1, case.heads, count, count), generator=generator) < 0.25
    blocks |= torch.eye(count, dtype=torch.bool)
    _, head, row, col = blocks.nonzero().unbind(1)
    lists = build.compact(head * count + row, col.int(), shape=(1, case.heads, count))
    problem.mask = BlockMask.from_blocks(*lists, case.s, case.s).to("cuda")
    return problem


def selected(problem: Problem, left_out: tuple[str, ...]):
    """(schedule, CPU seconds) of a selection without some stages."""
    case = problem.case
    mask = lowering.lower(problem.mask).mask
    heads = config.schedule_heads(mask.shape[1], case.batch, case.heads, case.kv_heads)
    group = case.batch * case.heads // heads
    options = {"heads": heads, "machine": config.MACHINES[case.dim], "group": group}
    with contextlib.ExitStack() as stack:
        for name in left_out:
            stack.enter_context(mock.patch.object(selection, name, lambda *_: False))
        selection._cache.clear()
        start = time.process_time()
        schedule = selection.select(mask, **options).schedule
        return schedule, time.process_time() - start


def timed(problem: Problem) -> dict:
    """Median backward microseconds of each variant, interleaved."""
    q, k, v, dout = problem.drawn(0)
    for t in (q, k, v):
        t.requires_grad_()
    schedules, seconds, names = {}, {}, {}
    for name, left_out in LEFT_OUT.items():
        schedules[name], seconds[name] = selected(problem, left_out)
        names[name] = schedules[name].name
    schedules |= {kind: kind for kind in KINDS}
    backward, hashes = {}, {}
    for name, schedule in schedules.items():
        key = getattr(schedule, "hash", name)
        hashes[name] = key
        if key not in backward:
            out = ck.block_sparse_attention(q, k, v, problem.mask, schedule=schedule)
            backward[key] = lambda out=out: torch.autograd.grad(
                out, (q, k, v), dout, retain_graph=True
            )
    times = {key: [] for key in backward}
    for repeat in range(_REPEATS + 4):
        for key, run in backward.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= 4:
                times[key].append(start.elapsed_time(end) * 1e3)
    medians = {name: statistics.median(times[key]) for name, key in hashes.items()}
    return {"case": problem.case.label, "us": medians, "names": names, "cpu_s": seconds}


def main(path: str) -> None:
    with open(path, "a") as file:
        problems = [lambda c=case: Problem(c, "cuda") for case in CASES]
        problems += [lambda c=case: by_head(c) for case in BY_HEAD]
        for make in problems:
            problem = make()
            row = timed(problem)
            row["mask_heads"] = problem.mask.shape[1]
            file.write(json.dumps(row) + "\n")
            file.flush()
            us = row["us"]
            best = min(us[kind] for kind in KINDS)
            ratios = (f"{us[name] / best:7.3f}" for name in LEFT_OUT)
            cells = f"{best:9.0f}", f"{row['cpu_s']['all']:6.2f}", row["names"]["all"]
            print(f"{row['case']:34}", *ratios, *cells, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
