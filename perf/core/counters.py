"""Counters of ops that are functions of operands (`passes`): every launch of every case.

One run of ncu brackets one call of each case.  A kernel that only waits begins each bracket, so
that a case with several launches has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from . import ncu, record, timing
from .passes import Suite

_MARK = "spin_kernel"  # what torch.cuda._sleep launches


def target(suite: Suite, todo: Iterable, system: str) -> None:
    """Run the calls that ncu profiles."""
    for case in todo:
        call, t = suite.rivals[system].start[case.product](case), case.inputs(0, "cuda")
        ncu.bracketed(lambda call=call, t=t: (torch.cuda._sleep(1), call(t)))


def profile(suite: Suite, todo: list, system: str, commit: str | None = None) -> list[dict]:
    """The records of all cases; ProfileError where ncu fails or saw another number of them."""
    ceilings = timing.ceilings()
    launches, unknown = ncu.launches_of()
    groups = by_case(launches)
    if len(groups) != len(todo):
        raise ncu.ProfileError(f"ncu output: expected {len(todo)} cases, got {len(groups)}")
    head = record.environment(commit) | {"kind": "profile", "kernel": suite.kernel}
    bodies = []
    for case, group in zip(todo, groups, strict=True):
        body = ncu.summary(group, case.work, ceilings) | {"unknown_metrics": unknown}
        kernels = [
            [launch.kernel, launch.values.get(ncu.METRICS["time_ns"], 0.0) / 1e3]
            for launch in group
        ]
        bodies.append(head | case.items() | body | {"system": system, "kernels": kernels})
    return bodies


def by_case(launches: list[ncu.Launch]) -> list[list[ncu.Launch]]:
    """The launches behind each mark, without it."""
    groups: list[list[ncu.Launch]] = []
    for launch in launches:
        if _MARK in launch.kernel:
            groups.append([])
        elif not groups:
            raise ncu.ProfileError(f"ncu output: expected {_MARK} first, got {launch.kernel}")
        else:
            groups[-1].append(launch)
    return groups


def lines(body: dict) -> Iterator[str]:
    """Lines of the terminal for one record."""
    yield from ncu.lines(body)
    for name, time_us in body["kernels"]:
        yield f"  {time_us:8.1f} us  {name[:90]}"
