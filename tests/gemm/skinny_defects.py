"""Defects of the SM90 kernel for few rows: each replaces a helper while it is compiled."""

from __future__ import annotations

from tests.gemm.sm90_defects import (
    k_steps_swapped,
    no_wait_for_loads,
    producer_starts_full,
    tail_dropped,
)
from tests.kernels.ring_defects import (
    half_the_bytes,
    no_release,
    no_wait_for_empty_stages,
    released_before_read,
    wrong_phase,
)


def groups_descending(monkeypatch, module):
    """The groups of a K block from the last to the first."""
    from cute_kernels.dsl import mma

    cute, cutlass = module.cute, module.cutlass

    @cute.jit
    def add_block(tiled, acc, tCrA, tCrB, stage):
        cute.nvgpu.warpgroup.fence()
        last = cute.size(tCrA, mode=[2]) - 1
        for group in cutlass.range_constexpr(last + 1):
            index = (None, None, last - group, stage)
            cute.gemm(tiled, acc, tCrA[index], tCrB[index], acc)
        cute.nvgpu.warpgroup.commit_group()

    monkeypatch.setattr(mma, "add_block", add_block)


def leaves_by_split(monkeypatch, module):
    """Cut K into as many leaves as there are CTAs: the tree follows who computes it."""
    length = module.leaves.length
    monkeypatch.setattr(module.leaves, "length", lambda k: 4 * length(k))


def leaves_descending(monkeypatch, module):
    """The last CTA's leaves are added first."""
    load4 = module.cluster.load4
    monkeypatch.setattr(module.cluster, "load4", lambda at, rank: load4(at, 7 - rank))


def partials_in_bf16(monkeypatch, module):
    """Leaves are rounded before they are added."""
    true_store = module.SwappedFrame.store_sums

    def store_sums(self, acc, sums, tidx):
        acc.store(acc.load().to(module.cutlass.BFloat16).to(module.cutlass.Float32))
        true_store(self, acc, sums, tidx)

    monkeypatch.setattr(module.SwappedFrame, "store_sums", module.cute.jit(store_sums))


def no_meeting(monkeypatch, module):
    """CTAs add before all of their sums are there."""
    monkeypatch.setattr(module.SkinnySm90, "sync_cluster", lambda self: None)


def no_barrier_of_consumers(monkeypatch, module):
    """Sums overwrite a ring that another warp still reads."""
    monkeypatch.setattr(module.cute.arch, "barrier", lambda *a, **k: None)


def own_leaves_only(monkeypatch, module):
    """Each CTA adds what it has computed itself."""
    load4 = module.cluster.load4
    monkeypatch.setattr(module.cluster, "load4", lambda at, rank: load4(at, 0))


def next_leaf_begun(monkeypatch, module):
    """A leaf ends with the K block that it ends in."""
    size = module.leaves.size

    def longer(leaf, k, minimum, maximum):
        return minimum(size(leaf, k, minimum, maximum) + 16, k)

    monkeypatch.setattr(module.leaves, "size", longer)


#: Which kernel shows each: one CTA's chain, one CTA's tree, a tree that eight or two CTAs share.
DEFECTS = [
    (no_wait_for_loads, "chain"),
    (producer_starts_full, "chain"),
    (no_wait_for_empty_stages, "chain"),
    (no_release, "chain"),
    (wrong_phase, "chain"),
    (half_the_bytes, "chain"),
    (released_before_read, "chain"),
    (tail_dropped, "chain"),
    (k_steps_swapped, "chain"),
    (groups_descending, "chain"),
    (no_barrier_of_consumers, "two warpgroups"),
    (no_wait_for_empty_stages, "pair"),
    (half_the_bytes, "pair"),
    (no_meeting, "pair"),
    (leaves_by_split, "tree"),
    (next_leaf_begun, "tree"),
    (groups_descending, "halves"),
    (partials_in_bf16, "halves"),
    (leaves_by_split, "halves"),
    (leaves_descending, "split"),
    (own_leaves_only, "split"),
    (no_meeting, "split"),
]
