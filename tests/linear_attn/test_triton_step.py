"""Triton's kernel of decoding: steps after steps have the bytes of one pass in the same engine."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from cute_kernels.linear_attn.tensors import DeltaRecord, DeltaRule
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

from .delta_cases import BF16, FP32, Case, operands
from .delta_launches import ALLOWED, SCALE, forward
from .triton_engine import DELTA, DELTA_STEP

pytestmark = pytest.mark.simulates("linear_attn.triton")

LENGTH, DRAFTS, SLOTS = 140, 3, 3
CASE = Case((LENGTH,), batch=1, heads=(1, 2), sizes=(16, 32), initial=False)
#: With sizes that the public function takes on a GPU.
WIDE = CASE._replace(sizes=(128, 64))


def record(given: Case = CASE, drafts: int = DRAFTS, poison: float = float("nan")) -> DeltaRecord:
    """An empty record of slots; rings hold what memory may."""
    rows, (k_heads, heads), (k, v) = 64 + 2 * drafts, given.heads, given.sizes
    state = torch.full((SLOTS, heads, k, v), poison)
    state[:2] = 0
    shapes = ((k_heads, k), BF16), ((heads, v), BF16), ((heads,), FP32), ((heads,), FP32)
    shapes += ((heads, v), BF16), ((heads, v), BF16), ((heads, 64), BF16)
    rings = [torch.full((SLOTS * rows + 1, *s), poison, dtype=t) for s, t in shapes]
    counters = (torch.zeros(SLOTS, dtype=torch.int64) for _ in range(3))
    return DeltaRecord((state, *rings[:4]), tuple(rings[4:]), *counters, rows, drafts)


def slow(seed: int = 0, given: Case = CASE) -> DeltaRule:
    o = operands(given, seed)
    return o._replace(g=o.g * 0.05)


def part(o: DeltaRule, first: int, end: int) -> list[torch.Tensor]:
    return [t[first:end] for t in o[:5]]


def at_chunk(kept: DeltaRecord, o: DeltaRule, row: int, engine: str, options: dict) -> None:
    """Fill slots 0 and 1 with rows up to ``row``, as prefill would."""
    grid = max(row - kept.drafts, 0) // 64 * 64
    if grid:
        with DELTA.running(engine, **options) as launch:
            k, v = o.k.shape[2], o.v.shape[2]
            given = CASE._replace(lengths=(row,), sizes=(k, v))
            start = forward(launch, given, DeltaRule(*part(o, 0, row), None), kept.drafts)
        kept.tensors[0][:2] = start.final
    for slot in (0, 1):
        place = slot * kept.rows + torch.arange(grid, row) % kept.rows
        for ring, rows in zip(kept.tensors[1:], part(o, grid, row)[1:], strict=True):
            ring[place] = rows.to(ring.dtype)
    kept.grid[:2], kept.length[:2] = grid, row


def step(launch, kept: DeltaRecord, rows: list[list[torch.Tensor]], slots=None) -> torch.Tensor:
    """o [sequences, T, HV, V] of new rows of sequences, of one length each."""
    joined = DeltaRule(*(torch.cat(pieces) for pieces in zip(*rows, strict=True)), None)
    out = torch.full_like(joined.v, float("nan"))
    launch.delta_step(joined, len(rows[0][0]), None, slots, SCALE, out, kept)
    return out.unflatten(0, (len(rows), -1))


def steps(engine: str, *edits, given: Case = CASE, **options) -> None:
    """Rows alone and drafts that are dropped again, across blocks and the end of a chunk."""
    o, other = slow(0, given), slow(40, given)
    with DELTA.running(engine, **options) as launch:
        whole = forward(launch, given, o).out
    for row, offered in ((0, (1, 4, 1)), (61, (1, 4, 2, 1, 4)), (126, (2, 4, 4))):
        kept = record(given)
        at_chunk(kept, o, row, engine, options)
        with DELTA_STEP.running(engine, *edits, **options) as launch:
            for count in offered:
                good = (count + 1) // 2
                pairs = zip(part(o, row, row + good), part(other, 0, count - good), strict=True)
                mixed = [torch.cat(pair) for pair in pairs]
                bad = [torch.full_like(t, float("nan")) for t in mixed]
                out = step(launch, kept, [bad, mixed], torch.tensor([2, 0]))
                assert same_bytes(out[1, :good], whole[row : row + good]), (row, count)
                kept.length.sub_(count - good)
                row += good
        assert kept.length.tolist()[0] == row and kept.grid[0] == max(row - DRAFTS, 0) // 64 * 64


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
        launch.delta_step(DeltaRule(*rows, None), 7, offsets, None, SCALE, out, kept)
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
        launch.delta_step(o, 4, None, None, SCALE, torch.empty_like(o.v), kept)

    kernels = DELTA_STEP.compiled(target, call)
    assert {kernel.name: set(complaints(kernel)) - ALLOWED for kernel in kernels} == {
        "step_kernel": set(), "advance_kernel": set(),
    }  # fmt: skip
