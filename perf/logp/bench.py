"""`python -m perf bench logp`: check every rival, measure its memory, then time them in turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ..core import record, timing, watch
from ..core.bits import repeats, same_bytes
from ..core.rival import Absent, Call
from ..core.work import measured
from .cases import Case, Inputs
from .rivals import RIVALS

#: Tokens whose results are compared with float64, and with those of the tokens alone.
SOME = 16
REPEATS = 5


def started(case: Case, names: list[str]) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of the rivals that have this pass here, and why each other one is not."""
    calls, absent = {}, {}
    for name in names:
        if case.which not in RIVALS[name].start:
            continue
        try:
            calls[name] = RIVALS[name].start[case.which](case)
        except Absent as error:
            absent[name] = str(error)
    return calls, absent


def oracle(case: Case, t: Inputs) -> torch.Tensor:
    """Reference of the first tokens in float64: log p, or dhidden of the pass with gradients."""
    hidden = t["hidden"][:SOME].detach().double().requires_grad_()
    weight = t["weight"].detach()
    # A float64 head of all rows would be 5 GB.
    logits = torch.cat([hidden @ rows.double().mT for rows in weight.split(16384)], dim=1)
    logp = torch.log_softmax(logits, 1).gather(1, t["target"][:SOME, None])[:, 0]
    if case.which == "fwd":
        return logp.detach()
    return torch.autograd.grad(logp, hidden, t["d_logp"][:SOME].double())[0]


def alone(t: Inputs) -> Inputs:
    """The first tokens without the others."""
    subset = {name: t[name].detach()[:SOME] for name in ("hidden", "target", "d_logp")}
    subset["hidden"].requires_grad_()
    return {"weight": t["weight"]} | subset


def verdict(name: str, call: Call, case: Case, t: Inputs, per_token: bool) -> dict:
    """Error against float64, memory, and for what is ordered: the same bytes again and alone."""
    try:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        first = call(t)
        call(t)  # the second call: nothing is made once
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call(t)
        outputs = sum(out.nbytes for out in results)
        extra = torch.cuda.max_memory_allocated() - before - outputs
        body = {"extra_mib": extra / 2**20}
        if per_token:
            exact = oracle(case, t)
            error = (first[0][:SOME].double() - exact).norm() / exact.norm()
            body["check"] = {"relative_error": float(error), "tokens": SOME}
        bits = {}
        if RIVALS[name].ordered:
            bits["repeat"] = repeats(lambda: call(t), REPEATS)
            alone_results = RIVALS[name].start[case.which](case)(alone(t))
            bits["rows"] = same_bytes(alone_results[0], first[0][:SOME])
        return body | {"bitwise": bits, "status": "ok"}
    except Exception as error:
        # A rival that fails on the card is a result to record, with its reason.
        return {"status": "failed", "why": watch.words(error)}


def run_case(
    case: Case, names: list[str], *, rounds: int, device: str, l2_bytes: int, ceilings: dict
) -> dict[str, dict]:
    """One record body per rival that has the pass."""
    runnable, absent = started(case, names)
    first = case.inputs(0, device)
    if case.which != "fwd":
        first = {name: t.detach().requires_grad_(t.requires_grad) for name, t in first.items()}
    bodies = {}
    for name, call in runnable.items():
        per_token = "fwd" in RIVALS[name].start
        bodies[name] = verdict(name, call, case, first, per_token)
    calls = {name: runnable[name] for name, body in bodies.items() if body["status"] == "ok"}
    set_bytes = sum(value.nbytes for value in first.values())
    count = timing.set_count(set_bytes, l2_bytes, len(calls))
    sets = [first, *(case.inputs(i, device) for i in range(1, count))]
    rotated = timing.rotating(calls, sets)
    timing.warm_up(rotated, count)
    times = timing.interleave(rotated, rounds=rounds)
    medians = {name: stats.median for name, stats in times.items()}
    for name, stats in times.items():
        ratios = {other: t / medians[name] for other, t in medians.items() if other != name}
        bodies[name] |= measured(stats, case.work, ceilings) | {"ratio": ratios}
        head = 2 * case.vocab * case.width / stats.median / 1e3
        bodies[name] |= {"of_copy": head / ceilings["copy_gbs"], "cold_l2": {"sets": count}}
    for name, why in absent.items():
        bodies[name] = {"status": "absent", "why": why}
    return {name: case.items() | {"system": name} | body for name, body in bodies.items()}


def logp(
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

    common = record.environment(commit) | {"kind": "bench", "kernel": "logp"}
    ceilings = timing.ceilings()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for case in todo:
        options = {"rounds": rounds, "device": device, "l2_bytes": l2_bytes}
        bodies = run_case(case, names, **options, ceilings=ceilings)
        clocks = record.clocks()
        for name, body in bodies.items():
            body |= common | {"clocks": clocks}
            if RIVALS[name].promised:
                body["contract_id"] = ck.contract_id("linear_logp", device)
            record.append(output, body)
            yield body


def line(body: dict) -> str:
    """One record for the terminal."""
    head = f"{body['product']:<5} {body['shape']:<10} {body['system']:<13}"
    if body["status"] != "ok":
        return f"{head} {body['status']}: {body['why'][:100]}"
    cells = [f"{body['median_us']:9.1f} us", f"{body['tflops']:4.0f} TF/s"]
    cells += [f"extra {body['extra_mib']:.0f} MiB", f"copy {body['of_copy']:.0%}"]
    broken = [name for name, held in body["bitwise"].items() if not held]
    cells += [f"BITS DIFFER: {broken}"] if broken else []
    error = body.get("check", {}).get("relative_error")
    cells += [f"err {error:.1e}"] if error is not None else []
    ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in body["ratio"].items())
    return f"{head} {'  '.join(cells)}  [{ratios}]"
