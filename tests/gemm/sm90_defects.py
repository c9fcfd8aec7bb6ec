"""Defects of the SM90 kernels: each replaces one helper or one method while they are compiled."""

from __future__ import annotations

from cute_kernels.dsl import epilogue
from tests.kernels.ring_defects import pipeline, ring_class


def no_wait_for_loads(monkeypatch, module):
    monkeypatch.setattr(ring_class(module), "consumer_wait", lambda self, state: None)


def producer_starts_full(monkeypatch, module):
    monkeypatch.setattr(pipeline(), "producer_state", pipeline().consumer_state)


def _groups_in_order(monkeypatch, module, group_at):
    """The groups of a K block in another order: ``group_at(index, count)``."""
    from cute_kernels.dsl import mma

    cute, cutlass = module.cute, module.cutlass

    @cute.jit
    def add_block(tiled, acc, tCrA, tCrB, stage):
        cute.nvgpu.warpgroup.fence()
        for group in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            index = (None, None, group_at(group, cute.size(tCrA, mode=[2])), stage)
            cute.gemm(tiled, acc, tCrA[index], tCrB[index], acc)
        cute.nvgpu.warpgroup.commit_group()

    monkeypatch.setattr(mma, "add_block", add_block)


def k_steps_swapped(monkeypatch, module):
    _groups_in_order(monkeypatch, module, lambda group, count: group ^ 1)


def groups_descending(monkeypatch, module):
    _groups_in_order(monkeypatch, module, lambda group, count: count - 1 - group)


def tail_not_predicated(monkeypatch, module):
    """The whole last block is multiplied, zeros included."""
    from cute_kernels.dsl import mma

    monkeypatch.setattr(
        mma,
        "add_groups",
        lambda tiled, acc, a, b, stage, groups: mma.add_block(tiled, acc, a, b, stage),
    )


def tail_dropped(monkeypatch, module):
    from cute_kernels.dsl import mma

    true_groups = mma.add_groups
    monkeypatch.setattr(mma, "add_groups", lambda *a: true_groups(*a[:-1], a[-1] - 1))


def store_before_buffer_is_free(monkeypatch, module):
    arch = module.cute.arch
    monkeypatch.setattr(arch, "cp_async_bulk_wait_group", lambda *a, **k: None)


def no_epilogue_barrier(monkeypatch, module):
    monkeypatch.setattr(epilogue.Epilogue, "sync", lambda self, consumer: None)


def one_buffer_for_both_consumers(monkeypatch, module):
    true_store = epilogue.Epilogue.store

    def store(self, acc, d, sD, consumer, *rest):
        return true_store(self, acc, d, sD, 0 * consumer, *rest)

    monkeypatch.setattr(epilogue.Epilogue, "store", store)


def last_tile_skipped(monkeypatch, module):
    counts = module.Frame.grid_counts
    monkeypatch.setattr(module.Frame, "grid_counts", lambda *a: (counts(*a)[0], counts(*a)[1] - 1))


def rows_beyond_read(monkeypatch, module):
    """accumulate: rows beyond M are read where they would lie, not clamped."""
    monkeypatch.setattr(module.cutlass, "min", lambda a, b: a)


# ---- few rows ------------------------------------------------------------------------------------


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
