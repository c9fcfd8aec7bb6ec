"""Device time of several rivals side by side, and host time of one call.

The method: one process; the rivals take turns, so drift of clocks and temperature hits all of them,
in an order that is drawn anew for each round: what a call leaves to be written from the L2 is
written at the next one's cost, and no rival always comes behind the same one; every call reads
another input set, and the sets together are several times the L2, so no call finds its operands
there; calls are queued behind a busy device (the backlog), so gaps between launches are not in the
numbers; the median is reported with p10 and p90.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .room import with_room

L2_FACTOR = 4
MIN_ROUNDS = 50
_CYCLES_PER_US = 2000  # of torch.cuda._sleep, at the highest clock


@dataclass(frozen=True)
class Timing:
    """Samples of one rival, microseconds.  backlog: the device was never waiting for the host."""

    samples: tuple[float, ...]
    backlog: bool

    @property
    def median(self) -> float:
        return quantile(self.samples, 0.5)

    @property
    def p10(self) -> float:
        return quantile(self.samples, 0.1)

    @property
    def p90(self) -> float:
        return quantile(self.samples, 0.9)


def quantile(samples, q: float) -> float:
    """The q-quantile, linear between neighbours."""
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def set_count(set_bytes: int, l2_bytes: int, rivals: int) -> int:
    """How many input sets to rotate: their sum is L2_FACTOR times the L2 or more.

    The number shares no factor with the number of rivals.  Call number c reads set c mod sets, so
    that rounds begin at every set in turn.
    """
    sets = max(2, math.ceil(L2_FACTOR * l2_bytes / set_bytes))
    while math.gcd(sets, rivals) != 1:
        sets += 1
    return sets


def rotating(calls: Mapping[str, Callable], sets: list) -> dict[str, Callable[[int], object]]:
    """Wrap each call in one that takes a running number, from which it picks its input set."""

    def on(call: Callable, number: int) -> object:
        return call(sets[number % len(sets)])

    return {name: functools.partial(on, call) for name, call in calls.items()}


def warm_up(calls: Mapping[str, Callable[[int], object]], count: int) -> None:
    """Every call on each of `count` input sets."""
    for call in calls.values():
        for number in range(count):
            call(number)


class CudaClock:
    """CUDA events on the current stream, and a sleep that keeps the device busy."""

    def sleep(self, us: float) -> None:
        torch.cuda._sleep(int(us * _CYCLES_PER_US))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def finish(self) -> None:
        torch.cuda.synchronize()

    def between(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return start.elapsed_time(stop) * 1e3


def interleave(
    calls: Mapping[str, Callable[[int], object]],
    *,
    rounds: int = MIN_ROUNDS,
    clock=None,
    chunk: int = 10,
    backlog_us: float = 5000.0,
    tries: int = 4,
) -> dict[str, Timing]:
    """Times every call `rounds` times, in turns, in an order that each round draws.

    Each call gets a running number, from which it picks its input set; warm it up before.  A chunk
    of rounds is queued behind a sleep of `backlog_us`; if the sleep ended before all of it was
    queued, the chunk is measured again behind twice the sleep, `tries` times at most.
    """
    clock = clock or CudaClock()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    number, rounds_done, attempt, backlog = 0, 0, 1, True
    order, draw = list(calls.items()), random.Random(0)
    while rounds_done < rounds:
        chunk_rounds = min(chunk, rounds - rounds_done)
        clock.sleep(backlog_us)
        awake = clock.mark()
        marks = []
        for _ in range(chunk_rounds):
            draw.shuffle(order)
            for name, call in order:
                start = clock.mark()
                call(number)
                marks.append((name, start, clock.mark()))
                number += 1
        backlog_held = not clock.passed(awake)
        clock.finish()
        if not backlog_held and attempt < tries:
            attempt, backlog_us = attempt + 1, 2 * backlog_us
            continue
        backlog = backlog and backlog_held
        for name, start, stop in marks:
            samples[name].append(clock.between(start, stop))
        rounds_done += chunk_rounds
    return {name: Timing(tuple(values), backlog) for name, values in samples.items()}


def in_turns(
    calls: Mapping[str, Callable],
    first: Mapping[str, torch.Tensor],
    draw: Callable[[int], object],
    *,
    rounds: int,
    device: str = "cuda",
    clock=None,
    set_bytes: int | None = None,
) -> tuple[dict[str, Timing], dict[str, int]]:
    """Times the calls on ``first`` and on as many drawn input sets as keep the L2 cold, in turns.

    And what a record says of those sets.  set_bytes: of the operands that are read, if not all are.
    """
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 1
    set_bytes = set_bytes or sum(value.nbytes for value in first.values())
    count = set_count(set_bytes, l2_bytes, len(calls))
    rotated = rotating(calls, [first, *map(draw, range(1, count))])
    warm_up(rotated, count)
    times = interleave(rotated, rounds=rounds, clock=clock)
    return times, {"sets": count, "set_bytes": set_bytes, "l2_bytes": l2_bytes}


def awaited(
    calls: Mapping[str, Callable[[int], object]],
    *,
    rounds: int = MIN_ROUNDS,
    clock=None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times every call `rounds` times, in turns, from an idle device until it is idle again.

    What a caller waits who needs each result before the next call: the host's part is in it, at no
    unlucky depth of Python's stack.
    """
    clock = clock or CudaClock()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    number = 0
    for _ in range(rounds):
        for name, call in calls.items():
            clock.finish()
            start = now()
            with_room(call, number)
            clock.finish()
            samples[name].append((now() - start) * 1e6)
            number += 1
    return {name: Timing(tuple(values), False) for name, values in samples.items()}


def host_cost(
    call: Callable[[], object],
    *,
    finish: Callable[[], None],
    calls: int = 100,
    batches: int = 21,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Microseconds of host time per call: the median over batches that are queued, then awaited.

    A batch is far shorter than the launch queue, so the device never holds the host back.
    """

    def batch() -> float:
        start = now()
        for _ in range(calls):
            call()
        return (now() - start) / calls * 1e6

    call()
    finish()
    costs = []
    for _ in range(batches):
        costs.append(with_room(batch))
        finish()
    return quantile(costs, 0.5)


def ceilings(rounds: int = 20) -> dict[str, float]:
    """Ceilings of this card: GB/s of a device copy (read + write), TFLOP/s of a bf16 product."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    calls = {"copy": lambda _: target.copy_(source), "mm": lambda _: torch.mm(a, b)}
    for call in calls.values():
        call(0)
    times = interleave(calls, rounds=rounds)
    return {
        "copy_gbs": 2 * source.nbytes / times["copy"].median / 1e3,
        "mm_tflops": 2 * 8192**3 / times["mm"].median / 1e6,
    }
