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


def zero_of_the_other_sign(number: int, found) -> None:
    found[2].view(-1)[0] = -0.0 if number else 0.0


@pytest.mark.parametrize("output", range(5), ids=OUTPUTS)
def test_one_bit_of_one_output_is_seen(output):
    body = soak.soak(Stub(flips(output)), options(capture=None))
    assert body["status"] == "failed" and "graph" not in body
    name = OUTPUTS[output]
    # 41 calls, the first of which is the result to compare with: 5 are changed.
    assert body["differing_bytes"] == dict.fromkeys(OUTPUTS, 0) | {name: 5}
    assert body["why"] == f"5 bytes of {name} differ in 5 repeats"
    assert soak.differed(body)


def test_a_zero_of_the_other_sign_is_seen():
    body = soak.soak(Stub(zero_of_the_other_sign), options())
    assert body["differing_bytes"]["dq"] == 40 and body["status"] == "failed"


def test_a_replay_that_differs_is_seen():
    def stale(call):
        held = call()
        held[1].view(torch.int32)[0] ^= 1 << 30
        return held, lambda: None

    body = soak.soak(Stub(), options(capture=stale))
    assert body["differing_results"] == 0 and body["status"] == "failed"
    assert body["why"] == "40 bytes of lse differ in 40 graph replays"


@pytest.mark.parametrize(
    ("output", "status"), [(0, "failed"), (1, "failed"), (2, "ok"), (3, "failed"), (4, "failed")]
)
def test_a_control_may_differ_in_dq_alone(output, status):
    body = soak.soak(Stub(flips(output), ordered=False), options(capture=None))
    assert body["expected_to_differ"] and body["status"] == status
    assert soak.differed(body)


@pytest.mark.parametrize("value", [float("nan"), 1.0])
def test_results_that_cannot_tell_are_refused(value):
    body = soak.soak(Stub(lambda number, found: found[3].fill_(value)), options())
    assert body["status"] == "failed" and "dk of the first call" in body["why"]


def test_an_error_is_recorded():
    def broken(number, found):
        raise RuntimeError("no such tile")

    body = soak.soak(Stub(broken), options())
    assert (body["status"], body["why"]) == ("failed", "RuntimeError: no such tile")
    assert "FAILED: RuntimeError" in soak.line(body)


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
    ("bodies", "held", "words"),
    [
        ([body_of(True, 0), body_of(False, 0), body_of(False, 9)], True, "1 controls differed"),
        ([body_of(True, 0), body_of(False, 0)], False, "no control differed"),
        ([body_of(True, 0)], True, "without a control"),
        ([body_of(True, 4, "failed"), body_of(False, 9)], False, "1 failed"),
    ],
)
def test_a_soak_whose_controls_never_differ_does_not_hold(bodies, held, words):
    text, out = soak.verdict(bodies)
    assert out == held and words in text
