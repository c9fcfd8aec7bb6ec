"""Ways in which ranks add their leaves: the same sum, the same bytes, other messages.

A rank has the leaves l of its part of K, in fp32; ranks ascend, and so do the leaves of each.  The
sum of every element is ((l0 + l1) + l2) + ..., then the bias, then one rounding.

    gathered   every rank gets all leaves of all rows and adds them
    scattered  every rank gets all leaves of some rows, adds them, and gets the other rows rounded
    chained    of two ranks: the sum of rank 0 passes to rank 1, which adds its leaves to it and
               passes the rounded rows back

Which path runs follows the sizes, which every rank knows; no bit follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..gemm import op
from ..runtime import process_groups

GATHERED, SCATTERED, CHAINED = PATHS = ("gathered", "scattered", "chained")


class Sizes(NamedTuple):
    """Sizes of a sum over ranks: all that the choice of a path may read."""

    rows: int
    columns: int
    leaves: int  # of each rank
    ranks: int

    def all_leaves(self) -> int:
        """Bytes of the leaves of all ranks."""
        return self.ranks * self.leaves * self.rows * self.columns * 4


def choose(sizes: Sizes, gather_bytes: int) -> str:
    """Path of an exchange.

    Two ranks pass a sum on, in which one of them waits for no message.  With more, a chain's steps
    cost more host time than collectives, and on four H200s its messages took longer than NCCL's
    collectives also in a CUDA graph (docs/notes/tensor_parallel.md).

    Args:
        gather_bytes: Up to so many bytes of all ranks' leaves, they are gathered.
    """
    if sizes.rows < sizes.ranks or sizes.all_leaves() <= gather_bytes:
        return GATHERED
    return CHAINED if sizes.ranks == 2 else SCATTERED


class Sum(NamedTuple):
    """A sum over ranks; ``leaves_of(rows)`` computes a rank's leaves: fp32 [leaves, rows, N]."""

    leaves_of: Callable[[slice], torch.Tensor]
    sizes: Sizes
    bias: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup

    def run(self, path: str, block: int) -> torch.Tensor:
        """The sum [rows, N] on every rank; no more than ``block`` rows are exchanged at a time.

        The leaves of a row do not depend on other rows, so blocks show in no bit.
        """
        if path == CHAINED:
            return chained(self, block)
        exchange, rows = gathered if path == GATHERED else scattered, self.sizes.rows
        sums = [exchange(self.slice_rows(_span(i, block, rows))) for i in range(0, rows, block)]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def slice_rows(self, block: slice) -> Sum:
        """The sum of some rows."""

        def leaves_of(span: slice) -> torch.Tensor:
            return self.leaves_of(slice(block.start + span.start, block.start + span.stop))

        sizes = self.sizes._replace(rows=block.stop - block.start)
        return self._replace(leaves_of=leaves_of, sizes=sizes)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor."""
        return torch.empty(shape, dtype=dtype, device=self.device)


def gathered(total: Sum) -> torch.Tensor:
    """[rows, N], by one collective."""
    leaves = process_groups.all_gather(total.leaves_of(slice(0, total.sizes.rows)), total.group)
    return op.add_leaves(leaves.flatten(0, 1), total.bias, total.dtype)


def scattered(total: Sum) -> torch.Tensor:
    """[rows, N], by an all-to-all of leaves and a gathering of rounded rows.

    Every rank adds an equal share of the rows; the last one's may be shorter.
    """
    sizes, ranks = total.sizes, total.sizes.ranks
    share = -(-sizes.rows // ranks)
    received = _exchange(total, share)
    # Rows after the last one are gathered as they are, and dropped.
    out = total.new(share * ranks, sizes.columns, dtype=total.dtype)
    rounded = total.new(share, sizes.columns, dtype=total.dtype)
    if count := received.shape[2]:
        # Ranks ascend, and so do the leaves of each: the order is that of one rank.
        op.add_leaves_into(rounded[:count], (received.flatten(0, 1),), total.bias)
    process_groups.start_gather(out.view(-1), rounded.view(-1), total.group)()
    return out[: sizes.rows]


def _exchange(total: Sum, share: int) -> torch.Tensor:
    """[ranks, leaves, rows of this rank, N]: the leaves of all ranks, of ``share`` rows each."""
    sizes, rank = total.sizes, total.group.rank()
    ranks, rows = sizes.ranks, sizes.rows
    spans = [_span(r * share, share, rows) for r in range(ranks)]
    counts = [span.stop - span.start for span in spans]
    leaves = total.leaves_of(slice(0, rows))
    if sizes.leaves == 1:
        mine = leaves.view(-1)
    elif rows == share * ranks:
        mine = leaves.unflatten(1, (ranks, share)).transpose(0, 1).reshape(-1)
    else:
        mine = torch.cat([leaves[:, span].reshape(-1) for span in spans])
    row = sizes.leaves * sizes.columns
    received = total.new(ranks, sizes.leaves, counts[rank], sizes.columns)
    sent = [count * row for count in counts]
    parts = received.view(-1), mine, [counts[rank] * row] * ranks, sent
    process_groups.start_all_to_all(*parts, total.group)()
    return received


def chained(total: Sum, block: int) -> torch.Tensor:
    """[rows, N] on two ranks, by messages.

    Rank 0 sums its leaves of piece p in step p, and rank 1 adds its own to that sum in step p + 1
    and rounds.  In each step a rank receives what it works on in the next one.  While messages are
    in flight, the leaves of the next piece are computed.
    """
    sizes, group = total.sizes, total.group
    rank, other = group.rank(), 1 - group.rank()
    process_groups.connect(group, total.device)
    pieces = -(-sizes.rows // block)
    size = -(-sizes.rows // pieces)
    spans = [_span(first, size, sizes.rows) for first in range(0, sizes.rows, size)]
    out = total.new(sizes.rows, sizes.columns, dtype=total.dtype)
    following = iter(spans)
    leaves, running = total.leaves_of(next(following)), None

    def piece(index: int) -> slice | None:
        return spans[index] if 0 <= index < len(spans) else None

    for step in range(len(spans) + 1):
        sends, receives = [], []
        if (span := piece(step - rank)) is not None:
            if rank == 0:
                part = op.add_leaves_into(leaves[0], (leaves,), None)
            else:
                addends = running.unsqueeze(0), leaves
                part = op.add_leaves_into(out[span], addends, total.bias)
            sends.append((part, other))
            leaves = None
        if (span := piece(step - other)) is not None:
            running = out[span] if rank == 0 else total.new(span.stop - span.start, sizes.columns)
            receives.append((running, other))
        finish = process_groups.start_messages(sends, receives, group)
        if leaves is None and (span := next(following, None)) is not None:
            leaves = total.leaves_of(span)
        finish()
    return out


def _span(first: int, size: int, rows: int) -> slice:
    return slice(min(first, rows), min(first + size, rows))
