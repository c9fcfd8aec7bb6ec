"""`python -m perf bench gemm`: check every rival, then time them in turns, one record per case."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ..core import record, timing, watch
from ..core.rival import Call, Rival, started
from ..core.work import measured, ratios
from . import check
from .cases import Case, Inputs
from .rivals import RIVALS

HOST_SIZE = 256  # M = K = N of the call whose host time is taken: the kernel is shorter than it


def verdicts(rival: Rival, call: Call, case: Case, t: Inputs) -> dict:
    """Correctness and bitwise verdict of one rival; an exception is a verdict too."""
    try:
        outcome = check.check(call, case.product, t, promised=rival.promised)
        bits = check.bitwise(call, case.product, t)
    except Exception as error:
        # A rival that fails on the card is a result to record, with its reason.
        return {"status": "failed", "why": watch.words(error)}
    status = {"check": outcome.items(), "bitwise": bits}
    if not outcome.ok:
        return status | {"status": "failed", "why": "the result is wrong"}
    return status | {"status": "ok"}


def host_costs(call: Call, case: Case, device: str, finish) -> dict[str, float]:
    """Host microseconds of one small forward call that records a graph, and in inference mode."""
    small = Case(case.product, case.shape, HOST_SIZE, HOST_SIZE, HOST_SIZE)
    t = small.inputs(0, device)
    costs = {}
    with torch.inference_mode():
        costs["inference"] = timing.host_cost(lambda: call(t), finish=finish)
    t = {name: value.requires_grad_() for name, value in t.items()}
    costs["grad"] = timing.host_cost(lambda: call(t), finish=finish)
    return costs


def run_case(
    case: Case,
    found: dict[str, Call],
    *,
    rounds: int,
    device: str,
    ceilings: dict[str, float] | None,
    clock=None,
) -> dict[str, dict]:
    """One record body per rival.  Without ceilings the products are checked, not timed."""
    first = case.inputs(0, device)
    bodies = {
        name: case.items() | {"system": name} | verdicts(RIVALS[name], call, case, first)
        for name, call in found.items()
    }
    timed = [name for name, body in bodies.items() if body["status"] == "ok"]
    if ceilings is None or not timed:
        return bodies
    calls = {name: found[name] for name in timed}
    draw = functools.partial(case.inputs, device=device)
    options = {"rounds": rounds, "device": device, "clock": clock}
    with torch.inference_mode():
        times, cold_l2 = timing.in_turns(calls, first, draw, **options)
    for name, stats in times.items():
        bodies[name] |= measured(stats, case.work, ceilings) | {"cold_l2": cold_l2}
    return bodies


def own_process(rival: Rival, todo: list[Case], rounds: int, check_only: bool) -> dict[Case, dict]:
    """The bodies of a rival that needs other variables, from a process that has them."""
    command = ["env", *rival.environment, sys.executable, "-m", "perf", "bench", "gemm"]
    command += ["--rivals", "cublas", "--rounds", str(rounds), "--json"]
    command += ["--check-only"] if check_only else []
    for case in todo:
        command += ["--case", f"{case.product}:{case.shape}:{case.m}"]
    process = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True)
    lines = [json.loads(x) for x in process.stdout.splitlines() if x.startswith("{")]
    bodies = {}
    for index, case in enumerate(todo):
        if index < len(lines):
            body = lines[index] | {"own_process": list(rival.environment)}
        else:
            output_tail = (process.stdout + process.stderr).strip()[-500:]
            why = f"its process ended with {process.returncode}: {output_tail}"
            body = case.items() | {"status": "failed", "why": why}
        bodies[case] = body | {"system": rival.name}
    return bodies


def host_of(call: Call, case: Case, device: str) -> dict:
    """The host costs of one rival, or why they could not be taken."""
    try:
        return host_costs(call, case, device, torch.cuda.synchronize)
    except Exception as error:
        return {"why": watch.words(error, 500)}


def gemm(
    todo: list[Case],
    names: list[str],
    *,
    output: Path | None,
    rounds: int = timing.MIN_ROUNDS,
    check_only: bool = False,
    commit: str | None = None,
    device: str = "cuda",
    clock=None,
) -> Iterator[dict]:
    """Measures every case on the device; yields each record as it is written.

    A rival that is absent has a record with status "absent" and the reason, one whose result is
    wrong or that raised has status "failed" and no time.  Rivals in a process of their own come
    first, so two processes never share the card.
    """
    common = record.environment(commit) | {"kind": "bench", "kernel": "gemm"}
    separate = {
        name: own_process(RIVALS[name], todo, rounds, check_only)
        for name in names
        if RIVALS[name].environment
    }
    in_process = [name for name in names if name not in separate]
    # All are started before any time is taken: to import a package may change CuTe process-wide.
    ready = [(case, *started(RIVALS, in_process, case.product, case)) for case in todo]
    ceilings = None if check_only else timing.ceilings()
    options = {"rounds": rounds, "device": device, "ceilings": ceilings, "clock": clock}
    host: dict[str, dict] = {}
    for case, calls, absent in ready:
        bodies = run_case(case, calls, **options)
        clocks = record.clocks()
        bodies |= {name: results[case] for name, results in separate.items()}
        for name, why in absent.items():
            bodies[name] = case.items() | {"system": name, "status": "absent", "why": why}
        medians = {name: b["median_us"] for name, b in bodies.items() if "median_us" in b}
        for name in names:
            body = {"clocks": clocks} | bodies[name] | common
            if name in medians:
                body["ratio"] = ratios(medians, name)
            if name in calls and case.product == "fwd" and name in medians:
                if name not in host:
                    host[name] = host_of(calls[name], case, device)
                body["host_us"] = host[name]
            if name == "ours":
                body["contract_id"] = contract_id(device)
            if output is not None:
                record.append(output, body)
            yield body


def contract_id(device: str) -> str:
    """Contract id of `ours`: backend and order, as the library names them."""
    import cute_kernels as ck

    return str(ck.contract_id("linear", device))


def line(body: dict) -> str:
    """One line for the terminal."""
    head = f"{body['system']:<15} {body['product']:<4} {body['shape']:<14}"
    if body["status"] != "ok":
        return f"{head} {body['status']}: {body['why']}"
    bits = ", ".join(f"{k} {'same' if v else 'DIFFERS'}" for k, v in body["bitwise"].items())
    if "median_us" not in body:
        return f"{head} right (error {body['check']['rel_error']:.1e}); {bits}"
    against = body.get("ratio", {}).get("cublas")
    ratio = f" {against:5.2f}x cuBLAS" if against else ""
    return (
        f"{head} {body['median_us']:9.1f} us [{body['p10_us']:.1f}, {body['p90_us']:.1f}]"
        f" {body['tflops']:6.1f} TFLOP/s {body['floor_fraction']:5.1%} of floor{ratio}; {bits}"
    )
