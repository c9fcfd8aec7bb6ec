"""Experts cut over the ranks of a group: rows travel to their experts' ranks, and results back.

Rank r of R has the experts r E / R to (r + 1) E / R - 1.  A rank sorts its rows by expert, and one
collective gives an owner the rows of rank 0, of rank 1, ... for each of its experts; a second sort
puts them in the order of (expert, source rank, token, choice).  So an expert has its rows in the
order of the tokens of all ranks, one rank after the other, and its dW is the chain that one rank
with all these tokens would add.  Results go back the same way and are added where the token is.

Collectives only move bytes: none of them adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import ArgumentValueError, ShapeError, expected
from ..runtime import checking, process_groups
from ..runtime.dynamo import untraced
from . import checks, routing_op
from .tensors import Dispatch, Exchange, Permutation

DISPATCH, COMBINE = "dispatch", "combine"
#: Description of a call, which must be the same on every rank.
_FIELDS = ("function", "experts", "k of indices", "columns", "dtype", "requires_grad")


@untraced
def dispatch(
    x: torch.Tensor, indices: torch.Tensor, experts: int, group: object, verify: bool
) -> tuple[torch.Tensor, Dispatch]:
    """Send each token's row to its experts' ranks; the rows of this rank's experts."""
    process_groups.refuse_graphs("moe.dispatch")
    group = process_groups.group_of(group, "group")
    refusal, description = None, [0] * len(_FIELDS)
    try:
        checking.flag("verify", verify)
        checks.permute(x, indices, experts)
        checks.index_values(indices, experts)
        checks.ranks(experts, group.size())
        process_groups.check_exchangeable("x", x, group)
        description = _describe(DISPATCH, x, experts, indices.shape[1])
    except Exception as error:
        refusal = error
    _agree(description, refusal, group, verify)
    permutation = Permutation(*routing_op.sort(indices, experts))
    rows = routing_op.gather(x, *permutation)
    if group.size() == 1:
        exchange = Exchange(group, experts, [len(rows)], [len(rows)], None, None, verify)
        return rows, Dispatch(permutation.offsets, permutation, exchange)
    exchange, offsets = _plan(permutation, experts, group, verify)
    return _Move.apply(rows, exchange, False), Dispatch(offsets, permutation, exchange)


@untraced
def collect(rows: torch.Tensor, weights: torch.Tensor | None, dispatched: Dispatch) -> torch.Tensor:
    """Send results back to the ranks of their tokens: [T k, D], in the order of `permute`."""
    process_groups.refuse_graphs("moe.combine")
    exchange, permutation = dispatched.exchange, dispatched.permutation
    refusal, description = None, [0] * len(_FIELDS)
    try:
        checks.collect(rows, weights, permutation, sum(exchange.received))
        process_groups.check_exchangeable("rows", rows, exchange.group)
        k = permutation.positions.shape[1]
        description = _describe(COMBINE, rows, exchange.experts, k)
    except Exception as error:
        refusal = error
    _agree(description, refusal, exchange.group, exchange.verify)
    return rows if exchange.group.size() == 1 else _Move.apply(rows, exchange, True)


# ---- checks; ranks raise together ----------------------------------------------------------------


def _describe(name: str, rows: torch.Tensor, experts: int, k: int) -> list[int]:
    # Ranks enter the exchange of gradients whose rows need them, so all of them must.
    needs_gradient = rows.requires_grad and torch.is_grad_enabled()
    dtype = checks.DTYPES.index(rows.dtype)
    return [(DISPATCH, COMBINE).index(name), experts, k, rows.shape[1], dtype, needs_gradient]


def _agree(
    description: list[int], refusal: Exception | None, group: dist.ProcessGroup, verify: bool
) -> None:
    """Raise on every rank if one refuses its arguments, or if they differ."""
    if verify and group.size() > 1:
        heard = process_groups.agree(description, refusal, group, "group")
        for name, values in zip(_FIELDS, zip(*heard, strict=True), strict=True):
            names = {"function": (DISPATCH, COMBINE), "dtype": checks.DTYPES}.get(name)
            process_groups.alike(name, [names[v] if names else v for v in values], "group")
    if refusal is not None:
        raise refusal


# ---- plan ----------------------------------------------------------------------------------------


def _plan(
    permutation: Permutation, experts: int, group: dist.ProcessGroup, verify: bool
) -> tuple[Exchange, torch.Tensor]:
    """Exchange counts of rows: who sends how many to whom, and this rank's offsets.

    The host waits for the counts, as a collective takes its sizes from there.
    """
    ranks, rank, local = group.size(), group.rank(), experts // group.size()
    counts = permutation.offsets.diff()
    slots = counts.new_full((1,), permutation.order.numel())
    heard = process_groups.all_gather(torch.cat([counts, slots]), group)
    counts, slots = heard[:, :-1], heard[:, -1:]
    by_owner = counts.reshape(ranks, ranks, local).sum(-1)
    *owners, totals = zip(*torch.cat([by_owner, slots], 1).tolist(), strict=True)
    _check_counts(owners, totals, experts)
    sent, received = [owner[rank] for owner in owners], list(owners[rank])
    arrived = counts[:, rank * local : (rank + 1) * local].long()
    order, inverse = _orders(arrived, sum(received)) if local > 1 else (None, None)
    ends = arrived.sum(0).cumsum(0).to(torch.int32)
    offsets = torch.cat([ends.new_zeros(1), ends])
    return Exchange(group, experts, sent, received, order, inverse, verify), offsets


def _check_counts(owners: Sequence[Sequence[int]], totals: Sequence[int], experts: int) -> None:
    """Check on every rank that all rows have an expert, and that no rank gets too many."""
    sent = [sum(row) for row in zip(*owners, strict=True)]
    strays = [rank for rank, total in enumerate(totals) if sent[rank] != total]
    if strays:
        want = f"0 to {experts - 1}, experts, on every rank of group"
        raise ArgumentValueError(expected("indices", want, f"others on rank {strays[0]}"))
    for rank, owner in enumerate(owners):
        if sum(owner) > checks.MAX_SIZE:
            want = f"at most {checks.MAX_SIZE} rows for the experts of a rank"
            raise ShapeError(expected("indices", want, f"{sum(owner)} for rank {rank}"))


def _orders(arrived: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(received row of each sorted one, sorted row of each received one).

    ``arrived`` [ranks, experts] counts the rows of segments, which come in the order of (rank,
    expert) and are sorted into the order of (expert, rank).
    """
    by_rank, by_expert = arrived.reshape(-1), arrived.mT.reshape(-1)
    starts = (by_rank.cumsum(0) - by_rank).view(arrived.shape)
    sorted_starts = (by_expert.cumsum(0) - by_expert).view(arrived.mT.shape).mT
    shift = starts - sorted_starts
    row = torch.arange(rows, device=arrived.device)
    order = row + shift.mT.reshape(-1).repeat_interleave(by_expert, output_size=rows)
    inverse = row - shift.reshape(-1).repeat_interleave(by_rank, output_size=rows)
    return order, inverse


# ---- rows ----------------------------------------------------------------------------------------


class _Move(torch.autograd.Function):
    """Rows to the ranks of their experts, or back; gradients go the other way."""

    @staticmethod
    def forward(ctx, rows, exchange, back):
        ctx.exchange, ctx.back = exchange, back
        return _to_tokens(rows, exchange) if back else _to_experts(rows, exchange)

    @staticmethod
    def backward(ctx, grad):
        return _Move.apply(grad, ctx.exchange, not ctx.back), None, None


def _to_experts(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    received = _all_to_all(rows, exchange.received, exchange.sent, exchange.group)
    return received if exchange.order is None else received.index_select(0, exchange.order)


def _to_tokens(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    if exchange.inverse is not None:
        rows = rows.index_select(0, exchange.inverse)
    return _all_to_all(rows, exchange.sent, exchange.received, exchange.group)


def _all_to_all(
    rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Rows of every rank, by rank; ``received``, ``sent``: how many from and to each."""
    width = rows.shape[1]
    out = rows.new_empty(sum(received), width)
    sizes = ([count * width for count in counts] for counts in (received, sent))
    process_groups.start_all_to_all(out.view(-1), rows.contiguous().view(-1), *sizes, group)()
    return out
