"""Results of routing that other functions take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist


class Routing(NamedTuple):
    """Experts of each token.

    weights: fp32 [T, k].  indices: int32 [T, k].  scores: fp32 [T, E], of all experts.
    """

    weights: torch.Tensor
    indices: torch.Tensor
    scores: torch.Tensor


class Permutation(NamedTuple):
    """Slots (token t, choice j) in the order of their experts; int32.

    offsets: [E + 1]; expert e has the rows offsets[e] to offsets[e + 1]; rows from offsets[E] on
    have no expert.  order: [T k], the slot t k + j of each row.  positions: [T, k], the row of each
    slot.
    """

    offsets: torch.Tensor
    order: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, eq=False)
class Exchange:
    """How rows of all ranks reach the ranks of their experts, and their results return.

    sent, received: Rows to and from each rank.  order: int64, the received row of each sorted one;
    inverse: the sorted row of each received one; None where these are in the same order.
    """

    group: dist.ProcessGroup
    experts: int
    sent: Sequence[int]
    received: Sequence[int]
    order: torch.Tensor | None
    inverse: torch.Tensor | None
    verify: bool


class Dispatch(NamedTuple):
    """Rows of all ranks that chose experts of this rank.

    offsets: int32 [E / ranks + 1]; expert e of this rank has the rows offsets[e] to offsets[e + 1],
    in the order of (source rank, token t, choice j).  permutation: `Permutation` of this rank's
    tokens over all E experts.  exchange: How results go back.
    """

    offsets: torch.Tensor
    permutation: Permutation
    exchange: Exchange
