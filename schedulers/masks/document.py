"""The rule "query and key are in the same document", for runs and for scattered documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import rules
from .rules import Grid, Rule, indices, kind_of, take


@dataclass(frozen=True, eq=False)
class SameDocument(Rule):
    """``ids[b, q] == ids[b, kv]``; ids int32 [B or 1, S], q_len = kv_len = S.

    Masks number ids by first appearance (``document_ids``), so that equal masks have equal hashes.
    """

    ids: Tensor

    @property
    def extent(self):
        return self.ids.shape[0], 1

    @cached_property
    def contiguous(self) -> bool:
        """Whether every document is one run of tokens."""
        return bool((self.ids[:, 1:] >= self.ids[:, :-1]).all())

    def evaluate(self, b, h, q_idx, kv_idx):
        b = take(b, self.ids.shape[0])
        return self.ids[b, q_idx] == self.ids[b, kv_idx]

    def classify(self, grid, b, h, m):
        b = take(b, self.ids.shape[0])
        q_first, q_last = grid.q_span(m)
        kv_first, kv_last = grid.kv_span(m.device)
        if not self.contiguous:
            return self._classify_scattered(grid, b, m)
        # The ids do not descend: two blocks share one if their ranges meet, as tokens do.
        q_low, q_high = self.ids[b, q_first][:, None], self.ids[b, q_last][:, None]
        kv_low, kv_high = self.ids[:, kv_first][b], self.ids[:, kv_last][b]
        any_allowed = (q_high >= kv_low) & (q_low <= kv_high)
        return kind_of(any_allowed, (q_low == q_high) & (kv_low == kv_high))

    def _classify_scattered(self, grid: Grid, b: Tensor, m: Tensor) -> Tensor:
        """Blocks share a document if the product of their "holds document d" tables is not zero."""
        any_allowed = torch.zeros(m.numel(), grid.num_kv_blocks, dtype=torch.bool, device=m.device)
        every = torch.zeros_like(any_allowed)
        width = max(1, rules.CHUNK // max(grid.num_q_blocks, grid.num_kv_blocks))
        for batch in b.unique().tolist():
            rows = (b == batch).nonzero()[:, 0]
            ids = self.ids[batch].unique(return_inverse=True)[1]
            for start in range(0, int(ids.max()) + 1, width):
                in_q = _holds(ids, grid.block_size[0], grid.num_q_blocks, start, width)[m[rows]]
                in_kv = _holds(ids, grid.block_size[1], grid.num_kv_blocks, start, width)
                any_allowed[rows] |= (in_q @ in_kv.T) > 0
            q_low, q_high = _range(ids, grid.block_size[0], grid.num_q_blocks)
            kv_low, kv_high = _range(ids, grid.block_size[1], grid.num_kv_blocks)
            single = (q_low == q_high)[m[rows], None] & (kv_low == kv_high)
            every[rows] = single & (q_low[m[rows], None] == kv_low)
        return kind_of(any_allowed, every)


def _holds(ids: Tensor, block: int, blocks: int, start: int, width: int) -> Tensor:
    """Return fp32 [blocks, width]: 1 where the block holds document start + column."""
    token = ((ids >= start) & (ids < start + width)).nonzero()[:, 0]
    table = torch.zeros(blocks, width, dtype=torch.float32, device=ids.device)
    table[token // block, ids[token] - start] = 1.0
    return table


def _range(ids: Tensor, block: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the least and greatest id of every block."""
    block = min(block, ids.numel())
    tail = ids[-1:].expand(blocks * block - ids.numel())
    return torch.cat([ids, tail]).view(blocks, block).aminmax(dim=1)


def document_ids(ids: Tensor) -> Tensor:
    """Renumber integer labels [B, S] by first appearance, int32: 7 7 2 7 -> 0 0 1 0."""
    labels, order = ids.sort(dim=1, stable=True)
    size = ids.shape[1]
    position = indices(size, ids.device).expand_as(ids)
    new = torch.ones_like(labels, dtype=torch.bool)
    new[:, 1:] = labels[:, 1:] != labels[:, :-1]
    # A stable sort: the first of equal labels in sorted order is the first in the sequence.
    run_start = torch.where(new, position, 0).cummax(dim=1).values
    first = torch.zeros_like(order).scatter_(1, order, order.gather(1, run_start))
    number = (first == position).cumsum(dim=1) - 1
    return number.gather(1, first).to(torch.int32)
