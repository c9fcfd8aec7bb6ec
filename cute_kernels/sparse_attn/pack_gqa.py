"""Packed GQA: the query heads of a group become the rows of one head, which share K and V.

    q [B, Sq, Hq, D]   -> [B, G · Sp, Hkv, D],  G = Hq / Hkv

One query (a decoding step) has Sp = Sq = 1: a view, and a tile has all heads of a group.

The backward of masks by query head has Sp = 128 ⌈Sq / 128⌉: each head's rows begin at a multiple of
128, and what was a mask by query head is one by KV head, with more rows:

    a mask of Hq heads -> of Hkv, block m of a group's head g at g · Sp / 128 + m

A column of the schedule is a KV head's, all the visits of its group, so that dK and dV are one fp32
chain and one rounding, as they are without such a mask.  Rows between one head's last and the next
head's first are none: their lse is +inf, so P is 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from ..schedulers.masks.bits import Bits
from ..schedulers.masks.mask import BlockMask
from ..schedulers.masks.rules import Grid
from . import masks
from .masks import BLOCK
from .tensors import Grads, Saved


def has_group_masks(mask_heads: int, heads: int, kv_heads: int) -> bool:
    """Whether query heads that share a KV head have masks of their own."""
    return mask_heads > 1 and kv_heads < heads


class PackedGqa(NamedTuple):
    """Shapes before and after packing; head_rows: of one head of a group, at least q_len."""

    q_len: int
    heads: int
    kv_heads: int
    head_rows: int

    @classmethod
    def of_blocks(cls, q_len: int, heads: int, kv_heads: int) -> PackedGqa:
        """Heads padded to whole blocks of rows."""
        return cls(q_len, heads, kv_heads, -(-q_len // BLOCK[0]) * BLOCK[0])

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        return self.group * self.head_rows

    def pack(self, t: Tensor) -> Tensor:
        """[B, Sq, Hq, D] -> [B, G · Sp, Hkv, D]; a view of one query."""
        by_head = t.unflatten(2, (self.kv_heads, self.group)).permute(0, 3, 1, 2, 4)
        if self.head_rows > self.q_len:
            padded = t.new_zeros(t.shape[0], self.group, self.head_rows, *by_head.shape[3:])
            padded[:, :, : self.q_len] = by_head
            by_head = padded
        return by_head.flatten(1, 2)

    def unpack(self, t: Tensor) -> Tensor:
        """[B, G · Sp, Hkv, D] -> [B, Sq, Hq, D]."""
        by_head = t.unflatten(1, (self.group, self.head_rows))[:, :, : self.q_len]
        return by_head.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def pack_sums(self, t: Tensor, fill: float = 0.0) -> Tensor:
        """[B, Hq, Sq] -> [B, Hkv, G · Sp], ``fill`` in rows that are none; a view of one query."""
        if self.head_rows > self.q_len:
            t = pad(t, (0, self.head_rows - self.q_len), value=fill)
        return t.view(t.shape[0], self.kv_heads, self.rows)

    def operands(self, grads: Grads, saved: Saved) -> tuple[Grads, Saved]:
        """Operands of a backward with one query head for each KV head; without sinks."""
        (dout, dlse), (q, k, v, out, lse, _) = grads, saved
        dlse = None if dlse is None else self.pack_sums(dlse)
        dout, q, out = (self.pack(t) for t in (dout, q, out))
        return Grads(dout, dlse), Saved(q, k, v, out, self.pack_sums(lse, math.inf))

    def mask(self, mask: BlockMask) -> BlockMask:
        """One `by_bits`, by KV head."""
        bits = mask.rule
        grid = Grid(self.rows, mask.kv_len, BLOCK)
        # A block's key counts rows of blocks over all heads: those of a group follow each other.
        words = pad(bits.words, (0, 0, 0, BLOCK[0] - bits.words.shape[1]))
        rule = Bits(grid, (mask.shape[0], self.kv_heads), bits.key, bits.tile, words)
        return BlockMask.from_rule(
            rule, self.rows, mask.kv_len, block_size=BLOCK, device=mask.device
        )


def by_bits(mask: BlockMask) -> BlockMask:
    """``mask`` in blocks of 128 x 128, whose partial blocks are bits: no rule by position."""
    mask = mask if mask.block_size == BLOCK else mask.reblock(BLOCK)
    bits = masks.captured(mask)
    return BlockMask(mask.q_len, mask.kv_len, BLOCK, *mask.lists("kv"), *mask.lists("q"), bits)
