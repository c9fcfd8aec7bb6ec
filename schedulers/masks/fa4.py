"""Block lists under FlashAttention-4's field names, both ways.

Field meanings: Dao-AILab/flash-attention ``flash_attn/cute/block_sparsity.py``.  "mask" blocks are
partial, "full" blocks are not masked; the backward lists are the transpose.  Index tensors are
compact, and write-order tensors have the shape of their index tensor, always.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.errors import MaskError, expected

from . import bits, checks
from . import lists as mask_lists
from .algebra import all_of
from .build import compact, ragged
from .mask import BlockMask
from .rules import Grid, Rule, indices

_SIDES = {"forward": "kv", "backward": "q"}


class Fa4Lists(NamedTuple):
    """Block lists for ``BlockSparseTensorsTorch(**lists._asdict())``.

    Forward: counts int32 [B or 1, H or 1, Mb], indices int32 [.., Mb, L] of key blocks.
    Backward: counts [.., Nb], indices [.., Nb, L] of query blocks; ``dq_write_order[.., n, i]`` is
    the rank of key block n among all contributors of the query block at place i.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


def to_fa4(
    mask: BlockMask,
    direction: str = "forward",
    *,
    write_order: Tensor | None = None,
    spt: bool | None = None,
    tail_partial: bool = False,
) -> Fa4Lists:
    """Convert a mask to FA4's fields; ``direction`` is "forward" or "backward" (transposed).

    write_order: int32 ranks shaped as ``mask.q_index``, backward only; then ``spt`` is required.
    tail_partial: report full blocks that reach past a length as partial, as FlexAttention does,
    for kernels that mask the tail in partial blocks only.
    """
    side = _side(direction)
    checks.flag("tail_partial", tail_partial)
    if (write_order is None) != (spt is None):
        want = "both or neither (FA4 requires spt with a write order)"
        actual = "write_order alone" if spt is None else "spt alone"
        raise MaskError(expected("write_order, spt", want, actual))
    if write_order is not None:
        if side == "kv":
            raise MaskError(expected("write_order", "none in direction 'forward'", "a tensor"))
        checks.flag("spt", spt)
        checks.tensor("write_order", write_order, (torch.int32,), (4,))
        if write_order.shape != mask.q_index.shape:
            want = f"shape {list(mask.q_index.shape)} like mask.q_index"
            raise MaskError(expected("write_order", want, list(write_order.shape)))
        checks.same_device(("mask.q_index", "write_order"), (mask.q_index, write_order))
    count, index, full = mask.lists(side)
    if tail_partial:
        full = full & ~_reaches_past(mask, index, side)
    lists = mask_lists.split(count, index, full, write_order)
    return Fa4Lists(*lists[:4], mask.block_size, *lists[4:], spt)


def from_fa4(
    lists: object,
    q_len: int,
    kv_len: int,
    *,
    rule: Rule | None = None,
    direction: str = "forward",
    block_size: int | tuple[int, int] | None = None,
) -> tuple[BlockMask, Tensor | None, bool | None]:
    """Return ``(mask, write_order, spt)`` of any object with FA4's fields.

    rule: the element rule of the partial blocks (FA4's mask_mod); None if all blocks are allowed
    entirely.  Blocks are classified anew, so partial blocks may come back full or not at all; a
    full block that the rule does not allow entirely is refused.
    block_size: needed where ``lists.block_size`` is absent; the two must agree.
    write_order: int32 shaped as ``mask.q_index``, or None.
    """
    side = _side(direction)
    fields = {name: getattr(lists, name, None) for name in Fa4Lists._fields}
    if getattr(lists, "cu_total_m_blocks", None) is not None:
        raise MaskError(expected("cu_total_m_blocks", "None (one length for all)", "a tensor"))
    grid = Grid(*checks.lengths(q_len, kv_len), _block_size(fields["block_size"], block_size))
    split = _checked(fields, grid, side)
    count, index, full, order = mask_lists.merge(split)

    row, col, _ = _by_query(count, index, full, grid, side)
    pattern = bits.pattern(grid, tuple(count.shape[:2]), row, col)
    full_rule = pattern if rule is None else all_of(pattern, rule)
    size, device = grid.block_size, row.device
    mask = BlockMask.from_rule(full_rule, q_len, kv_len, block_size=size, device=device)

    count, index, full = (_expand(tensor, mask.shape) for tensor in (count, index, full))
    _refuse_overclaimed(mask, *_by_query(count, index, full, grid, side))
    if order is None:
        return mask, None, None
    return mask, _carried(mask, count, index, _expand(order, mask.shape)), fields["spt"]


def _side(direction: str) -> str:
    if direction not in _SIDES:
        raise MaskError(expected("direction", "'forward' or 'backward'", repr(direction)))
    return _SIDES[direction]


def _block_size(theirs: object, ours: object) -> tuple[int, int]:
    if theirs is None and ours is None:
        raise MaskError(expected("block_size", "(q, kv), here or in the lists", "None"))
    sizes = [checks.block_size(size) for size in (theirs, ours) if size is not None]
    if sizes[0] != sizes[-1]:
        raise MaskError(expected("block_size", f"{sizes[0]} like the lists", sizes[-1]))
    return sizes[0]


def _reaches_past(mask: BlockMask, index: Tensor, side: str) -> Tensor:
    """Return bool shaped as ``index``: the block has positions beyond q_len or kv_len."""
    rows, cols = (mask.num_q_blocks, mask.num_kv_blocks)[:: 1 if side == "kv" else -1]
    lengths = (mask.q_len, mask.kv_len)[:: 1 if side == "kv" else -1]
    sizes = mask.block_size[:: 1 if side == "kv" else -1]
    row_short = lengths[0] % sizes[0] != 0
    col_short = lengths[1] % sizes[1] != 0
    last_row = indices(rows, index.device)[:, None] == rows - 1
    return (last_row & row_short) | ((index == cols - 1) & col_short)


def _checked(fields: dict, grid: Grid, side: str) -> mask_lists.SplitLists:
    """Check all values; return the lists with absent parts as empty ones."""
    rows, blocks = grid.num_q_blocks, grid.num_kv_blocks
    if side == "q":
        rows, blocks = blocks, rows
    if fields["full_block_cnt"] is None and fields["full_block_idx"] is None:
        checks.tensor("mask_block_cnt", fields["mask_block_cnt"], (torch.int32,), (3,))
        fields["full_block_cnt"] = torch.zeros_like(fields["mask_block_cnt"])
        fields["full_block_idx"] = fields["full_block_cnt"][..., None]
    heads = (1, 1)
    for kind in ("mask", "full"):
        names = f"{kind}_block_cnt", f"{kind}_block_idx"
        count, index = fields[names[0]], fields[names[1]]
        checks.block_lists(names[0], count, names[1], index)
        checks.rows(names[0], count, rows, "ceil(length / block_size)")
        checks.block_list_values(names[0], count, names[1], index, blocks)
        heads = checks.extent(heads, tuple(count.shape[:2]), names[0])
    lists = [fields[name] for name in Fa4Lists._fields[:4]]
    checks.same_device(Fa4Lists._fields[:4], lists)
    lists += _write_orders(fields, side)
    shaped = [t if t is None else t.expand(*heads, *t.shape[2:]) for t in lists]
    split = mask_lists.SplitLists(*shaped)
    _refuse_shared(split, blocks)
    return split


def _write_orders(fields: dict, side: str) -> list[Tensor | None]:
    orders = [fields["dq_write_order"], fields["dq_write_order_full"]]
    if orders == [None, None]:
        return orders
    if side == "kv":
        raise MaskError(expected("dq_write_order", "None in direction 'forward'", "a tensor"))
    if orders[1] is None and not bool(fields["full_block_cnt"].any()):
        orders[1] = torch.zeros_like(fields["full_block_idx"])
    checks.flag("spt", fields["spt"])
    for name, order, kind in zip(
        ("dq_write_order", "dq_write_order_full"), orders, ("mask", "full"), strict=True
    ):
        index = fields[f"{kind}_block_idx"]
        checks.tensor(name, order, (torch.int32,), (4,))
        if order.shape != index.shape:
            want = f"shape {list(index.shape)} like {kind}_block_idx"
            raise MaskError(expected(name, want, list(order.shape)))
        checks.same_device((f"{kind}_block_idx", name), (index, order))
    return orders


def _refuse_shared(split: mask_lists.SplitLists, blocks: int) -> None:
    partial = ragged(split.partial_count, split.partial_index)
    full_blocks = ragged(split.full_count, split.full_index)
    keys = [row * blocks + col for row, col in (partial, full_blocks)]
    if bool(torch.isin(keys[1], keys[0]).any()):
        want = "no block that mask_block_idx lists too"
        raise MaskError(expected("full_block_idx", want, "a block in both"))


def _by_query(count: Tensor, index: Tensor, full: Tensor, grid: Grid, side: str):
    """Return (row, col, full) of the listed blocks in the order of the query blocks."""
    row, col, is_full = ragged(count, index, full)
    col = col.long()
    if side == "kv":
        return row, col, is_full
    head, n = row // max(1, grid.num_kv_blocks), row % max(1, grid.num_kv_blocks)
    row, col = head * grid.num_q_blocks + col, n
    order = (row * grid.num_kv_blocks + col).argsort()
    return row[order], col[order], is_full[order]


def _expand(tensor: Tensor, heads: tuple[int, int]) -> Tensor:
    return tensor.expand(*heads, *tensor.shape[2:])


def _refuse_overclaimed(mask: BlockMask, row: Tensor, col: Tensor, claimed: Tensor) -> None:
    """Refuse blocks listed as full that the rule does not allow entirely."""
    exact_row, exact_col, exact_full = ragged(mask.kv_count, mask.kv_index, mask.kv_full)
    exact = (exact_row * mask.num_kv_blocks + exact_col)[exact_full]
    row, col = row[claimed], col[claimed]
    bad = (~torch.isin(row * mask.num_kv_blocks + col, exact)).nonzero()
    if bad.numel():
        index = bad[0]
        b, h, m, n = bits.coordinates(mask.grid, mask.shape, row[index], col[index])
        bad_block = f"block (q {int(m)}, kv {int(n)}) of batch {int(b)}, head {int(h)}"
        want = "blocks that the rule allows entirely"
        raise MaskError(expected("full_block_idx", want, bad_block))


def _carried(mask: BlockMask, count: Tensor, index: Tensor, order: Tensor) -> Tensor:
    """Return the ranks in the shape of ``mask.q_index``; every listed block must remain."""
    row, col, rank = ragged(count, index, order)
    exact_row, exact_col = ragged(mask.q_count, mask.q_index)
    if not (torch.equal(row, exact_row) and torch.equal(col, exact_col)):
        want = "ranks for blocks that the rule does not leave empty"
        counts = f"{row.numel()} listed blocks, {exact_row.numel()} under the rule"
        raise MaskError(expected("dq_write_order", want, counts))
    return compact(row, rank, shape=tuple(mask.q_count.shape))[1]
