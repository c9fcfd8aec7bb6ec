"""Ops that are functions of operands through autograd: each measured forward and backward alone.

A case has ``product`` ("rms_norm fwd"), ``label``, ``work``, ``items()`` for its record and
``inputs(seed, device)``: operands by name, those that want a gradient requiring it, and the
gradients that come in, ``d0``, ``d1``, ...
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
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
    fitting: (case, names) -> those of the rivals that say something of a case.
    set_bytes: Bytes that a case reads of its operands; None: all of them.
    timed_in: The context in which calls are timed.
    patience_s: Seconds of one case after which the process ends.
    """

    kernel: str
    op: str
    rivals: Mapping[str, Rival]
    check: Callable[[Rival, Call, Any, Inputs], dict] = repeated
    facts: Callable[[Any, float, dict], dict] = lambda case, median_us, ceilings: {}
    compares: bool = True
    ops: Mapping[str, str] = field(default_factory=dict)
    fitting: Callable[[Any, list[str]], list[str]] = lambda case, names: names
    set_bytes: Callable[[Any], int | None] = lambda case: None
    timed_in: Callable[[], AbstractContextManager] = nullcontext
    patience_s: float | None = None


def forward(load: Callable[[], Op]) -> Start:
    """An op's forward; ``load`` imports the library, or raises Absent."""

    def start(case) -> Call:
        run = load()

        def call(t: Inputs):
            with torch.no_grad():
                return run(t)

        return call

    return start


def backward(load: Callable[[], Op]) -> Start:
    """An op's backward, on a graph that is made before, from the gradients that come in."""

    def start(case) -> Call:
        run, graphs = load(), {}

        def call(t: Inputs):
            key = id(t[next(iter(t))])
            inputs = [value for value in t.values() if value.requires_grad]
            if key not in graphs:
                graphs[key] = run(t)
            upstream = [value for name, value in t.items() if name in ("d0", "d1", "d2")]
            return torch.autograd.grad(graphs[key], inputs, upstream, retain_graph=True)

        return call

    return start


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

    out = {}
    for op in names:
        load = functools.partial(run_of, op)
        out |= {f"{op} fwd": forward(load), f"{op} bwd": backward(load)}
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
    suite: Suite,
    case,
    calls: Mapping[str, Call],
    others: Mapping[str, dict],
    *,
    rounds: int,
    device: str,
    ceilings: dict | None,
) -> dict[str, dict]:
    """One record body per rival, with a time if there are ceilings.

    others: The fields of rivals that have no call here.
    """
    first = case.inputs(0, device)
    bodies = {
        name: _verdict(suite, suite.rivals[name], call, case, first) for name, call in calls.items()
    }
    calls = {name: calls[name] for name, body in bodies.items() if body["status"] == "ok"}
    bodies |= others
    if suite.compares and "ours" in calls:
        ours = calls["ours"](first)
        for name in calls:
            # One that computes nothing, a copy say, has no results.
            if name != "ours" and (results := calls[name](first)):
                bodies[name]["distance"] = _distance(results, ours)
        del ours
    if calls and ceilings is not None:
        draw = functools.partial(case.inputs, device=device)
        options = {"rounds": rounds, "device": device, "set_bytes": suite.set_bytes(case)}
        with suite.timed_in():
            times, cold_l2 = timing.in_turns(calls, first, draw, **options)
        for name, taken in times.items():
            bodies[name] |= measured(taken, case.work, ceilings) | {"cold_l2": cold_l2}
            bodies[name] |= suite.facts(case, taken.median, ceilings)
    medians = {name: body["median_us"] for name, body in bodies.items() if "median_us" in body}
    for name in medians:
        bodies[name]["ratio"] = ratios(medians, name)
    return {name: case.items() | body | {"system": name} for name, body in bodies.items()}


def own_process(rival: Rival, todo: Iterable) -> dict[Any, dict]:
    """Fields of a rival that needs other variables, by case.

    They come from this command line, run again in a process that has them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        command = ["env", *rival.environment, sys.executable, "-m", "perf", *sys.argv[1:]]
        command += ["--rivals", rival.program, "-o", str(path)]
        process = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True)
        records = record.read(path) if path.is_file() else []
    by_case = {(r["product"], r["shape"]): r for r in records}
    output_tail = (process.stdout + process.stderr).strip()[-500:]
    why = f"its process ended with {process.returncode}: {output_tail}"
    failed, facts = {"status": "failed", "why": why}, {"own_process": list(rival.environment)}
    return {case: by_case.get((case.product, case.label), failed) | facts for case in todo}


def bench(
    suite: Suite,
    todo: Iterable,
    names: list[str],
    *,
    output: Path,
    rounds: int,
    seconds: float = math.inf,
    commit: str | None = None,
    device: str = "cuda",
) -> Iterator[dict | str]:
    """Checks the bits, compares results, times in turns; yields each record as it is written.

    And a line of text for the cases that are not begun within ``seconds``.  rounds: Samples of each
    rival; 0: checks alone.
    """
    import cute_kernels as ck

    todo = list(todo)
    end = time.monotonic() + seconds
    common = record.environment(commit) | {"kind": "bench", "kernel": suite.kernel}
    # Processes of their own come first: two never share the card.
    separate = {n: own_process(suite.rivals[n], todo) for n in names if suite.rivals[n].environment}
    here = [name for name in names if name not in separate]
    # All are started before any time is taken: to import a package may change CuTe process-wide.
    ready = {
        case: started(suite.rivals, suite.fitting(case, here), case.product, case) for case in todo
    }
    ceilings = timing.ceilings() if rounds else None

    def run(case) -> Iterator[dict]:
        calls, others = ready[case]
        others |= {name: bodies[case] for name, bodies in separate.items()}
        options = {"rounds": rounds, "device": device, "ceilings": ceilings}
        with watch.watched(suite.patience_s):
            bodies = _run_case(suite, case, calls, others, **options)
        clocks = record.clocks()
        for name in (name for name in names if name in bodies):
            body, rival = bodies[name] | common | {"clocks": clocks}, suite.rivals[name]
            # One that failed may have no backend, and so no contract.
            if rival.promised and rival.op is not None and body["status"] == "ok":
                op = rival.op or suite.ops.get(case.product, suite.op)
                body["contract_id"] = str(ck.contract_id(op, device))
            record.append(output, body)
            yield body
        if device == "cuda":
            torch.cuda.empty_cache()

    yield from watch.within(end, todo, run, time.monotonic)


#: Field of a record -> how the terminal shows it.
_CELLS = {
    "tflops": "{:.0f} TFLOP/s",
    "floor_fraction": "{:.0%} of floor",
    "weight_gbs": "{:.0f} GB/s of weights",
    "of_copy": "{:.0%} of copy",
    "extra_mib": "{:.0f} MiB more",
    "distance": "distance {:.1e}",
}


def line(body: dict) -> str:
    """One record for the terminal."""
    head = f"{body['product']:<20} {body['shape']:<28} {body['system']:<13}"
    if body["status"] != "ok":
        return f"{head} {body['status']}: {body['why'][:100]}"
    cells = []
    if "median_us" in body:
        cells.append(f"{body['median_us']:8.1f} us [{body['p10_us']:.1f}, {body['p90_us']:.1f}]")
    cells += [form.format(body[name]) for name, form in _CELLS.items() if body.get(name)]
    checked = body.get("check", {})
    errors = [checked[name] for name in ("rel_error", "relative_error") if name in checked]
    cells += [f"error {error:.1e}" for error in errors]
    broken = [name for name, held in body["bitwise"].items() if not held]
    cells += [f"BITS DIFFER: {', '.join(broken)}"] if broken else []
    if body.get("ratio"):
        cells.append("[" + " ".join(f"{name} {r:.2f}" for name, r in body["ratio"].items()) + "]")
    return f"{head} {'  '.join(cells)}"
