"""Soak: repeat calls under disturbances and compare bytes, for every system.

A case is called again and again beside a stream of other work, on 16 caps of the persistent grid,
into outputs and workspace that hold junk; then captured in a CUDA graph and replayed.  Each result
is compared with the first call's, byte for byte, on the device.  The controls are calls without an
order: some outputs are expected to differ, which shows that this loop can see a difference.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from cute_kernels import settings
from cute_kernels.runtime import plan_cache

from . import record
from .watch import failure, watched, within

#: Caps of the persistent grid, one after another; on fewer SMs the larger ones are the same.
CTAS = (8, 13, 21, 33, 44, 55, 66, 77, 88, 96, 104, 112, 120, 128, 131, 132)
#: Bytes that fill outputs and workspace: NaN and -1, large, small, zero.
FILLS = (0xFF, 0x7F, 0x01, 0x00)
# No common factors with each other or with 16: every cap meets every disturbance.
POISON_EVERY, BUSY_EVERY = 7, 3
GRAPH_REPLAYS = 1_000
PATIENCE_S = 100.0
_CAP = settings.PREFIX + "MAX_CTAS"

Call = Callable[[], tuple[Tensor, ...]]
#: A call to (the tensors that a replay writes, what replays).
Capture = Callable[[Call], tuple[tuple[Tensor, ...], Callable[[], None]]]


class Case(Protocol):
    """A call that the soak repeats.

    outputs: their names.  may_differ: those that a control may differ in; none of other cases.
    launcher: the module whose `allocator` allocates what the kernels write.
    """

    label: str
    repeats: int
    outputs: tuple[str, ...]
    may_differ: tuple[str, ...]
    launcher: ModuleType

    def items(self) -> dict:
        """The fields of a record that say what was run."""

    def started(self, device: str) -> Call:
        """A call on one set of inputs."""


@dataclass
class Options:
    """How long, and the device (a CPU in tests); repeats: in place of each case's own."""

    repeats: int | None = None
    budget_s: float = 1e9
    device: str = "cuda"
    finish: Callable[[], None] = torch.cuda.synchronize
    now: Callable[[], float] = time.monotonic
    patience_s: float | None = None
    #: Puts other work on the device, beside what follows.
    busy: Callable[[], None] = lambda: None
    capture: Capture | None = None


class Tally:
    """Differing bytes of each output, and differing results, counted on the device."""

    def __init__(self, names: tuple[str, ...], want: tuple[Tensor, ...]):
        self.names = names
        self.want = [_bytes(t).clone() for t in want]
        self.bytes = torch.zeros(len(want), dtype=torch.int64, device=want[0].device)
        self.results = torch.zeros((), dtype=torch.int64, device=want[0].device)

    def add(self, found: tuple[Tensor, ...]) -> None:
        """Compares one result; waits for nothing."""
        pairs = zip(found, self.want, strict=True)
        differing = torch.stack([(_bytes(got) != want).sum() for got, want in pairs])
        self.bytes += differing
        self.results += differing.any()

    def read(self) -> dict:
        """The fields of a record; waits for the device."""
        counts = dict(zip(self.names, self.bytes.tolist(), strict=True))
        return {"differing_bytes": counts, "differing_results": int(self.results)}


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


@contextlib.contextmanager
def poisoned(launcher: ModuleType, fill: int):
    """Fill every byte that a launcher allocates within this block with `fill`."""
    shipped = launcher.allocator

    def allocator(*args):
        new = shipped(*args)
        return lambda: _filled(new(), fill)

    launcher.allocator = allocator
    plan_cache.clear()
    try:
        yield
    finally:
        launcher.allocator = shipped
        plan_cache.clear()


def _filled(t: Tensor, fill: int) -> Tensor:
    t.view(torch.uint8).fill_(fill)
    return t


@contextlib.contextmanager
def caps():
    """Gives a function that caps the persistent grid; at the end the cap is what it was."""
    old_value = os.environ.get(_CAP)

    def cap(ctas: int) -> None:
        os.environ[_CAP] = str(ctas)
        settings.reload()

    try:
        yield cap
    finally:
        os.environ.pop(_CAP, None)
        if old_value is not None:
            os.environ[_CAP] = old_value
        settings.reload()


def repeat(case: Case, call: Call, want: tuple[Tensor, ...], count: int, options: Options) -> dict:
    """Calls `count` times under every disturbance; what differed from `want`."""
    tally, poisons = Tally(case.outputs, want), 0
    with caps() as cap:
        for i in range(count):
            cap(CTAS[i % len(CTAS)])
            if i % BUSY_EVERY == 0:
                options.busy()
            if i % POISON_EVERY == 0:
                with poisoned(case.launcher, FILLS[poisons % len(FILLS)]):
                    results = call()
                poisons += 1
            else:
                results = call()
            tally.add(results)
    return tally.read() | {"repeats": count, "poisoned": poisons, "ctas": list(CTAS)}


def replay(case: Case, call: Call, want: tuple[Tensor, ...], count: int, options: Options) -> dict:
    """Captures a call, its poison included, and replays it `count` times."""
    with poisoned(case.launcher, FILLS[0]):
        results, replay_graph = options.capture(call)
    tally = Tally(case.outputs, want)
    for i in range(count):
        if i % BUSY_EVERY == 0:
            options.busy()
        replay_graph()
        tally.add(results)
    return tally.read() | {"replays": count}


def soak(case: Case, options: Options) -> dict:
    """The record body of one case."""
    body = case.items() | {"expected_to_differ": bool(case.may_differ), "status": "ok"}
    start = options.now()
    try:
        with watched(options.patience_s):
            call = case.started(options.device)
            want = call()
            options.finish()
        body["first_call_s"] = round(options.now() - start, 3)
        odd = _unlikely(case.outputs, want)
        if odd:
            return body | {"status": "failed", "why": odd}
        start = options.now()
        count = options.repeats or case.repeats
        with watched(options.patience_s):
            body |= repeat(case, call, want, count, options)
        if options.capture is not None:
            with watched(options.patience_s):
                replays = min(count, GRAPH_REPLAYS)
                body["graph"] = replay(case, call, want, replays, options)
        body["seconds"] = round(options.now() - start, 3)
    except Exception as error:
        return body | failure(error, options.finish)
    why = wrong(body, case.may_differ)
    return body | ({"status": "failed", "why": why} if why else {})


def _unlikely(names: tuple[str, ...], first: tuple[Tensor, ...]) -> str:
    """Why the bytes of a first result are not worth comparing; empty if they are."""
    for name, t in zip(names, first, strict=True):
        if not t.isfinite().all():
            return f"{name} of the first call is not finite"
        if t.float().std() == 0:
            return f"{name} of the first call is one value"
    return ""


def wrong(body: dict, may_differ: tuple[str, ...]) -> str:
    """Differences that must not be; empty if there are none."""
    complaints = []
    for calls, run in (("repeats", body), ("graph replays", body.get("graph"))):
        counts = (run or {}).get("differing_bytes", {})
        unexpected = {n: c for n, c in counts.items() if n not in may_differ}
        if any(unexpected.values()):
            named = ", ".join(f"{c} bytes of {n}" for n, c in unexpected.items() if c)
            complaints.append(f"{named} differ in {run['differing_results']} {calls}")
    return "; ".join(complaints)


def differed(body: dict) -> bool:
    """Whether any byte differed in the repeats or the replays."""
    runs = (body, body.get("graph") or {})
    return any(sum(run.get("differing_bytes", {}).values()) for run in runs)


def verdict(bodies: list[dict]) -> tuple[str, bool]:
    """One line on all records, and whether the soak holds."""
    failed = [body for body in bodies if body["status"] != "ok"]
    controls = [body for body in bodies if body["expected_to_differ"]]
    controls_differing = sum(map(differed, controls))
    blind = bool(controls) and not controls_differing
    text = f"{len(bodies) - len(controls)} cases and {len(controls)} controls: "
    text += f"{len(failed)} failed, {controls_differing} controls differed"
    if blind:
        text += "; no control differed, so this soak could not have seen a difference"
    if not controls:
        text += "; without a control nothing shows that a difference would be seen"
    return text, not failed and not blind


def measure(
    kernel: str,
    todo: list[Case],
    options: Options,
    *,
    output: Path | None,
    commit: str | None = None,
) -> Iterator[dict | str]:
    """Yields records as they are written; a line of text for what the budget does not reach."""
    common = record.environment(commit) | {"kind": "soak", "kernel": kernel}

    def recorded(case: Case) -> Iterator[dict]:
        body = soak(case, options) | common
        if output is not None:
            record.append(output, body)
        yield body

    yield from within(options.now() + options.budget_s, todo, recorded, options.now)


def line(body: dict) -> str:
    """One line for the terminal."""
    cells = []
    if body["status"] != "ok":
        cells.append(f"{body['status'].upper()}: {body['why'].splitlines()[0][:300]}")
    if "repeats" in body:
        differing = sum(body["differing_bytes"].values())
        cells.append(f"{body['repeats']} repeats, {differing} differing bytes")
    if "graph" in body:
        differing = sum(body["graph"]["differing_bytes"].values())
        cells.append(f"{body['graph']['replays']} replays, {differing}")
    if "seconds" in body:
        cells.append(f"{body['seconds']:.1f} s (first call {body['first_call_s']:.1f} s)")
    return f"{body['shape']:<44} " + "; ".join(cells)


def on_the_card(repeats: int | None, budget_s: float) -> Options:
    """The options of a run on a GPU: products on another stream, graphs, a watchdog."""
    stream = torch.cuda.Stream()
    small, large = (torch.randn(n, n, device="cuda").bfloat16() for n in (1024, 4096))
    sinks = torch.empty_like(small), torch.empty_like(large)
    turn = [0]
    torch.cuda.synchronize()

    def busy() -> None:
        turn[0] += 1
        noise, sink = ((small, sinks[0]), (large, sinks[1]))[turn[0] % 2]
        with torch.cuda.stream(stream):
            torch.mm(noise, noise, out=sink)

    def capture(call: Call):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        return results, graph.replay

    return Options(repeats, budget_s, patience_s=PATIENCE_S, busy=busy, capture=capture)
