"""A ``BlockMask`` as the tensors that kernels read: blocks of 128 x 128, lists, one element rule.

Three kinds of element rule, a constant of the compiled kernel each:

    none    partial blocks do not occur
    band    in partial blocks, lo <= kv - q <= hi (positions from 0, any alignment is in lo and hi)
    bits    in partial blocks, one bit per element: any other rule, captured here

The ends of both sequences are not in the rule: a kernel bounds q < q_len and kv < kv_len itself, in
full blocks too.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..schedulers import mask_bits, mask_build
from ..schedulers.mask import BlockMask
from ..schedulers.mask_rules import Band
from ..schedulers.schedule import Schedule

BLOCK = (128, 128)
FORMS = ("none", "band", "bits")
TENSORS = (
    *("kv_count", "kv_entry", "kv_tile", "q_count", "q_entry", "q_tile"),
    *("words", "key_words"),
)
WORDS = BLOCK[1] // mask_bits.WORD

#: An open end of a band.  Lengths stay below it, so that q + hi and q + lo fit into int32.
FAR = 2**30

_KEPT = 64
_TILES_AT_ONCE = 1024
_cache: OrderedDict[tuple[str, torch.device], LoweredMask] = OrderedDict()


@dataclass(frozen=True, eq=False)
class LoweredMask:
    """What every backend reads.  Mb = ceil(q_len / 128), Nb = ceil(kv_len / 128); all int32.

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
    all unread.  ``mask`` is the BlockMask in blocks of 128 x 128, what schedules are made and
    checked for; a launcher, which is given tensors and numbers only, sees None.
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

    def tensors(self) -> list[Tensor]:
        """The run-time operands, as the torch op takes them."""
        return [getattr(self, name) for name in TENSORS]

    def numbers(self) -> list[int]:
        """The rest of it, as the torch op takes it."""
        return [FORMS.index(self.form), self.q_len, self.kv_len, self.lo, self.hi]


class Order(NamedTuple):
    """The order of a backward pass, as a kernel reads it; all int32.

    The first five are ``schedulers.ScheduleTensors``.  Its heads are the B * Hkv KV heads, and an
    entry stands for a visit by each query head of the group, ascending, all with its rank.  Only if
    the mask differs between query heads and Hkv < Hq are they the B * Hq query heads, and dK, dV
    the sums over each group, ascending.

    ``tile`` [E] is the row of ``LoweredMask.words`` of each entry, or -1; [1], unread, unless the
    form is "bits".
    """

    order: Tensor
    list_of_head: Tensor
    offset: Tensor
    entry: Tensor
    rank: Tensor
    tile: Tensor


def restored(tensors: list[Tensor], numbers: list[int]) -> LoweredMask:
    """The inverse of ``tensors()`` and ``numbers()``, without the BlockMask."""
    form, q_len, kv_len, lo, hi = numbers
    return LoweredMask(FORMS[form], q_len, kv_len, lo, hi, *tensors)


def lower(mask: BlockMask) -> LoweredMask:
    """The tensors of ``mask``, on its device; built once per mask hash and device, then reused."""
    mine = vars(mask).get("_lowered")
    if mine is not None:
        return mine
    key = (mask.hash(), mask.device)
    if key not in _cache:
        _cache[key] = _lower(mask if mask.block_size == BLOCK else mask.reblock(BLOCK))
    _cache.move_to_end(key)
    if len(_cache) > _KEPT:
        _cache.popitem(last=False)
    # As a cached_property keeps its value: the next call on this mask hashes nothing.
    object.__setattr__(mask, "_lowered", _cache[key])
    return _cache[key]


def order_of(lowered: LoweredMask, schedule: Schedule) -> Order:
    """The tensors of a schedule on the mask's device."""
    device = lowered.words.device
    unread = torch.full((1,), -1, dtype=torch.int32, device=device)
    tile = entry_tiles(lowered, schedule) if lowered.form == "bits" else unread
    return Order(*schedule.tensors(device), tile)


def entry_tiles(lowered: LoweredMask, schedule: Schedule) -> Tensor:
    """int32 [E] on the mask's device: the row of ``words`` of each entry of a schedule, or -1.

    For the form "bits".  The heads that share a set of lists share a mask (``checks`` sees to it).
    """
    columns = schedule.num_kv_blocks
    first_head = {int(s): head for head, s in reversed([*enumerate(schedule.list_of_head)])}
    group = torch.tensor([first_head.get(s, 0) for s in range(schedule.num_lists)])
    which = torch.repeat_interleave(
        torch.arange(len(schedule.offset) - 1), torch.from_numpy(schedule.offset.copy()).diff()
    )
    batches, heads = lowered.mask.shape
    mask_head = group_of_heads(batches, heads, schedule.heads)[group][which // max(1, columns)]
    m, n = torch.from_numpy(schedule.q_block.copy()).long(), which % max(1, columns)
    dense = torch.full((batches * heads, schedule.num_q_blocks, columns), -1, dtype=torch.int32)
    count, entry, tile = (t.cpu() for t in (lowered.kv_count, lowered.kv_entry, lowered.kv_tile))
    row, entry, tile = mask_build.ragged(count, entry, tile)
    dense.view(-1)[row * columns + (entry >> 1)] = tile
    return dense[mask_head, m, n].to(lowered.words.device)


def group_of_heads(batches: int, heads: int, total: int) -> Tensor:
    """int64 [total]: the mask, of batches x heads, that each (batch, head) pair b * H + h uses."""
    index = torch.arange(total)
    return index // (total // batches) if heads == 1 else index % (batches * heads)


def _lower(mask: BlockMask) -> LoweredMask:
    rule = mask.partial_rule
    lo, hi, form = -FAR, FAR, "none"
    tiles = (torch.full((1, 1, 1, 1), -1, dtype=torch.int32, device=mask.device),) * 2
    words = torch.zeros(1, BLOCK[0], WORDS, dtype=torch.int32, device=mask.device)
    if mask.num_full < mask.num_blocks and isinstance(rule, Band):
        form = "band"
        lo = lo if rule.lo is None else max(lo, rule.lo)
        hi = hi if rule.hi is None else min(hi, rule.hi)
    elif mask.num_full < mask.num_blocks:
        form = "bits"
        bits = _captured(mask)
        tiles = mask.tiles(bits, "kv"), mask.tiles(bits, "q")
        words = _whole_tiles(bits.words)
    return LoweredMask(
        form,
        mask.q_len,
        mask.kv_len,
        lo,
        hi,
        mask.kv_count.contiguous(),
        _entries(*mask.lists("kv")),
        tiles[0].contiguous(),
        mask.q_count.contiguous(),
        _entries(*mask.lists("q")),
        tiles[1].contiguous(),
        words,
        _transposed(words),
        mask,
    )


def _entries(count: Tensor, index: Tensor, full: Tensor) -> Tensor:
    listed = torch.arange(index.shape[3], device=index.device) < count[..., None]
    return torch.where(listed, 2 * index + (~full).int(), 0).to(torch.int32).contiguous()


def _captured(mask: BlockMask) -> mask_bits.Bits:
    """The bits of the partial blocks, and of no other."""
    row, col, full = mask_build.ragged(mask.kv_count, mask.kv_index, mask.kv_full)
    elements = partial(mask.partial_rule.blocks, mask.grid)
    return mask_bits.capture(mask.grid, mask.shape, row, col.long(), full, elements)


def _whole_tiles(words: Tensor) -> Tensor:
    """Tiles of a mask shorter than a block, padded with zeros to 128 rows of 4 words."""
    rows, columns = BLOCK[0] - words.shape[1], WORDS - words.shape[2]
    return torch.nn.functional.pad(words, (0, columns, 0, rows)).contiguous()


def _transposed(words: Tensor) -> Tensor:
    """The bits of each tile with rows and columns exchanged; a few tiles at a time, unpacked."""
    parts = words.split(_TILES_AT_ONCE)
    return torch.cat([mask_bits.pack(mask_bits.unpack(x, BLOCK[1]).mT.contiguous()) for x in parts])
