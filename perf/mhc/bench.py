"""`python -m perf bench mhc`: check the bits, compare the rivals with ours, time them in turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ..core import record, timing, watch
from ..core.bits import repeats
from ..core.rival import Absent, Call
from ..core.work import measured
from .cases import Case, Inputs
from .rivals import RIVALS

REPEATS = 5


def started(case: Case, names: list[str]) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of the rivals that can run here, and why each other one is not."""
    found, absent = {}, {}
    for name in names:
        try:
            found[name] = RIVALS[name].start[case.product](case)
        except Absent as error:
            absent[name] = str(error)
    return found, absent


def verdict(name: str, call: Call, t: Inputs) -> dict:
    """The bits of what is ordered."""
    try:
        call(t)
        bits = {}
        if RIVALS[name].ordered:
            bits["repeat"] = repeats(lambda: call(t), REPEATS)
        return {"bitwise": bits, "status": "ok"}
    except Exception as error:
        # A rival that fails on the card is a result to record, with its reason.
        return {"status": "failed", "why": watch.words(error)}


def distance(results: tuple, of: tuple) -> float:
    """The largest relative distance of a result from another's."""
    pairs = zip(results, of, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def run_case(
    case: Case, names: list[str], *, rounds: int, device: str, l2_bytes: int, ceilings: dict
) -> dict[str, dict]:
    """One record body per rival."""
    found, absent = started(case, names)
    first = case.inputs(0, device)
    bodies = {name: verdict(name, call, first) for name, call in found.items()}
    calls = {name: found[name] for name, body in bodies.items() if body["status"] == "ok"}
    if "ours" in calls:
        ours = calls["ours"](first)
        for name in calls:
            if name != "ours":
                bodies[name]["distance"] = distance(calls[name](first), ours)
        del ours
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


def mhc(
    todo: list[Case],
    names: list[str],
    *,
    output: Path,
    rounds: int,
    commit: str | None = None,
    device: str = "cuda",
) -> Iterator[dict]:
    """Measures every case on the device; yields each record as it is written."""
    import cute_kernels as ck

    # TransformerEngine's gradient of phi is a product of cuBLAS, in TF32 as in its own library.
    torch.backends.cuda.matmul.allow_tf32 = True
    common = record.environment(commit) | {"kind": "bench", "kernel": "mhc"}
    ceilings = timing.ceilings()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for case in todo:
        options = {"rounds": rounds, "device": device, "l2_bytes": l2_bytes}
        bodies = run_case(case, names, **options, ceilings=ceilings)
        clocks = record.clocks()
        for name, body in bodies.items():
            body |= common | {"clocks": clocks}
            if RIVALS[name].promised:
                body["contract_id"] = ck.contract_id("mhc", device)
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
