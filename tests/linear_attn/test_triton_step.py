"""Triton's kernel of decoding: steps after steps have the bytes of one pass in the same engine."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.linear_attn.tensors import DeltaRule
from tests.contract import same_bytes
from tests.triton_runner import (
    CARD,
    HOPPER,
    INTERPRETER,
    LATE,
    SM90,
    TARGETS,
    case,
    complaints,
    device_guard,  # noqa: F401  (a fixture)
)

from .decoding import CASE, WIDE, at_chunk, part, record, slow, steps
from .delta_cases import Case
from .launches import ALLOWED, forward
from .triton_engine import DELTA, DELTA_STEP

pytestmark = pytest.mark.simulates("linear_attn.triton")


def in_one_engine(_, engine: str, given: Case = CASE, **options: int) -> None:
    steps(engine, given=given, **options)


CHECKS = [
    case(INTERPRETER, in_one_engine, INTERPRETER),
    case(SM90, in_one_engine, SM90, **HOPPER),
    case(SM90, in_one_engine, SM90, **LATE),
    case(CARD, in_one_engine, CARD, WIDE),
]


@pytest.mark.parametrize(("engine", "check", "options"), CHECKS)
def test_steps(engine, check, options):
    check(engine, **options)


def test_pack_and_slots_by_place():
    """Sequences of other lengths in a pack, slot i of sequence i; rows behind the pack stay."""
    o = slow()
    with DELTA.running(INTERPRETER) as launch:
        whole = forward(launch, CASE, o).out
    kept = record()
    at_chunk(kept, o, 62, INTERPRETER, {})
    rows = [torch.cat([a, b, b]) for a, b in zip(part(o, 62, 63), part(o, 62, 65), strict=True)]
    out = torch.zeros_like(rows[2])
    with DELTA_STEP.running(INTERPRETER) as launch:
        offsets = torch.tensor([0, 1, 4])
        launch.delta_step(DeltaRule(*rows, None), 7, offsets, None, Case.options, out, kept)
    assert same_bytes(out[:1], whole[62:63]) and same_bytes(out[1:4], whole[62:65])
    assert not out[4:].any() and kept.length.tolist() == [63, 65, 0]


MUTANTS = {
    "drafts_count": ("tl.maximum(total - DRAFTS, 0) //", "total //"),
    "ring_by_place": ("place = slot * R + (base + p) % R", "place = slot * R + p % R"),
    "slot_by_place": ("slot = tl.load(slots_ptr + sequence).to(tl.int64)\n    base = tl.load("
                      "grid_ptr + slot)\n    opened", "base = tl.load("
                      "grid_ptr + slot)\n    opened"),
    "keys_of_no_head": ("if head % GROUP == 0:", "if head % GROUP == GROUP:"),
    "grid_stays": ("tl.store(grid_ptr + slot, base + moved)", "tl.store(grid_ptr + slot, base)"),
    "dropped_rows_are_made": (
        "tl.minimum(tl.maximum(tl.load(made_ptr + slot) - base, 0), opened)",
        "tl.maximum(tl.load(made_ptr + slot) - base, 0)",
    ),
    "nothing_of_blocks_before": (
        "u = product(tl.where(before[None, :], a, zero), r_before, narrow, UPCAST)", "u = narrow",
    ),
    "blocks_behind_count": (
        "r_before = _ring_rows(r_ring_ptr, place, head, HV, V, columns, before)",
        "r_before = _ring_rows(r_ring_ptr, place, head, HV, V, columns, there)",
    ),
    "a_block_alone": ("    rest = (unit - product(lower, before, wide, UPCAST))",
                      "    rest = (unit - wide)"),
    "old_rows_are_new": ("    return tl.where(old[:, None], kept, given)",
                         "    return given"),
}  # fmt: skip


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name):
    with pytest.raises(AssertionError):
        steps(INTERPRETER, MUTANTS[name])


@pytest.mark.parametrize("target", TARGETS)
def test_code(target):
    """No atomics, nothing fused, offsets of 64 bits, in every target."""
    o, kept = slow(0, WIDE), record(WIDE)

    def call() -> None:
        launch = DELTA_STEP.launch
        launch.delta_step(o, 4, None, None, Case.options, torch.empty_like(o.v), kept)

    kernels = DELTA_STEP.compiled(target, call)
    assert {kernel.name: set(complaints(kernel)) - ALLOWED for kernel in kernels} == {
        "step_kernel": set(), "advance_kernel": set(),
    }  # fmt: skip
