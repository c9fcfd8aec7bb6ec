"""Watchdog of ordered backwards (CUTE_KERNELS_WATCHDOG_MS): names the turn that does not come.

For debugging.  The kernel records what it waited for, stops waiting and ends (dsl/turnstile.py);
its gradients are wrong then, and `require_turns` raises.  The kernel does not print or trap: a call
to printf makes ptxas await every WGMMA, which is another kernel to debug, and a trap loses what was
written before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import settings
from ..errors import WatchdogError
from .masks import BLOCK, Order

#: Size of the record, int32: 0, or 1 and then the tile of rows among those of all query heads, the
#: rank that is waited for there, and the tiles of dQ that have landed.
FIELDS = 4
_NAME = f"{settings.PREFIX}WATCHDOG_MS"


def record(device: torch.device) -> Tensor:
    """Return a record of zeros for a kernel to write.

    Raises:
        WatchdogError: a graph is being captured, in which nothing could read it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise WatchdogError(f"{_NAME}: cannot be read while a CUDA graph is captured: unset it")
    return torch.zeros(FIELDS, dtype=torch.int32, device=device)


def require_turns(
    record: Tensor, order: Order, tiles: int, tile_m: int, group: int, parts: int, limit_ms: int
) -> None:
    """Wait for the device, and raise if a turn did not come.

    record: as the kernel left it; tiles: of a query head, ``tile_m`` rows each; group: query heads
    per head of ``order``; parts: tickets per ticket of ``order``.

    Raises:
        WatchdogError: a turn did not come; the message names it, and whose turn it was.
    """
    given_up, row, rank, landed = record.tolist()
    if not given_up:
        return
    head, tile = divmod(row, tiles)
    rank, landed = rank // parts, landed // parts
    visit = order, head // group, tile * tile_m // BLOCK[0]
    raise WatchdogError(
        f"block_sparse_attention: a backward gave up after {limit_ms} ms ({_NAME}): at query head "
        f"{head}, row tile {tile}, {_ticket_of(*visit, rank)} waits for rank {rank}; {landed} have "
        f"landed, and the turn of rank {landed} is that of {_ticket_of(*visit, landed)}"
    )


def order_of_pack(tickets: Tensor, table: Tensor, hi: int) -> Order:
    """Return the order of a varlen batch, whose kernels follow formulas (``device/packed``); waits.

    tickets, table: as ``kernel_pack_sm90`` wrote them; hi: of the band.
    """
    tickets = tickets.cpu()
    tickets, last = tickets[: int(tickets[-1, 0])], table.cpu()[:, 3]
    head, block, begin, end = tickets.unbind(1)
    ends = (end - begin).cumsum(0)
    index = torch.arange(int(ends[-1]), dtype=torch.int64, device="cpu")
    q_block = index - (ends - end).repeat_interleave(end - begin)
    column = block.repeat_interleave(end - begin)
    rank = torch.minimum(last[column], q_block + (hi + BLOCK[1] - 1) // BLOCK[1]) - column
    listed = torch.stack((head, block, ends - (end - begin), ends), dim=1)
    nothing = tickets.new_empty(0)
    return Order(listed, nothing, nothing, 2 * q_block, rank, nothing)


def _ticket_of(order: Order, head: int, q_block: int, rank: int) -> str:
    """Name the ticket that visits a query block at a rank: one, in a schedule that is valid."""
    of_rank = ((order.entry >> 1 == q_block) & (order.rank == rank)).tolist()
    tickets = [
        f"key block {block} (ticket {t})"
        for t, (of_head, block, begin, end) in enumerate(order.ticket.tolist())
        if of_head == head and any(of_rank[begin:end])
    ]
    return " and ".join(tickets) or "nobody"
