"""Build exact block lists of an element rule, with tensor operations only.

Blocks are classified in chunks of at most ``CHUNK`` blocks, so that no [B, H, Mb, Nb] tensor exists
above that size; blocks that the classes of the parts do not decide are settled by their elements,
again in chunks.  The result is a sorted list of entries, and compact tensors made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import bits, rules
from .algebra import And, Or
from .rules import EMPTY, FULL, UNKNOWN, Grid, Rule, indices, kind_of


@dataclass(frozen=True)
class Entries:
    """Blocks that are not empty, ascending in (row, col); row = (b * H + h) * Mb + m."""

    row: Tensor
    col: Tensor
    full: Tensor


def entries_of(rule: Rule, grid: Grid, heads: tuple[int, int], device: torch.device) -> Entries:
    """Classify all blocks exactly: full only if every element within the lengths is allowed."""
    row, col, kind = _classified(rule, grid, heads, device)
    unclear = (kind == UNKNOWN).nonzero()[:, 0]
    elements = partial(rule.blocks, grid)
    for part, _, any_allowed, every in bits.evaluate_blocks(
        grid, heads, row, col, unclear, elements
    ):
        kind[part] = kind_of(any_allowed, every).long()
    nonempty = kind != EMPTY
    return Entries(row[nonempty], col[nonempty], kind[nonempty] == FULL)


def on_grid(rule: Rule, grid: Grid) -> Rule:
    """Store all ``Bits`` of a rule in the blocks of ``grid``."""
    if isinstance(rule, And | Or):
        return type(rule)(tuple(on_grid(part, grid) for part in rule.parts))
    if not isinstance(rule, bits.Bits) or rule.grid == grid:
        return rule
    row, col, kind = _classified(rule, grid, rule.heads, rule.key.device)
    elements = partial(rule.blocks, grid)
    return bits.capture(grid, rule.heads, row, col, kind == FULL, elements)


def _classified(rule: Rule, grid: Grid, heads: tuple[int, int], device: torch.device):
    """Return row, column and class of every block that is not classified EMPTY."""
    rows = heads[0] * heads[1] * grid.num_q_blocks
    entries = [torch.zeros(3, 0, dtype=torch.int64, device=device)]
    step = max(1, rules.CHUNK // max(1, grid.num_kv_blocks))
    for start in range(0, rows if grid.num_kv_blocks else 0, step):
        row = start + indices(min(step, rows - start), device)
        b, h, m, _ = bits.coordinates(grid, heads, row, row)
        kind = rule.classify(grid, b, h, m)
        r, n = kind.nonzero(as_tuple=True)
        entries.append(torch.stack([r + start, n, kind[r, n].long()]))
    return torch.cat(entries, dim=1).unbind(0)


def transpose(entries: Entries, grid: Grid) -> Entries:
    """Transpose entries to key blocks: row = (b * H + h) * Nb + n, col = m, ascending."""
    head = entries.row // max(1, grid.num_q_blocks)
    m = entries.row - head * grid.num_q_blocks
    row = head * grid.num_kv_blocks + entries.col
    order = (row * grid.num_q_blocks + m).argsort()
    return Entries(row[order], m[order], entries.full[order])


def compact(row: Tensor, *values: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Convert ragged rows to (count int32 [*shape], each value [*shape, L]), L the longest row.

    ``row`` ascends; places beyond the count hold zero.
    """
    rows = 1
    for size in shape:
        rows *= size
    start = torch.searchsorted(row, indices(rows + 1, row.device))
    count = start.diff()
    longest = max(1, int(count.max())) if rows else 1
    offset = row * longest + indices(row.numel(), row.device) - start[row]
    lists = []
    for value in values:
        table = torch.zeros(rows * longest, dtype=value.dtype, device=row.device)
        table[offset] = value
        lists.append(table.view(*shape, longest))
    return count.to(torch.int32).view(shape), *lists


def ragged(count: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    """Invert ``compact``: return (row int64, values ...) of the valid places, in list order."""
    length = tables[0].shape[-1]
    valid = indices(length, count.device) < count[..., None]
    flat_index = valid.flatten().nonzero()[:, 0]
    return flat_index // max(1, length), *(table.reshape(-1)[flat_index] for table in tables)
