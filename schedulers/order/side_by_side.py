"""One schedule of masks that share no block, such as those of a varlen batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cute_kernels.errors import ScheduleError, expected

from .ranks import block_grid
from .schedule import Schedule

_PARTIAL = 1


def side_by_side(parts: Sequence[tuple[int, Schedule]], mask: object) -> Schedule:
    """Combine the visits and ranks of parts, each at its place on the diagonal of ``mask``.

    parts: (first block, schedule): query and key blocks from there on; the parts do not overlap.
        Tickets are taken in this order, those of blocks that no part has at the end.
    mask: whose blocks are those of the parts; it says which of them are partial.

    A sum of dQ, dK or dV has the order that its part gives it.  A part that waits for earlier
    tickets only does so here.
    """
    grid = block_grid(mask, parts[0][1].heads if parts else None)
    _check_parts(parts, grid.num_q_blocks, grid.num_kv_blocks)
    masks, sets, list_of_head = _sets(parts, grid.mask_of)
    ascending = sorted(range(len(parts)), key=lambda i: parts[i][0])
    columns = np.arange(grid.num_kv_blocks, dtype=np.int32)
    count = np.zeros((sets.shape[1], len(columns)), np.int32)
    rows, ranks, places = [], [], []
    for set_index, of_part in enumerate(sets.T):
        for i in ascending:
            begin, part = parts[i]
            first = of_part[i] * part.num_kv_blocks
            offset = part.offset[first : first + part.num_kv_blocks + 1]
            count[set_index, begin : begin + part.num_kv_blocks] = np.diff(offset)
            inside = slice(offset[0], offset[-1])
            rows.append(part.q_block[inside] + np.int32(begin))
            ranks.append(part.rank[inside])
            places.append(np.repeat(columns[begin:][: part.num_kv_blocks], np.diff(offset)))
    q_block, rank, column = (_joined(each) for each in (rows, ranks, places))
    kinds = grid.host[np.repeat(masks, count.sum(axis=1)), q_block, column]
    return Schedule(
        num_q_blocks=grid.num_q_blocks,
        num_kv_blocks=grid.num_kv_blocks,
        heads=grid.heads,
        order=_tickets(parts, grid.heads, columns),
        list_of_head=list_of_head,
        offset=np.concatenate(([0], count.reshape(-1).cumsum())).astype(np.int32),
        q_block=q_block,
        partial=kinds == _PARTIAL,
        rank=rank,
        block_size=grid.block_size,
        heads_in_flight=max((part.heads_in_flight for _, part in parts), default=0),
        name="side by side",
    )


def _check_parts(parts: Sequence[tuple[int, Schedule]], rows: int, columns: int) -> None:
    end = 0, 0
    for begin, part in sorted(parts, key=lambda each: each[0]):
        if begin < max(end):
            want = f"a first block of at least {max(end)}, where the part before it ends"
            raise ScheduleError(expected("parts", want, begin))
        end = begin + part.num_q_blocks, begin + part.num_kv_blocks
        if part.heads != parts[0][1].heads:
            want = f"{parts[0][1].heads} heads, as the first part has"
            raise ScheduleError(expected("parts", want, part.heads))
    if end[0] > rows or end[1] > columns:
        raise ScheduleError(expected("parts", f"{rows} x {columns} blocks like the mask", end))


def _sets(
    parts: Sequence[tuple[int, Schedule]], mask_of: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ([S], [parts, S], [heads]): mask and parts' lists of each set, set of each head."""
    lists = np.stack([mask_of, *(part.list_of_head for _, part in parts)])
    sets, of_head = np.unique(lists, axis=1, return_inverse=True)
    return sets[0], sets[1:], of_head.reshape(-1).astype(np.int32)


def _tickets(parts: Sequence[tuple[int, Schedule]], heads: int, columns: np.ndarray) -> np.ndarray:
    orders, free = [], np.ones(len(columns), bool)
    for begin, part in parts:
        orders.append(part.order + np.array([0, begin], np.int32))
        free[begin : begin + part.num_kv_blocks] = False
    free_tickets = np.stack(np.meshgrid(np.arange(heads), columns[free], indexing="ij"), axis=-1)
    return np.concatenate([*orders, free_tickets.reshape(-1, 2)]).astype(np.int32)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
