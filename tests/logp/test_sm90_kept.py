"""The SM90 forward that keeps logits, in the simulator, and the gradient that is made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import ptxsim
from cute_kernels.logp import exact, kernel_fwd_sm90, launch
from cute_kernels.logp.triton import launch as triton_launch
from ptxsim.skips import requires_sim
from tests import contract
from tests.kernels.edited import changed
from tests.logp import simulated as doubles
from tests.logp.simulated import simulated
from tests.logp.sm90_cases import Case, case, every, same_exp2, same_states, states_oracle, upstream
from tests.logp.triton_engine import RUNNER as TRITON

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_stored_sums test_gradients_of_sums"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("logp", often=EACH_COMMIT)]

#: (T, V, D): a tail of each, the last columns of a tile of 256 and of the sums' rows.
SHAPE = 130, 601, 72
#: Tokens that are kept: all, some that end inside a warpgroup's 64 rows, one, none.
KEPT = (130, 70, 1)
#: What lies in the sums before the launch.
POISON = -7.75


def _plain_or_all(chosen) -> bool:
    flags = (chosen.bias, chosen.softcap, chosen.entropy)
    return all(flags) or (not any(flags) and chosen.order == "chain")


def wide():
    return every((launch.config_of(*chosen) for chosen in launch.options()), _plain_or_all)


def stored(given: Case, tokens: int, entropy: bool, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(states [T, C], sums [tokens, V']) of a launch."""
    width = -(-len(given.head.weight) // 4) * 4
    # A row behind the kept ones, and the gaps between rows, must stay as they are.
    memory = torch.full((tokens + 1, width + 4), POISON)
    with simulated(wgmma_math="exact", **options):
        sums = memory[:tokens, :width]
        states = launch.states(given.hidden, given.head, given.rows, entropy, sums)
    assert (memory[tokens:] == POISON).all() and (memory[:, width:] == POISON).all()
    return exact.merge(states), sums


def sums_oracle(given: Case) -> torch.Tensor:
    return given._replace(head=given.head._replace(bias=None)).logits


def right(given: Case, tokens: int, entropy: bool, want: torch.Tensor, **options) -> bool:
    """Whether the sums, their padding and the states are the oracle's."""
    states, sums = stored(given, tokens, entropy, **options)
    oracle, vocab = sums_oracle(given)[:tokens], len(given.head.weight)
    known = ~oracle.isnan()
    kept = sums[:, :vocab]
    return (
        contract.same_bytes(kept[known], oracle[known])
        and bool(kept[~known].isnan().all())
        and not (sums[:, vocab:][known.all(1)] != 0).any()
        and (want is None or same_states(states, want))
    )


@pytest.mark.parametrize("chosen", list(wide()))
def test_stored_sums(chosen, monkeypatch):
    given = case(chosen, *SHAPE)
    want = None
    if not chosen.softcap:  # tanh is made of a reciprocal that is approximate
        with same_exp2(monkeypatch):
            want = states_oracle(given, chosen.entropy)
    for tokens in KEPT:
        assert right(given, tokens, chosen.entropy, want, clusters=1 + tokens % 3), tokens


def test_no_schedule_shows():
    chosen = launch.config_of("bf16", "chain", False, False, False)
    given = case(chosen, *SHAPE)
    want = stored(given, 70, False)
    for options in ({"clusters": 1}, {"clusters": 66, "cta_order": 1, "warp_order": 1, "seed": 3}):
        for got, expected in zip(stored(given, 70, False, **options), want, strict=True):
            known = ~expected.isnan() if expected.is_floating_point() else ...
            assert contract.same_bytes(got[known], expected[known])


@pytest.mark.parametrize("chosen", list(wide()))
def test_gradients_of_sums(chosen):
    """Triton's gradient of kept sums has the bytes of the kernel that makes the logits again."""
    given = case(chosen, *SHAPE)
    states, sums = stored(given, SHAPE[0], chosen.entropy)
    of = upstream(given, states[None], chosen.entropy)
    with simulated(wgmma_math="exact"):
        want = launch.gradients(given.hidden, given.head, given.rows, of)
    got = torch.empty(want.shape, dtype=want.dtype)
    sums = sums[:, : len(given.head.weight)]
    with TRITON.running("sm_90"):
        triton_launch.gradients_of_sums_as_sm90(sums, given.head, given.rows, of, got)
    known = ~want.isnan()
    assert torch.equal(got.isnan(), ~known)
    assert contract.same_bytes(got[known], want[known])


def test_other_roundings_show():
    """Triton's own formula, whose sums are not fused, has other bytes."""
    chosen = launch.config_of("bf16", "chain", False, True, True)
    given = case(chosen, *SHAPE)
    states, sums = stored(given, SHAPE[0], True)
    of = upstream(given, states[None], True)
    sums, results = sums[:, : len(given.head.weight)], []
    for function in (triton_launch.gradients_of_sums_as_sm90, triton_launch.gradients_of_sums):
        results.append(torch.empty(sums.shape, dtype=torch.float32))
        with TRITON.running("sm_90"):
            function(sums, given.head, given.rows, of, results[-1])
    assert not contract.same_bytes(*results)


#: Defects of `tile.keep`: name -> (what is written, instead of what).
MUTANTS = {
    "the row behind the last": ("if row < mSums.shape[0]:", "if row <= mSums.shape[0]:"),
    "columns in the gap": ("[1] < mSums.shape[1]:", "[1] <= mSums.shape[1]:"),
    "the other row's pair": (
        "acc[4 * i + 2 * half], acc[4 * i + 2 * half + 1]",
        "acc[4 * i + 2 - 2 * half], acc[4 * i + 3 - 2 * half]",
    ),
    "neighbours exchanged": (
        "rPair[0], rPair[1] =",
        "rPair[1], rPair[0] =",
    ),
    "always the first tile": (
        "* mSums.stride[0] + column0\n",
        "* mSums.stride[0]\n",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name, tmp_path, monkeypatch):
    chosen = replace(launch.config_of("bf16", "chain", False, False, False), keep=True)
    given = case(chosen, *SHAPE)
    edited = changed(tmp_path, "logp.device.tile", *MUTANTS[name])
    with monkeypatch.context() as patch:
        patch.setattr(kernel_fwd_sm90.tile, "keep", edited.keep)
        kernel = kernel_fwd_sm90.build(chosen, compile=ptxsim.compile)
    monkeypatch.setattr(doubles, "forward", lambda config: kernel)
    try:
        survived = all(right(given, tokens, False, None) for tokens in KEPT)
    except (AssertionError, ptxsim.PtxsimError):
        survived = False
    assert not survived
