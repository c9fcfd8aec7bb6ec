"""Defects put into the SM90 kernels on purpose: the simulator and the oracle must notice each one.

A mutant replaces one helper or one method while the kernel is compiled.  It counts as killed when a
run differs from the oracle by a byte, fails in the simulator (deadlock, wild access), or reports a
missing fence.  The same runs of the intact kernel must all pass.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import ptxsim
from cute_kernels.gemm import launch
from cute_kernels.gemm.tiles import Skinny
from ptxsim.skips import requires_sim
from tests import contract
from tests.gemm import sm90_defects as defects
from tests.gemm.simulated import WIDE, simulated
from tests.kernels import edited, ring_defects
from tests.kernels.operands import cancelling, operand
from tests.kernels.ring_defects import LIMITS, SETTINGS
from tests.oracles import gemm as reference

#: A test of each kind: what runs at every commit while the kernels are proved.
EACH_COMMIT = "test_mutants_are_killed test_edits_of_the_frame_are_killed"
pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("gemm", often=EACH_COMMIT)]

BF16 = torch.bfloat16
EPILOGUES = ("plain", "bias", "accumulate")
#: Kinds of the kernel for few rows: one CTA's chain, one CTA's tree, a tree that CTAs share.
FEW = {
    "chain": Skinny(16, 64, 128, 1, 1),
    "tree": Skinny(16, 64, 128, 1, 1),
    "split": Skinny(16, 64, 128, 1, 8),
    "halves": Skinny(16, 64, 128, 1, 2),
    "two warpgroups": Skinny(128, 128, 64, 1, 1),
    "pair": Skinny(16, 64, 128, 1, pair=2),
}
#: Sums that round: exact ones hide a change of order.
ALSO = {"wgmma_math": "fma"}


def order_of(kind: str) -> str:
    return "tree" if kind in ("tree", "split", "halves") else "chain"


def module_of(kind: str) -> ModuleType:
    """The module of the kernel: of an epilogue, or of a kind of `FEW`."""
    from cute_kernels.gemm import kernel_skinny_sm90, kernel_sm90

    return kernel_skinny_sm90 if kind in FEW else kernel_sm90


def compiled(kind: str, module: ModuleType | None = None):
    if kind in FEW:
        chosen = launch.skinny_config(BF16, "k", True, FEW[kind], order_of(kind))
    else:
        chosen = launch.dense_config(BF16, "k", "k", kind, WIDE)
    return (module or module_of(kind)).build(chosen, compile=ptxsim.compile)


def dense_runs(epilogue: str):
    """(operands, the bytes of their product, options) of every run."""
    for m, n, k in ((300, 520, 600), (130, 264, 80)):
        a, b = operand(m, k, BF16, "k", seed=m), operand(n, k, BF16, "k", seed=n)
        bias = torch.randn(n).bfloat16() if epilogue == "bias" else None
        start = torch.randn(m, n) if epilogue == "accumulate" else None
        want = reference.chain(a, b, bias, start)
        for options in SETTINGS:
            yield (a, b, bias, start), want, {"clusters": 1} | options
        if start is not None:
            # -0 everywhere, under the arithmetic that keeps it: zeros added show.
            a, b = torch.full_like(a, -0.0)[:, :80], torch.ones_like(b)[:, :80]
            zeros = torch.full_like(start, -0.0)
            yield (a, b, None, zeros), zeros, {"clusters": 1} | ALSO


def few_runs(kind: str):
    """The same of few rows."""
    oracle = reference.tree if order_of(kind) == "tree" else reference.chain
    for m, n, k in ((21, 150, 2200), (5, 60, 200)):
        x, w = cancelling(m, n, k, BF16, m)
        noise = torch.randn(m, n, generator=torch.Generator().manual_seed(k))
        bias = (1e-6 * noise).bfloat16()
        for options in SETTINGS:
            yield (x, w, bias), oracle(x, w, bias), {"tile": FEW[kind]} | options


def product(kind: str, operands: tuple) -> torch.Tensor:
    if kind in FEW:
        x, w, bias = operands
        how = launch._matrices(x, w, order_of(kind))
        return launch._plan_skinny(x, w, bias, how, FEW[kind], order_of(kind)).run(x, w, bias)
    *of, start = operands
    return launch.gemm(*of, None if start is None else start.clone())


def survives(kernel, kind: str) -> bool:
    """Whether every run under every setting is right; `kernel` is a compiled function."""
    for operands, want, options in few_runs(kind) if kind in FEW else dense_runs(kind):
        try:
            with simulated(kernel=lambda *_: kernel, **LIMITS, **options):
                got = product(kind, operands)
        except ptxsim.PtxsimError:
            return False
        right = contract.same_bytes(got, want.to(got.dtype))
        if ptxsim.report()["fence_warnings"]["count"] or not right:
            return False
    return True


#: (defect, what shows it: an epilogue, or a kind of `FEW`)
MUTANTS = [
    *((defect, "plain") for defect in ring_defects.DEFECTS.values()),
    (defects.no_wait_for_loads, "plain"),
    (defects.producer_starts_full, "plain"),
    (defects.k_steps_swapped, "accumulate"),
    (defects.tail_not_predicated, "accumulate"),
    (defects.tail_dropped, "plain"),
    (defects.store_before_buffer_is_free, "plain"),
    (defects.no_epilogue_barrier, "plain"),
    (defects.one_buffer_for_both_consumers, "plain"),
    (defects.last_tile_skipped, "plain"),
    (defects.rows_beyond_read, "accumulate"),
    (defects.rows_beyond_read, "bias"),
    *((d, "chain") for n, d in ring_defects.DEFECTS.items() if n != "no_proxy_fence"),
    (defects.no_wait_for_loads, "chain"),
    (defects.producer_starts_full, "chain"),
    (defects.tail_dropped, "chain"),
    (defects.k_steps_swapped, "chain"),
    (defects.groups_descending, "chain"),
    (defects.no_barrier_of_consumers, "two warpgroups"),
    (ring_defects.no_wait_for_empty_stages, "pair"),
    (ring_defects.half_the_bytes, "pair"),
    (defects.no_meeting, "pair"),
    (defects.leaves_by_split, "tree"),
    (defects.next_leaf_begun, "tree"),
    (defects.groups_descending, "halves"),
    (defects.partials_in_bf16, "halves"),
    (defects.leaves_by_split, "halves"),
    (defects.leaves_descending, "split"),
    (defects.own_leaves_only, "split"),
    (defects.no_meeting, "split"),
]

#: (old text, new text) of the frame that every product kernel derives from.
FRAME_EDITS = {
    "another_tile_loaded": (
        "tiles.at(index, walk, cta.rank), args)\n            index += step",
        "tiles.at(index, walk, cta.rank), args)\n            index += 2 * step",
    ),
    "a_tile_goes_on_from_the_last": ("            consumer.tCrC.fill(0.0)\n", ""),
    "half_of_b_twice": ("cta.cluster, cta.rank)", "cta.cluster, (0, 0, 0))"),
    "the_first_rows_loaded": ("min(m, loads.a.tiles - 1)", "min(m, 0)"),
    "the_first_columns_loaded": ("min(n, loads.b.tiles - 1)", "min(n, 0)"),
    "a_block_short": ("        blocks = size // self.tile_k\n", "        blocks = size // 128\n"),
    "rows_of_the_other_warpgroup": (
        "(tile.m * CONSUMERS + consumer.index, tile.n)",
        "(tile.m * CONSUMERS + 1 - consumer.index, tile.n)",
    ),
}


@pytest.mark.parametrize("kind", [*EPILOGUES, *FEW])
def test_the_intact_kernel_survives(kind):
    assert survives(compiled(kind), kind)


@pytest.mark.parametrize(("mutant", "kind"), MUTANTS, ids=lambda v: getattr(v, "__name__", v))
def test_mutants_are_killed(monkeypatch, mutant, kind):
    with monkeypatch.context() as patch:
        mutant(patch, module_of(kind))
        kernel = compiled(kind)
    assert not survives(kernel, kind)


@pytest.mark.parametrize("name", FRAME_EDITS)
def test_edits_of_the_frame_are_killed(tmp_path, name):
    edited.changed(tmp_path, "dsl.product", *FRAME_EDITS[name])
    frame = "from ..dsl.product import", "from ..dsl.product_changed import"
    module = edited.changed(tmp_path, "gemm.kernel_sm90", *frame)
    assert not survives(compiled("plain", module), "plain")
