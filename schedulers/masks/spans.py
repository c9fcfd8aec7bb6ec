"""The rule "each query sees one run of keys", as of padding, varlen batches and windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import rules
from .rules import Rule, kind_of, take


@dataclass(frozen=True, eq=False)
class Spans(Rule):
    """``first[b, q] <= kv < end[b, q]``; both int32 [B or 1, q_len]."""

    first: Tensor
    end: Tensor

    @property
    def extent(self):
        return self.first.shape[0], 1

    def evaluate(self, b, h, q_idx, kv_idx):
        b = take(b, self.first.shape[0])
        return (kv_idx >= self.first[b, q_idx]) & (kv_idx < self.end[b, q_idx])

    def classify(self, grid, b, h, m):
        kv_first, kv_last = grid.kv_span(m.device)
        rows = torch.arange(grid.tile[0], dtype=torch.int64, device=m.device)
        q_idx = (m[:, None] * grid.block_size[0] + rows).clamp(max=grid.q_len - 1)
        b = take(b, self.first.shape[0])[:, None]
        kinds = []
        # At most CHUNK elements at a time, at least one block of queries.
        step = max(1, rules.CHUNK // max(1, q_idx.shape[1] * grid.num_kv_blocks))
        for part, batch_index in zip(q_idx.split(step), b.split(step), strict=True):
            first, end = (t[batch_index, part][:, :, None] for t in (self.first, self.end))
            any_allowed = (first <= kv_last) & (end > kv_first) & (first < end)
            every = (first <= kv_first) & (end > kv_last)
            kinds.append(kind_of(any_allowed.any(dim=1), every.all(dim=1)))
        return torch.cat(kinds) if kinds else m.new_zeros(0, grid.num_kv_blocks, dtype=torch.uint8)
