"""Tests of perf tune-norm: variants are parsed, compiled and compared; times need a card."""

from __future__ import annotations

import itertools

import pytest

from perf.norm import tune
from perf.norm.cases import Case
from tests.norm.simulated import built
from tests.ptxsim.available import requires_sim

CASE = Case("rms_norm", "fwd", 45, 2048)
CASES = [
    CASE,
    Case("add_rms_norm", "fwd", 45, 1032),
    Case("layer_norm", "fwd", 13, 4096),
]
BACKWARDS = [
    Case("add_rms_norm", "bwd", 70, 2048),
    Case("rms_norm", "bwd", 70, 4096),
    Case("layer_norm", "bwd", 40, 1032),
]


class Clock:
    """Counts instead of times."""

    def __init__(self):
        self.ticks = itertools.count(1)

    def sleep(self, us):
        pass

    def mark(self):
        return next(self.ticks)

    def passed(self, mark):
        return False

    def finish(self):
        pass

    def between(self, start, stop):
        return float(stop - start)


def measured(variants: list[str], build, case: Case = CASE) -> list[dict]:
    options = {"sms": 2, "rounds": 1, "device": "cpu", "clock": Clock(), "build": build}
    return list(tune.norm(case, variants, **options))


@pytest.mark.parametrize("text", ["cta=3", "ctas", "stages=x", "stays=-1", "ctas=4;"])
def test_unknown_fields_are_named(text):
    with pytest.raises(ValueError, match="variant: expected NAME=NUMBER"):
        tune.parse(text)
    with pytest.raises(ValueError, match="variant: expected NAME=NUMBER"):
        measured(["", text], built)


def test_the_list_parses():
    assert tune.parse("") == tune.Variant()
    for variants in (tune.VARIANTS, tune.BACKWARD_VARIANTS):
        assert len(set(map(tune.parse, variants))) == len(variants)


@requires_sim
@pytest.mark.sim
@pytest.mark.parametrize(
    "case",
    [CASE, *(pytest.param(case, marks=pytest.mark.nightly) for case in CASES[1:])],
    ids=lambda case: case.op,
)
def test_every_variant_has_the_shipped_bits(case):
    variants = ["", "threads=256,ctas=4,stages=0", "threads=512,ctas=2,stages=3"]
    variants += ["threads=128,ctas=6,stages=2", "threads=512,ctas=2,stages=0"]
    bodies = measured(variants, built, case)
    assert [b["system"] for b in bodies] == [*(f"ours[{v}]" for v in variants), "copy"]
    assert all(b["status"] == "ok" and b["median_us"] > 0 for b in bodies)
    assert all(tune.line(body) for body in bodies)


@requires_sim
@pytest.mark.sim
@pytest.mark.parametrize(
    "case",
    [*(pytest.param(case, marks=pytest.mark.nightly) for case in BACKWARDS[1:]), BACKWARDS[0]],
    ids=lambda case: case.op,
)
def test_every_variant_of_a_backward_has_the_shipped_bits(case):
    variants = list(tune.BACKWARD_VARIANTS)
    bodies = measured(variants, built, case)
    assert [b["system"] for b in bodies] == [*(f"ours[{v}]" for v in variants), "copy"]
    assert all(b["status"] == "ok" for b in bodies)


@requires_sim
@pytest.mark.sim
def test_what_a_row_cannot_have_is_named():
    """A row of one warp has no barrier behind which a stage of the copy engine would be free."""
    bodies = measured(["", "bulk=1"], built, Case("rms_norm", "bwd", 9, 128))
    failed = [b for b in bodies if b["status"] == "failed"]
    assert [b["system"] for b in failed] == ["ours[bulk=1]"]
    assert "median_us" not in failed[0]
    assert "threads: expected more than 32 a row (a barrier), got 16" in tune.line(failed[0])


@requires_sim
@pytest.mark.sim
def test_other_bits_are_not_timed():
    number_of = itertools.count()

    def build(chosen):
        kernel, number = built(chosen), next(number_of)

        def other(*args):
            kernel(*args)
            if number == 2:  # behind the reference and the shipped one
                args[5][3, 7] += 1.0

        return other

    bodies = measured(["", "ctas=3"], build)
    failed = [b for b in bodies if b["status"] == "failed"]
    assert [b["system"] for b in failed] == ["ours[ctas=3]"]
    assert "median_us" not in failed[0] and "other bits" in tune.line(failed[0])
