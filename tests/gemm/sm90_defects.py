"""Defects of the SM90 GEMM: each replaces one helper or one method while the kernel is compiled."""

from __future__ import annotations

from cute_kernels.dsl import epilogue
from tests.kernels.ring_defects import pipeline, ring_class


def no_wait_for_loads(monkeypatch, module):
    monkeypatch.setattr(ring_class(module), "consumer_wait", lambda self, state: None)


def producer_starts_full(monkeypatch, module):
    monkeypatch.setattr(pipeline(), "producer_state", pipeline().consumer_state)


def k_steps_swapped(monkeypatch, module):
    from cute_kernels.dsl import mma

    cute, cutlass = module.cute, module.cutlass

    @cute.jit
    def add_block(tiled, acc, tCrA, tCrB, stage):
        cute.nvgpu.warpgroup.fence()
        for group in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            index = (None, None, group ^ 1, stage)
            cute.gemm(tiled, acc, tCrA[index], tCrB[index], acc)
        cute.nvgpu.warpgroup.commit_group()

    monkeypatch.setattr(mma, "add_block", add_block)


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
