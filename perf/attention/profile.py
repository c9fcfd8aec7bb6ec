"""`python -m perf profile attention`: counters of the forward and of the ordered backward's kernel.

One run of ncu brackets one call of each case and pass, in order; of a backward the fused kernel
alone counts, not those before and after it.
"""

from __future__ import annotations

import functools
import re

from ..core import ncu, record, timing
from .cases import PASSES, Case, Inputs, Problem
from .rivals import RIVALS

LENGTH, HEADS, DEVICE = 8_192, 16, "cuda"
#: The kernels' names hold those of their modules, of narrow and of wide heads; which those around
#: a backward do not match.
KERNELS = {"fwd": "kernel_fwd_(no_overlap_|wide_)?sm90", "bwd": "kernel_bwd_(wide_)?sm90"}


def cases(masks: list[str], dims: list[int]) -> list[Case]:
    """MHA, 32k tokens a batch."""
    return [Case(mask, LENGTH, dim, HEADS, HEADS) for dim in dims for mask in masks]


def attention(todo: list[Case], passes: list[str], commit: str | None = None) -> list[dict]:
    """Profiles each case and pass; the records.

    ProfileError where ncu fails or has not seen one launch of the right kernel for each of them.
    """
    pairs = [(case, which) for case in todo for which in ordered(passes)]
    ceilings = timing.ceilings()
    launches, unknown = ncu.launches_of("|".join(KERNELS.values()))
    if len(launches) != len(pairs):
        want = f"one launch of each of {len(pairs)} cases"
        raise ncu.ProfileError(f"ncu output: expected {want}, got {len(launches)}")
    common = record.environment(commit) | {"kind": "profile", "kernel": "attention"}
    bodies = []
    for (case, which), launch in zip(pairs, launches, strict=True):
        if not re.search(KERNELS[which], launch.kernel):
            wanted_kernel = f"{KERNELS[which]} for {case.label}"
            raise ncu.ProfileError(f"ncu output: expected {wanted_kernel}, got {launch.kernel}")
        work = Problem(case, DEVICE).work(which)
        body = ncu.summary([launch], work, ceilings)
        body |= {"tflops": work.flops / body["time_us"] / 1e6, "unknown_metrics": unknown}
        bodies.append(common | case.items(which) | body | {"system": "ours"})
    return bodies


def ordered(passes: list[str]) -> list[str]:
    """The passes in the order in which they are run."""
    return [which for which in PASSES if which in passes]


def target(todo: list[Case], passes: list[str]) -> None:
    """Run what ncu profiles: of each case and pass three calls, then one with the profiler open."""
    for case in todo:
        problem = Problem(case, DEVICE)
        operands = problem.drawn(0)
        forward = RIVALS["ours"].start["fwd"](problem)
        out, lse = forward(Inputs(*operands, None, None))
        t = problem.inputs(operands, out, lse)
        for which in ordered(passes):
            call = RIVALS["ours"].start[which](problem)
            ncu.bracketed(functools.partial(call, t))
