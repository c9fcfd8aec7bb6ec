"""Transforms of sequences that must not change a byte of a row of attention.

``RowOp`` knows rows in any order; a causal row also has a place.  ``Runs`` calls the op; every
``check_*`` compares raw bytes of out and lse with those of one plain run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_kernels.schedulers import BlockMask
from tests.contract import require_same

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SequenceOp:
    """``run(q, k, v, mask, **options)`` -> (out [B, Sq, Hq, D], lse [B, Hq, Sq]).

    ``mask(q_len, kv_len, q_from)`` is the mask of queries q_from .. q_from + q_len of a long
    sequence against its first kv_len keys.
    """

    name: str
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    mask: Callable[[int, int, int], BlockMask]
    options: dict[str, object]

    def __call__(self, q, k, v, q_from: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        mask = self.mask(q.shape[1], k.shape[1], q_from)
        out, lse = self.run(q, k, v, mask, return_lse=True, **self.options)
        return out, lse.transpose(1, 2)

    def same(self, got, want, transform: str, case: str) -> None:
        """Both out and lse, rows [B, S, H, ..]."""
        for part, actual, theirs in zip(("out", "lse"), got, want, strict=True):
            name = f"{self.name} {part}"
            require_same(actual, theirs, op=name, transform=transform, case=case, seed=0)


def check_chunks(op: SequenceOp, x: Tensors, cuts: list[list[int]]) -> int:
    """Chunked prefill and decode: queries in pieces, each against the keys so far."""
    q, k, v = x
    want = op(q, k, v)
    for at in cuts:
        edges = [0, *at, q.shape[1]]
        parts = [op(q[:, a:b], k[:, :b], v[:, :b], a) for a, b in itertools.pairwise(edges)]
        got = [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
        op.same(got, want, "chunked prefill", f"cuts at {at}")
    return len(cuts)


def check_padding(op: SequenceOp, x: Tensors, sizes: list[int]) -> int:
    """More positions after the sequence, of zeros, of large numbers and of NaN (NaN not in V)."""
    want = op(*x)
    fills = ((0.0, 0.0), (2.0**14, -(2.0**14)), (math.nan, 3.0), (math.inf, 1.0))
    for (key, value), more in itertools.product(fills, sizes):
        q, k, v = (
            torch.cat([t, t.new_full((t.shape[0], more, *t.shape[2:]), fill)], dim=1)
            for t, fill in zip(x, (key, key, value), strict=True)
        )
        got = op(q, k, v)
        size = x[0].shape[1]
        op.same([t[:, :size] for t in got], want, "padding", f"{more} of {key}, {value}")
    return len(fills) * len(sizes)


def check_batch(op: SequenceOp, x: Tensors, shuffles: int = 2) -> int:
    """Any place in the batch, any company in it, alone."""
    q, k, v = x
    want, count = op(q, k, v), 0
    size, generator = q.shape[0], torch.Generator().manual_seed(1)
    orders = [torch.randperm(size, generator=generator) for _ in range(shuffles)]
    orders += [torch.tensor([i]) for i in range(size)] + [torch.tensor([0] * (size + 2))]
    for order in orders:
        got = op(q[order], k[order], v[order])
        op.same(got, [t[order] for t in want], "batch position", f"{order.tolist()}")
        count += 1
    for keep, fill in itertools.product(range(size), (math.nan, math.inf, 2.0**14)):
        changed = [torch.full_like(t, fill) for t in x]
        for new, old in zip(changed, x, strict=True):
            new[keep] = old[keep]
        got = op(*changed)
        case = f"{fill} around {keep}"
        op.same([t[keep] for t in got], [t[keep] for t in want], "batch content", case)
        count += 1
    return count


def check_heads(op: SequenceOp, x: Tensors) -> int:
    """KV heads with their query heads: alone, in another order, next to NaN."""
    q, k, v = x
    want, group, count = op(q, k, v), q.shape[2] // k.shape[2], 0
    for kv_head in range(k.shape[2]):
        mine = slice(kv_head * group, (kv_head + 1) * group)
        got = op(q[:, :, mine], k[:, :, [kv_head]], v[:, :, [kv_head]])
        op.same(got, [t[:, :, mine] for t in want], "head alone", f"KV head {kv_head}")
        changed = [torch.full_like(t, math.nan) for t in x]
        changed[0][:, :, mine] = q[:, :, mine]
        changed[1][:, :, kv_head], changed[2][:, :, kv_head] = k[:, :, kv_head], v[:, :, kv_head]
        got = [t[:, :, mine] for t in op(*changed)]
        op.same(got, [t[:, :, mine] for t in want], "head content", f"KV head {kv_head}")
        count += 2
    back = torch.arange(q.shape[2]).view(-1, group).flip(0).flatten()
    got = op(q[:, :, back], k.flip(2), v.flip(2))
    op.same(got, [t[:, :, back] for t in want], "head position", "reversed")
    return count + 1


def check_neighbours(op: SequenceOp, x: Tensors, rows: list[int]) -> int:
    """Every other query is NaN or large, and so are the keys after the row (causal masks)."""
    q, k, v = x
    want, count = op(q, k, v), 0
    for row, fill in itertools.product(rows, (math.nan, math.inf, -(2.0**14))):
        queries, keys, values = torch.full_like(q, fill), k.clone(), v.clone()
        queries[:, row] = q[:, row]
        keys[:, row + 1 :] = fill
        values[:, row + 1 :] = -(2.0**14)
        # Whole blocks of keys that this row has no use for may hold anything.
        values[:, (row // 128 + 1) * 128 :] = fill
        got = op(queries, keys, values)
        case = f"{fill} around {row}"
        op.same([t[:, row] for t in got], [t[:, row] for t in want], "neighbours", case)
        count += 1
    return count


def check_untouched(op: SequenceOp, x: Tensors, rows: slice, keys: slice) -> int:
    """Blocks that are visited for other rows of the query block may hold anything, in V too."""
    q, k, v = x
    want, fills = op(q, k, v), (math.nan, math.inf, 2.0**14)
    for fill in fills:
        changed = [t.clone() for t in (k, v)]
        for t in changed:
            t[:, keys] = fill
        got = op(q, *changed)
        case = f"{fill} in keys {keys.start} to {keys.stop}"
        op.same([t[:, rows] for t in got], [t[:, rows] for t in want], "untouched block", case)
    return len(fills)


def check_layout(op: SequenceOp, x: Tensors) -> int:
    """Heads before tokens, odd strides, offsets of one element, expanded heads."""
    want = op(*x)

    def placed(t: torch.Tensor, cut: Callable, *shape: int) -> torch.Tensor:
        view = cut(torch.full(shape, math.nan, dtype=t.dtype))
        return view.copy_(t)

    b, s = x[0].shape[:2]
    layouts = {
        "BHSD": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "SBHD": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "D first": lambda t: t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        "row stride + 1": lambda t: placed(
            t, lambda u: u[..., : t.shape[3]], *t.shape[:3], t.shape[3] + 1
        ),
        "offset by 1": lambda t: placed(t, lambda u: u[..., 1:], *t.shape[:3], t.shape[3] + 1),
        "every other token": lambda t: placed(t, lambda u: u[:, ::2], b, 2 * s, *t.shape[2:]),
    }
    for label, view in layouts.items():
        op.same(op(*(view(t) for t in x)), want, "layout", label)
    return len(layouts)
