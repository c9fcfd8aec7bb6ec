"""A pass over sequences that are laid out as a pack (``packs``): spread, one launch, gathered."""

from __future__ import annotations

import math

from torch import Tensor

from .. import dispatch
from ..arch import CPU
from . import packs
from .tensors import Grads, Saved

_NAME = "block_sparse_attention"


def at_once(t: Tensor) -> bool:
    """Whether one launch takes all sequences; on the CPU, BLAS has lengths in its bits."""
    return dispatch.backend(_NAME, t.device, t.dtype) != CPU


def forward(
    of: packs.Layout,
    window: packs.Window,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q [B, T, Hq, D], k and v [B, T, Hkv, D]; rows of no sequence are 0 and -inf."""
    mask = packs.lowered(of, window, str(q.device))
    launch = dispatch.launcher(_NAME, q.device, q.dtype)
    out, lse = launch(*(of.spread(t) for t in (q, k, v)), mask, scale, softcap, sinks)
    sizes = q.shape[:2]
    return of.gathered(out, sizes), _turned(of.gathered(_turned(lse), sizes, -math.inf))


def backward(
    of: packs.Layout,
    window: packs.Window,
    grads: Grads,
    saved: Saved,
    scale: float,
    softcap: float,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv); rows of no sequence are 0.  With sinks their gradient too."""
    (dout, dlse), (q, k, v, out, lse, sinks) = grads, saved
    device, heads, sizes = str(q.device), (q.shape[2], k.shape[2]), q.shape[:2]
    mask = packs.lowered(of, window, device)
    order = packs.order(of, window, heads, q.shape[3], device)
    dlse = None if dlse is None else _turned(of.spread(_turned(dlse)))
    # P of a row in a gap is exp2(S - inf) = 0, as of rows behind the last one of a tensor.
    lse = _turned(of.spread(_turned(lse), math.inf))
    dout, q, k, v, out = (of.spread(t) for t in (dout, q, k, v, out))
    launch = dispatch.launcher(f"{_NAME}_backward", q.device, q.dtype)
    given = Grads(dout, dlse), Saved(q, k, v, out, lse, sinks)
    dq, dk, dv, *dsinks = launch(*given, mask, order, scale, softcap, True)
    return *(of.gathered(t, sizes) for t in (dq, dk, dv)), *dsinks


def _turned(t: Tensor) -> Tensor:
    """[B, H, T] as [B, T, H], or back; contiguous."""
    return t.transpose(1, 2).contiguous()
