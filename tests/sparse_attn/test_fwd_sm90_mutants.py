"""Defects put into the SM90 forward on purpose: the simulator and the bytes must notice each one.

A mutant replaces helpers while the kernel is compiled.  It counts as killed when a run differs from
the order in torch by a byte, fails in the simulator (deadlock, wild access) or reports a missing
fence.  The same runs of the intact kernel must all pass.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

import ptxsim
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn import masks
from cute_kernels.sparse_attn.config import configure_forward
from ptxsim.skips import requires_sim
from tests import contract
from tests.kernels.ring_defects import (
    LIMITS,
    SETTINGS,
    half_the_bytes,
    no_proxy_fence,
    no_release,
    no_wait_for_empty_stages,
    released_before_read,
    wrong_phase,
)
from tests.sparse_attn.fwd_battery import zeros
from tests.sparse_attn.fwd_defects import (
    bits_of_the_next_row,
    blocks_descending,
    blocks_without_keys_change_the_state,
    heads_shared_in_turn,
    key_groups_swapped,
    lanes_not_added,
    masked_by_multiplication,
    masked_with_a_large_number,
    masks_kept_by_name,
    maximum_of_the_block_only,
    negative_zero_kept,
    no_guard_for_empty_rows,
    no_turn_given,
    o_given_back_before_it_is_read,
    o_told_before_it_is_kept,
    o_told_over_what_is_unread,
    one_key_too_many,
    output_not_rescaled,
    partial_blocks_not_masked,
    rescaled_rows_swapped,
    scores_of_the_next_stage,
    step_kept_by_name,
    tail_not_masked,
    values_of_the_stage_of_the_scores,
)
from tests.sparse_attn.fwd_masks import dense
from tests.sparse_attn.simulated_fwd import Case, case, chain, run
from tests.sparse_attn.waits import no_wait_for, no_wait_for_products

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_mutants_are_killed"
pytestmark = [
    requires_sim,
    pytest.mark.sim,
    pytest.mark.simulates("sparse_attn", often=EACH_COMMIT),
]

WIDTH = 64
#: A CTA for each tile, and few with many tiles.
CTAS = (132, 2, 3, 1)


def masked_nan(given: Case) -> Case:
    """NaN in the keys that no row sees."""
    given.k[:, ~given.allowed[0].any(0).any(0)] = math.nan
    return given


def full_tail(q_len: int, kv_len: int) -> Case:
    """Random elements, and a full block at the end of the keys."""
    allowed = torch.rand(q_len, kv_len, generator=torch.Generator().manual_seed(6)) < 0.5
    allowed[:, kv_len // 128 * 128 :] = True
    return case(BlockMask.from_dense(allowed), (1, 2, 1, WIDTH), seed=6)


@functools.cache
def cases(form: str) -> list[tuple[Case, tuple]]:
    """(case, its bytes): rows without keys, blocks that some rows skip, tails, several blocks."""
    shape = (2, 4, 2, WIDTH)
    if form == "none":
        # More blocks than stages.
        out = [case(BlockMask.full(130, 900), (1, 4, 2, WIDTH), seed=1)]
    elif form == "band":
        out = [
            case(BlockMask.causal(130, 600), shape, seed=1),
            case(BlockMask.sliding_window(600, 200, left=90, right=60), shape, seed=2),
            # No row sees the first or the last keys of its only block.
            masked_nan(case(BlockMask.from_rule(Band(20, 40), 60, 128), shape, seed=3)),
        ]
    else:
        keys = torch.arange(512) % 5 != 0
        holes = torch.rand(100, 512, generator=torch.Generator().manual_seed(3)) < 0.4
        out = [
            case(dense(300, 600), shape, seed=4),
            masked_nan(case(BlockMask.from_dense(holes & keys), shape, seed=5)),
            full_tail(100, 200),
            zeros(extra=False),
        ]
    assert all(masks.lower(inputs.mask).form == form for inputs in out)
    return [(inputs, chain(inputs)) for inputs in out]


def survives(compiled, form: str) -> bool:
    """Whether every run under every setting is right."""
    for inputs, want in cases(form):
        # The arithmetic that keeps -0, where O is nothing else.
        arithmetic = "exact" if want[0].any() else "fma"
        for ctas, options in zip(CTAS, SETTINGS, strict=True):
            simulator = {"wgmma_math": arithmetic, **LIMITS, **options}
            try:
                got = run(inputs, ctas=ctas, forward=lambda _: compiled, **simulator)
            except ptxsim.PtxsimError:
                return False
            if ptxsim.report()["fence_warnings"]["count"]:
                return False
            if not all(map(contract.same_bytes, got, want)):
                return False
    return True


def compiled(form: str):
    from cute_kernels.sparse_attn import kernel_fwd_sm90

    return kernel_fwd_sm90.build(configure_forward("bf16", WIDTH, form), compile=ptxsim.compile)


MUTANTS = [
    # Q; K of the first block, which is awaited for its word and again as after skipped ones, and V;
    # those of the others.  Of skipped blocks: test_fwd_sm90_merge.py.
    *((no_wait_for(*numbers), "none") for numbers in ((1,), (2, 7), (8,), (11,), (12,))),
    *((no_wait_for_products(number), "none") for number in range(1, 5)),
    (scores_of_the_next_stage, "none"),
    (values_of_the_stage_of_the_scores, "none"),
    (no_wait_for_empty_stages, "none"),
    (no_release, "none"),
    (wrong_phase, "none"),
    (half_the_bytes, "none"),
    (released_before_read, "none"),
    (no_turn_given, "none"),
    (o_told_before_it_is_kept, "none"),
    (o_given_back_before_it_is_read, "none"),
    (o_told_over_what_is_unread, "none"),
    # Q of the next tile.
    (no_wait_for(19), "none"),
    (no_proxy_fence, "none"),
    # Of a mutant of both masks, the form of the other test is nightly.
    (masked_by_multiplication, "band"),
    pytest.param(masked_by_multiplication, "bits", marks=pytest.mark.nightly),
    pytest.param(masked_with_a_large_number, "band", marks=pytest.mark.nightly),
    (masked_with_a_large_number, "bits"),
    (tail_not_masked, "none"),
    pytest.param(tail_not_masked, "bits", marks=pytest.mark.nightly),
    (one_key_too_many, "band"),
    (bits_of_the_next_row, "bits"),
    (partial_blocks_not_masked, "bits"),
    (output_not_rescaled, "none"),
    (rescaled_rows_swapped, "none"),
    (blocks_without_keys_change_the_state, "bits"),
    (maximum_of_the_block_only, "bits"),
    (no_guard_for_empty_rows, "bits"),
    (lanes_not_added, "none"),
    (key_groups_swapped, "none"),
    (blocks_descending, "bits"),
    (heads_shared_in_turn, "none"),
    (negative_zero_kept, "bits"),
]


@pytest.mark.parametrize("form", ["none", "band", "bits"])
def test_the_intact_kernel_survives(form):
    assert survives(compiled(form), form)


@pytest.mark.parametrize(
    ("rewritten", "form"),
    [(masks_kept_by_name, "band"), (masks_kept_by_name, "bits"), (step_kept_by_name, "bits")],
)
def test_rewritten_parts_survive(monkeypatch, rewritten, form):
    """What kills the mutants of masks and of the softmax is their defect, not their text."""
    from cute_kernels.sparse_attn import kernel_fwd_sm90

    with monkeypatch.context() as patch:
        rewritten(patch, kernel_fwd_sm90)
        out = compiled(form)
    assert survives(out, form)


@pytest.mark.parametrize(("mutant", "form"), MUTANTS, ids=lambda v: getattr(v, "__name__", v))
def test_mutants_are_killed(monkeypatch, mutant, form):
    from cute_kernels.sparse_attn import kernel_fwd_sm90

    with monkeypatch.context() as patch:
        mutant(patch, kernel_fwd_sm90)
        out = compiled(form)
    assert not survives(out, form)
