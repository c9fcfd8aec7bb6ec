"""The SM90 launchers for calls like an earlier one (`again`): one launch and nothing else.

Each is None where an operand would be copied.  What else a call has is left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..compile.call import allocator, prepared
from ..operands import addressable, not_empty
from . import config, launch
from .masks import SPANS, LoweredMask
from .tensors import shape_of_out

_Made = tuple[Tensor, Tensor]


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: LoweredMask, scale: float, softcap: float
) -> Callable[..., _Made] | None:
    """``run(q, k, v, ...)`` of all operands like these: `launch.forward` without sinks."""
    if _copied(q, k, v):
        return None
    batch, q_len, heads, dim = q.shape
    chosen = config.configure_forward(config.DTYPE_NAMES[q.dtype], dim, mask.form, softcap > 0)
    run_kernel = prepared(q.device, launch.forward_kernel(chosen))
    lists = mask.kv_count, not_empty(mask.kv_entry), not_empty(mask.kv_tile), mask.words
    counter, ctas = launch.grid(chosen, q_len, batch * heads, q.device)
    numbers = mask.lo, mask.hi, *config.factors(scale, softcap), ctas
    empty_out = allocator(shape_of_out(q, v), q.dtype, q.device)
    empty_lse = allocator((batch, heads, q_len), torch.float32, q.device)

    def run(q: Tensor, k: Tensor, v: Tensor, *_: object) -> _Made:
        out, lse = empty_out(), empty_lse()
        run_kernel(q, k, v, out, lse, *lists, None, None, None, counter(), *numbers)
        return out, lse

    return run


def forward_of_spans(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, scale: float, softcap: float
) -> Callable[..., _Made] | None:
    """``run(q, k, v, spans, ...)`` of all operands like these: `launch.forward_of_spans`, likewise.

    spans: [B, 1, T, 4], contiguous.
    """
    (batch, q_len, heads, dim), kv_heads = q.shape, k.shape[2]
    of_out = shape_of_out(q, v)
    # A step of decoding has the query heads of a group in one tile.
    grouped = q_len == 1
    rows = launch.rows_of_groups(q, kv_heads) if grouped else q
    if _copied(rows, k, v) or not spans.is_contiguous():
        return None
    chosen = config.configure_forward(config.DTYPE_NAMES[q.dtype], dim, SPANS, softcap > 0)
    run_kernel = prepared(q.device, launch.forward_kernel(chosen))
    counter, ctas = launch.grid(chosen, rows.shape[1], batch * rows.shape[2], q.device)
    numbers = 0, 0, *config.factors(scale, softcap), ctas
    empty_out = allocator(of_out, q.dtype, q.device)
    empty_lse = allocator((batch, heads, q_len), torch.float32, q.device)

    if grouped:
        stored = launch.rows_of_groups(torch.empty(of_out, dtype=q.dtype, device="meta"), kv_heads)
        as_rows, as_stored = _view_like(rows), _view_like(stored)
        of_sums = batch, kv_heads, heads // kv_heads

    def run(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, *_: object) -> _Made:
        out, lse = empty_out(), empty_lse()
        made = out, lse
        if grouped:
            q, made = as_rows(q), (as_stored(out), lse.view(of_sums))
        of_rows = spans.squeeze(1), None, None, counter()
        run_kernel(q, k, v, *made, *launch.NO_LISTS, *of_rows, *numbers)
        return out, lse

    return run


def _copied(q: Tensor, k: Tensor, v: Tensor) -> bool:
    given = (q, "q"), (k, "k"), (v, "v")
    return any(addressable(t, launch.NAME, name) is not t for t, name in given)


def _view_like(t: Tensor) -> Callable[[Tensor], Tensor]:
    """What views another tensor's memory with the sizes and strides of ``t``, in one step."""
    return functools.partial(torch.as_strided, size=t.shape, stride=t.stride())
