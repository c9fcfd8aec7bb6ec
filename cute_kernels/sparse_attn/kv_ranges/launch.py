"""The SM90 launchers of one query a sequence over a long key buffer: two kernels, as `plan_long`.

A kernel of tiles walks all keys of a query's heads in one CTA.  Where few such CTAs would leave SMs
idle the kernels here share the keys between SMs, with the same bytes; `is_long` says where.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...compile.call import allocator
from ...compile.kernel import Entry
from ...runtime.operands import addressable, is_addressable
from ...schedulers.masks.rules import Band
from .. import config
from ..config import LONG_COLUMNS, BufferScoresConfig, BufferValuesConfig
from ..entries import entry
from ..masks import BLOCK, LoweredMask
from ..paged import launch as paged
from ..tensors import shape_of_out

NAME = "block_sparse_attention"

#: (first, end) of the keys that every query sees; None: its range says it.
Keys = tuple[int, int] | None


def is_long(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `plan` is the faster one for q [B, T, Hq, D], by shapes: one query, few sequences."""
    batch, q_len, heads, _ = q.shape
    return q_len == 1 and paged.shares_keys((batch, heads), v, k.shape[1], q.device)


def keys_of(mask: LoweredMask) -> Keys:
    """Keys that the one query of a mask sees; None where its rule is no band."""
    rule = None if mask.mask is None else mask.mask.rule
    if not isinstance(rule, Band):
        return None
    first = 0 if rule.lo is None else max(rule.lo, 0)
    end = mask.kv_len if rule.hi is None else min(rule.hi + 1, mask.kv_len)
    return first, max(first, end)


def plan(
    q: Tensor, k: Tensor, v: Tensor, keys: Keys, scale: float, softcap: float
) -> Callable[..., tuple[Tensor, Tensor]]:
    """``run(q, k, v, sinks, kv_ranges)`` of (out, lse) of one query a sequence; [B, 1, 4].

    Scores of the whole buffer are allocated: where ranges are, lengths stay on the device.
    """
    (batch, _, heads, dim), rows, device, by_range = q.shape, k.shape[1], q.device, keys is None
    dtype, ends = config.DTYPE_NAMES[q.dtype], (0, 0) if by_range else keys
    scores = BufferScoresConfig(dtype, dim, softcap=softcap > 0, kv_ranges=by_range)
    values = functools.partial(BufferValuesConfig, dtype, v.shape[3], kv_ranges=by_range)
    # Key 0 of a range lies up to 127 rows before its first key.
    blocks = -(-(rows + (BLOCK[1] - 1 if by_range else 0)) // BLOCK[1])
    factors = config.factors(scale, softcap)
    launch = paged.plan_two_kernels(q[:, 0], v, blocks, (scores, values), ends, factors)
    new_out = allocator(shape_of_out(q, v), q.dtype, device)
    new_lse = allocator((batch, heads, 1), torch.float32, device)
    direct = all(map(is_addressable, (q.squeeze(1), k, v)))

    def run(q, k, v, sinks, kv_ranges):
        q = q.squeeze(1)
        if not direct:
            named = {"q": q, "k": k, "v": v}
            q, k, v = (addressable(t, NAME, name) for name, t in named.items())
        out, lse, sinks = new_out(), new_lse(), paged.sinks_or_none(sinks, heads, device)
        launch(q, k, v, out.squeeze(1), lse.squeeze(2), (kv_ranges,), sinks)
        return out, lse

    return run


def catalogue() -> Iterator[Entry]:
    """Every kernel that these launchers can ask for."""
    dtypes, flags = config.DTYPE_NAMES.values(), (False, True)
    for dtype, dim, softcap, by_range in itertools.product(dtypes, config.HEAD_DIMS, flags, flags):
        chosen = BufferScoresConfig(dtype, dim, softcap=softcap, kv_ranges=by_range)
        yield Entry(entry(chosen), "A", paged.expected_scores(chosen))
    sizes = [(dim, columns) for dim, pair in LONG_COLUMNS.items() for columns in pair]
    for dtype, size, by_range in itertools.product(dtypes, sizes, flags):
        chosen = BufferValuesConfig(dtype, *size, kv_ranges=by_range)
        yield Entry(entry(chosen), "A", paged.expected_values(chosen))
