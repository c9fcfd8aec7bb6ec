"""Lowering of a ``BlockMask`` to kernel tensors: blocks of 128 x 128, lists, one element rule.

Three kinds of element rule, a constant of the compiled kernel each:

    none    partial blocks do not occur
    band    in partial blocks, lo <= kv - q <= hi (positions from 0, any alignment is in lo and hi)
    bits    in partial blocks, one bit per element: any other rule, evaluated here

The ends of both sequences are not in the rule: a kernel bounds q < q_len and kv < kv_len itself, in
full blocks too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..schedulers.masks import bits as mask_bits
from ..schedulers.masks import build
from ..schedulers.masks.mask import BlockMask
from ..schedulers.masks.rules import Band
from ..schedulers.order.schedule import Schedule

BLOCK = (128, 128)
FORMS = ("none", "band", "bits")
#: Form of a forward alone: lists and elements follow from ranges of keys, on the device.
SPANS = "spans"
FORWARD_FORMS = (*FORMS, SPANS)
TENSORS = (
    *("kv_count", "kv_entry", "kv_tile", "q_count", "q_entry", "q_tile"),
    *("words", "key_words"),
)
WORDS = BLOCK[1] // mask_bits.WORD

#: An open end of a band.  Lengths stay below it, so that q + hi and q + lo fit into int32.
FAR = 2**30

_TILES_AT_ONCE = 1024

#: (left, right): how many keys before and after its own position a query sees; None: all.
Window = tuple[int | None, int | None]


def band(window: Window) -> tuple[int, int]:
    """Return (lo, hi) of keys less queries."""
    left, right = window
    return -FAR if left is None else -left, FAR if right is None else right


@dataclass(frozen=True, eq=False)
class LoweredMask:
    """Tensors and numbers of a mask that every backend reads; all int32.

    Mb = ceil(q_len / 128), Nb = ceil(kv_len / 128).

    form      "none", "band" or "bits"
    q_len, kv_len
    lo, hi    the band (-FAR and FAR for an open end, and in the other forms)
    kv_count  [B or 1, H or 1, Mb]      key blocks of a query block; H counts query heads
    kv_entry  [B or 1, H or 1, Mb, Lk]  2 * key block + is_partial, ascending; 0 beyond the count
    kv_tile   as kv_entry               the row of ``words`` of each entry, -1 for none
    q_count, q_entry, q_tile            the transpose: [.., Nb], [.., Nb, Lq], [.., Nb, Lq]
    words     [T >= 1, 128, 4]          bit j of word w of a row is key 32 w + j of the block; bits
                                        outside the lengths are 0
    key_words [T >= 1, 128, 4]          transposed: bit j of word w of a key is query 32 w + j

    In the forms "none" and "band" both tile tensors are [1, 1, 1, 1] and the words are one tile,
    all unread.  Two fields are not read by kernels: ``mask``, the BlockMask in blocks of 128 x 128
    that schedules are built and checked for; and in the form "bits" ``block_tile``
    [B or 1, H or 1, Mb, Nb], the row of ``words`` of each block, -1 for none.  Both are None in a
    launcher, which takes tensors and numbers only.
    """

    form: str
    q_len: int
    kv_len: int
    lo: int
    hi: int
    kv_count: Tensor
    kv_entry: Tensor
    kv_tile: Tensor
    q_count: Tensor
    q_entry: Tensor
    q_tile: Tensor
    words: Tensor
    key_words: Tensor
    mask: BlockMask | None = None
    block_tile: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return the run-time tensors, as the torch op takes them."""
        return [getattr(self, name) for name in TENSORS]

    def numbers(self) -> list[int]:
        """Return form, lengths and band as the torch op takes them: numbers."""
        return [FORMS.index(self.form), self.q_len, self.kv_len, self.lo, self.hi]


class Order(NamedTuple):
    """Order of a backward pass, as kernels read it; all int32.

    The first five are ``schedulers.ScheduleTensors``.  Its heads are the B * Hkv KV heads, and an
    entry stands for a visit by each query head of the group, ascending, all with its rank.  If the
    mask differs between query heads and Hkv < Hq, they are the B * Hq query heads, and dK, dV the
    sums over each group, ascending; or, on SM90, KV heads with all their rows (``pack_gqa``).  A
    ticket says where its entries are; the lists of a head and their offsets are for kernels that
    start from a head.

    ``tile`` [E] is the row of ``LoweredMask.words`` of each entry, or -1; [1], unread, unless the
    form is "bits".
    """

    ticket: Tensor
    list_of_head: Tensor
    offset: Tensor
    entry: Tensor
    rank: Tensor
    tile: Tensor

    def mean_key_blocks(self, rows: int, keys: int) -> float:
        """Return how many key blocks a block of query rows sees; from shapes, nothing is read."""
        q_blocks, key_blocks = (
            -(-n // block) for n, block in zip((rows, keys), BLOCK, strict=True)
        )
        lists = (len(self.offset) - 1) // max(key_blocks, 1)
        return len(self.entry) / max(lists * q_blocks, 1)


def restored(tensors: list[Tensor], numbers: list[int]) -> LoweredMask:
    """Return the mask of ``tensors()`` and ``numbers()``, without ``mask`` and ``block_tile``."""
    form, q_len, kv_len, lo, hi = numbers
    return LoweredMask(FORMS[form], q_len, kv_len, lo, hi, *tensors)


# Cached, and saved for a backward: no tensor may be an inference tensor.
@torch.inference_mode(False)
def lower(mask: BlockMask) -> LoweredMask:
    """Lower ``mask`` to tensors on its device."""
    mask = mask if mask.block_size == BLOCK else mask.reblock(BLOCK)
    rule = mask.partial_rule
    lo, hi, form = -FAR, FAR, "none"
    tiles = (torch.full((1, 1, 1, 1), -1, dtype=torch.int32, device=mask.device),) * 2
    words = torch.zeros(1, BLOCK[0], WORDS, dtype=torch.int32, device=mask.device)
    block_tile = None
    if mask.num_full < mask.num_blocks and isinstance(rule, Band):
        form = "band"
        lo = lo if rule.lo is None else max(lo, rule.lo)
        hi = hi if rule.hi is None else min(hi, rule.hi)
    elif mask.num_full < mask.num_blocks:
        form = "bits"
        bits = captured(mask)
        tiles = mask.tiles(bits, "kv"), mask.tiles(bits, "q")
        words = _whole_tiles(bits.words)
        block_tile = _by_block(bits)
    return LoweredMask(
        form,
        mask.q_len,
        mask.kv_len,
        lo,
        hi,
        mask.kv_count.clone(memory_format=torch.contiguous_format),
        _entries(*mask.lists("kv")),
        tiles[0].contiguous(),
        mask.q_count.clone(memory_format=torch.contiguous_format),
        _entries(*mask.lists("q")),
        tiles[1].contiguous(),
        words,
        _transposed(words),
        mask,
        block_tile,
    )


def order_of(lowered: LoweredMask, schedule: Schedule) -> Order:
    """Return the tensors of a schedule, queued on the mask's device; nothing is read back."""
    device = lowered.words.device
    if lowered.form != "bits":
        return Order(*schedule.tensors(device)[:5], lowered.q_tile.view(-1))
    *lists, place = schedule.tensors(device, _mask_of_list(lowered, schedule))
    return Order(*lists, lowered.block_tile.view(-1).index_select(0, place))


def _mask_of_list(lowered: LoweredMask, schedule: Schedule) -> tuple[int, ...]:
    """Return the mask of each set of lists, [S]; any mask for a set that no head has.

    The heads that share a set of lists share a mask (``checks`` sees to it).
    """
    of_list = np.zeros(schedule.num_lists, np.int64)
    of_list[schedule.list_of_head] = group_of_heads(*lowered.mask.shape, schedule.heads).numpy()
    return tuple(of_list.tolist())


@cache
def group_of_heads(batches: int, heads: int, total: int) -> Tensor:
    """Return int64 [total], the mask (of batches x heads) of each (batch, head) pair b * H + h."""
    index = torch.arange(total, device="cpu")
    return index // (total // batches) if heads == 1 else index % (batches * heads)


def _entries(count: Tensor, index: Tensor, full: Tensor) -> Tensor:
    listed = torch.arange(index.shape[3], device=index.device) < count[..., None]
    return torch.where(listed, 2 * index + (~full).int(), 0).to(torch.int32).contiguous()


def _by_block(bits: mask_bits.Bits) -> Tensor:
    """Return ``block_tile``, the dense table of the tiles that ``bits`` lists."""
    grid = bits.grid
    table = bits.tile.new_full((*bits.heads, grid.num_q_blocks, grid.num_kv_blocks), -1)
    table.view(-1)[bits.key] = bits.tile
    return table


def captured(mask: BlockMask) -> mask_bits.Bits:
    """Return the bits of the partial blocks, and of no other."""
    row, col, full = build.ragged(mask.kv_count, mask.kv_index, mask.kv_full)
    elements = partial(mask.partial_rule.blocks, mask.grid)
    return mask_bits.capture(mask.grid, mask.shape, row, col.long(), full, elements)


def _whole_tiles(words: Tensor) -> Tensor:
    """Pad tiles of a mask shorter than a block with zeros to 128 rows of 4 words."""
    rows, columns = BLOCK[0] - words.shape[1], WORDS - words.shape[2]
    return torch.nn.functional.pad(words, (0, columns, 0, rows)).contiguous()


def _transposed(words: Tensor) -> Tensor:
    """Transpose the bits of each tile; a few tiles at a time, unpacked."""
    parts = words.split(_TILES_AT_ONCE)
    return torch.cat([mask_bits.pack(mask_bits.unpack(x, BLOCK[1]).mT.contiguous()) for x in parts])
