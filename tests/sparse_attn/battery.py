"""Attention under the battery of tests/contract.py: rows, and transforms of sequences.

``RowOp`` knows rows in any order; a causal row also has a place.  Every ``check_*`` compares raw
bytes of out and lse with those of one plain run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import RowOp, require_same, same_bytes
from tests.sparse_attn import cases

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


def _placed(t: torch.Tensor, cut: Callable, *more: int) -> torch.Tensor:
    """The values in part of a tensor that is larger by ``more``, NaN around them."""
    shape = (size + extra for size, extra in zip(t.shape, more, strict=True))
    return cut(torch.full((*shape,), math.nan, dtype=t.dtype)).copy_(t)


#: Heads before tokens, odd strides, offsets of one element.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "BHSD": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "SBHD": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "D first": lambda t: t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "row stride + 1": lambda t: _placed(t, lambda u: u[..., :-1], 0, 0, 0, 1),
    "offset by 1": lambda t: _placed(t, lambda u: u[..., 1:], 0, 0, 0, 1),
    "every other token": lambda t: _placed(t, lambda u: u[:, ::2], 0, t.shape[1], 0, 0),
}


def check_layout(op: SequenceOp, x: Tensors) -> int:
    """Each of `LAYOUTS`."""
    want = op(*x)
    for label, view in LAYOUTS.items():
        op.same(op(*map(view, x)), want, "layout", label)
    return len(LAYOUTS)


# ---- masks and cuts ---------------------------------------------------------------------------

SEED, SIZE = 5, 300
#: Chunks of any length, and single rows at the edges of a block: steps of decoding.
CUTS = [[150], [SIZE - 1], [64, 128, 200], [3, 131, 140, 299], [127, 129, 257]]
CUTS.append([1, 2, 3, 63, 64, 65, 127, 128, 129, 130])


def rows_op(dim: int = 64, dtype: torch.dtype = torch.bfloat16, softcap: float = 0.0) -> RowOp:
    """Rows are queries of two heads against 200 fixed keys, all allowed."""
    x = cases.inputs(1, 2, 1, 1, 200, dim, dtype, seed=3)
    k, v = x.k.detach(), x.v.detach()

    def run(rows: torch.Tensor) -> torch.Tensor:
        q = rows.view(1, len(rows), 2, dim)
        return block_sparse_attention(q, k, v, softcap=softcap).view(len(rows), -1)

    return RowOp(f"attention {dtype} D{dim}", run, 2 * dim, dtype)


def causal(q_len: int, kv_len: int, q_from: int) -> BlockMask:
    return BlockMask.causal(q_len, kv_len)


def window(q_len: int, kv_len: int, q_from: int) -> BlockMask:
    return BlockMask.sliding_window(q_len, kv_len, left=70, right=0)


IDS = torch.tensor([0] * 37 + [1] * 120 + [2] * 1 + [3] * 90 + [4] * 52 + [5] * 400)


def causal_documents(q_len: int, kv_len: int, q_from: int) -> BlockMask:
    """Bits: any rule that is no band."""
    q, kv = torch.arange(q_from, q_from + q_len)[:, None], torch.arange(kv_len)
    return BlockMask.from_dense((IDS[q] == IDS[kv]) & (kv <= q))


def empty_first_rows(q_len: int, kv_len: int, q_from: int) -> BlockMask:
    """Key at least 40 tokens ago: the first 40 rows see nothing."""
    return BlockMask.from_rule(Band(None, q_from - 40), q_len, kv_len)


MASKS = {
    "causal": causal,
    "window": window,
    "causal documents": causal_documents,
    "40 ago": empty_first_rows,
}


def sequence_op(mask: str, **options) -> SequenceOp:
    return SequenceOp(mask, block_sparse_attention, MASKS[mask], options)


def sequence(batch: int = 2, dim: int = 64, dtype: torch.dtype = torch.bfloat16):
    x = cases.inputs(batch, 4, 2, SIZE, SIZE, dim, dtype, seed=SEED)
    return tuple(t.detach() for t in x.leaves())


def battery(op: SequenceOp, x) -> int:
    """All transforms of sequences."""
    count = check_chunks(op, tuple(t[:1] for t in x), CUTS)
    count += check_padding(op, tuple(t[:1] for t in x), [1, 84, 130])
    count += check_batch(op, x) + check_heads(op, x)
    count += check_neighbours(op, tuple(t[:1] for t in x), [0, 1, 127, 128, 200, 299])
    return count + check_layout(op, x)


def same_elements_have_the_same_bits():
    """A band, the same band as bits, and from smaller blocks: one set of bits."""
    q, k, v = sequence()
    mask = BlockMask.causal(SIZE, SIZE)
    want = block_sparse_attention(q, k, v, mask)
    others = {
        "bits": BlockMask.from_dense(mask.to_dense()[0, 0]),
        "blocks of 64 x 32": BlockMask.causal(SIZE, SIZE, block_size=(64, 32)),
        "per batch": BlockMask.from_dense(mask.to_dense().expand(2, 1, -1, -1)),
        "per head": BlockMask.from_dense(mask.to_dense().expand(1, 4, -1, -1)),
    }
    for label, other in others.items():
        assert same_bytes(block_sparse_attention(q, k, v, other), want), label
    assert same_bytes(block_sparse_attention(q, k, v, causal=True), want)
    full = BlockMask.full(SIZE, SIZE)
    assert same_bytes(block_sparse_attention(q, k, v, full, causal=True), want)
