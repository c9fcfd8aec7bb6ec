"""The SM90 kernels of logp in the simulator: values, byte for byte, the battery, schedules, cuts.

With ``wgmma_math="exact"`` logits are those of gemm's oracle, and 2^y is the C library's, so states
must be the oracle's integers.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import ptxsim
from cute_kernels.logp import exact, launch, op, tiles
from cute_kernels.logp.config import FinishConfig
from cute_kernels.logp.tensors import Head
from ptxsim.skips import requires_sim
from tests import contract
from tests.contract import RowOp
from tests.kernels.operands import operand
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

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_states_and_gradients test_few_tokens test_what_states_end_in test_battery "
    "test_battery_of_gradients test_no_schedule_shows test_a_cut_of_the_vocabulary_does_not_show"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("logp", often=EACH_COMMIT)]

# ---- values --------------------------------------------------------------------------------------

#: (T, V, D): tails of each; several tiles and blocks of D; less than one unit.
SHAPES = [(130, 600, 136), (300, 264, 64), (1, 7, 8)]


def wide():
    """The configuration of the battery first, whose kernels are compiled for it."""
    configs = [launch.config_of(*chosen) for chosen in launch.options()]
    own = launch.config_of("bf16", "chain", False, False, True)
    return every(sorted(configs, key=lambda chosen: chosen != own), _plain_or_all)


def few():
    return every(launch.few_configs(), _plain_or_all)


def _plain_or_all(chosen) -> bool:
    flags = (chosen.bias, chosen.softcap, chosen.entropy)
    if chosen.order == "tree":
        return all(flags)
    # The battery's has the entropy alone.
    return not any(flags) or all(flags) or flags == (False, False, True)


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


# ---- the battery ---------------------------------------------------------------------------------

V, D, ROWS, SEED = 88, 72, 150, 3
BF16 = torch.bfloat16


def results(rows: torch.Tensor, order: str, **options) -> torch.Tensor:
    """[T, 2]: log p and the entropy; a row's target follows from its own bits."""
    weight = operand(V, D, BF16, "k", seed=1)
    target = (rows[:, 0].contiguous().view(torch.int16).long() & 0xFFFF) % V
    tokens = op.rows_of(target, None, 0.8, -100, V)
    with simulated(wgmma_math="hopper", **options):
        states = launch.states(rows, Head(weight, None, 0, V, 0.0, order), tokens, True)
        logp, _, entropy = launch.finish(states, tokens)
    return torch.stack([logp, entropy], 1)


def scores(order: str, **options) -> RowOp:
    return RowOp(f"linear_logp, {order}", lambda x: results(x, order, **options), D, BF16)


def gradients(order: str) -> RowOp:
    """The gradient of logits, for rows that are hidden states."""

    def run(rows):
        weight = operand(V, D, BF16, "k", seed=1)
        head = Head(weight, None, 0, V, 0.0, order)
        target = (rows[:, 0].contiguous().view(torch.int16).long() & 0xFFFF) % V
        tokens = op.rows_of(target, None, 1.0, -100, V)
        ones = torch.linspace(0.5, 2.0, V)[target]
        nines = torch.full((len(rows),), 9.0)
        of = op.upstream_of(ones, 1 - ones, tokens, nines, nines / 4)
        with simulated(wgmma_math="hopper"):
            return launch.gradients(rows, head, tokens, of).contiguous()

    return RowOp(f"gradient of logits, {order}", run, D, BF16)


@pytest.mark.parametrize("order", ["chain", pytest.param("tree", marks=pytest.mark.nightly)])
def test_battery(order):
    assert contract.check_rows(scores(order), ROWS, SEED) > 60


@pytest.mark.parametrize("order", ["chain", pytest.param("tree", marks=pytest.mark.nightly)])
def test_battery_of_gradients(order):
    assert contract.check_rows(gradients(order), ROWS, SEED) > 60


@pytest.mark.parametrize("order", ["chain", "tree"])
def test_rows_across_a_change_of_kernel(order):
    """Few tokens take another kernel, with operands swapped; many take the wide one."""
    sizes = [1, 7, 8, 9, 16, 17, 64, 65, 128, 129, 200]
    target = scores(order, wide=False)
    assert contract.check_population(target, 200, SEED, sizes) == len(sizes)


def test_no_schedule_shows():
    """Runs of the vocabulary, clusters, orders of CTAs and warps, resident CTAs."""
    rows = scores("chain").rows(300, SEED)
    want = results(rows, "chain")
    orders = {"cta_order": "random", "warp_order": "random", "async_mode": "random"}
    for runs, clusters, resident in itertools.product((1, 2), (1, 2, 66), (1, 7, 132)):
        options = {"runs": runs, "clusters": clusters, "resident_ctas": resident, **orders}
        if resident < 2:
            options["resident_ctas"] = 2  # a cluster is two CTAs
        got = results(rows, "chain", **options, seed=runs + clusters)
        assert contract.same_bytes(got, want), options


def test_a_cut_of_the_vocabulary_does_not_show():
    """Shards at any multiple of 16, each by a call of its own."""
    rows = scores("chain").rows(40, SEED)
    weight = operand(V, D, BF16, "k", seed=1)
    tokens = op.rows_of(torch.arange(40), None, 1.0, -100, V)

    def parts(*cuts: int) -> torch.Tensor:
        with simulated(wgmma_math="hopper"):
            return torch.cat(
                [
                    launch.states(rows, Head(weight[a:b], None, a, V, 0.0, "chain"), tokens, True)
                    for a, b in itertools.pairwise(cuts)
                ]
            )

    want = exact.merge(parts(0, V))
    for cut in range(16, V, 16):
        assert contract.same_bytes(exact.merge(parts(0, cut, V)), want), cut
