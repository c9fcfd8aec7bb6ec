"""Ops that are functions of operands through autograd: each measured forward and backward alone.

A case has ``product`` ("rms_norm fwd"), ``label``, ``work``, ``items()`` for its record and
``inputs(seed, device)``: operands by name, those that want a gradient requiring it, and the
gradients that come in, ``d0``, ``d1``, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from . import record, timing, watch
from .bits import repeats
from .rival import Absent, Call, Rival, Start
from .work import measured

Inputs = dict[str, torch.Tensor]
Op = Callable[[Inputs], tuple[torch.Tensor, ...]]
DIRECTIONS = ("fwd", "bwd")
REPEATS = 5


@dataclass(frozen=True)
class Suite:
    """Subject of a bench: the kernel in its records, the op whose contract ours keeps, the
    rivals."""

    kernel: str
    op: str
    rivals: Mapping[str, Rival]


def starts(names: Iterable[str], ops: Callable[[], dict[str, Op]]) -> dict[str, Start]:
    """The passes of a library: `product` of a case -> what starts it.

    names: of all ops.  ops: imports the library, or raises Absent; one without an op lacks its
    name.
    """

    def started(op: str) -> Op:
        available = ops()
        if op not in available:
            raise Absent(f"it has no {op}")
        return available[op]

    def fwd(op: str) -> Start:
        def start(case) -> Call:
            run = started(op)

            def call(t: Inputs):
                with torch.no_grad():
                    return run(t)

            return call

        return start

    def bwd(op: str) -> Start:
        def start(case) -> Call:
            run, graphs = started(op), {}

            def call(t: Inputs):
                key = id(t[next(iter(t))])
                inputs = [value for value in t.values() if value.requires_grad]
                if key not in graphs:
                    graphs[key] = run(t)
                upstream = [value for name, value in t.items() if name in ("d0", "d1", "d2")]
                return torch.autograd.grad(graphs[key], inputs, upstream, retain_graph=True)

            return call

        return start

    out = {}
    for op in names:
        out |= {f"{op} fwd": fwd(op), f"{op} bwd": bwd(op)}
    return out


def _started(suite: Suite, case, names: list[str]) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of the rivals that can run here, and why each other one is not."""
    calls, absent = {}, {}
    for name in names:
        try:
            calls[name] = suite.rivals[name].start[case.product](case)
        except Absent as error:
            absent[name] = str(error)
    return calls, absent


def _verdict(rival: Rival, call: Call, t: Inputs) -> dict:
    """The bits of what is ordered."""
    try:
        call(t)
        bits = {}
        if rival.ordered:
            bits["repeat"] = repeats(lambda: call(t), REPEATS)
        return {"bitwise": bits, "status": "ok"}
    except Exception as error:
        # A rival that fails on the card is a result to record, with its reason.
        return {"status": "failed", "why": watch.words(error)}


def _distance(results: tuple, reference: tuple) -> float:
    """The largest relative distance of a result from another's."""
    pairs = zip(results, reference, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def _run_case(
    suite: Suite, case, names: list[str], *, rounds: int, device: str, ceilings: dict
) -> dict[str, dict]:
    """One record body per rival."""
    runnable, absent = _started(suite, case, names)
    first = case.inputs(0, device)
    bodies = {name: _verdict(suite.rivals[name], call, first) for name, call in runnable.items()}
    calls = {name: runnable[name] for name, body in bodies.items() if body["status"] == "ok"}
    if "ours" in calls:
        ours = calls["ours"](first)
        for name in calls:
            # One that computes nothing, a copy say, has no results.
            if name != "ours" and (results := calls[name](first)):
                bodies[name]["distance"] = _distance(results, ours)
        del ours
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    set_bytes = sum(value.nbytes for value in first.values())
    count = timing.set_count(set_bytes, l2_bytes, len(calls))
    sets = [first, *(case.inputs(i, device) for i in range(1, count))]
    rotated = timing.rotating(calls, sets)
    timing.warm_up(rotated, count)
    times = timing.interleave(rotated, rounds=rounds)
    medians = {name: taken.median for name, taken in times.items()}
    for name, taken in times.items():
        others = {other: t / medians[name] for other, t in medians.items() if other != name}
        bodies[name] |= measured(taken, case.work, ceilings) | {"ratio": others}
        bodies[name] |= {"cold_l2": {"sets": count}}
    for name, why in absent.items():
        bodies[name] = {"status": "absent", "why": why}
    return {name: case.items() | {"system": name} | body for name, body in bodies.items()}


def bench(
    suite: Suite,
    todo: Iterable,
    names: list[str],
    *,
    output: Path,
    rounds: int,
    commit: str | None = None,
    device: str = "cuda",
) -> Iterator[dict]:
    """Checks the bits, compares results, times in turns; yields each record as it is written."""
    import cute_kernels as ck

    common = record.environment(commit) | {"kind": "bench", "kernel": suite.kernel}
    ceilings = timing.ceilings()
    for case in todo:
        options = {"rounds": rounds, "device": device, "ceilings": ceilings}
        bodies = _run_case(suite, case, names, **options)
        clocks = record.clocks()
        for name, body in bodies.items():
            body |= common | {"clocks": clocks}
            if suite.rivals[name].promised:
                body["contract_id"] = ck.contract_id(suite.op, device)
            record.append(output, body)
            yield body
        torch.cuda.empty_cache()


def line(body: dict) -> str:
    """One record for the terminal."""
    head = f"{body['product']:<20} {body['shape']:<11} {body['system']:<11}"
    if body["status"] != "ok":
        return f"{head} {body['status']}: {body['why'][:100]}"
    cells = [f"{body['median_us']:8.1f} us", f"floor {body['floor_fraction']:4.0%}"]
    broken = [name for name, held in body["bitwise"].items() if not held]
    cells += [f"BITS DIFFER: {broken}"] if broken else []
    cells += [f"distance {body['distance']:.1e}"] if "distance" in body else []
    ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in body["ratio"].items())
    return f"{head} {'  '.join(cells)}  [{ratios}]"
