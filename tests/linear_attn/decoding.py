"""Steps of decoding for the gated delta rule: records as caches have them, and what steps give."""

from __future__ import annotations

import functools

import torch

from cute_kernels.linear_attn.tensors import DeltaRecord, DeltaRule
from tests.contract import same_bytes

from .delta_cases import BF16, FP32, Case, operands
from .launches import forward
from .triton_engine import DELTA, DELTA_STEP

LENGTH, DRAFTS, SLOTS = 140, 3, 3
CASE = Case((LENGTH,), batch=1, heads=(1, 2), sizes=(16, 32), initial=False)
#: With sizes that the public function takes on a GPU.
WIDE = CASE._replace(sizes=(128, 64))


def record(given: Case = CASE, drafts: int = DRAFTS, poison: float = float("nan")) -> DeltaRecord:
    """An empty record of slots; rings hold what memory may."""
    rows, (k_heads, heads), (k, v) = 64 * (1 + -(-2 * drafts // 64)), given.heads, given.sizes
    state = torch.full((SLOTS, heads, k, v), poison)
    state[:2] = 0
    shapes = ((k_heads, k), BF16), ((heads, v), BF16), ((heads,), FP32), ((heads,), FP32)
    shapes += ((heads, v), BF16), ((heads, v), BF16), ((heads, 64), BF16)
    rings = [torch.full((SLOTS * rows + 1, *s), poison, dtype=t) for s, t in shapes]
    counters = (torch.zeros(SLOTS, dtype=torch.int64) for _ in range(4))
    rounded = torch.full((SLOTS, heads, k * v), poison, dtype=BF16)
    return DeltaRecord((state, *rings[:4]), tuple(rings[4:]), rounded, *counters, rows, drafts)


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
    launch.delta_step(joined, len(rows[0][0]), None, slots, Case.options, out, kept)
    return out.unflatten(0, (len(rows), -1))


def steps(
    engine: str, *edits, given: Case = CASE, drafts: int = DRAFTS, running=None, **options
) -> None:
    """Rows alone and drafts that are dropped again, across blocks and the end of a chunk.

    running: Context of the launcher of steps, where it is not Triton's.
    """
    o, other = slow(0, given), slow(40, given)
    running = running or functools.partial(DELTA_STEP.running, engine, *edits, **options)
    with DELTA.running(engine, **options) as launch:
        whole = forward(launch, given, o).out
    for row, offered in ((0, (1, 4, 1)), (61, (1, 4, 2, 1, 4)), (126, (2, 4, 4))):
        kept = record(given, drafts)
        at_chunk(kept, o, row, engine, options)
        with running() as launch:
            for count in offered:
                good = (count + 1) // 2
                pairs = zip(part(o, row, row + good), part(other, 0, count - good), strict=True)
                mixed = [torch.cat(pair) for pair in pairs]
                bad = [torch.full_like(t, float("nan")) for t in mixed]
                out = step(launch, kept, [bad, mixed], torch.tensor([2, 0]))
                assert same_bytes(out[1, :good], whole[row : row + good]), (row, count)
                kept.length.sub_(count - good)
                row += good
        assert kept.length.tolist()[0] == row and kept.grid[0] == max(row - drafts, 0) // 64 * 64
