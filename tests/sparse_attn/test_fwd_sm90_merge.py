"""Three consumers of the SM90 forward: 192 rows, of two blocks of the mask with lists of their own.

A row's bytes are those of two consumers, of a CTA with one list, whatever the other list is.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

import ptxsim
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import config, masks
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests import contract
from tests.kernels.ring_defects import LIMITS, SETTINGS
from tests.sparse_attn.fwd_lists import EVERY, LISTS, OFTEN, by_two, listed
from tests.sparse_attn.fwd_masks import MASKS
from tests.sparse_attn.simulated_fwd import BLOCK, Case, case, chain, right, run, same
from tests.sparse_attn.waits import no_wait_for

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_lists test_values_of_others_stay_out test_mutants_are_killed"
pytestmark = [
    requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]

#: Reports words that are read while they may be written.
RACES = [SETTINGS[-1] | {"check_races": 1, "seed": seed} for seed in (3, 6, 7, 10)]


def whole_or_bits():
    """Each list with whole blocks or with bits for every commit, and with the others nightly."""
    for index, name in enumerate(LISTS):
        yield name, bool(index % 2)
        yield pytest.param(name, not index % 2, marks=pytest.mark.nightly)


@pytest.mark.parametrize(("name", "bits"), list(whole_or_bits()))
def test_lists(name, bits):
    """The order in torch, and the bytes of two consumers in the card's arithmetic."""
    inputs = listed(LISTS[name], bits=bits)
    assert same(run(inputs, **LIMITS), chain(inputs))
    assert ptxsim.report()["fence_warnings"]["count"] == 0
    card = {"wgmma_math": "hopper", **LIMITS}
    assert same(run(inputs, **card), by_two(inputs, **card))


@pytest.mark.parametrize("name", MASKS)
def test_the_bytes_of_two_consumers(name):
    """Tails around every multiple of 64 rows, groups of heads, masks by head."""
    for q_len in (1, 63, 65, 127, 129, 191, 192, 193, 255, 257):
        inputs = case(MASKS[name](q_len, 300), (1, 2, 1, 64), seed=q_len)
        card = {"wgmma_math": "hopper", **LIMITS}
        assert same(run(inputs, **card), by_two(inputs, **card)), q_len


def test_drawn_lists():
    """Random lists of two heads and two batches, sparse and dense, and any length."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        rows, share = 1 + seed % 5, (0.12, 0.25, 0.6)[seed % 3]
        blocks = torch.rand(2, 2, rows, 16, generator=generator) < share
        allowed = blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
        cut = torch.randint(0, BLOCK, (2,), generator=generator).tolist()
        allowed = allowed[..., : rows * BLOCK - cut[0], : 16 * BLOCK - cut[1]]
        if seed % 2:
            allowed = allowed & (torch.rand(allowed.shape, generator=generator) < 0.7)
        inputs = case(BlockMask.from_dense(allowed), (2, 2, 1, 64), seed=seed)
        card = {"wgmma_math": "hopper", **LIMITS}
        assert same(run(inputs, **card), by_two(inputs, **card)), seed


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.nightly) for n in LISTS]
)
def test_schedules(name):
    """Every mode: late and early data, random warps, 1, 2, 7 and 132 CTAs in any order."""
    inputs = listed(LISTS[name], bits=name == "away in turns", shape=(2, 2, 1, 64))
    seven = modes.Mode("resident-7", SETTINGS[-1] | {"resident_ctas": 7})
    modes.run_modes(lambda: run(inputs, **LIMITS), [*modes.QUICK_MODES, seven])


@pytest.mark.parametrize("name", ["alternate", "away for long", "away in turns", "first empty"])
def test_values_of_others_stay_out(name):
    """V that is NaN in every block that a row's list does not have."""
    inputs = listed(LISTS[name])
    want = run(inputs)
    for m, row in enumerate(LISTS[name]):
        v = inputs.v.clone()
        for n in set(EVERY) - set(row):
            v[:, n * BLOCK : (n + 1) * BLOCK] = math.nan
        out, lse = run(dataclasses.replace(inputs, v=v))
        rows = slice(m * BLOCK, (m + 1) * BLOCK)
        assert contract.same_bytes(out[:, rows], want[0][:, rows])
        assert contract.same_bytes(lse[..., rows], want[1][..., rows])


# ---- mutants -------------------------------------------------------------------------------------


def one_list_for_all(monkeypatch, module):
    """Consumers of the second block of the mask do not skip what only the first one has."""
    cute, true = module.cute, module.ForwardSm90.thread_mask

    def thread_mask(self, tensors, scalars, steps, *args):
        stride = (0, *steps.stride[1:])
        first = cute.make_tensor(steps.iterator, cute.make_layout(steps.shape, stride=stride))
        return true(self, tensors, scalars, first, *args)

    monkeypatch.setattr(module.ForwardSm90, "thread_mask", thread_mask)


def _skipping(monkeypatch, module, turn=True, wait=(True, True), release=(True, True)):
    cute, next_step = module.cute, module.next_step

    @cute.jit
    def skip_block(self, ctx, step):
        rings, state = ctx.rings, step.state(self.stages)
        if module.cutlass.const_expr(wait[0]):
            rings.k.consumer_wait(state)
        if module.cutlass.const_expr(turn):
            self.warp_scheduler_sync(ctx.consumer)
            self.warp_scheduler_arrive(ctx.consumer)
        following = next_step(ctx.mask.steps, state.index)
        if module.cutlass.const_expr(release[0]):
            rings.k.consumer_release(state)
        if module.cutlass.const_expr(wait[1]):
            rings.v.consumer_wait(state)
        if module.cutlass.const_expr(release[1]):
            rings.v.consumer_release(state)
        return following

    monkeypatch.setattr(module.ForwardSm90, "skip_block", skip_block)


def skip_kept_by_name(monkeypatch, module):
    """No mutant: the step as ``_skipping`` writes it."""
    _skipping(monkeypatch, module)


def skipped_without_a_turn(monkeypatch, module):
    _skipping(monkeypatch, module, turn=False)


def begun_before_k_came(monkeypatch, module):
    """The word of the first step may not be there, and the stage not be in use.  In later steps the
    simulator's producer is always far enough ahead."""
    no_wait_for(2)(monkeypatch, module)
    _skipping(monkeypatch, module, wait=(False, True))


def skipped_before_v_came(monkeypatch, module):
    """Given back for the block before it in its stage, which another consumer still reads."""
    _skipping(monkeypatch, module, wait=(True, False))


def skipped_without_release_of_k(monkeypatch, module):
    _skipping(monkeypatch, module, release=(False, True))


def skipped_without_release_of_v(monkeypatch, module):
    _skipping(monkeypatch, module, release=(True, False))


def _waiting(monkeypatch, module, more):
    true_step = module.block_union.step
    monkeypatch.setattr(
        module.block_union,
        "step",
        lambda lists, at, words, n, code: true_step(lists, at, words, n + more, code),
    )


def a_step_too_patient(monkeypatch, module):
    """V of the last block is held while V of a block in its stage is awaited."""
    _waiting(monkeypatch, module, 1)


def never_given_a_step(monkeypatch, module):
    _waiting(monkeypatch, module, 10**6)


def last_block_counted_again(monkeypatch, module):
    """The step of a list that is away is another visit of block 0."""
    monkeypatch.setattr(module.block_union, "BEYOND", 0)


MUTANTS = [
    (one_list_for_all, "alternate"),
    (skipped_without_a_turn, "away for long"),
    (begun_before_k_came, "alternate"),
    (skipped_before_v_came, "held while another skips"),
    (skipped_without_release_of_k, "away for long"),
    pytest.param(skipped_without_release_of_v, "away for long", marks=pytest.mark.nightly),
    (a_step_too_patient, "away for long"),
    pytest.param(never_given_a_step, "away for long", marks=pytest.mark.nightly),
    (last_block_counted_again, "away for long"),
]


def survives(mutant, name, monkeypatch) -> bool:
    from cute_kernels.sparse_attn import kernel_fwd_sm90

    with monkeypatch.context() as patch:
        mutant(patch, kernel_fwd_sm90)
        out = kernel_fwd_sm90.build(
            config.configure_forward("bf16", 64, "none"), compile=ptxsim.compile
        )
    inputs, want = intact(name)
    # First what needs no deadlock to show: those take up to `max_steps`.
    return all(
        right(inputs, want, forward=lambda _: out, **LIMITS, **options)
        for options in (*RACES, *SETTINGS)
    )


@functools.cache
def intact(name: str) -> tuple[Case, tuple]:
    inputs = listed(LISTS[name])
    assert masks.lower(inputs.mask).form == "none"
    return inputs, chain(inputs)


@pytest.mark.parametrize("name", ["held while another skips"])
def test_a_rewritten_skip_survives(monkeypatch, name):
    assert survives(skip_kept_by_name, name, monkeypatch)


@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=lambda v: getattr(v, "__name__", v))
def test_mutants_are_killed(monkeypatch, mutant, name):
    assert not survives(mutant, name, monkeypatch)
