"""Tensors that travel together through a backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2E = math.log2(math.e)


def sinks_gradient(sinks: Tensor, lse2: Tensor, delta: Tensor) -> Tensor:
    """fp32 [Hq]: -Σ P delta over batches and rows, P = exp2(sink log2 e - lse2) a sink's weight.

    A sink is a key with a value of zeros, so that dP is 0 there.  lse2 and delta (less dlse) fp32
    [B, Hq, ..]; rows that are none have lse2 +inf.  The sum is fp64, so that its order is hidden
    below a rounding to fp32 that hardly ever falls between two of them.
    """
    shape = (-1, *(1,) * (lse2.dim() - 2))
    weight = torch.exp2((sinks.float() * LOG2E).view(shape) - lse2)
    # A sink of -inf weighs nothing; beside a row that sees nothing, -inf - -inf is NaN.
    absent = (sinks == -math.inf).view(shape)
    return -torch.where(absent, 0.0, weight * delta).double().flatten(2).sum((0, 2)).float()


def shape_of_out(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """[B, Sq, Hq, Dv]: the head size of v, which that of q need not be."""
    return *q.shape[:3], v.shape[3]


class Saved(NamedTuple):
    """What a forward read and wrote.

    q [B, Sq, Hq, D]; k [B, Sk, Hkv, D]; v [B, Sk, Hkv, Dv]; out [B, Sq, Hq, Dv]; lse fp32
    [B, Hq, Sq]; sinks [Hq] or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    sinks: Tensor | None = None


class Grads(NamedTuple):
    """The gradients of its results: dout like out; dlse fp32 [B, Hq, Sq], or None for zeros."""

    dout: Tensor
    dlse: Tensor | None
