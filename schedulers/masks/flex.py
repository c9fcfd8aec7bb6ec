"""Element bits of a FlexAttention ``BlockMask`` (``torch.nn.attention.flex_attention``).

A flex mask lists partial blocks, in which its Python ``mask_mod`` decides, and full blocks, in
which it is not called.  The function is evaluated here, in the partial blocks only, once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.errors import MaskError, MaskTypeError, expected

from . import checks
from .bits import Bits, capture
from .build import ragged
from .rules import Grid


def rule_of(flex) -> Bits:
    """Return ``Bits`` with the elements of ``flex``; blocks outside its lists are empty.

    Blocks are classified anew: a partial block whose elements within the lengths are all allowed is
    full.  Lists must ascend in each row; a block in both lists is refused.
    """
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    if not isinstance(flex, FlexBlockMask):
        want = "a torch.nn.attention.flex_attention.BlockMask"
        raise MaskTypeError(expected("flex", want, type(flex).__name__))
    size = checks.block_size(tuple(flex.BLOCK_SIZE))
    grid = Grid(*checks.lengths(*flex.seq_lengths), size)
    lists = {"kv_num_blocks": flex.kv_num_blocks, "kv_indices": flex.kv_indices}
    if flex.full_kv_num_blocks is not None:
        lists["full_kv_num_blocks"] = flex.full_kv_num_blocks
        lists["full_kv_indices"] = flex.full_kv_indices
    heads = _check(lists, grid)

    row, col = _entries(lists["kv_num_blocks"], lists["kv_indices"], heads)
    full = torch.zeros_like(row, dtype=torch.bool)
    if "full_kv_num_blocks" in lists:
        full_blocks = _entries(lists["full_kv_num_blocks"], lists["full_kv_indices"], heads)
        row, col = torch.cat([row, full_blocks[0]]), torch.cat([col, full_blocks[1]])
        full = torch.cat([full, torch.ones_like(full_blocks[0], dtype=torch.bool)])
    key, order = (row * grid.num_kv_blocks + col).sort()
    if bool((key[1:] == key[:-1]).any()):
        want = "no block that kv_indices lists too"
        raise MaskError(expected("full_kv_indices", want, "a block in both"))

    def elements(b, h, m, n):
        return _evaluate(flex.mask_mod, grid, b, h, m, n)

    return capture(grid, heads, row[order], col[order], full[order], elements)


def _check(lists: dict[str, Tensor], grid: Grid) -> tuple[int, int]:
    """Check the flex lists; return their common (batch, heads)."""
    names = list(lists)
    heads = (1, 1)
    for count_name, index_name in zip(names[::2], names[1::2], strict=True):
        count, index = lists[count_name], lists[index_name]
        checks.block_lists(count_name, count, index_name, index)
        checks.rows(count_name, count, grid.num_q_blocks, "ceil(q_len / BLOCK_SIZE[0])")
        checks.block_list_values(count_name, count, index_name, index, grid.num_kv_blocks)
        heads = checks.extent(heads, tuple(count.shape[:2]), count_name)
    checks.same_device(names, list(lists.values()))
    return heads


def _entries(count: Tensor, index: Tensor, heads: tuple[int, int]) -> tuple[Tensor, Tensor]:
    row, col = ragged(count.expand(*heads, -1), index.expand(*heads, -1, -1))
    return row, col.long()


def _evaluate(mask_mod, grid: Grid, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Return bool [T, tile_q, tile_kv]: ``mask_mod``, a function of scalars, mapped over all."""
    q_idx, kv_idx = grid.positions(m, n)
    # Positions beyond the lengths would reach outside captured tensors; their value is not used.
    q_idx = q_idx[:, :, 0].clamp(max=grid.q_len - 1)
    kv_idx = kv_idx[:, 0, :].clamp(max=grid.kv_len - 1)
    mapped = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    mapped = torch.vmap(mapped, in_dims=(None, None, 0, None))
    mapped = torch.vmap(mapped, in_dims=(0, 0, 0, 0))
    try:
        value = mapped(b, h, q_idx, kv_idx)
    except Exception as error:
        want = "a mask_mod that torch.vmap can map"
        raise MaskError(
            expected("flex.mask_mod", want, f"{type(error).__name__}: {error}")
        ) from error
    if value.dtype != torch.bool:
        raise MaskTypeError(expected("flex.mask_mod", "bool values", value.dtype))
    return value
