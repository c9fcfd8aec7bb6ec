"""The soak loop on a CPU: what it disturbs, what it counts, and that it sees what differs."""

from __future__ import annotations

import os

import pytest
import torch

from cute_kernels import settings
from perf.core import soak
from tests.perf.core.soaked import (
    OUTPUTS,
    Stub,
    body_of,
    flips,
    options,
    settings_are_kept,  # noqa: F401 (autouse)
)


def other_zero(number: int, found) -> None:
    found[2].view(-1)[0] = -0.0 if number else 0.0


def broken(number: int, found) -> None:
    raise RuntimeError("no such tile")


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("output", range(5), ids=OUTPUTS)
def test_one_bit_of_one_output_is_seen(output, ordered):
    """A control may differ in dq alone."""
    body = soak.soak(Stub(flips(output), ordered=ordered), options(capture=None))
    name = OUTPUTS[output]
    assert body["status"] == ("ok" if not ordered and name == "dq" else "failed")
    # 41 calls, the first of which is the result to compare with: 5 are changed.
    assert body["differing_bytes"] == dict.fromkeys(OUTPUTS, 0) | {name: 5}
    assert body["expected_to_differ"] == (not ordered) and soak.differed(body)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_zero, "40 bytes of dq differ in 40 repeats"),
        (broken, "RuntimeError: no such tile"),
        (lambda number, found: found[3].fill_(torch.nan), "dk of the first call"),
        (lambda number, found: found[3].fill_(1.0), "dk of the first call"),
    ],
)
def test_what_differs_raises_or_cannot_tell_has_failed(change, why):
    body = soak.soak(Stub(change), options())
    assert body["status"] == "failed" and why in body["why"]


def test_a_replay_that_differs_is_seen():
    def stale(call):
        held = call()
        held[1].view(torch.int32)[0] ^= 1 << 30
        return held, lambda: None

    body = soak.soak(Stub(), options(capture=stale))
    assert body["differing_results"] == 0 and body["status"] == "failed"
    assert body["why"] == "40 bytes of lse differ in 40 graph replays"


def test_every_cap_meets_other_work_and_junk(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", "3")
    settings.reload()
    case, recorded, work = Stub(), [], []
    true = soak.poisoned
    monkeypatch.setattr(soak, "poisoned", lambda at, fill: recorded.append(fill) or true(at, fill))
    count = 16 * soak.POISON_EVERY * soak.BUSY_EVERY
    body = soak.soak(case, options(repeats=count, capture=None, busy=lambda: work.append(1)))
    assert case.caps[0] == 3 and case.caps[1:17] == list(soak.CTAS) == body["ctas"]
    assert len(set(soak.CTAS)) == 16
    assert len(recorded) == body["poisoned"] == count / soak.POISON_EVERY
    assert set(recorded) == set(soak.FILLS)
    both = {c for i, c in enumerate(case.caps[1:]) if i % 21 == 0}
    assert both == set(soak.CTAS) and len(work) == count / soak.BUSY_EVERY
    assert settings.max_ctas() == 3 and os.environ["CUTE_KERNELS_MAX_CTAS"] == "3"


@pytest.mark.parametrize(
    ("bodies", "held"),
    [
        ([body_of(True, 0), body_of(False, 0), body_of(False, 9)], True),
        ([body_of(True, 0), body_of(False, 0)], False),
        ([body_of(True, 0)], True),
        ([body_of(True, 4, "failed"), body_of(False, 9)], False),
    ],
)
def test_a_soak_whose_controls_never_differ_does_not_hold(bodies, held):
    assert soak.verdict(bodies)[1] == held
