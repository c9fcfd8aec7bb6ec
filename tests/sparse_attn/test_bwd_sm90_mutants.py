"""Defects put into the SM90 backward on purpose: the simulator must notice each one.

A mutant replaces one function or method while the kernel is compiled.  It counts as killed when a
run differs by a byte from the intact kernel's, fails in the simulator (deadlock, wild access) or
reports a race or a missing fence.  The same runs of the intact kernel must all pass.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import ptxsim
from cute_kernels.runtime.caching import ByteCache
from cute_kernels.sparse_attn import lowering, masks
from ptxsim import skips
from tests import contract
from tests.sparse_attn import simulated, waits
from tests.sparse_attn.bwd_defects import (
    LIMITS,
    bits_of_the_first_rows,
    bits_of_the_next_key,
    cases,
    consumers_do_not_meet,
    dq_buffer_not_awaited,
    handed_over_before_it_is_written,
    here,
    keys_beyond_the_end_seen,
    kv_freed_before_it_is_stored,
    last_buffer_not_handed_over,
    no_fence_before_hand_over,
    no_fence_before_kv_is_stored,
    no_fence_behind_ds,
    no_meeting_before_the_store,
    no_proxy_fence,
    no_release,
    no_wait_for_the_turn,
    no_wait_for_v,
    nothing_masked,
    of_bits,
    one_buffer_of_dq_too_few,
    out_of_range_tile_visited,
    rank_not_reached,
    read_wait_only,
    release_before_landing,
    rings_released_too_early,
    semaphore_of_another_tile,
    survives,
    wrong_buffer_handed_over,
    wrong_rank,
)

simulated_bwd = skips.import_module("tests.sparse_attn.simulated_bwd")
#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_mutants_are_killed test_everything_that_the_first_kernel_writes_is_needed"
pytestmark = [
    skips.requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]
module = skips.import_module("cute_kernels.sparse_attn.kernel_bwd_sm90")


def nightly(*given):
    """A mutant whose other head size is killed for every commit."""
    return pytest.param(*given, marks=pytest.mark.nightly)


MUTANTS = [
    (release_before_landing, 128, "rule"),
    (read_wait_only, 128, "rule"),
    (no_wait_for_the_turn, 128, "rule"),
    nightly(no_wait_for_the_turn, 64, "rule"),
    (wrong_rank, 128, "rule"),
    (rank_not_reached, 64, "rule"),
    (no_release, 128, "rule"),
    (semaphore_of_another_tile, 128, "rule"),
    (no_proxy_fence, 128, "rule"),
    (no_fence_behind_ds, 128, "rule"),
    nightly(no_fence_behind_ds, 64, "rule"),
    nightly(no_fence_before_hand_over, 128, "rule"),
    (no_fence_before_hand_over, 64, "rule"),
    (no_fence_before_kv_is_stored, 128, "rule"),
    nightly(wrong_buffer_handed_over, 128, "rule"),
    (wrong_buffer_handed_over, 64, "rule"),
    (handed_over_before_it_is_written, 64, "rule"),
    (last_buffer_not_handed_over, 128, "rule"),
    nightly(last_buffer_not_handed_over, 64, "rule"),
    (consumers_do_not_meet, 128, "rule"),
    nightly(consumers_do_not_meet, 64, "rule"),
    (dq_buffer_not_awaited, 128, "rule"),
    nightly(one_buffer_of_dq_too_few, 128, "rule"),
    (one_buffer_of_dq_too_few, 64, "rule"),
    (kv_freed_before_it_is_stored, 128, "rule"),
    nightly(no_meeting_before_the_store, 128, "rule"),
    (no_meeting_before_the_store, 64, "rule"),
    (no_wait_for_v, 128, "rule"),
    nightly(no_wait_for_v, 64, "rule"),
    (rings_released_too_early, 64, "rule"),
    # Q and lse2; dO and delta.
    *((here(waits.no_wait_for(number)), 128, "rule") for number in (1, 2)),
    # The last visit's dK; S; dP; dQ with dV; the last dK of a ticket.
    *((here(waits.no_wait_for_products(number)), 128, "rule") for number in range(1, 6)),
    (out_of_range_tile_visited, 128, "rule"),
    (nothing_masked, 64, "rule"),
    (keys_beyond_the_end_seen, 64, "rule"),
    nightly(keys_beyond_the_end_seen, 128, "rule"),
]
MUTANTS_OF_BITS = [
    (bits_of_the_next_key, 64, "bits"),
    nightly(bits_of_the_next_key, 128, "bits"),
    (bits_of_the_first_rows, 128, "bits"),
    (keys_beyond_the_end_seen, 128, "bits"),
]


@pytest.mark.parametrize("form", ["rule", "bits"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_intact_kernel_survives(head_dim, form):
    assert survives(simulated.kernel, head_dim, form)


@pytest.mark.parametrize(
    ("mutant", "head_dim", "form"),
    [*MUTANTS, *MUTANTS_OF_BITS],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_mutants_are_killed(monkeypatch, mutant, head_dim, form):
    @functools.cache
    def kernel(config):
        with monkeypatch.context() as patch:
            mutant(patch)
            return module.build(config, compile=ptxsim.compile)

    cases(head_dim, form)  # with the intact kernel
    assert not survives(kernel, head_dim, form)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_words_that_are_not_transposed_are_noticed(monkeypatch, head_dim):
    """The backward reads the words of a key, which are not those of a query."""
    ((case, schedule, wanted),) = cases(head_dim, "bits")
    monkeypatch.setattr(lowering, "cache", ByteCache("of this test", lowering.cache.limit))
    again = case._replace(mask=of_bits())
    for a, b in zip(simulated_bwd.backward(again, schedule), wanted, strict=True):
        assert contract.same_bytes(a, b)
    monkeypatch.setattr(lowering, "cache", ByteCache("of this test", lowering.cache.limit))
    monkeypatch.setattr(masks, "_transposed", lambda words: words)
    again = case._replace(mask=of_bits())
    grads = simulated_bwd.backward(again, schedule)
    assert not any(contract.same_bytes(a, b) for a, b in zip(grads, wanted, strict=True))
    with pytest.raises(AssertionError):
        simulated_bwd.check(again, grads)


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.nightly)])
def test_one_stage_of_ds_too_few_is_killed(head_dim):
    """The kernel needs two, as the consumers meet once a visit."""

    @functools.cache
    def kernel(config):
        one = dataclasses.replace(config, ds_stages=1)
        return module.build(one, compile=ptxsim.compile)

    assert not survives(kernel, head_dim)


@pytest.mark.parametrize("which", ["lse2", "delta", "dq", "semaphore", "counter"])
def test_everything_that_the_first_kernel_writes_is_needed(which):
    """Its outputs start poisoned; what it leaves unwritten is noticed, each by itself.

    Zeros of dQ are for a pass without order.
    """
    case, schedule, expected = cases(128)[0]
    names = ("out", "dout", "lse", "dlse", "lse2", "delta", "dq", "semaphore", "counter")
    true = simulated.kernel

    def pre(*args):
        def run(*tensors):
            index = names.index(which)
            copy = tensors[index].clone()
            true(*args)(*tensors)
            tensors[index].copy_(copy)

        return run

    try:
        with ptxsim.options(**LIMITS):
            grads = simulated_bwd.backward(case, schedule, ordered=which != "dq", pre=pre)
    except (ptxsim.PtxsimError, AssertionError):
        return
    assert not torch.equal(grads.dq.isfinite(), expected.dq.isfinite()) or not contract.same_bytes(
        grads.dk, expected.dk
    )
