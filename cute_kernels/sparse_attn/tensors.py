"""Tensors that travel together through a backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Saved(NamedTuple):
    """What a forward read and wrote.

    q [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D]; out like q; lse fp32 [B, Hq, Sq].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Grads(NamedTuple):
    """The gradients of its results: dout like out; dlse fp32 [B, Hq, Sq], or None for zeros."""

    dout: Tensor
    dlse: Tensor | None
