"""Gradients of a table that is cut over ranks: each rank's entries have the bytes of one rank's."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from cute_kernels.model.parallel import exchange
from cute_kernels.rowwise import op as rowwise
from tests.contract import same_bytes

VOCABULARY, WIDTH, RANKS = 12, 8, 2


class Group(NamedTuple):
    """One rank's group: its sums are not asked for, as every entry of these ids is its own."""

    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("padding", [-1, 0, 7, 11])
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("accumulates", [False, True], ids=["grad", "main_grad"])
def test_the_padding_entry_has_no_gradient_on_any_rank(padding, rank, accumulates):
    generator = torch.Generator().manual_seed(padding + 2)
    part = VOCABULARY // RANKS
    ids = torch.randint(VOCABULARY, (3, 40), generator=generator)
    dy = torch.randn(3, 40, WIDTH, generator=generator).bfloat16()
    weight = torch.randn(part, WIDTH, generator=generator).bfloat16().requires_grad_()
    into = torch.randn(part, WIDTH, generator=generator) if accumulates else None
    whole, mine = torch.zeros(VOCABULARY, WIDTH), slice(rank * part, (rank + 1) * part)
    if accumulates:
        whole[mine] = into
        rowwise.embedding_gradient_(dy, ids, padding, whole)
    else:
        whole = rowwise.embedding_gradient(dy, ids, padding, VOCABULARY)
        assert padding < 0 or not whole[padding].any()
    exchange.embedding(ids, weight, padding, into, Group(rank)).backward(dy)
    assert same_bytes(into if accumulates else weight.grad, whole[mine])
    assert (weight.grad is None) == accumulates
