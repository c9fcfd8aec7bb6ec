"""Forward and backward of a varlen batch (``layout``): one launch for all sequences.

SM90 kernels read the sequences where they lie; others get a copy, spread, and their results are
gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ...arch import CPU, CUTE_SM90
from ...runtime import dispatch
from ...runtime.plan_cache import PlanCache
from ..tensors import Grads, Saved, shape_of_out
from . import layout

NAME = "block_sparse_attention"
#: Its launchers that read packs where they lie; ``varlen.op`` registers them.
PACK_NAME = f"{NAME}_of_pack"


def at_once(t: Tensor) -> bool:
    """Whether one launch takes all sequences; on the CPU, BLAS has lengths in its bits."""
    return dispatch.backend(NAME, t.device, t.dtype) != CPU


def in_place(t: Tensor) -> bool:
    """Whether kernels read a pack where it lies, and where that is."""
    return dispatch.backend(NAME, t.device, t.dtype) == CUTE_SM90


#: Plans of passes over packs that lie in place: of shapes and options alone, as bounds are read on
#: the device.
_plans = PlanCache(capacity=256)


def _launcher(name: str, options: tuple, tensors: tuple, operands: tuple) -> Callable:
    """Return what runs a pass over a pack in place: its plan if cacheable, else the launcher.

    tensors: those among the ``operands``; options: what else a plan depends on.
    """
    device, dtype = tensors[0].device, tensors[0].dtype

    def make() -> Callable | None:
        plan = dispatch.plan(name, device, dtype, *operands)
        return plan.run if plan.cacheable else None

    run = _plans.find_or_add((name, *options), tensors, make)
    return run or dispatch.launcher(name, device, dtype)


def forward(
    of: layout.Where,
    window: layout.Window,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q [B, T, Hq, D], k, v [B, T, Hkv, ..]; rows of no sequence are 0 and -inf."""
    device, sizes = str(q.device), q.shape[:2]
    if in_place(q):
        operands = *(_flat(t) for t in (q, k, v)), of.on(q.device), window, scale, softcap, sinks
        tensors = *operands[:4], sinks
        launch = _launcher(PACK_NAME, (*window, scale, softcap), tensors, operands)
        out, lse = launch(*operands)
        out, lse = of.filled(out, 1), of.filled(lse, 2, -math.inf)
        return out.view(shape_of_out(q, v)), _by_batch(lse, sizes)
    row_layout = layout.layout(of, sizes.numel(), device)
    launch = dispatch.launcher(NAME, q.device, q.dtype)
    mask = layout.lowered(row_layout, window, device)
    out, lse = launch(*(row_layout.spread(t) for t in (q, k, v)), mask, scale, softcap, sinks)
    return row_layout.gathered(out, sizes), _turned(
        row_layout.gathered(_turned(lse), sizes, -math.inf)
    )


def backward(
    of: layout.Where,
    window: layout.Window,
    grads: Grads,
    saved: Saved,
    scale: float,
    softcap: float,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv); rows of no sequence are 0.  With sinks their gradient too."""
    (dout, dlse), (q, k, v, out, lse, sinks) = grads, saved
    device, heads, sizes = str(q.device), (q.shape[2], k.shape[2]), q.shape[:2]
    if in_place(q):
        dlse = None if dlse is None else _of_tokens(dlse)
        flat = Saved(*(_flat(t) for t in (q, k, v, out)), _of_tokens(lse), sinks)
        upstream, bounds = Grads(_flat(dout), dlse), of.on(q.device)
        operands = upstream, flat, bounds, window, scale, softcap
        tensors = *upstream, *flat, bounds
        options = *window, scale, softcap
        launch = _launcher(f"{PACK_NAME}_backward", options, tensors, operands)
        dq, dk, dv, *dsinks = launch(*operands)
        pairs = zip((dq, dk, dv), (q, k, v), strict=True)
        return *(of.filled(grad, 1).view(operand.shape) for grad, operand in pairs), *dsinks
    row_layout = layout.layout(of, sizes.numel(), device)
    mask = layout.lowered(row_layout, window, device)
    order = layout.order(row_layout, window, heads, q.shape[3], device)
    dlse = None if dlse is None else _turned(row_layout.spread(_turned(dlse)))
    # P of a row in a gap is exp2(S - inf) = 0, as of rows behind the last one of a tensor.
    lse = _turned(row_layout.spread(_turned(lse), math.inf))
    dout, q, k, v, out = (row_layout.spread(t) for t in (dout, q, k, v, out))
    launch = dispatch.launcher(f"{NAME}_backward", q.device, q.dtype)
    grads_and_saved = Grads(dout, dlse), Saved(q, k, v, out, lse, sinks)
    dq, dk, dv, *dsinks = launch(*grads_and_saved, mask, order, scale, softcap, True)
    return *(row_layout.gathered(t, sizes) for t in (dq, dk, dv)), *dsinks


def _turned(t: Tensor) -> Tensor:
    """[B, H, T] as [B, T, H], or back; contiguous."""
    return t.transpose(1, 2).contiguous()


def _flat(t: Tensor) -> Tensor:
    """[B, T, ..] as [1, B T, ..]."""
    return t.flatten(0, 1)[None]


def _of_tokens(t: Tensor) -> Tensor:
    """[B, H, T] as [1, H, B T], contiguous."""
    return t.transpose(0, 1).flatten(1)[None].contiguous()


def _by_batch(t: Tensor, sizes: tuple[int, int]) -> Tensor:
    """[1, H, B T] as [B, H, T], contiguous: the inverse of `_of_tokens`."""
    return t[0].unflatten(1, sizes).transpose(0, 1).contiguous()
