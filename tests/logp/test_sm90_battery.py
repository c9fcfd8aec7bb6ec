"""The contract battery through the SM90 kernels of logp, and schedules that may not show."""

from __future__ import annotations

import itertools

import pytest
import torch

from cute_kernels.logp import exact, launch, op
from cute_kernels.logp.tensors import Head
from ptxsim.skips import requires_sim
from tests import contract
from tests.contract import RowOp
from tests.kernels.operands import operand
from tests.logp.simulated import simulated

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = (
    "test_battery test_battery_of_gradients test_no_schedule_shows "
    "test_a_cut_of_the_vocabulary_does_not_show"
)
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("logp", often=EACH_COMMIT)]

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
        of = op.upstream_of(ones, None, tokens, torch.full((len(rows),), 9.0), None)
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
    drawn = {"cta_order": "random", "warp_order": "random", "async_mode": "random"}
    for runs, clusters, resident in itertools.product((1, 2), (1, 2, 66), (1, 7, 132)):
        options = {"runs": runs, "clusters": clusters, "resident_ctas": resident, **drawn}
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
