"""`python -m perf bench gemm`: check every rival, then time them in turns, one record per case."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core import record, timing
from . import check, targets
from .rivals import RIVALS, Absent, Inputs, Product, Rival

HOST_SIZE = 256  # M = K = N of the call whose host time is taken: the kernel is shorter than it
_SEED = 20_261_120


@dataclass(frozen=True)
class Case:
    """One product at one shape: its size, floor and inputs."""

    product: str
    shape: str
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        """The least traffic: each bf16 operand and result once; main_grad is read and written."""
        m, k, n = self.m, self.k, self.n
        if self.product == "dw":
            return 2 * (m * n + m * k) + 8 * n * k
        return 2 * (m * k + n * k + m * n)

    @property
    def result(self) -> tuple[int, int]:
        return {"fwd": (self.m, self.n), "dx": (self.m, self.k), "dw": (self.n, self.k)}[
            self.product
        ]

    def floor_us(self, ceilings: dict[str, float]) -> float:
        """No version runs much faster on the card whose ceilings these are."""
        compute = self.flops / ceilings["mm_tflops"] / 1e6
        return max(compute, self.bytes / ceilings["copy_gbs"] / 1e3)

    def inputs(self, seed: int, device: str) -> Inputs:
        """One random input set; never zeros, on which a card runs faster."""
        generator = torch.Generator(device).manual_seed(_SEED + seed)

        def normal(rows: int, cols: int, scale: float = 1.0, dtype=torch.bfloat16):
            made = torch.randn(rows, cols, generator=generator, device=device)
            return made.mul_(scale).to(dtype)

        t: Inputs = {}
        if self.product != "dx":
            t["x"] = normal(self.m, self.k)
        if self.product != "dw":
            t["w"] = normal(self.n, self.k, scale=self.k**-0.5)
        if self.product != "fwd":
            t["dy"] = normal(self.m, self.n)
        if self.product == "dw":
            t["main_grad"] = normal(self.n, self.k, dtype=torch.float32)
        return t

    def items(self) -> dict:
        return {
            "product": self.product,
            "shape": targets.label(self.shape, self.m),
            "m": self.m,
            "k": self.k,
            "n": self.n,
            "dtype": "bf16",
        }


def cases(shapes: list[str], ms: list[int], products: list[str]) -> list[Case]:
    """The cases asked for: M defaults to the shape's own; with neither, the status page's rows."""
    if not shapes and not ms:
        wanted = [row for row in targets.gemm_cases() if row[0] in products]
    else:
        wanted = [
            (product, shape, m)
            for product in products
            for shape in shapes or [targets.SWEEP_SHAPE]
            for m in ms or [targets.SHAPES[shape][0]]
        ]
    return [Case(product, shape, *targets.shape_of(shape, m)) for product, shape, m in wanted]


def load(names: list[str]) -> tuple[dict[str, dict[str, Product]], dict[str, str]]:
    """The products of the rivals that are here, and why each other one is not."""
    found, absent = {}, {}
    for name in names:
        try:
            found[name] = RIVALS[name].load()
        except Absent as error:
            absent[name] = str(error)
    return found, absent


def verdicts(rival: Rival, call: Product, case: Case, t: Inputs) -> dict:
    """Correctness and bitwise verdict of one rival; an exception is a verdict too."""
    try:
        found = check.check(call, case.product, t, promised=rival.promised)
        bits = check.bitwise(call, case.product, t)
    except Exception as error:
        # A rival that fails on the card is a result to record, with its reason.
        return {"status": "failed", "why": f"{type(error).__name__}: {error}"[:2000]}
    status = {"check": found.items(), "bitwise": bits}
    if not found.ok:
        return status | {"status": "failed", "why": "the result is wrong"}
    return status | {"status": "ok"}


def host_costs(call: Product, case: Case, device: str, finish) -> dict[str, float]:
    """Host microseconds of one small forward call that records a graph, and in inference mode."""
    small = Case(case.product, case.shape, HOST_SIZE, HOST_SIZE, HOST_SIZE)
    t = small.inputs(0, device)
    costs = {}
    with torch.inference_mode():
        costs["inference"] = timing.host_cost(lambda: call(t), finish=finish)
    t = {name: value.requires_grad_() for name, value in t.items()}
    costs["grad"] = timing.host_cost(lambda: call(t), finish=finish)
    return costs


def ratios(medians: dict[str, float], name: str) -> dict[str, float]:
    """A rival's time over this system's: above 1 this system is the faster one."""
    return {other: t / medians[name] for other, t in medians.items() if other != name}


def _result(case: Case, times: timing.Timing, ceilings: dict[str, float]) -> dict:
    floor = case.floor_us(ceilings)
    return {
        "median_us": times.median,
        "p10_us": times.p10,
        "p90_us": times.p90,
        "samples": len(times.samples),
        "backlog": times.backlog,
        "tflops": case.flops / times.median / 1e6,
        "floor_us": floor,
        "floor_fraction": floor / times.median,
        "ceilings": ceilings,
    }


def run_case(
    case: Case,
    found: dict[str, dict[str, Product]],
    *,
    rounds: int,
    device: str,
    l2_bytes: int,
    ceilings: dict[str, float] | None,
    clock=None,
) -> dict[str, dict]:
    """One record body per rival.  Without ceilings the products are checked, not timed."""
    first = case.inputs(0, device)
    bodies = {
        name: case.items() | {"system": name} | verdicts(RIVALS[name], p[case.product], case, first)
        for name, p in found.items()
    }
    timed = [name for name, body in bodies.items() if body["status"] == "ok"]
    if ceilings is None or not timed:
        return bodies
    set_bytes = sum(value.nbytes for value in first.values())
    count = timing.set_count(set_bytes, l2_bytes, len(timed))
    sets = [first] + [case.inputs(i, device) for i in range(1, count)]

    def on(call: Product, number: int) -> torch.Tensor:
        return call(sets[number % count])

    calls = {name: functools.partial(on, found[name][case.product]) for name in timed}
    for call in calls.values():
        for number in range(count):
            call(number)
    with torch.inference_mode():
        times = timing.interleave(calls, rounds=rounds, clock=clock)
    for name, taken in times.items():
        bodies[name] |= _result(case, taken, ceilings)
        bodies[name]["cold_l2"] = {"sets": count, "set_bytes": set_bytes, "l2_bytes": l2_bytes}
    return bodies


def own_process(rival: Rival, todo: list[Case], rounds: int, check_only: bool) -> dict[Case, dict]:
    """The bodies of a rival that needs other variables, from a process that has them."""
    command = ["env", *rival.environment, sys.executable, "-m", "perf", "bench", "gemm"]
    command += ["--rivals", "cublas", "--rounds", str(rounds), "--json"]
    command += ["--check-only"] if check_only else []
    for case in todo:
        command += ["--case", f"{case.product}:{case.shape}:{case.m}"]
    done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True)
    lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
    bodies = {}
    for index, case in enumerate(todo):
        if index < len(lines):
            body = lines[index] | {"own_process": list(rival.environment)}
        else:
            said = (done.stdout + done.stderr).strip()[-500:]
            why = f"its process ended with {done.returncode}: {said}"
            body = case.items() | {"status": "failed", "why": why}
        bodies[case] = body | {"system": rival.name}
    return bodies


def host_of(call: Product, case: Case, device: str) -> dict:
    """The host costs of one rival, or why they could not be taken."""
    try:
        return host_costs(call, case, device, torch.cuda.synchronize)
    except Exception as error:
        return {"why": f"{type(error).__name__}: {error}"[:500]}


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
    found, absent = load([name for name in names if name not in separate])
    ceilings = None if check_only else timing.ceilings()
    options = {"rounds": rounds, "device": device, "ceilings": ceilings, "clock": clock}
    options["l2_bytes"] = torch.cuda.get_device_properties(0).L2_cache_size
    host: dict[str, dict] = {}
    for case in todo:
        bodies = run_case(case, found, **options)
        clocks = record.clocks()
        bodies |= {name: results[case] for name, results in separate.items()}
        for name, why in absent.items():
            bodies[name] = case.items() | {"system": name, "status": "absent", "why": why}
        medians = {name: b["median_us"] for name, b in bodies.items() if "median_us" in b}
        for name in names:
            body = {"clocks": clocks} | bodies[name] | common
            if name in medians:
                body["ratio"] = ratios(medians, name)
            if name in found and case.product == "fwd" and name in medians:
                if name not in host:
                    host[name] = host_of(found[name]["fwd"], case, device)
                body["host_us"] = host[name]
            if name == "ours":
                body["contract_id"] = contract_id(device)
            if output is not None:
                record.append(output, body)
            yield body


def contract_id(device: str) -> str:
    """Which backend and order `ours` ran, as the library itself names it."""
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
