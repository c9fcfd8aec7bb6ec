"""The sm_90 code of the Triton linear_logp in ptxsim: its order, its values, its masks."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.logp import config, exact
from cute_kernels.logp.triton import launch
from ptxsim.skips import requires_core
from tests.contract import same_bytes

from . import triton_cases as cases
from .triton_cases import BF16, FP32, Shape
from .triton_harness import simulated

pytestmark = [pytest.mark.sim, requires_core, pytest.mark.simulates("logp.triton")]

SIZES = (1, 2, 132)
RANDOM = {"warp_order": 1, "cta_order": 1, "seed": 5}


def engine(module=launch) -> cases.Engine:
    return cases.Engine(
        module.states, module.states_of_logits, module.gradients, module.gradients_of_logits
    )


def test_the_order_of_a_unit():
    """Read back from machine code: sums of powers of two have the bytes of the CPU backend."""
    with simulated(**RANDOM):
        cases.order(engine())


@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=pytest.mark.nightly)], ids=str)
def test_no_row_and_no_layout_shows(dtype):
    with simulated(**RANDOM):
        cases.rows_alone(engine(), cases.case(Shape(17, 144), dtype, seed=6))
        cases.layouts(engine(), dtype)


def test_no_part_shows():
    """Of parts that a device of 1, 9 or 132 units would make."""
    given = cases.case(Shape(9, 1008), seed=5)
    with simulated() as kernels:
        found = [launch._states_of_logits(*given, True, units) for units in SIZES]
    assert len({len(states) for states in found}) == len(SIZES)
    assert len({kernel.hash for kernel in kernels}) == 1
    for states in found:
        assert same_bytes(exact.merge(states), exact.merge(found[0]))


def float64(given: cases.Case, softcap: float):
    """(log p, entropy, dlogits of ones) over the columns that are entries of the vocabulary."""
    valid = given.place.vocab - given.place.start
    z = given.logits.double()[:, :valid]
    z = softcap * torch.tanh(z / softcap) if softcap else z
    y = (z * given.rows.scale.double()[:, None] * config.LN2).log_softmax(1)
    target = given.rows.target - given.place.start
    known = (target >= 0) & (target < valid)
    logp = y.gather(1, torch.where(known, target, 0)[:, None])[:, 0]
    return known, logp, -(y.exp() * y).sum(1), y


@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_values(softcap):
    """Log-probabilities, entropies and gradients of machine code against float64."""
    shape = Shape(9, 300, start=0, vocab=281, softcap=softcap)
    given = cases.case(shape)
    given = given._replace(logits=given.logits.clamp(-60, 60))
    known, logp, entropy, y = float64(given, softcap)
    with simulated(**RANDOM):
        states = launch.states_of_logits(*given, True)
        got, lse2, h = exact.finish(states, given.rows)
        of_logp = given.rows.scale * config.LN2
        upstream = cases.Upstream(lse2, of_logp, None, None)
        gradient = launch.gradients_of_logits(*given, upstream, FP32)
    size = 1 + given.logits.double().abs().amax(1) * given.rows.scale
    assert ((got - logp).abs() <= 2.0**-21 * size)[known].all()
    assert ((h - entropy).abs() <= 2.0**-19 * size)[known].all()
    hit = torch.arange(281) == given.rows.target[:, None]
    want = (hit.double() - y.exp()) * of_logp.double()[:, None]
    if softcap:
        want = want * (1 - torch.tanh(given.logits[:, :281].double() / softcap) ** 2)
    want = torch.where(given.rows.target[:, None] >= 0, want, 0.0)
    error = (gradient[:, :281] - want).abs()
    assert (error <= 2.0**-18 * size[:, None] * of_logp[:, None]).all()
    assert not gradient[:, 281:].any()


def test_far_rows_are_addressed_in_64_bits():
    """A row stride of 2^28: row 8 begins 2^31 elements from the first."""
    given = cases.case(Shape(9, 32))
    want = given._replace(logits=given.logits.bfloat16())
    room = torch.empty(8 * 2**28 + 32, dtype=BF16)
    far = room.as_strided((9, 32), (2**28, 1))
    far.copy_(want.logits)
    with simulated():
        states = [launch.states_of_logits(t, *want[1:], True) for t in (want.logits, far)]
    assert same_bytes(*(exact.merge(s) for s in states))
