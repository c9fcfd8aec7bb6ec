"""Ops that are functions of operands through autograd: each measured forward and backward alone.

A case has ``product`` ("rms_norm fwd"), ``label``, ``work``, ``items()`` for its record and
``inputs(seed, device)``: operands by name, those that want a gradient requiring it, and the
gradients that come in, ``d0``, ``d1``, ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import record, timing, watch
from .bits import repeats
from .rival import Absent, Call, Rival, Start, started
from .work import measured, ratios

Inputs = dict[str, torch.Tensor]
Op = Callable[[Inputs], tuple[torch.Tensor, ...]]
DIRECTIONS = ("fwd", "bwd")
REPEATS = 5


def repeated(rival: Rival, call: Call, case: object, t: Inputs) -> dict:
    """Whether the bytes of an ordered rival repeat."""
    call(t)
    return {"bitwise": {"repeat": repeats(lambda: call(t), REPEATS)} if rival.ordered else {}}


@dataclass(frozen=True)
class Suite:
    """Subject of a bench.

    kernel: Its name in the records.  op: The op whose contract ours keeps.
    ops: Product -> another op, of those that have one.
    check: (rival, call, case, operands) -> fields of a record; what it raises is recorded.
    facts: (case, median in us, ceilings) -> more fields of a record that has a time.
    compares: Whether a record has the distance of the results from ours.
    """

    kernel: str
    op: str
    rivals: Mapping[str, Rival]
    check: Callable[[Rival, Call, Any, Inputs], dict] = repeated
    facts: Callable[[Any, float, dict], dict] = lambda case, median_us, ceilings: {}
    compares: bool = True
    ops: Mapping[str, str] = field(default_factory=dict)


def starts(names: Iterable[str], ops: Callable[[], dict[str, Op]]) -> dict[str, Start]:
    """The passes of a library: `product` of a case -> what starts it.

    names: of all ops.  ops: imports the library, or raises Absent; one without an op lacks its
    name.
    """

    def run_of(op: str) -> Op:
        available = ops()
        if op not in available:
            raise Absent(f"it has no {op}")
        return available[op]

    def fwd(op: str) -> Start:
        def start(case) -> Call:
            run = run_of(op)

            def call(t: Inputs):
                with torch.no_grad():
                    return run(t)

            return call

        return start

    def bwd(op: str) -> Start:
        def start(case) -> Call:
            run, graphs = run_of(op), {}

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


def copied(case) -> Call:
    """A copy of as many bytes as the case moves: about the least that a kernel of its size takes.

    The others' operands, which are several times the L2, pass between two calls.
    """
    buffers: list[torch.Tensor] = []

    def call(t: Inputs) -> tuple:
        if not buffers:
            like = next(iter(t.values()))
            size = 2, case.work.bytes // 4
            buffers.extend(like.new_empty(size, dtype=torch.bfloat16).normal_())
        target, source = buffers
        target.copy_(source)
        return ()

    return call


def _verdict(suite: Suite, rival: Rival, call: Call, case, t: Inputs) -> dict:
    try:
        return {"status": "ok"} | suite.check(rival, call, case, t)
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
    runnable, absent = started(suite.rivals, names, case.product, case)
    first = case.inputs(0, device)
    bodies = {
        name: _verdict(suite, suite.rivals[name], call, case, first)
        for name, call in runnable.items()
    }
    calls = {name: runnable[name] for name, body in bodies.items() if body["status"] == "ok"}
    if suite.compares and "ours" in calls:
        ours = calls["ours"](first)
        for name in calls:
            # One that computes nothing, a copy say, has no results.
            if name != "ours" and (results := calls[name](first)):
                bodies[name]["distance"] = _distance(results, ours)
        del ours
    draw = functools.partial(case.inputs, device=device)
    times, cold_l2 = timing.in_turns(calls, first, draw, rounds=rounds, device=device)
    medians = {name: taken.median for name, taken in times.items()}
    for name, taken in times.items():
        bodies[name] |= measured(taken, case.work, ceilings) | {"ratio": ratios(medians, name)}
        bodies[name] |= suite.facts(case, taken.median, ceilings) | {"cold_l2": cold_l2}
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
            # One that failed may have no backend, and so no contract.
            if suite.rivals[name].promised and body["status"] == "ok":
                op = suite.rivals[name].op or suite.ops.get(case.product, suite.op)
                body["contract_id"] = ck.contract_id(op, device)
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
