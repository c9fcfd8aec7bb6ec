"""Calls of the convolution: a batch or a pack, with every option."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.linear_attn.tensors import Sequences
from tests.runtime.cached_calls import drawn

BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """One call; ``lengths``: of a pack's sequences, or one number of a batch of ``batch``."""

    lengths: tuple[int, ...]
    batch: int = 0
    channels: int = 40
    width: int = 4
    dtype: torch.dtype = BF16
    bias: bool = True
    initial: bool = True
    silu: bool = True
    behind: int = 0  # rows behind the last sequence of a pack

    @property
    def rows(self) -> int:
        return self.batch * self.lengths[0] if self.batch else sum(self.lengths) + self.behind

    @property
    def count(self) -> int:
        return self.batch or len(self.lengths)

    @property
    def offsets(self) -> torch.Tensor | None:
        """cu_seqlens of a pack."""
        if self.batch:
            return None
        return torch.tensor([0, *self.lengths]).cumsum(0).int()

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.rows, self.lengths[0] if self.batch else 0, self.offsets)


class Operands(NamedTuple):
    """Rows [N, D] of a call, its parameters and states, and the gradient of its result."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    initial: torch.Tensor | None
    dy: torch.Tensor


def operands(case: Case, seed: int = 0) -> Operands:
    d, dtype = case.channels, case.dtype
    return Operands(
        drawn(case.rows, d, seed=seed, dtype=dtype),
        drawn(d, case.width, seed=seed + 1, dtype=dtype),
        drawn(d, seed=seed + 2, dtype=dtype) if case.bias else None,
        drawn(case.count, d, case.width - 1, seed=seed + 3, dtype=dtype) if case.initial else None,
        drawn(case.rows, d, seed=seed + 4, dtype=dtype),
    )


CASES = {
    "batch": Case((21,), batch=2),
    "batch, two chunks": Case((70,), batch=2, initial=False),
    "pack": Case((5, 0, 66, 1, 130), behind=3),
    "plain": Case((9,), batch=1, bias=False, initial=False, silu=False),
    "width 2": Case((3, 70), width=2, dtype=FP32),
    "width 3": Case((67,), batch=1, width=3, channels=130, dtype=torch.float16),
}
