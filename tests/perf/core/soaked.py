"""Stand-ins of a soaked case."""

from __future__ import annotations

import functools
import itertools
import types

import pytest
import torch

from cute_kernels import settings
from perf.core import soak

OUTPUTS = ("out", "lse", "dq", "dk", "dv")


LAUNCHER = types.SimpleNamespace(allocator=lambda *args: functools.partial(torch.empty, *args))


SHAPES = ((3, 4), (4,), (5, 2), (2, 2), (2, 2))


@pytest.fixture(autouse=True)
def settings_are_kept(monkeypatch):
    """Keep settings as outside of tests: what is read once is kept until `reload`."""
    monkeypatch.setattr(settings, "get", functools.cache(settings.get))


def captured(call):
    """Stand-in of a graph: static results, and a replay that writes them."""
    held = call()

    def again():
        for t, new in zip(held, call(), strict=True):
            t.copy_(new)

    return held, again


def options(**more) -> soak.Options:
    inputs = {"device": "cpu", "finish": lambda: None, "capture": captured} | more
    return soak.Options(**inputs)


class Stub:
    """A case whose calls give drawn tensors; `change(number, tensors)` is the bug."""

    repeats, label, outputs, launcher = 40, "stub", OUTPUTS, LAUNCHER

    def __init__(self, change=None, ordered: bool = True):
        self.change, self.ordered = change, ordered
        self.may_differ = () if ordered else ("dq",)
        generator = torch.Generator().manual_seed(0)
        self.right = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.caps: list[int] = []

    def items(self) -> dict:
        return {"shape": self.label}

    def started(self, device: str):
        numbers = itertools.count()

        def call():
            self.caps.append(settings.max_ctas())
            out = tuple(t.clone() for t in self.right)
            if self.change:
                self.change(next(numbers), out)
            return out

        return call


def flips(output: int, every: int = 7):
    """One bit of one output in some calls, never in the first."""

    def change(number: int, found) -> None:
        if number % every == every - 1:
            found[output].view(torch.int32).view(-1)[-1] ^= 1

    return change


def body_of(ordered: bool, dq: int, status: str = "ok") -> dict:
    counts = dict.fromkeys(OUTPUTS, 0) | {"dq": dq}
    return {"status": status, "expected_to_differ": not ordered, "differing_bytes": counts}
