"""Ways in which ranks add their leaves: the same sum, the same bytes, other messages.

A rank has the leaves l of its part of K, in fp32; ranks ascend, and so do the leaves of each.  The
sum of every element is ((l0 + l1) + l2) + ..., then the bias, then one rounding.

    gathered   every rank gets all leaves of all rows and adds them
    scattered  every rank gets all leaves of some rows, adds them, and gets the other rows rounded
    chained    a running sum passes from rank to rank, ascending; each adds its leaves to it, and
               the last rank passes the rounded rows on; rows are cut into pieces, so that all
               ranks work at once

Which one runs follows the sizes, which every rank knows; no bit follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..gemm import op
from ..runtime import process_groups

GATHERED, SCATTERED, CHAINED = PATHS = ("gathered", "scattered", "chained")
#: Rows of one rank from which on products are computed, and sent, for one rank after the other: so
#: many fill an SM90 with tiles of 4096 columns.
PRODUCT_ROWS = 1024
#: Bytes that a link moves in the time that a step of messages takes the host: 50 us at 320 GB/s.
#: A prediction, not a measurement (docs/notes/tensor_parallel.md).
STEP_BYTES = 16 << 20


class Sizes(NamedTuple):
    """Sizes of a sum over ranks: all that the choice of a path may read."""

    rows: int
    columns: int
    leaves: int  # of each rank
    ranks: int
    item_bytes: int  # of an element of the result

    @property
    def elements(self) -> int:
        """Elements of the result."""
        return self.rows * self.columns

    def all_leaves(self) -> int:
        """Bytes of the leaves of all ranks."""
        return self.ranks * self.leaves * self.elements * 4

    def received(self, path: str) -> int:
        """Bytes that a rank receives; in a chain, the rank that receives most."""
        others = self.ranks - 1
        if path == GATHERED:
            return self.all_leaves() * others // self.ranks
        if path == SCATTERED:  # others' leaves of this rank's rows; others' rounded rows
            return self.elements * others * (self.leaves * 4 + self.item_bytes) // self.ranks
        if self.ranks == 2:  # rank 1 receives the running sum, rank 0 the rounded rows
            return self.elements * 4
        return self.elements * (4 + self.item_bytes)

    def steps(self, pieces: int) -> int:
        """Steps of a chain of so many pieces: up the ranks, and down the ring of results."""
        return pieces + 2 * self.ranks - 3


def choose(sizes: Sizes, gather_bytes: int) -> tuple[str, int]:
    """The path of least predicted time, and the pieces of a chain.

    Times are in bytes of a link.  A chain of p pieces takes (p + c) (bytes / p + step), c = 2 ranks
    - 3, which is least at p = sqrt(c bytes / step).

    Args:
        gather_bytes: Up to so many bytes of all ranks' leaves, they are gathered.
    """
    if sizes.rows < sizes.ranks or sizes.all_leaves() <= gather_bytes:
        return GATHERED, 1
    size = sizes.received(CHAINED)
    pieces = round(math.sqrt(sizes.steps(0) * size / STEP_BYTES))
    pieces = max(1, min(pieces, sizes.rows))
    chained = sizes.steps(pieces) * (size / pieces + STEP_BYTES)
    scattered = sizes.received(SCATTERED) + 2 * STEP_BYTES
    return (CHAINED, pieces) if chained < scattered else (SCATTERED, 1)


class Sum(NamedTuple):
    """A sum over ranks; ``leaves_of(rows)`` computes a rank's leaves: fp32 [leaves, rows, N]."""

    leaves_of: Callable[[slice], torch.Tensor]
    sizes: Sizes
    bias: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup

    def run(self, path: str, pieces: int) -> torch.Tensor:
        """The sum [rows, N] on every rank."""
        if path == CHAINED:
            return chained(self, pieces)
        return (gathered if path == GATHERED else scattered)(self)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor."""
        return torch.empty(shape, dtype=dtype, device=self.device)


def gathered(total: Sum) -> torch.Tensor:
    """[rows, N], by one collective."""
    every = process_groups.all_gather(total.leaves_of(slice(0, total.sizes.rows)), total.group)
    return op.add_leaves(every.flatten(0, 1), total.bias, total.dtype)


def scattered(total: Sum) -> torch.Tensor:
    """[rows, N], by a message between every two ranks and one collective.

    Products of many rows are computed for one rank after the other, while others are sent.
    """
    sizes, group = total.sizes, total.group
    ranks, rank = sizes.ranks, group.rank()
    process_groups.connect(group, total.device)
    share = -(-sizes.rows // ranks)
    spans = [_span(r * share, share, sizes.rows) for r in range(ranks)]
    counts = [span.stop - span.start for span in spans]
    leaves_of, whole = total.leaves_of, None
    if share < PRODUCT_ROWS:
        whole = leaves_of(slice(0, sizes.rows))

        def leaves_of(span: slice) -> torch.Tensor:
            return whole[:, span].contiguous()

    others = total.new(ranks - 1, sizes.leaves, counts[rank], sizes.columns)
    # In round i each rank sends to the i-th after it, and receives from the i-th before it.
    rounds = [[i] for i in range(1, ranks)] if whole is None else [range(1, ranks)]
    started = []
    for distances in rounds:
        targets = [(rank + distance) % ranks for distance in distances]
        sources = [(rank - distance) % ranks for distance in distances if counts[rank]]
        sends = [(leaves_of(spans[to]), to) for to in targets if counts[to]]
        receives = [(others[source - (source > rank)], source) for source in sources]
        started.append(process_groups.start_messages(sends, receives, group))
    rounded = total.new(share, sizes.columns, dtype=total.dtype)
    # A view is enough for leaves that are not sent.
    own = whole[:, spans[rank]] if whole is not None else None
    if own is None and counts[rank]:
        own = leaves_of(spans[rank])
    for finish in started:
        finish()
    if counts[rank]:
        # Ranks ascend, and so do the leaves of each: the order is that of one rank.
        lower, higher = others[:rank].flatten(0, 1), others[rank:].flatten(0, 1)
        op.add_leaves_into(rounded[: counts[rank]], (lower, own, higher), total.bias)
    # Rows after the last one are sent as they are, and dropped.
    return process_groups.all_gather(rounded, group).flatten(0, 1)[: sizes.rows]


def chained(total: Sum, pieces: int) -> torch.Tensor:
    """[rows, N], by messages between neighbours only.

    Rank r adds its leaves of piece p in step r + p, and sends the sum to rank r + 1 at the end of
    it.  The last rank rounds; rounded pieces go round the ring, one rank further a step.  In each
    step a rank receives what it works on in the next one, so no rank waits for one that waits for
    it.  While messages are under way, the leaves of the next piece are computed.
    """
    sizes, group = total.sizes, total.group
    ranks, rank = sizes.ranks, group.rank()
    process_groups.connect(group, total.device)
    last, above, below = ranks - 1, (rank + 1) % ranks, (rank - 1) % ranks
    size = -(-sizes.rows // pieces)
    spans = [_span(first, size, sizes.rows) for first in range(0, sizes.rows, size)]
    hops = (rank + 1) % ranks  # from the last rank to this one, along the ring of results
    out = total.new(sizes.rows, sizes.columns, dtype=total.dtype)
    following = iter(spans)
    leaves, running = total.leaves_of(next(following)), None

    def piece(index: int) -> slice | None:
        return spans[index] if 0 <= index < len(spans) else None

    for step in range(sizes.steps(len(spans))):
        sends, receives = [], []
        if (span := piece(step - rank)) is not None:
            addends = (leaves,) if rank == 0 else (running.unsqueeze(0), leaves)
            if rank == last:
                op.add_leaves_into(out[span], addends, total.bias)
            else:
                state = addends[0][0]
                sends.append((op.add_leaves_into(state, addends, None), above))
            leaves = None
        if rank > 0 and (span := piece(step - below)) is not None:
            running = total.new(span.stop - span.start, sizes.columns)
            receives.append((running, below))
        if hops < last and (span := piece(step - last - hops)) is not None:
            sends.append((out[span], above))
        if hops > 0 and (span := piece(step - last - hops + 1)) is not None:
            receives.append((out[span], below))
        finish = process_groups.start_messages(sends, receives, group)
        if leaves is None and (span := next(following, None)) is not None:
            leaves = total.leaves_of(span)
        finish()
    return out


def _span(first: int, size: int, rows: int) -> slice:
    return slice(min(first, rows), min(first + size, rows))
