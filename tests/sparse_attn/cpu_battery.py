"""Attention as ops of the battery of tests/contract.py: rows, sequences, masks and cuts."""

from __future__ import annotations

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import RowOp, same_bytes
from tests.sparse_attn import cases, sequences
from tests.sparse_attn.sequences import SequenceOp

SEED = 5

SIZE = 300

CUTS = [[150], [1], [SIZE - 1], [128], [64, 128, 200], [3, 131, 140, 299], [127, 129, 257]]


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
    count = sequences.check_chunks(op, tuple(t[:1] for t in x), CUTS)
    count += sequences.check_padding(op, tuple(t[:1] for t in x), [1, 84, 130])
    count += sequences.check_batch(op, x) + sequences.check_heads(op, x)
    count += sequences.check_neighbours(op, tuple(t[:1] for t in x), [0, 1, 127, 128, 200, 299])
    return count + sequences.check_layout(op, x)


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
