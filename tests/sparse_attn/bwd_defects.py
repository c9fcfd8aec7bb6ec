"""Defects of the SM90 backward: each replaces a function or method while the kernel is compiled.

`survives` says whether the simulator notices one.
"""

from __future__ import annotations

import functools

import torch

import ptxsim
from cute_kernels.schedulers.masks.mask import BlockMask
from cute_kernels.schedulers.order import kinds
from ptxsim import skips
from ptxsim.modes import ANY_CTA, RANDOM
from tests import contract
from tests.kernels import ring_defects
from tests.oracles import sparse_attn as reference

simulated_bwd = skips.import_module("tests.sparse_attn.simulated_bwd")
module = skips.import_module("cute_kernels.sparse_attn.kernel_bwd_sm90")
cute, turnstile = module.cute, module.turnstile

#: The settings that find most missing waits, with few CTAs and with all, and races.
SETTINGS = [
    *ring_defects.SETTINGS,
    ANY_CTA | {"seed": 4},
    RANDOM | {"resident_ctas": 2, "seed": 5},
    RANDOM | {"check_races": 2, "seed": 6},
]
LIMITS = ring_defects.LIMITS


def of_bits() -> BlockMask:
    """Another one than its transpose; tails on both sides, that of the keys in full blocks."""
    allowed = torch.rand(1, 1, 200, 300, generator=torch.Generator().manual_seed(8)) < 0.4
    allowed[..., 256:] = True
    return BlockMask.from_dense(allowed)


def low(case):
    """Scores far below 0: weights of keys beyond the end, whose scores are 0, would be infinite."""
    q, k = case.q.abs() * 6, -case.k.abs() * 6
    out, lse = reference.attention(q, k, case.v, case.mask.to_dense(), scale=case.scale)
    assert lse.mean() < -100
    return case._replace(q=q, k=k, out=out.to(q.dtype), lse=lse.float())


@functools.cache
def cases(head_dim: int, form: str = "rule"):
    """Tails on both sides, groups of two heads and of one, tickets of even and of odd visits;
    cyclic visits, for which turns come late."""
    inputs = [
        (BlockMask.full(330, 300), 2, kinds.left_to_right, "cyclic"),
        (BlockMask.full(300, 300), 1, kinds.left_to_right, "cyclic"),
        # Last: a kernel of its own, which is compiled for mutants that live till then.
        (BlockMask.sliding_window(400, 330, left=200, right=0), 2, kinds.spt, "ascending"),
    ]
    if form == "bits":
        inputs = [(of_bits(), 1, kinds.left_to_right, "cyclic")]
    out = []
    for mask, heads, kind, walk in inputs:
        case = simulated_bwd.case(mask, head_dim=head_dim, heads=heads, kv_heads=1)
        case = low(case) if heads == 1 else case
        schedule = kind(case.lowered.mask, heads=case.kv_heads, walk=walk)
        out.append((case, schedule, simulated_bwd.backward(case, schedule)))
        assert all(t.isfinite().all() for t in out[-1][2])
    return out


def survives(kernel, head_dim: int, form: str = "rule", more: tuple = ()) -> bool:
    """more: cases besides, as those of `cases`."""
    for case, schedule, expected in (*cases(head_dim, form), *more):
        for options in SETTINGS:
            ptxsim.clear_launches()
            try:
                with ptxsim.options(**options, **LIMITS):
                    grads = simulated_bwd.backward(case, schedule, ctas=3, backward=kernel)
            except (ptxsim.PtxsimError, AssertionError):
                return False
            if not all(contract.same_bytes(a, b) for a, b in zip(grads, expected, strict=True)):
                return False
            reports = [launch["report"] for launch in ptxsim.launches()]
            if any(r["races"] or r["fence_warnings"]["count"] for r in reports):
                return False
    return True


def inside(patch, method: str, **replaced) -> None:
    """Other functions of cute.arch while ``method`` of the kernel is traced."""
    true = getattr(module.BackwardSm90, method)
    kept = {name: getattr(cute.arch, name) for name in replaced}

    def traced(self, *args):
        vars(cute.arch).update(replaced)
        try:
            true(self, *args)
        finally:
            vars(cute.arch).update(kept)

    patch.setattr(module.BackwardSm90, method, traced)


def nothing(*args, **options) -> None:
    """Do nothing, in place of a wait or a fence."""


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


def no_fence_behind_ds(patch):
    """WGMMA reads a stage of dS whose stores are not fenced."""
    true_keep, true_fence, stored = module.BackwardSm90.keep_ds, cute.arch.fence_proxy, []

    def keep_ds(self, *args):
        true_keep(self, *args)
        stored.append(True)

    def fence_proxy(*args, **options):
        if stored:
            stored.clear()
        else:
            true_fence(*args, **options)

    patch.setattr(module.BackwardSm90, "keep_ds", keep_ds)
    patch.setattr(cute.arch, "fence_proxy", fence_proxy)


def no_fence_before_hand_over(patch):
    inside(patch, "hand_over", fence_proxy=nothing)


def handed_over_by_lane_0(patch):
    """Before other lanes have written their dQ."""
    inside(patch, "hand_over", sync_warp=nothing)


def kv_freed_before_it_has_left(patch):
    inside(patch, "copy_out", cp_async_bulk_wait_group=nothing)


def no_fence_before_kv_is_stored(patch):
    inside(patch, "store", fence_proxy=nothing)


def wrong_buffer_handed_over(patch):
    true = module.BackwardSm90.hand_over
    patch.setattr(
        module.BackwardSm90,
        "hand_over",
        lambda self, barriers, lane, buffer: true(self, barriers, lane, buffer ^ 1),
    )


def handed_over_before_it_is_written(patch):
    true_keep, hand_over = module.BackwardSm90.keep_dq, module.BackwardSm90.hand_over

    def keep_dq(self, cta, rdQ, consumer, lane, state):
        hand_over(self, cta.barriers, lane, state.index)
        true_keep(self, cta, rdQ, consumer, lane, state)

    patch.setattr(module.BackwardSm90, "keep_dq", keep_dq)
    patch.setattr(module.BackwardSm90, "hand_over", nothing)


def last_buffer_not_handed_over(patch):
    """The visits hand over what the visit before wrote; nobody does for a ticket's last."""
    true_keep, true_over = module.BackwardSm90.keep_dq, module.BackwardSm90.hand_over
    written = []

    def keep_dq(self, *args):
        true_keep(self, *args)
        written.append(True)

    def hand_over(self, *args):
        if not written:
            true_over(self, *args)

    patch.setattr(module.BackwardSm90, "keep_dq", keep_dq)
    patch.setattr(module.BackwardSm90, "hand_over", hand_over)


def dq_buffer_not_awaited(patch):
    """The consumers do not wait until the adding thread has emptied a buffer of dQ."""
    inside(patch, "keep_dq", mbarrier_wait=nothing)


def one_buffer_of_dq_too_few(patch):
    """Two stages of dQ by their barriers, in the memory of one."""
    true_adding, true_add, held = module.BackwardSm90.add_dq, turnstile.add, []

    def add_dq(self, *args):
        held.append(args[0].shared.sdQ)
        true_adding(self, *args)

    @cute.jit
    def keep_dq(self, cta, rdQ, consumer, lane, state):
        cute.arch.mbarrier_wait(cta.barriers.dq_empty + state.index, state.phase)
        fours = cute.size(rdQ) // 4
        layout = cute.make_layout((4, module.mma.WARPGROUP, fours, module.CONSUMERS))
        sdQ = cute.make_tensor(cta.shared.sdQ.data_ptr(), layout)[None, lane, None, consumer]
        cute.autovec_copy(cute.make_tensor(rdQ.iterator, cute.make_layout((4, fours))), sdQ)

    patch.setattr(
        turnstile, "add", lambda target, source, size: true_add(target, held[-1].data_ptr(), size)
    )
    patch.setattr(module.BackwardSm90, "add_dq", add_dq)
    patch.setattr(module.BackwardSm90, "keep_dq", keep_dq)


def kv_freed_before_it_is_stored(patch):
    wait = cute.arch.cp_async_bulk_wait_group
    patch.setattr(
        cute.arch,
        "cp_async_bulk_wait_group",
        lambda n, read=False: None if read else wait(n, read=read),
    )


def no_meeting_before_the_store(patch):
    """K is given back, and dS written over, while the other warpgroup may still multiply them."""
    true_store, true_sync, met = module.BackwardSm90.store, module.BackwardSm90.sync, []

    def store(self, *args):
        met.append(False)
        true_store(self, *args)
        met.pop()

    def sync(self):
        if met and not met[-1]:
            met[-1] = True
        else:
            true_sync(self)

    patch.setattr(module.BackwardSm90, "store", store)
    patch.setattr(module.BackwardSm90, "sync", sync)


def no_wait_for_v(patch):
    """The consumers' wait for V, of the first visit: the fourth wait of their code."""
    true_multiply, true_wait, recorded = module.BackwardSm90.multiply, cute.arch.mbarrier_wait, []

    def mbarrier_wait(*args, **options):
        recorded.append(args)
        if len(recorded) != 4:
            true_wait(*args, **options)

    def multiply(self, *args):
        cute.arch.mbarrier_wait = mbarrier_wait
        true_multiply(self, *args)
        cute.arch.mbarrier_wait = true_wait

    patch.setattr(module.BackwardSm90, "multiply", multiply)


def rings_released_too_early(patch):
    """Q and dO are given back before the products that read them have ended."""
    true = module.warpgroup.wait_group
    patch.setattr(module.warpgroup, "wait_group", lambda n: true(3))


def here(mutant):
    """A mutant of ``waits``, on this kernel."""

    def mine(patch):
        mutant(patch, module)

    mine.__name__ = mutant.__name__
    return mine


def out_of_range_tile_visited(patch):
    """Every entry is as many tiles as a whole block has."""

    def visits(sizes, q_block, tile_m):
        per_block = module.BLOCK // tile_m
        return module.cutlass.Int32(per_block), q_block * per_block

    patch.setattr(module.walk, "visits", visits)


def nothing_masked(patch):
    patch.setattr(module.key_mask, "keep", nothing)


def keys_beyond_the_end_seen(patch):
    true, far = module.key_mask.keep, module.key_mask.FAR
    patch.setattr(
        module.key_mask,
        "keep",
        lambda rS, form, tile_m, tensors, scalars, kv_len, coord: true(
            rS, form, tile_m, tensors, scalars, kv_len * 0 + far, coord
        ),
    )


def bits_of_the_next_key(patch):
    true = module.key_mask.mask.words_of
    patch.setattr(
        module.key_mask.mask,
        "words_of",
        lambda words, tile, key, *rest: true(words, tile, key ^ 1, *rest),
    )


def bits_of_the_first_rows(patch):
    """In every tile of rows those of its block's first."""
    true = module.key_mask.mask.words_of
    patch.setattr(
        module.key_mask.mask,
        "words_of",
        lambda words, tile, key, first, count: true(words, tile, key, first * 0, count),
    )
