"""Named kinds of schedule, built from launch order, visits and ranks.

Launch: heads go in sections of ``heads_in_flight``; within a section, place p of every head comes
before place p + 1.  So at most ``heads_in_flight`` heads share the machine (and its L2), and
columns of one head are that many tickets apart.

Kinds whose ranks follow the launch order progress with any number of resident CTAs.  ``shift`` and
``symmetric_shift`` need many; ``check`` computes how many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from cute_kernels.errors import ScheduleError, expected, one_of

from .ranks import BlockGrid, block_grid, column_order, integer, ranks
from .schedule import Schedule

WALKS = ("ascending", "descending", "by_rank", "cyclic", "partial_then_full")


def left_to_right(block_mask, *, heads=None, heads_in_flight=1, walk="ascending") -> Schedule:
    """Schedule with columns launched, and ranked, in ascending order.

    block_mask: a ``BlockMask``, or uint8 blocks [M, N] or [G, M, N] (0 empty, 1 partial, 2 full).
    heads: (batch, head) pairs of the launch, index b * H + h; None is one for each of the mask's.
    heads_in_flight: heads interleaved.  walk: one of ``WALKS``, or visit keys [M], [N, M] (least
    first).  Raises ScheduleError.

    Example:
        >>> mask = ck.BlockMask.causal(1024, 1024)
        >>> ck.schedulers.left_to_right(mask, heads=2).heads
        2
    """
    grid = block_grid(block_mask, heads)
    order = np.arange(grid.num_kv_blocks)[None]
    return build(grid, order, walk=walk, heads_in_flight=heads_in_flight, name="left_to_right")


def spt(block_mask, *, heads=None, heads_in_flight=1, walk="ascending") -> Schedule:
    """Schedule from right to left, the shortest column of a causal mask first.

    Arguments as in ``left_to_right``.

    Example:
        >>> mask = ck.BlockMask.causal(1024, 1024)
        >>> ck.schedulers.spt(mask, heads=2).heads
        2
    """
    grid = block_grid(block_mask, heads)
    order = np.arange(grid.num_kv_blocks)[None, ::-1]
    return build(grid, order, walk=walk, heads_in_flight=heads_in_flight, name="spt")


def lpt(block_mask, *, heads=None, heads_in_flight=1, walk="ascending") -> Schedule:
    """Schedule with each head's longest column first (most blocks; ties left to right).

    Example:
        >>> mask = ck.BlockMask.causal(1024, 1024)
        >>> ck.schedulers.lpt(mask, heads=2).heads
        2
    """
    facts = {"walk": walk, "heads_in_flight": heads_in_flight, "name": "lpt"}
    return _by_length(block_grid(block_mask, heads), longest_first=True, **facts)


def shortest_first(block_mask, *, heads=None, heads_in_flight=1, walk="ascending") -> Schedule:
    """Schedule with each head's shortest column first (fewest blocks; ties left to right).

    With a group of query heads a column that ends sooner never waits behind a longer one.

    Example:
        >>> mask = ck.BlockMask.causal(1024, 1024)
        >>> ck.schedulers.shortest_first(mask, heads=2).heads
        2
    """
    facts = {"walk": walk, "heads_in_flight": heads_in_flight, "name": "shortest_first"}
    return _by_length(block_grid(block_mask, heads), longest_first=False, **facts)


def _by_length(grid: BlockGrid, longest_first: bool, **facts) -> Schedule:
    order = by_length(grid, longest_first)
    return build(grid, order[grid.mask_of] if len(order) > 1 else order, **facts)


def permutation(
    block_mask, *, order, heads=None, write_order=None, heads_in_flight=1, walk="ascending"
) -> Schedule:
    """Schedule of any column order, [N] or [heads, N], first launched first.

    write_order: columns [N] or [heads, N] from first to last dQ writer; None is the launch order.
    With another write order the schedule may need many resident CTAs: see ``check``.

    Example:
        >>> mask = ck.BlockMask.causal(256, 256)
        >>> ck.schedulers.permutation(mask, order=range(mask.num_kv_blocks), heads=2).heads
        2
    """
    grid = block_grid(block_mask, heads)
    size = (grid.num_kv_blocks, grid.heads)
    launch = column_order("order", order, *size)
    write = None if write_order is None else column_order("write_order", write_order, *size)
    return build(grid, launch, write, walk, heads_in_flight, "permutation")


def shift(block_mask, *, heads=None, heads_in_flight=1) -> Schedule:
    """Schedule whose column n starts at row n M / N and goes round; rows are written in that order.

    Without a wait on a full mask with every column resident (DASH, arXiv 2601.21824).

    Example:
        >>> mask = ck.BlockMask.full(1024, 1024)
        >>> ck.schedulers.shift(mask, heads=2).heads
        2
    """
    grid = block_grid(block_mask, heads)
    return _by_time(grid, _cyclic(grid.num_q_blocks, grid.num_kv_blocks), heads_in_flight, "shift")


def symmetric_shift(block_mask, *, heads=None, heads_in_flight=1) -> Schedule:
    """Schedule for causal masks: columns i and N - 1 - i on one slot, all slots equally long.

    The left half goes round the rows that all of it shares, then up its own; the right half
    goes down (DASH, arXiv 2601.21824).

    Example:
        >>> mask = ck.BlockMask.full(1024, 1024)
        >>> ck.schedulers.symmetric_shift(mask, heads=2).heads
        2
    """
    grid = block_grid(block_mask, heads)
    rows, columns = grid.num_q_blocks, grid.num_kv_blocks
    half = (columns + 1) // 2
    column, row = np.arange(columns)[:, None], np.arange(rows)[None, :]
    first = column * rows // max(1, columns)
    shared = (half - 1) * rows // max(1, columns) if columns else 0
    tall = max(1, rows - shared)
    around = (row - shared - column * tall // max(1, half)) % tall
    above = tall + (row - first) % max(1, shared)
    left_half = np.where(row >= shared, around, above)
    down = rows - first[::-1] + rows - 1 - row
    time = np.where(column < half, left_half, down)
    return _by_time(grid, time, heads_in_flight, "symmetric_shift")


KINDS = {
    "left_to_right": left_to_right,
    "spt": spt,
    "lpt": lpt,
    "shortest_first": shortest_first,
    "shift": shift,
    "symmetric_shift": symmetric_shift,
}


def by_length(grid: BlockGrid, longest_first: bool) -> np.ndarray:
    """Return each mask's columns by their count of blocks, int64 [G, N]; ties left to right."""
    count = (grid.blocks != 0).sum(1, dtype=torch.int32).cpu().numpy()
    return np.argsort(-count if longest_first else count, axis=1, kind="stable")


def build(
    grid: BlockGrid,
    order: np.ndarray,
    write_order: np.ndarray | None = None,
    walk: str | np.ndarray = "ascending",
    heads_in_flight: int = 1,
    name: str = "given",
) -> Schedule:
    """Build a schedule of column orders [1 or heads, N] (write order also [1, M, N]) and a walk.

    The orders are permutations already; what a caller gave goes through ``column_order`` first.
    """
    integer("heads_in_flight", heads_in_flight)
    write = order if write_order is None else write_order
    # Heads of one mask and order share lists: the set of each head, and a head of each set.
    facts = [grid.mask_of[:, None], *(part for part in (order, write) if len(part) > 1)]
    _, sets, set_of_head = np.unique(
        np.concatenate(facts, axis=1), axis=0, return_index=True, return_inverse=True
    )
    masks = torch.from_numpy(grid.mask_of[sets]).to(grid.blocks.device)
    blocks = grid.blocks.index_select(0, masks)
    write = write[sets] if len(write) > 1 else write
    rank_table = ranks(blocks, torch.from_numpy(write.copy())).cpu().numpy()
    host = blocks.cpu().numpy()
    return assemble(
        host,
        Entries.of(host).visits(walk, rank_table),
        rank_table,
        launch(order, even(grid.heads, heads_in_flight)),
        set_of_head.reshape(-1),
        block_size=grid.block_size,
        heads_in_flight=min(heads_in_flight, grid.heads),
        name=name,
    )


@dataclass(frozen=True, eq=False)
class Entries:
    """Blocks of masks [S, M, N] that are not empty, by mask, column and row.

    blocks    uint8 [S, M, N]
    row       int64 [E]
    count     int64 [S, N]   of each column
    """

    blocks: np.ndarray
    row: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, blocks: np.ndarray) -> Entries:
        """Return the entries of blocks uint8 [S, M, N]."""
        rows = blocks.shape[1]
        present = np.ascontiguousarray((blocks != 0).transpose(0, 2, 1))
        count = np.count_nonzero(present, axis=2)
        return cls(blocks, np.flatnonzero(present) % max(1, rows), count)

    def pick(self, masks: np.ndarray) -> Entries:
        """Return the entries of some masks, int [..]."""
        if len(masks) == len(self.count) and (masks == np.arange(len(masks))).all():
            return self
        stop = self.stop.tolist()
        start = [0, *stop]
        rows = [self.row[start[mask] : stop[mask]] for mask in masks]
        return Entries(self.blocks[masks], np.concatenate(rows), self.count[masks])

    @cached_property
    def stop(self) -> np.ndarray:
        """End of each mask's entries, int64 [S]."""
        return np.cumsum(self.count.sum(axis=1))

    def visits(self, walk: str | np.ndarray, place: np.ndarray | None) -> np.ndarray:
        """Return each column's query blocks in visiting order, int32 [S, N, L]; -1 past the end.

        place: int32 [S, M, N], the ranks (for the walk by rank).
        """
        count = self.count
        listed = np.arange(int(count.max(initial=0))) < count[..., None]
        out = np.full(listed.shape, -1, np.int32)
        out[listed] = self.row
        if isinstance(walk, str) and walk == "descending":
            last = np.maximum(0, count[..., None] - 1 - np.arange(listed.shape[2]))
            out = np.where(listed, np.take_along_axis(out, last, 2), -1) if out.size else out
        elif not (isinstance(walk, str) and walk == "ascending"):
            # Each column in the order of its keys, equal ones ascending.
            masks, rows, columns = self.blocks.shape
            keys = np.broadcast_to(_walk_key(self.blocks, walk, place), (masks, columns, rows))
            column = np.repeat(np.arange(count.size), count.reshape(-1))
            key_of = keys.reshape(masks * columns, rows)[column, self.row]
            out[listed] = self.row[np.lexsort((key_of, column))]
        return out


def _walk_key(blocks: np.ndarray, walk: str | np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return visit keys, least first, that broadcast to [S, N, M]."""
    rows, columns = blocks.shape[1:]
    row = np.arange(rows, dtype=np.int32)
    if isinstance(walk, str):
        if walk == "cyclic":
            return _cyclic(rows, columns)
        if walk == "by_rank":
            return place.transpose(0, 2, 1)
        if walk == "partial_then_full":
            return (blocks == 2).transpose(0, 2, 1) * np.int32(rows) + row
        raise ScheduleError(one_of("walk", WALKS, walk))
    key = np.asarray(walk)
    if key.dtype.kind not in "iu":
        raise ScheduleError(expected("walk", "a rule's name or integer visit keys", key.dtype))
    if key.shape not in ((rows,), (columns, rows), (len(blocks), columns, rows)):
        want = f"keys of shape [{rows}] or [{columns}, {rows}]"
        raise ScheduleError(expected("walk", want, list(key.shape)))
    return np.minimum(key.astype(np.int64), np.iinfo(np.int64).max - 1)


def launch(order: np.ndarray, sections: list[int]) -> np.ndarray:
    """Return tickets, int32 [T, 2], of column orders [1 or heads, N]; sections: heads of each."""
    heads, columns = sum(sections), order.shape[1]
    full = np.broadcast_to(order, (heads, columns))
    parts, start = [np.zeros((0, 2), np.int32)], 0
    for size in sections:
        section = full[start : start + size].T
        head = np.broadcast_to(np.arange(start, start + size), section.shape)
        parts.append(np.stack((head, section), axis=2).reshape(-1, 2))
        start += size
    return np.concatenate(parts).astype(np.int32)


def even(heads: int, heads_in_flight: int) -> list[int]:
    """Return sections of ``heads_in_flight`` heads, the last one shorter."""
    full_sections, remainder = divmod(heads, heads_in_flight)
    return [heads_in_flight] * full_sections + [remainder] * (remainder > 0)


def assemble(
    blocks: np.ndarray,
    rows: np.ndarray,
    place: np.ndarray,
    order: np.ndarray,
    list_of_head: np.ndarray,
    **facts,
) -> Schedule:
    """Build a ``Schedule`` from visits [S, N, L] and ranks [S, M, N] of the masks [S, M, N]."""
    height, columns = blocks.shape[1:]
    listed = rows >= 0
    q_block, count = rows[listed], np.count_nonzero(listed, axis=2).reshape(-1)
    first = np.arange(len(blocks))[:, None] * (height * columns) + np.arange(columns)
    # Each entry's index in [S, M, N].
    block = q_block * np.int64(columns)
    block += first.reshape(-1).repeat(count)
    return Schedule(
        height,
        columns,
        len(list_of_head),
        order,
        list_of_head.astype(np.int32),
        np.concatenate(([0], np.cumsum(count))).astype(np.int32),
        q_block,
        blocks.reshape(-1).take(block) == 1,
        place.reshape(-1).take(block).astype(np.int32),
        **facts,
    )


def _cyclic(rows: int, columns: int) -> np.ndarray:
    """Return [N, M], steps from a column's own row n M / N, downwards and round."""
    column, row = np.arange(columns)[:, None], np.arange(rows)[None, :]
    return (row - column * rows // max(1, columns)) % max(1, rows)


def _by_time(grid: BlockGrid, time: np.ndarray, heads_in_flight: int, name: str) -> Schedule:
    """Schedule visits by time [N, M], and so the writers of each row, ties left to right."""
    order, write = np.arange(grid.num_kv_blocks)[None], np.argsort(time.T, axis=1, kind="stable")
    return build(grid, order, write[None], time, heads_in_flight, name)
