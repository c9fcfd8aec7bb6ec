"""Launches of several cases in one run of ncu, told apart by their marks."""

from __future__ import annotations

import pytest

from perf.core import counters, ncu


def launch(name: str) -> ncu.Launch:
    return ncu.Launch(name, {ncu.METRICS["time_ns"]: 1e3})


MARK = launch("at::cuda::(anonymous namespace)::spin_kernel(long)")


def test_cases_of_several_launches():
    a, b, c = map(launch, ("project", "add", "combine"))
    assert counters.by_case([MARK, a, b, MARK, c, MARK]) == [[a, b], [c], []]


def test_a_launch_before_the_first_mark_is_refused():
    with pytest.raises(ncu.ProfileError, match="expected spin_kernel first, got project"):
        counters.by_case([launch("project"), MARK])
