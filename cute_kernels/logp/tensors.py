"""Tensors and options passed between the parts of linear_logp."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Head(NamedTuple):
    """Rows of an LM head: all of them, a rank's, or a block.

    weight: [V, D].  bias: [V] or None.  start: the vocabulary's number of row 0.  vocab: entries of
    the whole vocabulary; rows from there on are padding.  softcap: 0 for none.
    order: of the logits' sums over D.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    start: int
    vocab: int
    softcap: float
    order: str

    @property
    def entries(self) -> int:
        """Rows that are entries of the vocabulary; those behind them are padding."""
        return min(len(self.weight), max(0, self.vocab - self.start))

    def block(self, rows: slice) -> Head:
        """Some rows of it."""
        bias = None if self.bias is None else self.bias[rows]
        return self._replace(weight=self.weight[rows], bias=bias, start=self.start + rows.start)


class Logits(NamedTuple):
    """Columns of logits in the vocabulary; the fields are those of `Head`."""

    start: int
    vocab: int
    softcap: float


class Rows(NamedTuple):
    """Inputs of each token besides its hidden state.

    target: int64 [T], its entry of the whole vocabulary; MASKED or OUTSIDE.
    scale: fp32 [T], log2(e) / τ.
    """

    target: torch.Tensor
    scale: torch.Tensor


class Upstream(NamedTuple):
    """Terms of the gradient of a token's logits: fp32 [T] each.

    lse2: log2 Σ 2^y.  of_logp: dlogp / τ.  of_entropy: dentropy / τ, and ``entropy``; or None.
    """

    lse2: torch.Tensor
    of_logp: torch.Tensor
    of_entropy: torch.Tensor | None
    entropy: torch.Tensor | None
