"""The timing method: turns, cold input sets, backlog, quantiles."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from perf.core import timing
from tests.perf.core.clocks import FakeClock


def test_quantiles_interpolate():
    samples = [40.0, 10.0, 30.0, 20.0]
    assert [timing.quantile(samples, q) for q in (0.5, 1.0)] == [25.0, 40.0]
    assert timing.quantile(samples, 0.1) == pytest.approx(13.0)
    times = timing.Timing(tuple(float(i) for i in range(101)), True)
    assert (times.p10, times.median, times.p90) == (10.0, 50.0, 90.0)


def test_input_sets_outgrow_the_l2_and_reach_every_rival():
    draw = random.Random(1)
    for _ in range(300):
        set_bytes, l2 = int(10 ** draw.uniform(0, 10)), int(10 ** draw.uniform(0, 8))
        rivals = draw.randint(1, 8)
        sets = timing.set_count(set_bytes, l2, rivals)
        assert sets >= 2 and sets * set_bytes >= timing.L2_FACTOR * l2
        assert math.gcd(sets, rivals) == 1
        if sets < 100:
            assert {number % sets for number in range(1, 1 + sets * rivals, rivals)} == {
                *range(sets)
            }


def test_rivals_take_turns_and_every_call_has_a_new_number():
    clock = FakeClock()
    calls = {"a": clock.call("a", 3.0), "b": clock.call("b", 5.0)}
    times = timing.interleave(calls, rounds=25, clock=clock, chunk=10)
    names = [name for name, _ in clock.log]
    assert all(sorted(names[i : i + 2]) == ["a", "b"] for i in range(0, 50, 2))
    assert [number for _, number in clock.log] == list(range(50))
    assert times["a"].samples == (3.0,) * 25
    assert times["b"].samples == (5.0,) * 25
    assert times["a"].backlog
    assert clock.sleeps == [5000.0] * 3


def test_a_rival_comes_behind_each_of_the_others():
    """What one leaves in the L2 to be written is charged to whoever comes next: to all alike."""
    clock = FakeClock()
    calls = {name: clock.call(name, 1.0) for name in "abcd"}
    timing.interleave(calls, rounds=60, clock=clock, chunk=10)
    names = [name for name, _ in clock.log]
    assert all(sorted(names[i : i + 4]) == list("abcd") for i in range(0, 240, 4))
    for one, other in itertools.permutations("abcd", 2):
        assert 8 <= sum(pair == (one, other) for pair in itertools.pairwise(names)) <= 30


def test_a_backlog_that_ran_out_is_repeated_behind_a_longer_sleep_or_reported():
    clock = FakeClock(enough_us=15_000.0)
    times = timing.interleave({"a": clock.call("a", 1.0)}, rounds=20, clock=clock, chunk=10)
    assert clock.sleeps == [5000.0, 10_000.0, 20_000.0, 20_000.0]
    assert len(times["a"].samples) == 20 and times["a"].backlog
    never = FakeClock(enough_us=math.inf)
    times = timing.interleave({"a": never.call("a", 1.0)}, rounds=20, clock=never, tries=3)
    assert len(times["a"].samples) == 20 and not times["a"].backlog


def test_what_is_awaited_has_the_hosts_part_and_the_devices():
    state, log = {"now": 0.0, "device": 0.0}, []

    class Clock:
        def finish(self):
            state["now"], state["device"] = max(state["now"], state["device"]), 0.0

    def call(name, host, device):
        def run(number):
            log.append((name, number))
            state["now"] += host * 1e-6
            state["device"] = state["now"] + device * 1e-6

        return run

    calls = {"a": call("a", 3.0, 10.0), "b": call("b", 5.0, 0.0)}
    times = timing.awaited(calls, rounds=4, clock=Clock(), now=lambda: state["now"])
    assert times["a"].samples == pytest.approx([13.0] * 4)
    assert times["b"].samples == pytest.approx([5.0] * 4)
    assert log == [(name, 2 * i + (name == "b")) for i in range(4) for name in "ab"]


def test_host_cost_leaves_the_wait_for_the_device_out():
    state = {"now": 0.0, "finished": 0}

    def call():
        state["now"] += 3e-6

    def finish():
        state["now"] += 1.0
        state["finished"] += 1

    cost = timing.host_cost(call, finish=finish, calls=10, batches=3, now=lambda: state["now"])
    assert cost == pytest.approx(3.0)
    assert state["finished"] == 4
