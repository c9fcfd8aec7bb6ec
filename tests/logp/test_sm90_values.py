"""The SM90 kernels of logp in the simulator: every configuration and tail class, byte for byte.

With ``wgmma_math="exact"`` logits are those of gemm's oracle, and 2^y is the C library's, so states
must be the oracle's integers.
"""

from __future__ import annotations

import pytest
import torch

import ptxsim
from cute_kernels.logp import exact, launch, tiles
from cute_kernels.logp.config import FinishConfig
from ptxsim.skips import requires_sim
from tests import contract
from tests.logp.finished_states import drawn
from tests.logp.simulated import simulated
from tests.logp.sm90_cases import (
    case,
    every,
    gradients_oracle,
    same_exp2,
    same_states,
    states_of,
    states_oracle,
    upstream,
)

pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("logp")]

#: (T, V, D): tails of each; several tiles and blocks of D; less than one unit.
SHAPES = [(130, 600, 136), (300, 264, 64), (1, 7, 8)]


def wide():
    return every((launch.config_of(*chosen) for chosen in launch.options()), _plain_or_all)


def few():
    return every(launch.few_configs(), _plain_or_all)


def _plain_or_all(chosen) -> bool:
    flags = (chosen.bias, chosen.softcap, chosen.entropy)
    if chosen.order == "tree":
        return all(flags)
    return not any(flags) or all(flags)


@pytest.mark.parametrize("chosen", list(wide()))
def test_states_and_gradients(chosen, monkeypatch):
    for shape in SHAPES:
        given = case(chosen, *shape)
        with simulated(wgmma_math="exact"):
            got = states_of(given, chosen.entropy)
        assert ptxsim.report()["fence_warnings"]["count"] == 0
        with same_exp2(monkeypatch):
            if not chosen.softcap:  # tanh is made of a reciprocal that is approximate
                assert same_states(got, states_oracle(given, chosen.entropy)), shape
            of = upstream(given, got[None], chosen.entropy)
            with simulated(wgmma_math="exact"):
                made = launch.gradients(given.hidden, given.head, given.rows, of)
            want = gradients_oracle(given, of)
        assert ptxsim.report()["fence_warnings"]["count"] == 0
        check_gradients(made, want, given, exactly=not (chosen.softcap or chosen.entropy))


def check_gradients(made, want, given, exactly: bool) -> None:
    masked = given.rows.target < 0
    padded = given.head.vocab
    assert not made[masked].any() and not made[:, padded:].any(), "zeros"
    if exactly:
        known = ~want.isnan()
        assert torch.equal(made.isnan(), ~known)
        assert contract.same_bytes(made[known], want[known])
        return
    made, want = torch.nan_to_num(made.float(), nan=9.0), torch.nan_to_num(want.float(), nan=9.0)
    # Elements are made by other roundings in fp32: a few fall on the other side of one in 16 bits.
    assert (made != want).float().mean() < 0.01
    torch.testing.assert_close(made, want, rtol=2**-7, atol=2**-14)


@pytest.mark.parametrize("chosen", list(few()))
def test_few_tokens(chosen, monkeypatch):
    plain = chosen.order == "chain" and not chosen.entropy and not chosen.softcap
    assert tiles.few(chosen.tile_m, plain).tile_m == chosen.tile_m
    for tokens in (chosen.tile_m, max(1, chosen.tile_m - 3)):
        given = case(chosen, tokens, 300, 200)
        with simulated(clusters=1, wide=False, wgmma_math="exact"):
            got = states_of(given, chosen.entropy)
        assert ptxsim.report()["fence_warnings"]["count"] == 0
        with simulated(clusters=2, wgmma_math="exact"):
            assert same_states(got, states_of(given, chosen.entropy)), "the wide kernel's"
        if not chosen.softcap:
            with same_exp2(monkeypatch):
                assert same_states(got, states_oracle(given, chosen.entropy))


@pytest.mark.parametrize("entropy", [False, True])
def test_what_states_end_in(entropy):
    """The kernel's fp64 operations are those of exact.finish."""
    for parts in (1, 3, 40, 100):
        states, rows = drawn(parts, entropy)
        with simulated():
            got = launch.finish(states, rows)
        assert launch._finish is not None and FinishConfig(entropy).entropy == (got[2] is not None)
        for ours, want in zip(got, exact.finish(states, rows), strict=True):
            if want is not None:
                known = ~want.isnan()
                assert torch.equal(ours.isnan(), ~known)
                assert contract.same_bytes(ours[known], want[known])
