"""A call with room below it maps no memory for frames, however deep it is made."""

from __future__ import annotations

import resource

import pytest

from perf.core.room import with_room

_CALLS, _DEPTHS = 200, 150


def _leaf(a, b):
    return a, b


# Wider than a frame of `_at`, so that at some depth a chunk ends in it.
_leaf.__code__ = _leaf.__code__.replace(co_stacksize=128)


def _loop() -> int:
    """Page faults of calls from here."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for i in range(_CALLS):
        _leaf(i, i)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _at(depth: int, run) -> int:
    return _at(depth - 1, run) if depth else run()


def test_calls_with_room_fault_at_no_depth():
    plain = max(_at(depth, _loop) for depth in range(_DEPTHS))
    roomy = max(_at(depth, lambda: with_room(_loop)) for depth in range(_DEPTHS))
    assert roomy < _CALLS // 4
    if plain < _CALLS:
        pytest.skip("this Python keeps a chunk, so there was nothing to be kept from")
