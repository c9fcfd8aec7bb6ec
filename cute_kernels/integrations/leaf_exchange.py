"""Ways in which ranks add their leaves: the same sum, the same bytes, other messages.

A rank has the leaves l of its part of K, in fp32; ranks ascend, and so do the leaves of each.  The
sum of every element is ((l0 + l1) + l2) + ..., then the bias, then one rounding.

    gathered   every rank gets all leaves of all rows and adds them
    scattered  every rank gets all leaves of some rows, adds them, and gets the other rows rounded
    chained    a running sum passes from rank to rank, ascending; each adds its leaves to it, and
               the last rank passes the rounded rows on; chosen for two ranks
    passed     the same, but a rank's product starts from the sum that it receives, in one launch
               on SM90: no leaf is in memory; chosen by no size, as it was not measured

Rows may be cut into pieces, so that products, messages and adds overlap; none is chosen so, as on
two H200s it gained nothing.  Which path runs follows the sizes, which every rank knows; no bit
follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..gemm import op
from ..runtime import process_groups

GATHERED, SCATTERED, CHAINED = PATHS = ("gathered", "scattered", "chained")
PASSED = "passed"


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
    """The path of an exchange, and its pieces.

    Two ranks pass a sum on, in which one of them waits for no message.  With more, a chain's steps
    cost more host time than collectives, and on four H200s its messages took longer than NCCL's
    collectives also in a CUDA graph.  A piece more costs a launch of everything, 0.4 ms of host
    time (docs/notes/tensor_parallel.md).

    Args:
        gather_bytes: Up to so many bytes of all ranks' leaves, they are gathered.
    """
    if sizes.rows < sizes.ranks or sizes.all_leaves() <= gather_bytes:
        return GATHERED, 1
    return (CHAINED if sizes.ranks == 2 else SCATTERED), 1


class Sum(NamedTuple):
    """A sum over ranks; ``leaves_of(rows)`` computes a rank's leaves: fp32 [leaves, rows, N]."""

    leaves_of: Callable[[slice], torch.Tensor]
    sizes: Sizes
    bias: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    #: ``part_of(rows, below, last, out)``: `part` in one launch; None: by leaves.
    part_of: Callable[..., torch.Tensor] | None = None

    def run(self, path: str, pieces: int) -> torch.Tensor:
        """The sum [rows, N] on every rank."""
        if path in (CHAINED, PASSED):
            return (chained if path == CHAINED else passed)(self, pieces)
        return gathered(self) if path == GATHERED else scattered(self, pieces)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def part(self, rows: slice, below: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """``out`` = ``below`` + this rank's leaves of some rows, ascending.

        below: fp32, the sum of the ranks below; None on the first rank.
        out: In fp32 the sum; else the result: the bias is added, and the sum is rounded.
        """
        bias = None if out.dtype == torch.float32 and self.dtype != torch.float32 else self.bias
        if self.part_of is not None and bias is None:
            return self.part_of(rows, below, out)
        leaves = self.leaves_of(rows)
        addends = (leaves,) if below is None else (below.unsqueeze(0), leaves)
        return op.add_leaves_into(out, addends, bias)


def gathered(total: Sum) -> torch.Tensor:
    """[rows, N], by one collective."""
    every = process_groups.all_gather(total.leaves_of(slice(0, total.sizes.rows)), total.group)
    return op.add_leaves(every.flatten(0, 1), total.bias, total.dtype)


def scattered(total: Sum, pieces: int = 1) -> torch.Tensor:
    """[rows, N], by an all-to-all of leaves and a gathering of rounded rows for each piece.

    A piece is a block of rows, of which every rank adds a part.  While leaves of a piece are under
    way, those of the next are computed and those of the one before are added.
    """
    sizes, ranks = total.sizes, total.sizes.ranks
    size = -(-sizes.rows // (pieces * ranks)) * ranks
    starts = range(0, sizes.rows, size)
    # Rows after the last one are gathered as they are, and dropped.
    out = total.new(-(-sizes.rows // ranks) * ranks, sizes.columns, dtype=total.dtype)
    gathering, exchanged = [], None
    for start in starts:
        piece = _span(start, size, sizes.rows)
        following = _start_exchange(total, piece), out[start : start + size]
        if exchanged is not None:
            gathering.append(_add_and_gather(total, *exchanged))
        exchanged = following
    gathering.append(_add_and_gather(total, *exchanged))
    for finish in gathering:
        finish()
    return out[: sizes.rows]


def _start_exchange(total: Sum, piece: slice) -> Callable[[], torch.Tensor]:
    """Send the leaves of a piece; the result waits for [ranks, leaves, rows of this rank, N]."""
    sizes, rank = total.sizes, total.group.rank()
    ranks, rows = sizes.ranks, piece.stop - piece.start
    share = -(-rows // ranks)
    spans = [_span(r * share, share, rows) for r in range(ranks)]
    counts = [span.stop - span.start for span in spans]
    leaves = total.leaves_of(piece)
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
    finish = process_groups.start_all_to_all(*parts, total.group)

    def arrived() -> torch.Tensor:
        finish()
        return received

    return arrived


def _add_and_gather(
    total: Sum, arrived: Callable[[], torch.Tensor], out: torch.Tensor
) -> Callable[[], None]:
    """Add this rank's rows of a piece, and start to gather those of all ranks in ``out``."""
    received = arrived()
    rounded = total.new(len(out) // total.sizes.ranks, total.sizes.columns, dtype=total.dtype)
    if count := received.shape[2]:
        # Ranks ascend, and so do the leaves of each: the order is that of one rank.
        op.add_leaves_into(rounded[:count], (received.flatten(0, 1),), total.bias)
    return process_groups.start_gather(out.view(-1), rounded.view(-1), total.group)


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


def passed(total: Sum, pieces: int) -> torch.Tensor:
    """[rows, N], by messages between neighbours, whose products start from the sum they receive.

    Rank r computes piece p in step 2 r + p, and sends it at the start of the next step, so that it
    is on its way while the next piece is computed.  The last rank rounds; rounded pieces go round
    the ring, one rank further a step.
    """
    sizes, group = total.sizes, total.group
    ranks, rank = sizes.ranks, group.rank()
    process_groups.connect(group, total.device)
    last, above, below = ranks - 1, (rank + 1) % ranks, (rank - 1) % ranks
    size = -(-sizes.rows // pieces)
    spans = [_span(first, size, sizes.rows) for first in range(0, sizes.rows, size)]
    hops = (rank + 1) % ranks  # from the last rank to this one, along the ring of results
    out = total.new(sizes.rows, sizes.columns, dtype=total.dtype)
    computed = running = None

    def piece(index: int) -> slice | None:
        return spans[index] if 0 <= index < len(spans) else None

    for step in range(3 * last + len(spans)):
        sends, receives, arriving = [], [], None
        if computed is not None:
            sends.append((computed, above))
        if rank > 0 and (span := piece(step + 1 - 2 * rank)) is not None:
            arriving = total.new(span.stop - span.start, sizes.columns)
            receives.append((arriving, below))
        if hops < last and (span := piece(step - 2 * last - hops - 1)) is not None:
            sends.append((out[span], above))
        if hops > 0 and (span := piece(step - 2 * last - hops)) is not None:
            receives.append((out[span], below))
        finish = process_groups.start_messages(sends, receives, group)
        computed = None
        if (span := piece(step - 2 * rank)) is not None:
            if rank == last:
                total.part(span, running, out[span])
            else:
                computed = total.new(span.stop - span.start, sizes.columns)
                total.part(span, running, computed)
        finish()
        running = arriving
    return out


def _span(first: int, size: int, rows: int) -> slice:
    return slice(min(first, rows), min(first + size, rows))
