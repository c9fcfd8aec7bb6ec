"""Defects put into the SM90 GEMM on purpose: the simulator and the battery must notice each one.

A mutant replaces one helper or one method while the kernel is compiled.  It counts as killed when a
run differs from the oracle by a byte, fails in the simulator (deadlock, wild access), or reports a
missing fence.  The same runs of the intact kernel must all pass.
"""

from __future__ import annotations

import pytest
import torch

import ptxsim
from cute_kernels.gemm import launch
from ptxsim.skips import requires_sim
from tests import contract
from tests.gemm.simulated import WIDE, simulated
from tests.gemm.sm90_defects import (
    k_steps_swapped,
    last_tile_skipped,
    no_epilogue_barrier,
    no_wait_for_loads,
    one_buffer_for_both_consumers,
    producer_starts_full,
    rows_beyond_read,
    store_before_buffer_is_free,
    tail_dropped,
    tail_not_predicated,
)
from tests.kernels import edited
from tests.kernels.operands import operand
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
from tests.oracles import gemm as reference

pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("gemm")]

#: Sums that round: exact ones hide a change of order.
ALSO = {"wgmma_math": "fma"}


def survives(kernel, epilogue: str) -> bool:
    """Whether every run under every setting is right; `kernel` is a compiled function."""
    for shape in ((300, 520, 600), (130, 264, 80)):
        m, n, k = shape
        a = operand(m, k, torch.bfloat16, "k", seed=m)
        b = operand(n, k, torch.bfloat16, "k", seed=n)
        bias = torch.randn(n).bfloat16() if epilogue == "bias" else None
        start = torch.randn(m, n) if epilogue == "accumulate" else None
        want = reference.chain(a, b, bias, start)
        want = want if start is not None else want.bfloat16()
        for options in (*SETTINGS, ALSO):
            if options.get("wgmma_math") == "fma":
                if start is None:
                    continue
                # -0 everywhere, under the arithmetic that keeps it: zeros added show.
                a, b = torch.full_like(a, -0.0), torch.ones_like(b)
                start, want = torch.full_like(start, -0.0), torch.full_like(want, -0.0)
                a, b = a[:, :80], b[:, :80]
            state = None if start is None else start.clone()
            try:
                with simulated(clusters=1, kernel=lambda *key: kernel, **LIMITS, **options):
                    got = launch.gemm(a, b, bias, state)
            except ptxsim.PtxsimError:
                return False
            if ptxsim.report()["fence_warnings"]["count"] or not contract.same_bytes(got, want):
                return False
    return True


def compiled(epilogue: str):
    from cute_kernels.gemm import kernel_sm90

    kernel_config = launch.dense_config(torch.bfloat16, "k", "k", epilogue, WIDE)
    return kernel_sm90.build(kernel_config, compile=ptxsim.compile)


MUTANTS = [
    (no_wait_for_loads, "plain"),
    (no_wait_for_empty_stages, "plain"),
    (no_release, "plain"),
    (wrong_phase, "plain"),
    (producer_starts_full, "plain"),
    (half_the_bytes, "plain"),
    (released_before_read, "plain"),
    (k_steps_swapped, "accumulate"),
    (tail_not_predicated, "accumulate"),
    (tail_dropped, "plain"),
    (store_before_buffer_is_free, "plain"),
    (no_epilogue_barrier, "plain"),
    (no_proxy_fence, "plain"),
    (one_buffer_for_both_consumers, "plain"),
    (last_tile_skipped, "plain"),
    (rows_beyond_read, "accumulate"),
    (rows_beyond_read, "bias"),
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


@pytest.mark.parametrize("epilogue", ["plain", "bias", "accumulate"])
def test_the_intact_kernel_survives(epilogue):
    assert survives(compiled(epilogue), epilogue)


@pytest.mark.parametrize(("mutant", "epilogue"), MUTANTS, ids=lambda v: getattr(v, "__name__", v))
def test_mutants_are_killed(monkeypatch, mutant, epilogue):
    from cute_kernels.gemm import kernel_sm90

    with monkeypatch.context() as patch:
        mutant(patch, kernel_sm90)
        kernel = compiled(epilogue)
    assert not survives(kernel, epilogue)


@pytest.mark.parametrize("name", FRAME_EDITS)
def test_edits_of_the_frame_are_killed(tmp_path, name):
    edited.changed(tmp_path, "dsl.product", *FRAME_EDITS[name])
    frame = "from ..dsl.product import", "from ..dsl.product_changed import"
    module = edited.changed(tmp_path, "gemm.kernel_sm90", *frame)
    chosen = launch.dense_config(torch.bfloat16, "k", "k", "plain", WIDE)
    assert not survives(module.build(chosen, compile=ptxsim.compile), "plain")
