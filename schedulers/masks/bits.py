"""``Bits``: an element rule given by its bits, stored for the partial blocks only.

Blocks that are not listed are empty, listed blocks without a tile are full, the others have one
bit per element.  With no tiles at all it is a block pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import rules
from .rules import EMPTY, FULL, PARTIAL, UNKNOWN, Grid, Rule, indices, take

WORD = 32


@dataclass(frozen=True, eq=False)
class Bits(Rule):
    """Blocks of ``grid`` in ascending key order, ``key = ((b * H + h) * Mb + m) * Nb + n``.

    key    int64 [E]
    tile   int32 [E]: row of ``words``, or -1 for a full block
    words  int32 [T, tile_q, ceil(tile_kv / 32)]: bit j of word w is key column 32 w + j of the
           block; bits outside the lengths are zero
    """

    grid: Grid
    heads: tuple[int, int]
    key: Tensor
    tile: Tensor
    words: Tensor

    @property
    def extent(self):
        return self.heads

    def find(self, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """(listed bool, tile int32) of blocks; the tile of a block that is not listed is -1."""
        batches, heads = self.heads
        row = (take(b, batches) * heads + take(h, heads)) * self.grid.num_q_blocks + m
        key = row * self.grid.num_kv_blocks + n
        if self.key.numel() == 0:
            return torch.zeros_like(key, dtype=torch.bool), torch.full_like(key, -1).int()
        index = torch.searchsorted(self.key, key).clamp(max=self.key.numel() - 1)
        listed = self.key[index] == key
        return listed, torch.where(listed, self.tile[index], -1)

    def evaluate(self, b, h, q_idx, kv_idx):
        block_q, block_kv = self.grid.block_size
        listed, tile = self.find(b, h, q_idx // block_q, kv_idx // block_kv)
        if self.words.shape[0] == 0:
            return listed
        row, column = q_idx % block_q, kv_idx % block_kv
        word = self.words[tile.clamp(min=0), row, column // WORD]
        return listed & ((tile < 0) | ((word >> (column % WORD)) & 1).bool())

    def blocks(self, grid, b, h, m, n):
        if grid != self.grid:
            return super().blocks(grid, b, h, m, n)
        listed, tile = self.find(b, h, m, n)
        full = (listed & (tile < 0))[:, None, None]
        if self.words.shape[0] == 0:
            return full.expand(m.numel(), *grid.tile)
        stored = unpack(self.words[tile.clamp(min=0)], grid.tile[1])
        return full | (stored & (tile >= 0)[:, None, None])

    def classify(self, grid, b, h, m):
        """Exact on its own grid; on another, exact where a block lies within one of its blocks."""
        q_first, q_last = grid.q_span(m)
        kv_first, kv_last = grid.kv_span(m.device)
        block_q, block_kv = self.grid.block_size
        own_m, own_n = q_first // block_q, kv_first // block_kv
        listed, tile = self.find(b[:, None], h[:, None], own_m[:, None], own_n)
        partial = PARTIAL if grid == self.grid else UNKNOWN
        value = torch.where(tile < 0, FULL, partial)
        value = torch.where(listed, value, EMPTY)
        within = (q_last // block_q == own_m)[:, None] & (kv_last // block_kv == own_n)
        return torch.where(within, value, UNKNOWN).to(torch.uint8)

    def structure(self):
        size = f"{self.grid.q_len}, {self.grid.kv_len}, {self.grid.block_size}"
        counts = f"{self.key.numel()}, {list(self.words.shape)}"
        return f"Bits({size}, {self.heads}, {counts})"

    def __str__(self):
        return f"Bits({self.words.shape[0]} tiles)" if self.words.shape[0] else "Pattern()"


def pack(elements: Tensor) -> Tensor:
    """Bool [T, R, C] -> int32 [T, R, ceil(C / 32)]."""
    tiles, rows, cols = elements.shape
    words = -(-cols // WORD)
    padded = torch.nn.functional.pad(elements, (0, words * WORD - cols))
    weight = 2 ** torch.arange(8, dtype=torch.uint8, device=elements.device)
    octets = padded.view(tiles, rows, words * 4, 8).to(torch.uint8) * weight
    return octets.sum(dim=-1, dtype=torch.uint8).view(torch.int32)


def unpack(words: Tensor, cols: int) -> Tensor:
    """int32 [T, R, W] -> bool [T, R, cols]."""
    shift = torch.arange(WORD, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shift) & 1).bool().flatten(-2)[..., :cols]


def pattern(grid: Grid, heads: tuple[int, int], row: Tensor, col: Tensor) -> Bits:
    """The rule that allows the listed blocks and nothing else; rows and columns ascend."""
    words = _no_words(grid, row.device)
    tile = torch.full_like(row, -1, dtype=torch.int32)
    return Bits(grid, heads, row * grid.num_kv_blocks + col, tile, words)


def _no_words(grid: Grid, device: torch.device) -> Tensor:
    words = -(-grid.tile[1] // WORD)
    return torch.zeros(0, grid.tile[0], words, dtype=torch.int32, device=device)


Elements = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def capture(
    grid: Grid, heads: tuple[int, int], row: Tensor, col: Tensor, full: Tensor, elements: Elements
) -> Bits:
    """Store the elements of the listed blocks that are not claimed full.

    ``row`` is (b * H + h) * Mb + m, ascending, then ``col`` ascending.  ``elements(b, h, m, n)`` is
    called for at most ``CHUNK`` elements at a time.  Blocks that turn out empty are dropped, those
    that turn out full are full.
    """
    unclear = (~full).nonzero()[:, 0]
    any_allowed = torch.ones_like(full)
    every = torch.ones_like(full)
    word_parts = []
    for part, value, part_some, part_every in evaluate_blocks(
        grid, heads, row, col, unclear, elements
    ):
        any_allowed[part], every[part] = part_some, part_every
        word_parts.append(pack(value[part_some & ~part_every]))
    words = torch.cat(word_parts).to(row.device) if word_parts else _no_words(grid, row.device)
    number = (any_allowed & ~every).cumsum(dim=0) - 1
    tile = torch.where(every, -1, number).to(torch.int32)
    key = row * grid.num_kv_blocks + col
    return Bits(grid, heads, key[any_allowed], tile[any_allowed], words)


def evaluate_blocks(
    grid: Grid,
    heads: tuple[int, int],
    row: Tensor,
    col: Tensor,
    unclear: Tensor,
    elements: Elements,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield chunks of the unclear blocks: (indices, elements, any is true, all are true).

    Elements outside the lengths come back False and do not count.
    """
    if unclear.numel() == 0:
        return
    for part in unclear.split(max(1, rules.CHUNK // (grid.tile[0] * grid.tile[1]))):
        b, h, m, n = coordinates(grid, heads, row[part], col[part])
        inside = grid.inside(*grid.positions(m, n))
        value = elements(b, h, m, n) & inside
        every = (value | ~inside).flatten(1).all(dim=1)
        yield part, value, value.flatten(1).any(dim=1), every


def coordinates(grid: Grid, heads: tuple[int, int], row: Tensor, col: Tensor):
    """(b, h, m, n) of blocks given by flat row and column."""
    head, m = row // grid.num_q_blocks, row % grid.num_q_blocks
    return head // heads[1], head % heads[1], m, col


def is_pattern(rule: Rule, grid: Grid) -> bool:
    """A block pattern on this grid: it is true all over every listed block."""
    return isinstance(rule, Bits) and rule.grid == grid and rule.words.shape[0] == 0


def from_dense(dense: Tensor, block_size: tuple[int, int]) -> Bits:
    """Make the bits of a bool tensor [B, H, q_len, kv_len]."""
    grid = Grid(dense.shape[2], dense.shape[3], block_size)
    heads = (dense.shape[0], dense.shape[1])
    flat = dense.flatten(0, 1)
    block_q, block_kv = block_size
    cols = grid.num_kv_blocks * grid.tile[1]
    entries = [torch.zeros(3, 0, dtype=torch.int64, device=dense.device)]
    # At most CHUNK elements at a time, at least one row of blocks.
    step = max(1, rules.CHUNK // max(1, grid.tile[0] * grid.kv_len))
    rows = flat.shape[0] * grid.num_q_blocks if grid.num_kv_blocks else 0
    for start in range(0, rows, step):
        row = start + indices(min(step, rows - start), dense.device)
        q_idx = (row % grid.num_q_blocks)[:, None] * block_q
        q_idx = q_idx + indices(grid.tile[0], dense.device)
        value = flat[(row // grid.num_q_blocks)[:, None], q_idx.clamp(max=grid.q_len - 1)]
        value = value & (q_idx < grid.q_len)[..., None]
        value = torch.nn.functional.pad(value, (0, cols - grid.kv_len))
        count = value.sum(dim=1, dtype=torch.int32).view(row.numel(), -1, grid.tile[1]).sum(dim=2)
        r, n = count.nonzero(as_tuple=True)
        entries.append(torch.stack([r + start, n, count[r, n]]))
    row, col, count = torch.cat(entries, dim=1).unbind(0)
    m = row % max(1, grid.num_q_blocks)
    area = (grid.q_len - m * block_q).clamp(max=block_q)
    area = area * (grid.kv_len - col * block_kv).clamp(max=block_kv)
    full = count == area

    def elements(b, h, m, n):
        q_idx, kv_idx = grid.positions(m, n)
        q_idx, kv_idx = q_idx.clamp(max=grid.q_len - 1), kv_idx.clamp(max=grid.kv_len - 1)
        return flat[(b * heads[1] + h)[:, None, None], q_idx, kv_idx]

    return capture(grid, heads, row, col, full, elements)
