"""`python -m perf bench attention`: check every rival, then time them in turns, by pass.

Rivals of one pass take turns on the same input sets.  Our own are checked first, for all cases:
that compiles their kernels before a rival's package is imported, which changes CuTe process-wide.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..core import record, timing
from ..core.bits import REPEATS, repeats, same_bytes
from ..core.rival import Call
from ..core.watch import failure, watched, within
from ..core.work import measured
from . import check, pack, schedule
from .cases import PASSES, Case, Inputs, Problem
from .rivals import RIVALS

_BACKLOG_US = 20_000.0
_CHUNK = 5
#: Of a launch for each sequence no more than one round fits the queue of launches.
_CHUNK_OF_RUNS = 1
#: Whose out and lse the backwards are given: of the first that is right.
_FORWARDS = ("ours", "fa4", "fa4_varlen")
_LONG = 3.0  # times the patience, for a rival that compiles for long


class NoForward(RuntimeError):
    """No rival's forward is right on a short case: there is nothing to give a backward."""


@dataclass
class Options:
    """Options of a run: rivals, passes, budget, and the device (a CPU in tests)."""

    rivals: list[str]
    passes: list[str] = field(default_factory=lambda: list(PASSES))
    rounds: int = timing.MIN_ROUNDS
    budget_s: float = 1e9
    check_only: bool = False
    device: str = "cuda"
    l2_bytes: int = 0
    ceilings: dict[str, float] | None = None
    clock: object = None
    finish: Callable[[], None] = torch.cuda.synchronize
    now: Callable[[], float] = time.monotonic
    #: After so long in one step the process ends with its stack: a kernel that waits for ever.
    patience_s: float | None = None
    #: Calls that must give the same bytes.
    repeats: int = REPEATS
    #: (rival, case) -> is it measured there?
    wanted: Callable[[str, Case], bool] = lambda rival, case: True


class Checks:
    """The checks of short cases, each done once."""

    def __init__(self, options: Options):
        self.options, self.found = options, {}

    def of(self, name: str, which: str, case: Case) -> dict:
        """The `check` of a rival in one pass, or {"status", "why"} where it could not run."""
        key = name, which, case.small
        if key not in self.found:
            self.found[key] = self._run(name, which, case)
        return self.found[key]

    def _run(self, name: str, which: str, case: Case) -> dict:
        try:
            with watched(self.options.patience_s):
                outcome = check.whole(RIVALS[name], which, case, self.options.device)
                self.options.finish()
            return outcome
        except Exception as error:
            return failure(error, self.options.finish)


def measure(
    todo: list[Case], options: Options, *, output: Path | None, commit: str | None = None
) -> Iterator[dict | str]:
    """Yields records as they are written, and a line of text for what has no record.

    A case that the budget does not reach is named in a line, not recorded.
    """
    common = record.environment(commit) | {"kind": "bench", "kernel": "attention"}

    def written(body: dict) -> dict:
        body |= common
        if output is not None:
            record.append(output, body)
        return body

    checks, end = Checks(options), options.now() + options.budget_s
    for case, large in _by_short_case(todo).items():
        for name, which in _early(large, options):
            body = checked(name, which, case, checks.of(name, which, case))
            yield written(body) if options.check_only else line(body)
    if options.check_only:
        return

    def recorded(case: Case) -> Iterator[dict]:
        return map(written, run_case(case, options, checks))

    yield from within(end, todo, recorded, options.now)


def _by_short_case(todo: list[Case]) -> dict[Case, list[Case]]:
    """Group the cases by the short case that checks them."""
    cases: dict[Case, list[Case]] = {}
    for case in todo:
        cases.setdefault(case.small, []).append(case)
    return cases


def _early(cases: list[Case], options: Options) -> list[tuple[str, str]]:
    """(rival, pass) of the checks that come before any time: ours, or all if nothing else is.

    cases: those with one short case; a rival is checked if it is measured in one of them.
    """
    names = [n for n in options.rivals if any(options.wanted(n, case) for case in cases)]
    pairs = [(n, which) for which in PASSES for n in names if which in RIVALS[n].start]
    if options.check_only:
        return [(name, which) for name, which in pairs if which in options.passes]
    # The forward always: its out and lse are what every backward is given.
    ours = [(n, w) for n, w in pairs if RIVALS[n].promised and w in (*options.passes, "fwd")]
    return list(dict.fromkeys([("ours", "fwd"), *ours]))


def checked(name: str, which: str, case: Case, outcome: dict) -> dict:
    """A record body from a check."""
    body = case.items(which) | {"system": name}
    if "status" in outcome:
        return body | outcome
    why = check.wrong(RIVALS[name], outcome)
    status = {"status": "failed", "why": why} if why else {"status": "ok"}
    return body | {"check": outcome} | status


def run_case(case: Case, options: Options, checks: Checks) -> Iterator[dict]:
    """The bodies of one case, pass by pass; each pass is yielded when it is measured."""
    try:
        problem = Problem(case, options.device)
        sets = [_input_set(problem, options, checks, 0)]
        options.finish()
    except Exception as error:
        why = failure(error, options.finish)
        for which in options.passes:
            for name in _of(which, case, options):
                # A check that has failed already says more.
                outcome = checks.found.get((name, which, case.small), why)
                body = checked(name, which, case, outcome)
                yield body if body["status"] != "ok" else body | why
        return
    for which in options.passes:
        bodies, calls = {}, {}
        for name in _of(which, case, options):
            bodies[name], calls[name] = _ready(name, which, problem, sets[0], options, checks)
        timed = {name: call for name, call in calls.items() if call is not None}
        try:
            with watched(options.patience_s):
                _compare_orders(bodies, timed, sets[0])
                _compare_runs(bodies, timed, sets[0])
                if timed:
                    _time(timed, which, problem, sets, bodies, options, checks)
        except Exception as error:
            for name in timed:
                bodies[name] |= failure(error, options.finish)
        yield from _finished(problem, which, bodies, options)


def _finished(problem: Problem, which: str, bodies: dict, options: Options) -> Iterator[dict]:
    """The bodies with what needs all medians of the pass."""
    medians = {name: b["median_us"] for name, b in bodies.items() if "median_us" in b}
    of_pack = functools.partial(pack.facts, clock=options.clock)
    facts = {"ours": (schedule.facts, "schedule"), "ours_pack": (of_pack, "new_pack")}
    for name, body in bodies.items():
        if which == "bwd" and name in medians and name in facts:
            more, field_name = facts[name]
            try:
                body |= more(problem, medians, options.finish)
            except Exception as error:
                body[field_name] = failure(error, options.finish)
        yield body


def _of(which: str, case: Case, options: Options) -> list[str]:
    names = (n for n in options.rivals if which in RIVALS[n].start)
    return [name for name in names if options.wanted(name, case)]


def _input_set(problem: Problem, options: Options, checks: Checks, seed: int) -> Inputs:
    """Random inputs, and the out and lse of the first rival whose forward is right."""
    operands = problem.drawn(seed)
    for name in _FORWARDS:
        body = checked(name, "fwd", problem.case, checks.of(name, "fwd", problem.case))
        if body["status"] == "ok":
            with watched(options.patience_s):
                out, lse = _started(name, "fwd", problem)(Inputs(*operands, None, None))
                options.finish()
            return problem.inputs(operands, out, lse)
    raise NoForward("no forward is right, so there is no out and lse to go by")


def _started(name: str, which: str, problem: Problem) -> Call:
    """The call of a rival on a problem, made once."""
    calls = vars(problem).setdefault("calls", {})
    if (name, which) not in calls:
        calls[name, which] = RIVALS[name].start[which](problem)
    return calls[name, which]


def _ready(
    name: str, which: str, problem: Problem, t: Inputs, options: Options, checks: Checks
) -> tuple[dict, Call | None]:
    """The body of a rival's checks on a case, and its call if there is something to time."""
    rival = RIVALS[name]
    body = checked(name, which, problem.case, checks.of(name, which, problem.case))
    if "check" not in body:
        return body, None
    try:
        start = options.now()
        patience_s = (1.0 if rival.short else _LONG) * (options.patience_s or 0.0)
        with watched(patience_s):
            call = _started(name, which, problem)
            results = call(t)
            options.finish()
            body["first_call_s"] = round(options.now() - start, 3)
            outcome = body["check"] | {"sampled_error": check.sampled(problem, which, t, results)}
            if rival.ordered or which == "fwd":
                body["bitwise"] = {"repeat": repeats(lambda: call(t), options.repeats)}
    except Exception as error:
        return body | failure(error, options.finish), None
    why = check.wrong(rival, outcome)
    body |= {"check": outcome} | ({"status": "failed", "why": why} if why else {})
    # Beyond the bound it is not right, but its time says something still.
    right = not check.wrong(rival, outcome | {"beyond_bound": 0})
    return body, call if right else None


def _compare_orders(bodies: dict, calls: dict, t: Inputs) -> None:
    """Our two orders against each other at full size."""
    if not {"ours", "ours_unordered"} <= set(calls):
        return
    count = check.apart(calls["ours"](t), calls["ours_unordered"](t))
    body = bodies["ours_unordered"]
    body["check"] |= {"apart": count}
    if count:
        body |= {"status": "failed", "why": f"{count} elements are far from the ordered result"}


def _compare_runs(bodies: dict, calls: dict, t: Inputs) -> None:
    """Whether the sequences of a pack have the bytes that they have alone."""
    if {"ours_pack", "ours_runs"} <= set(calls):
        pairs = zip(calls["ours_pack"](t), calls["ours_runs"](t), strict=True)
        bodies["ours_pack"]["bitwise"]["alone"] = all(same_bytes(x, y) for x, y in pairs)


def _time(
    calls: dict[str, Call],
    which: str,
    problem: Problem,
    sets: list[Inputs],
    bodies: dict[str, dict],
    options: Options,
    checks: Checks,
) -> None:
    """Takes the times of one pass, in turns, into the bodies."""
    set_bytes = sets[0].nbytes
    count = timing.set_count(set_bytes, options.l2_bytes, len(calls))
    for seed in range(len(sets), count):
        sets.append(_input_set(problem, options, checks, seed))

    turns = timing.rotating(calls, sets[:count])
    with torch.no_grad():
        timing.warm_up(turns, count)
        times = timing.interleave(
            turns,
            rounds=options.rounds,
            clock=options.clock,
            chunk=_CHUNK_OF_RUNS if "ours_runs" in calls else _CHUNK,
            backlog_us=_BACKLOG_US,
        )
    work, clocks = problem.work(which), record.clocks()
    for name, stats in times.items():
        body = bodies[name]
        pairs = {other: paired(theirs, stats) for other, theirs in times.items() if other != name}
        body["ratio"] = {other: middle for other, (_, middle, _) in pairs.items()}
        body["ratio_spread"] = {other: [low, high] for other, (low, _, high) in pairs.items()}
        body |= measured(stats, work, options.ceilings)
        body |= {"clocks": clocks, "elements": problem.elements}
        body["cold_l2"] = {"sets": count, "set_bytes": set_bytes, "l2_bytes": options.l2_bytes}


def paired(theirs: timing.Timing, own: timing.Timing) -> tuple[float, float, float]:
    """Ratio of a rival's time to this one's: p10, median and p90 over the rounds.

    Both ran within milliseconds of each other, so a change of clocks hits both: a ratio of medians
    would be wrong by more than the few percent that an order costs.
    """
    ratios = [x / y for x, y in zip(theirs.samples, own.samples, strict=True)]
    return tuple(timing.quantile(ratios, q) for q in (0.1, 0.5, 0.9))


def line(body: dict) -> str:
    """One line for the terminal."""
    head = f"{body['system']:<14} {body['pass']} {body['shape']:<28}"
    cells = []
    if "median_us" in body:
        spread = f"[{body['p10_us']:.0f}, {body['p90_us']:.0f}]"
        cells.append(f"{body['median_us']:8.1f} us {spread} {body['tflops']:5.0f} TFLOP/s")
        for name, ratio in body["ratio"].items():
            low, high = body["ratio_spread"][name]
            cells.append(f"{ratio:.3f}x {name} [{low:.3f}, {high:.3f}]")
    if "predicted" in body:
        cells.append(f"predicted {body['predicted']['ratio']:.3f} of unordered")
        cells.append(f"{body['schedule']['name']}; lists {body['order_share']:.1%}")
    if "new_pack_host_us" in body:
        sequences = f"{body['sequences']} sequences"
        cells.append(
            f"{sequences}; the host takes {body['new_pack_host_us']:,.0f} us for a new pack"
        )
    if "table_us" in body:
        cells.append(f"its table {body['table_us']:.1f} us, {body['table_share']:.1%}")
    if "check" in body:
        outcome = body["check"]
        if "rel_error" in outcome:
            cells.append(f"error {outcome['rel_error']:.1e}, {outcome['of_bound']:.2f} of bound")
        if "sampled_error" in outcome:
            cells.append(f"at full size {outcome['sampled_error']:.1e}")
    if "bitwise" in body:
        cells.append("repeats" if body["bitwise"]["repeat"] else "DOES NOT REPEAT")
        if not body["bitwise"].get("alone", True):
            cells.append("NOT THE BYTES OF EACH SEQUENCE ALONE")
    if body["status"] != "ok":
        cells.insert(0, f"{body['status'].upper()}: {body['why'].splitlines()[0][:300]}")
    return f"{head} " + "; ".join(cells)
