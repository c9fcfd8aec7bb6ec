"""Clocks for timing code that runs without a card."""

from __future__ import annotations

import time


class HostClock:
    """Wall time: enough to run the code, not to measure anything."""

    def sleep(self, us: float) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return False

    def finish(self) -> None:
        pass

    def between(self, start: float, stop: float) -> float:
        return (stop - start) * 1e6


class FakeClock(HostClock):
    """A device whose time is what the calls say.  `awake` tells when the backlog ran out."""

    def __init__(self, enough_us: float = 0.0):
        self.now, self.enough_us, self.sleeps, self.log = 0.0, enough_us, [], []

    def sleep(self, us: float) -> None:
        self.sleeps.append(us)

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return self.sleeps[-1] < self.enough_us

    def between(self, start: float, stop: float) -> float:
        return stop - start

    def call(self, name: str, us: float):
        """A call that takes `us` on this device and logs (name, number)."""

        def run(number: int) -> None:
            self.log.append((name, number))
            self.now += us

        return run
