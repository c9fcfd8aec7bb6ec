"""Times of a backward's kernels apart: python -m perf.attention.kernel_times [--dry-run]

The kernel before, the fused one and the kernel after it, of ours and of FA4, by torch.profiler, in
turns in one process, cold L2; "ours_before" and "ours_x" are ours with the options of `VARIANTS`.
A call ends where the next spin begins, so that a kernel that starts inside the one before it shows:
`span_us` is from the first start to the last end, `overlap_us` what its kernels' times exceed it.
Before they are timed, dq, dk and dv of every variant must have the bytes of ours.

Needs a GPU; with --dry-run, which compiles and launches nothing, it prints the cases.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from cute_kernels.compile import cache, together
from cute_kernels.compile.kernel import Kernel
from cute_kernels.sparse_attn import checks, config, launch, lowering
from cute_kernels.sparse_attn.tensors import Grads, Saved

from ..core import record, timing
from ..core.bits import same_bytes
from ..core.rival import Absent
from . import fa4
from .cases import Case, Inputs, Problem

#: Short sequences, with groups; then causal, window and full masks of 8k.
CASES = (
    *(Case("causal", 1024, dim, 32, 8, 8192) for dim in (128, 64)),
    *(Case(mask, 8192, dim, 16, 16) for mask in ("causal", "window", "full") for dim in (128, 64)),
)
_OFF = {"pdl": False, "rows_first": False, "first_stores": False}
#: Options of a backward's configuration, in place of the default ones.
VARIANTS: Mapping[str, dict[str, bool]] = {
    "ours": {},
    "ours_before": _OFF,
    **{f"ours_{name}": _OFF | {name: True} for name in _OFF},
    "ours_all": dict.fromkeys(_OFF, True),
    "ours_dp_first": {"dp_first": True},
}
RIVALS = {"fa4": False, "fa4_ordered": True}
DEFAULT = ("ours", "ours_before", "fa4")
ROUNDS, SPIN_US, BACKLOG_US = 20, 30, 20_000
#: Stages of a backward by kernel names, ours and FA4's; the first that fits.
STAGES = {
    "spin": r"spin_kernel",
    "pre": r"bwd_pre|preprocess",
    "post": r"bwd_post|postprocess",
    "main": r"kernel_bwd_(wide_)?sm90|flash_bwd|FlashAttentionBackward",
}
OTHER = "other"
_TIMED = (*(name for name in STAGES if name != "spin"), OTHER)


@dataclass(frozen=True)
class Event:
    """A kernel on the device's clock, microseconds."""

    name: str
    start: float
    end: float


def stage_of(name: str) -> str:
    """The stage of a kernel: one of `STAGES`, or `OTHER`."""
    return next((stage for stage, text in STAGES.items() if re.search(text, name)), OTHER)


def split(events: list[Event]) -> list[list[Event]]:
    """The kernels of each call: calls follow a spin each."""
    calls: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start):
        if stage_of(event.name) == "spin":
            calls.append([])
        elif calls:
            calls[-1].append(event)
    return calls


def times_of(call: list[Event]) -> dict[str, float]:
    """Microseconds of each stage of a call, its span, and by how much its kernels overlap."""
    times = dict.fromkeys(_TIMED, 0.0)
    for event in call:
        times[stage_of(event.name)] += event.end - event.start
    span = max(event.end for event in call) - min(event.start for event in call)
    return times | {"span": span, "overlap": sum(times.values()) - span}


def medians(calls: list[list[Event]], turns: list[str]) -> dict[str, dict[str, float]]:
    """The median times of each system; turns: whose each call is.  ValueError if calls lack."""
    if len(calls) != len(turns) or not all(calls):
        counts = sorted({len(call) for call in calls})
        want = f"kernels of {len(turns)} calls"
        raise ValueError(f"profile: expected {want}, got {len(calls)} of {counts} kernels")
    by_system: dict[str, list[dict[str, float]]] = {}
    for name, call in zip(turns, calls, strict=True):
        by_system.setdefault(name, []).append(times_of(call))
    return {
        name: {key: timing.quantile([each[key] for each in of_system], 0.5) for key in of_system[0]}
        for name, of_system in by_system.items()
    }


def variants(case: Case) -> dict[str, dict[str, bool]]:
    """Variants of ours for a case: at D = 64 ptxas serialises one of them."""
    return {name: o for name, o in VARIANTS.items() if case.dim > 64 or "dp_first" not in o}


def kernels(
    cases: Sequence[Case] = CASES, names: Sequence[str] = tuple(VARIANTS)
) -> Iterator[Kernel]:
    """Every kernel of ours that these cases and systems launch."""
    unique: dict[str, Kernel] = {}
    for case in cases:
        form, shape = "none" if case.mask == "full" else "band", ("bf16", case.dim)
        unique_entries = [launch.entry(config.configure_forward(*shape, form))]
        for options in (o for name, o in variants(case).items() if name in names):
            for key_blocks in config.FEW_AND_MANY:
                default = config.configure(*shape, form, True, key_blocks=key_blocks)
                main = replace(default, **options)
                pre, post = launch.configs_around(main, False)
                unique_entries += [
                    launch.entry(main),
                    launch.entry(pre),
                    launch.entry(post),
                ]
        unique |= {kernel.identity: kernel for kernel in unique_entries}
    yield from unique.values()


def ours(problem: Problem, t: Inputs, options: dict[str, bool]) -> Callable[[Inputs], tuple]:
    """(dq, dk, dv) of an input set, with these options of the configuration."""
    case, lowered = problem.case, lowering.lower(problem.mask)
    sizes = case.batch, case.s, case.s, case.heads, case.kv_heads, case.dim
    order = lowering.order_of(lowered, checks.AUTO, sizes)
    configure = config.configure

    def configured(*args, **kwargs):
        return replace(configure(*args, **kwargs), **options)

    fixed = lowered, order, case.scale, 0.0, True
    with mock.patch.object(config, "configure", configured):
        plan = launch.plan_backward(*_operands(t), *fixed)
    return lambda t: plan.run(*_operands(t), *fixed)


def _operands(t: Inputs) -> tuple[Grads, Saved]:
    return Grads(t.dout, None), Saved(t.q, t.k, t.v, t.out, t.lse)


def systems(problem: Problem, t: Inputs, names: list[str]) -> dict[str, Callable]:
    """The calls of these systems; a rival that cannot run here is printed and left out."""
    calls: dict[str, Callable] = {}
    for name in names:
        try:
            if name in RIVALS:
                calls[name] = fa4.backward(problem, RIVALS[name])
            elif name in variants(problem.case):
                calls[name] = ours(problem, t, VARIANTS[name])
            if name in calls:
                calls[name](t)
                torch.cuda.synchronize()
        except Absent as error:
            calls.pop(name, None)
            print(f"{name}: {error}", flush=True)
    return calls


def require_bytes(calls: Mapping[str, Callable], t: Inputs) -> None:
    """Raise if a variant of ours has other bytes than the first one."""
    variants = [name for name in calls if name in VARIANTS]
    results = {name: calls[name](t)[:3] for name in variants}
    for name in variants[1:]:
        for which, a, b in zip(
            ("dq", "dk", "dv"), results[variants[0]], results[name], strict=True
        ):
            if not same_bytes(a, b):
                raise AssertionError(f"{name}: {which} differs from that of {variants[0]}")


def inputs(problem: Problem, seed: int) -> Inputs:
    """A random input set, with our forward's results."""
    drawn = problem.drawn(seed)
    q, k, v, _ = drawn
    out, lse = launch.forward(q, k, v, lowering.lower(problem.mask), problem.case.scale, 0.0)
    return problem.inputs(drawn, out, lse)


def profiled(calls: Mapping[str, Callable], sets: list[Inputs]) -> tuple[list, list[str], dict]:
    """(kernels of each call, whose each is, the card's clocks while it works)."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    rotated = timing.rotating(calls, sets)
    timing.warm_up(rotated, len(sets))
    turns, clock, number = [], timing.CudaClock(), 0
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        torch.cuda._sleep(1)  # the profiler's own start is before it
        clock.sleep(BACKLOG_US)
        for _ in range(ROUNDS):
            for name, call in rotated.items():
                clock.sleep(SPIN_US)
                call(number)
                turns.append(name)
                number += 1
        clocks = record.clocks()
        clock.finish()
    events = [
        Event(each.name, each.time_range.start, each.time_range.end)
        for each in trace.events()
        if each.device_type == DeviceType.CUDA
    ]
    # Two spins come before the first call's.
    return split(events)[2:], turns, clocks


def run_case(case: Case, names: list[str]) -> Iterator[dict]:
    """The record bodies of a case, one of each system."""
    problem = Problem(case, "cuda")
    first = inputs(problem, 0)
    calls = systems(problem, first, names)
    require_bytes(calls, first)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    count = timing.set_count(first.nbytes, l2_bytes, len(calls))
    sets = [first, *(inputs(problem, seed) for seed in range(1, count))]
    with torch.no_grad():
        calls_of, turns, clocks = profiled(calls, sets)
    for name, times in medians(calls_of, turns).items():
        other = {e.name for call in calls_of for e in call if stage_of(e.name) == OTHER}
        body = case.items("bwd") | {"system": name, "status": "ok", "clocks": clocks}
        body |= {"median_us": round(times["span"], 2)}
        body |= {f"{key}_us": round(value, 2) for key, value in times.items()}
        yield body | ({"other": sorted(n[:80] for n in other)} if times[OTHER] else {})


def line(body: dict) -> str:
    """One line for the terminal."""
    stages = (f"{name} {body[f'{name}_us']:7.1f}" for name in (*_TIMED, "span", "overlap"))
    return f"{body['system']:<18} {body['shape']:<28} {'  '.join(stages)}"


def main() -> None:
    """Append the records of every case, and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", default=",".join(DEFAULT))
    parser.add_argument("--only", default="", help="parts of labels, such as causal/s1024,d64")
    parser.add_argument("--output", type=Path, default=record.RESULTS / "tune.jsonl")
    parser.add_argument("--commit")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    names = arguments.systems.split(",")
    if unknown := [name for name in names if name not in VARIANTS and name not in RIVALS]:
        parser.error(f"--systems: unknown {unknown[0]!r}; known: {', '.join((*VARIANTS, *RIVALS))}")
    todo = [c for c in CASES if any(text in c.label for text in arguments.only.split(","))]
    if arguments.dry_run:
        for case in todo:
            print(f"batch {case.batch} {case.label}: {', '.join(names)}")
        return
    common = record.environment(arguments.commit) | {"kind": "tune", "kernel": "attention"}
    catalogue = f"{__package__}.kernel_times:kernels"
    needed = list(kernels(todo, names))
    with together.compiling(needed, "sm_90a", catalogue):
        # All of ours before FA4 is imported, which changes CuTe process-wide.
        for kernel in needed:
            cache.get(kernel, "sm_90a")
        for case in todo:
            for body in run_case(case, names):
                record.append(arguments.output, body | common)
                print(line(body), flush=True)


if __name__ == "__main__":
    main()
