"""Tensors that a forward saves, and the gradients of its results."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import LoweredMask, Window

LOG2E = math.log2(math.e)


def sinks_gradient(sinks: Tensor, lse2: Tensor, delta: Tensor) -> Tensor:
    """Return the sinks' gradient, fp32 [Hq]: -Σ P delta over batches and rows.

    P = exp2(sink log2 e - lse2) is a sink's weight.

    A sink is a key with a value of zeros, so that dP is 0 there.  lse2 and delta (less dlse) fp32
    [B, Hq, ..]; rows beyond the end have lse2 +inf.  The sum is fp64: its order then hardly ever
    changes the rounding to fp32.
    """
    shape = (-1, *(1,) * (lse2.dim() - 2))
    weight = torch.exp2((sinks.float() * LOG2E).view(shape) - lse2)
    # A sink of -inf weighs nothing; in a row that sees nothing, -inf - -inf is NaN.
    absent = (sinks == -math.inf).view(shape)
    return -torch.where(absent, 0.0, weight * delta).double().flatten(2).sum((0, 2)).float()


def shape_of_out(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the output's shape, [B, Sq, Hq, Dv], with the head size of v."""
    return *q.shape[:3], v.shape[3]


class Varlen(NamedTuple):
    """Keys of a varlen batch: a token sees its own sequence.

    bounds: [N, 2], int32 or int64: where each sequence begins and ends, in ascending order; the
    host reads none.  window: (left, right), None for no bound.  Tokens after the last sequence see
    nothing; results of tokens between sequences are not written.
    """

    bounds: Tensor
    window: Window


#: Where keys are: lists of blocks; sequences; or, of a forward alone, ranges int32 [B, 1, T, 4] on
#: the device, all of a batch row with one begin and one position.
Keys = LoweredMask | Varlen | Tensor


class PagedOptions(NamedTuple):
    """Arguments of a launcher of paged attention after its six tensors, in their order.

    scale: factor of the scores.  window: see ``masks``; a right of 0 is the causal rule.  softcap:
    0 for none.  sinks: [Hq] or None.  out: [T, Hq, Dv], where the result goes; None: a new tensor.
    """

    scale: float
    window: Window = (None, None)
    softcap: float = 0.0
    sinks: Tensor | None = None
    out: Tensor | None = None


class Saved(NamedTuple):
    """Inputs and results of a forward, saved for its backward.

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
    """Gradients of a forward's results: dout like out; dlse fp32 [B, Hq, Sq] or None for zeros."""

    dout: Tensor
    dlse: Tensor | None
