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

from cute_kernels.schedulers import kinds
from cute_kernels.schedulers.mask import BlockMask
from tests import contract, ptxsim
from tests.ptxsim import available

simulated_bwd = available.import_module("tests.sparse_attn.simulated_bwd")
pytestmark = [available.requires_sim, pytest.mark.sim]
module = simulated_bwd.main_kernel
cute, turnstile = module.cute, module.turnstile

#: The settings of tests/ptxsim/README.md that find most missing waits, with few CTAs and with all.
_EARLY = {"async_mode": "now", "wgmma_mode": "late", "warp_order": "random"}
_RANDOM = {"async_mode": "random", "wgmma_mode": "random", "warp_order": "random"}
SETTINGS = [
    {"async_mode": "late", "wgmma_mode": "late"},
    *(_EARLY | {"seed": seed} for seed in (1, 2)),
    *(_RANDOM | {"cta_order": "random", "seed": seed} for seed in (3, 4)),
    _RANDOM | {"resident_ctas": 2, "seed": 5},
    _RANDOM | {"check_races": 1, "seed": 6},
]
LIMITS = {"max_steps": 20_000_000}


@functools.cache
def cases(head_dim: int):
    """Tails on both sides, a group of two heads; cyclic visits, for which turns come late."""
    found = []
    for mask, kind, walk in (
        (BlockMask.full(330, 300), kinds.left_to_right, "cyclic"),
        (BlockMask.sliding_window(400, 330, left=200, right=0), kinds.spt, "ascending"),
    ):
        case = simulated_bwd.case(mask, head_dim=head_dim, heads=2, kv_heads=1)
        schedule = kind(case.lowered.mask, heads=case.kv_heads, walk=walk)
        found.append((case, schedule, simulated_bwd.backward(case, schedule)))
    return found


def survives(kernel, head_dim: int) -> bool:
    for options in SETTINGS:
        for case, schedule, wanted in cases(head_dim):
            ptxsim.clear_launches()
            try:
                with ptxsim.options(**options, **LIMITS):
                    found = simulated_bwd.backward(case, schedule, ctas=3, kernel=kernel)
            except (ptxsim.PtxsimError, AssertionError):
                return False
            if not all(contract.same_bytes(a, b) for a, b in zip(found, wanted, strict=True)):
                return False
            reports = [launch["report"] for launch in ptxsim.launches()]
            if any(r["races"] or r["fence_warnings"]["count"] for r in reports):
                return False
    return True


def release_before_landing(patch):
    """A turn is over when its add is issued; it has landed before this thread's next turn."""
    true, land = turnstile.wait_turn, turnstile.land

    @cute.jit
    def wait_turn(semaphore, rank):
        land()
        true(semaphore, rank)

    patch.setattr(turnstile, "wait_turn", wait_turn)
    patch.setattr(turnstile, "land", lambda: None)


def read_wait_only(patch):
    wait = cute.arch.cp_async_bulk_wait_group
    patch.setattr(
        turnstile, "land", cute.jit(lambda: cute.arch.cp_async_bulk_wait_group(0, read=True))
    )
    assert wait is cute.arch.cp_async_bulk_wait_group


def no_wait_for_the_turn(patch):
    patch.setattr(turnstile, "wait_turn", lambda semaphore, rank: None)


def wrong_rank(patch):
    true = turnstile.wait_turn
    patch.setattr(turnstile, "wait_turn", lambda semaphore, rank: true(semaphore, rank + 1))


def rank_not_reached(patch):
    """Waits for the rank before its own."""
    true = turnstile.wait_turn
    clip = module.cutlass.max
    zero = module.cutlass.Int32
    patch.setattr(
        turnstile, "wait_turn", lambda semaphore, rank: true(semaphore, clip(rank - 1, zero(0)))
    )


def no_release(patch):
    patch.setattr(turnstile, "finish_turn", lambda semaphore: turnstile.land())


def semaphore_of_another_tile(patch):
    true = turnstile.wait_turn
    patch.setattr(turnstile, "wait_turn", lambda semaphore, rank: true(semaphore + 1, rank))


def no_proxy_fence(patch):
    patch.setattr(cute.arch, "fence_proxy", lambda *args, **options: None)


def consumers_do_not_meet(patch):
    patch.setattr(module.BackwardSm90, "sync", lambda self: None)


def dq_buffer_not_awaited(patch):
    """The consumers do not wait until the adding thread has emptied a buffer of dQ."""
    true, wait = module.BackwardSm90.hand_over, cute.arch.mbarrier_wait

    def hand_over(self, *args):
        cute.arch.mbarrier_wait = lambda *args: None
        try:
            true(self, *args)
        finally:
            cute.arch.mbarrier_wait = wait

    patch.setattr(module.BackwardSm90, "hand_over", hand_over)


def kv_freed_before_it_is_stored(patch):
    wait = cute.arch.cp_async_bulk_wait_group
    patch.setattr(
        cute.arch,
        "cp_async_bulk_wait_group",
        lambda n, read=False: None if read else wait(n, read=read),
    )


def rings_released_too_early(patch):
    """Q and dO are given back before the products that read them have ended."""
    true = module.warpgroup.wait_group
    patch.setattr(module.warpgroup, "wait_group", lambda n: true(3))


def out_of_range_tile_visited(patch):
    """Every entry is as many tiles as a whole block has."""
    per_block = module.BLOCK

    def visits(sizes, q_block, tile_m):
        return sizes.group * (per_block // tile_m), module.cutlass.Int32(per_block // tile_m - 1)

    patch.setattr(module.walk, "visits", visits)


def keys_beyond_the_end_seen(patch):
    patch.setattr(module.BackwardSm90, "mask", lambda self, *args: None)


MUTANTS = [
    (release_before_landing, 128),
    (read_wait_only, 128),
    (no_wait_for_the_turn, 128),
    (no_wait_for_the_turn, 64),
    (wrong_rank, 128),
    (rank_not_reached, 64),
    (no_release, 128),
    (semaphore_of_another_tile, 128),
    (no_proxy_fence, 128),
    (consumers_do_not_meet, 128),
    (consumers_do_not_meet, 64),
    (dq_buffer_not_awaited, 128),
    (kv_freed_before_it_is_stored, 128),
    (rings_released_too_early, 64),
    (out_of_range_tile_visited, 128),
    (keys_beyond_the_end_seen, 64),
]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_intact_kernel_survives(head_dim):
    assert survives(simulated_bwd.main, head_dim)


@pytest.mark.parametrize(("mutant", "head_dim"), MUTANTS, ids=lambda v: getattr(v, "__name__", v))
def test_mutants_are_killed(monkeypatch, mutant, head_dim):
    @functools.cache
    def kernel(config):
        with monkeypatch.context() as patch:
            mutant(patch)
            return module.build(config, compile=ptxsim.compile)

    cases(head_dim)  # with the intact kernel
    assert not survives(kernel, head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_stage_of_ds_too_few_is_killed(head_dim):
    """The kernel needs two, as the consumers meet once a visit."""

    @functools.cache
    def kernel(config):
        one = dataclasses.replace(config, ds_stages=1)
        return module.build(one, compile=ptxsim.compile)

    assert not survives(kernel, head_dim)


@pytest.mark.parametrize("which", ["lse2", "delta", "dq", "semaphore", "counter"])
def test_everything_that_the_first_kernel_writes_is_needed(monkeypatch, which):
    """Its outputs start poisoned; what it leaves unwritten is noticed, each by itself."""
    case, schedule, wanted = cases(128)[0]
    names = ("out", "dout", "lse", "dlse", "lse2", "delta", "dq", "semaphore", "counter")
    true = simulated_bwd.pre

    def pre(*args):
        def run(*tensors):
            at = names.index(which)
            kept = tensors[at].clone()
            true(*args)(*tensors)
            tensors[at].copy_(kept)

        return run

    monkeypatch.setattr(simulated_bwd, "pre", pre)
    try:
        with ptxsim.options(**LIMITS):
            found = simulated_bwd.backward(case, schedule)
    except (ptxsim.PtxsimError, AssertionError):
        return
    assert not torch.equal(found.dq.isfinite(), wanted.dq.isfinite()) or not contract.same_bytes(
        found.dk, wanted.dk
    )
