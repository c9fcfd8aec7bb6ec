"""What each part of the forward's battery is for: a defect that it, and it alone here, must notice.

The defects break a promise, not the result: each stays within rounding of the right values, or
shows with NaN neighbours only.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

import ptxsim
from ptxsim import modes
from ptxsim.skips import requires_sim
from tests.contract import ContractViolation
from tests.kernels import ring_defects
from tests.sparse_attn import fwd_battery as battery
from tests.sparse_attn import fwd_defects as mutants
from tests.sparse_attn import simulated

pytestmark = [requires_sim, pytest.mark.sim, pytest.mark.simulates("sparse_attn")]


def place_in_the_grid_enters(monkeypatch, module):
    """The scale depends on the CTA's number in its last bits."""
    cute, true = module.cute, module.ForwardSm90.mainloop

    @cute.jit
    def mainloop(self, ctx):
        index, _, _ = cute.arch.block_idx()
        c = ctx.c * (1.0 + index.to(module.cutlass.Float32) * 2.0**-20)
        return true(self, dataclasses.replace(ctx, c=c))

    monkeypatch.setattr(module.ForwardSm90, "mainloop", mainloop)


def length_of_the_list_enters(monkeypatch, module):
    """The scale depends on how many blocks the tile visits."""
    cute, true = module.cute, module.ForwardSm90.mainloop
    true_count, counts = module.TileInfo.count, []

    def count(self):
        counts.append(true_count(self))
        return counts[-1]

    @cute.jit
    def mainloop(self, ctx):
        factor = 1.0 + counts[-1].to(module.cutlass.Float32) * 2.0**-20
        return true(self, dataclasses.replace(ctx, c=ctx.c * factor))

    monkeypatch.setattr(module.TileInfo, "count", count)
    monkeypatch.setattr(module.ForwardSm90, "mainloop", mainloop)


@functools.cache
def mutated(mutant, config):
    """The forward with a defect, compiled once a process."""
    from cute_kernels.sparse_attn import kernel_fwd_sm90

    with pytest.MonkeyPatch.context() as patch:
        mutant(patch, kernel_fwd_sm90)
        return kernel_fwd_sm90.build(config, compile=ptxsim.compile)


CASES = [
    (ring_defects.released_before_read, battery.schedules, ("window", (1, 4, 1, 64), (383, 383))),
    (mutants.o_told_before_it_is_kept, battery.schedules, ("full", (1, 2, 2, 96), (200, 383))),
    # Nightly: of a part that has killed another mutant already.
    pytest.param(
        place_in_the_grid_enters,
        battery.chunked_prefill,
        ("window",),
        marks=pytest.mark.nightly,
    ),
    (length_of_the_list_enters, battery.chunked_prefill, ("window",)),
    (mutants.blocks_without_keys_change_the_state, battery.chunked_prefill, ("bits",)),
    (place_in_the_grid_enters, battery.one_row_at_a_time, ()),
    (place_in_the_grid_enters, battery.batches, ()),
    (place_in_the_grid_enters, battery.heads, ()),
    (mutants.masked_by_multiplication, battery.among_neighbours, ("window",)),
    (mutants.masked_by_multiplication, battery.among_neighbours, ("document",)),
    (mutants.masked_by_multiplication, battery.padding, ()),
    (place_in_the_grid_enters, battery.padding, ()),
    (length_of_the_list_enters, battery.other_rows_of_the_mask, ()),
    (mutants.blocks_without_keys_change_the_state, battery.other_rows_of_the_mask, ()),
    (mutants.one_key_too_many, battery.forms, (64,)),
    (mutants.negative_zero_kept, battery.zero_has_one_sign, ()),
]


@pytest.mark.parametrize(
    ("mutant", "part", "arguments"),
    CASES,
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else v.__name__,
)
def test_battery_mutants_are_killed(monkeypatch, mutant, part, arguments):
    monkeypatch.setattr(simulated, "kernel", functools.partial(mutated, mutant))
    zero_sign = part is battery.zero_has_one_sign
    with pytest.raises(AssertionError if zero_sign else (ContractViolation, modes.ModeFailure)):
        part(*arguments)
