"""Paged caches and their pages, as a server keeps them."""

from __future__ import annotations

import random

import torch

import cute_kernels as ck


class Server:
    """Caches that sequences are written to, on pages in random order."""

    def __init__(self, page: int, pages: int = 64, layout: str = "NHD"):
        shape = (pages, page, 2, 64) if layout == "NHD" else (pages, 2, page, 64)
        self.caches = [torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in "kv"]
        self.page, self.layout = page, layout
        self.free = random.Random(page).sample(range(pages), pages)

    def pages(self, keys: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-keys // self.page))]

    def write(self, pages: list[int], first: int, key, value) -> None:
        """Positions from ``first`` on."""
        positions = torch.arange(first, first + len(key))
        slots = torch.tensor(pages)[positions // self.page] * self.page + positions % self.page
        ck.write_kv_cache(key, value, *self.caches, slots, layout=self.layout)

    def attend(self, *sequences, **options):
        """Outputs of (q, pages, keys) each, one call."""
        most = max(len(pages) for _, pages, _ in sequences)
        table = torch.zeros(len(sequences), most, dtype=torch.int32)
        for n, (_, pages, _) in enumerate(sequences):
            table[n, : len(pages)] = torch.tensor(pages)
        starts = torch.tensor([0, *(len(q) for q, _, _ in sequences)]).cumsum(0).int()
        lengths = torch.tensor([keys for *_, keys in sequences], dtype=torch.int32)
        q = torch.cat([q for q, _, _ in sequences])
        out = ck.paged_attention(
            q, *self.caches, table, lengths, starts, layout=self.layout, **options
        )
        return out.split([len(q) for q, _, _ in sequences])


def tokens(count: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, h, 64, generator=generator).bfloat16() for h in (4, 2, 2)]
