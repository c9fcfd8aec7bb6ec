"""The backward of masks by query head under GQA, for a kernel whose groups share their lists.

The query heads of a group become one head: their rows one head's behind another's, each head's
begin at a multiple of 128.  What was a mask by query head is one by KV head then, with more rows:

    q [B, Sq, Hq, D]         -> [B, G · Sp, Hkv, D],  G = Hq / Hkv, Sp = 128 ⌈Sq / 128⌉
    a mask of Hq heads       -> of Hkv, block m of a group's head g at g · Sp / 128 + m

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


def wanted(mask_heads: int, heads: int, kv_heads: int) -> bool:
    """Whether query heads that share a KV head have masks of their own."""
    return mask_heads > 1 and kv_heads < heads


class Sizes(NamedTuple):
    """Shapes before and after packing a GQA group into one head."""

    q_len: int
    heads: int
    kv_heads: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def padded(self) -> int:
        """Rows of one head of a group."""
        return -(-self.q_len // BLOCK[0]) * BLOCK[0]

    @property
    def rows(self) -> int:
        return self.group * self.padded


def by_bits(mask: BlockMask) -> BlockMask:
    """``mask`` in blocks of 128 x 128, whose partial blocks are bits: no rule by position."""
    mask = mask if mask.block_size == BLOCK else mask.reblock(BLOCK)
    bits = masks.captured(mask)
    return BlockMask(mask.q_len, mask.kv_len, BLOCK, *mask.lists("kv"), *mask.lists("q"), bits)


def mask_of(mask: BlockMask, of: Sizes) -> BlockMask:
    """One `by_bits`, by KV head."""
    bits = mask.rule
    grid = Grid(of.rows, mask.kv_len, BLOCK)
    # A block's key counts rows of blocks over all heads: those of a group follow each other.
    words = pad(bits.words, (0, 0, 0, BLOCK[0] - bits.words.shape[1]))
    rule = Bits(grid, (mask.shape[0], of.kv_heads), bits.key, bits.tile, words)
    return BlockMask.from_rule(rule, of.rows, mask.kv_len, block_size=BLOCK, device=mask.device)


def operands(grads: Grads, saved: Saved, of: Sizes) -> tuple[Grads, Saved]:
    """Operands with one query head for each KV head; without sinks."""
    (dout, dlse), (q, k, v, out, lse, _) = grads, saved
    dlse = None if dlse is None else _sums(dlse, of, 0.0)
    dout, q, out = (_rows(t, of) for t in (dout, q, out))
    return Grads(dout, dlse), Saved(q, k, v, out, _sums(lse, of, math.inf))


def _rows(t: Tensor, sizes: Sizes) -> Tensor:
    """[B, Sq, Hq, D] -> [B, G · Sp, Hkv, D]."""
    packed = t.new_zeros(t.shape[0], sizes.group, sizes.padded, sizes.kv_heads, t.shape[3])
    packed[:, :, : sizes.q_len] = t.unflatten(2, (sizes.kv_heads, sizes.group)).permute(
        0, 3, 1, 2, 4
    )
    return packed.flatten(1, 2)


def _sums(t: Tensor, sizes: Sizes, fill: float) -> Tensor:
    """[B, Hq, Sq] -> [B, Hkv, G · Sp], with ``fill`` in rows that are none."""
    return pad(t, (0, sizes.padded - sizes.q_len), value=fill).view(
        t.shape[0], sizes.kv_heads, sizes.rows
    )


def gradient(dq: Tensor, of: Sizes) -> Tensor:
    """[B, G · Sp, Hkv, D] -> [B, Sq, Hq, D]."""
    by_head = dq.unflatten(1, (of.group, of.padded))[:, :, : of.q_len]
    return by_head.permute(0, 2, 3, 1, 4).flatten(2, 3)
