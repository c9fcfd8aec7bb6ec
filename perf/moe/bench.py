"""`python -m perf bench moe`: checks every rival, then times them in turns, a record per case."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ..core import record, timing, watch
from ..core.rival import Absent, Call
from ..core.work import measured, ratios
from . import check
from .cases import MOVES, Case
from .rivals import RIVALS, fitting

_PATIENCE_S = 100.0


def run_case(
    case: Case, names: list[str], *, rounds: int, device: str, ceilings: dict, clock=None
) -> dict[str, dict]:
    """One record body per rival, all from one interleaved run."""
    first = case.inputs(0, device)
    bodies: dict[str, dict] = {}
    calls: dict[str, Call] = {}
    with torch.inference_mode():
        for name in fitting(case, names):
            bodies[name] = _started(case, name, first, calls)
        if calls:
            draw = functools.partial(case.inputs, device=device)
            # The bytes that are read, not those of experts without rows.
            options = {"rounds": rounds, "device": device, "set_bytes": case.work.bytes}
            times, _ = timing.in_turns(calls, first, draw, clock=clock, **options)
            for name, taken in times.items():
                bodies[name] |= measured(taken, case.work, ceilings)
    medians = {name: body["median_us"] for name, body in bodies.items() if "median_us" in body}
    for name, median in medians.items():
        bodies[name]["ratio"] = ratios(medians, name)
        moved = case.weight_bytes if case.decode else case.work.bytes
        gbs = moved / median / 1e3
        field = "weight_gbs" if case.decode else "gbs"
        bodies[name] |= {field: gbs, "of_copy": gbs / ceilings["copy_gbs"]}
    return {name: case.items() | {"system": name} | body for name, body in bodies.items()}


def _started(case: Case, name: str, first: dict, calls: dict[str, Call]) -> dict:
    """The verdict of one rival; its call goes into ``calls`` if it is right."""
    rival = RIVALS[name]
    try:
        call = rival.start[case.product](case)
        exact = name not in ("copy", "dense")
        body = check.verdict(case, call, first, ours=rival.promised, exact=exact)
    except Absent as error:
        return {"status": "absent", "why": str(error)}
    except Exception as error:
        # A rival that fails on the card is a result to record, with its reason.
        return {"status": "failed", "why": watch.words(error)}
    if body["status"] == "ok":
        calls[name] = call
    return body


def moe(
    todo: list[Case],
    names: list[str],
    *,
    output: Path,
    rounds: int = timing.MIN_ROUNDS,
    budget_s: float = 500.0,
    commit: str | None = None,
) -> Iterator[dict | str]:
    """Measures every case on the device; yields each record as it is written."""
    import cute_kernels as ck

    end = time.monotonic() + budget_s
    common = record.environment(commit) | {"kind": "bench", "kernel": "moe"}
    ceilings = timing.ceilings()

    def run(case: Case) -> Iterator[dict]:
        with watch.watched(_PATIENCE_S):
            bodies = run_case(case, names, rounds=rounds, device="cuda", ceilings=ceilings)
        clocks = record.clocks()
        for name, body in bodies.items():
            body |= common | {"clocks": clocks}
            if RIVALS[name].promised and name == "ours":
                op = "moe" if case.product in MOVES else "grouped_linear"
                body["contract_id"] = str(ck.contract_id(op, "cuda"))
            record.append(output, body)
            yield body
        torch.cuda.empty_cache()

    yield from watch.within(end, todo, run, time.monotonic)


def line(body: dict) -> str:
    """One record for the terminal: a row of a table."""
    head = f"{body['shape']:<28} {body['product']:<7} {body['system']:<11}"
    if body["status"] != "ok":
        return f"{head} {body['status']}: {body['why'][:100]}"
    speed = f"{body.get('weight_gbs', body.get('gbs')):6.0f} GB/s {body['of_copy']:4.0%} of copy"
    if not ("weight_gbs" in body or body["product"] in MOVES):
        speed = f"{body['tflops']:6.1f} TFLOP/s {body['floor_fraction']:4.0%} of floor"
    broken = [name for name, holds in body["bitwise"].items() if not holds]
    cells = [f"{body['median_us']:9.1f} us", speed]
    cells += [f"BITS DIFFER: {', '.join(broken)}"] if broken else []
    ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in body["ratio"].items())
    return f"{head} {'  '.join(cells)}  [{ratios}]"
