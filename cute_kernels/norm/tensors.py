"""Tensors and options passed between the op and its backends."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..runtime.operands import flat_rows


class Rule(NamedTuple):
    """Rule of a norm: ``kind`` is RMS or LAYER; ``offset`` is added to the weight."""

    kind: str
    eps: float
    offset: float = 0.0


class Scale(NamedTuple):
    """Weight and bias of normalised rows, [D] each; None: 1 and 0."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def with_weight(self, offset: float, like: torch.Tensor) -> Scale:
        """The scale with a weight of ones if an offset would be added to a missing weight.

        Without an offset the product is left out, which has the same value.
        """
        if self.weight is not None or not offset:
            return self
        return self._replace(weight=like.new_ones(like.shape[-1]))


class Normed(NamedTuple):
    """Result for rows x [..., D]: y; h = x + residual, or None; fp32 [M] of each row:
    its mean (None of an RMS norm) and 1 / √(variance + eps)."""

    y: torch.Tensor
    h: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor


class Upstream(NamedTuple):
    """Upstream gradients [..., D]: of y, and of h if it was returned."""

    dy: torch.Tensor
    dh: torch.Tensor | None

    def flat(self) -> Upstream:
        """The gradients as [M, D]."""
        return Upstream(*(None if t is None else flat_rows(t, "norm") for t in self))


class Parts(NamedTuple):
    """Partial sums of dweight and dbias, fp32 [P, D or more]: over the rows of a part, in order."""

    weight: torch.Tensor
    bias: torch.Tensor | None
