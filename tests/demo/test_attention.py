"""attention.py: the op's bytes with a cache, in chunks, with padding, in any batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.demo import attention
from tests.contract import same_bytes
from tests.demo import wrong_attention

HEADS, GROUPS, DIM = 4, 2, 64
LENGTH, LONG, NEIGHBOUR = 300, 420, 137  # three, four and two blocks of 128 keys
MODULE = torch.nn.Module()

#: Queries first..end-1 of a sequence whose keys end at ``end``.
CHUNKS = [(0, 1), (0, 130), (127, 129), (128, 257), (299, 300), (33, 300)]


def _qkv(length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, GROUPS, GROUPS)
    return [torch.randn(1, h, length, DIM, generator=generator).to(torch.bfloat16) for h in heads]


def _attend(q, k, v, mask):
    columns = attention.real_columns(q.shape[0], k.shape[2], mask)
    return attention.attention(MODULE, q, k, v, columns, scaling=DIM**-0.5)[0]


def _alone(q, k, v):
    """[1, S, H, D]: the op itself, the sequence whole."""
    return ck.block_sparse_attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)


@torch.no_grad()
def _chunk(first: int, end: int, pad: int) -> torch.Tensor:
    """[end - first, H, D]: a chunk behind ``pad`` columns of NaN, with a longer neighbour."""
    q, k, v = _qkv(LENGTH, seed=11)
    near = _qkv(end + pad, seed=12)
    nans = torch.full((1, GROUPS, pad, DIM), torch.nan, dtype=torch.bfloat16)
    keys, values = (torch.cat([nans, t[:, :, :end]], dim=2) for t in (k, v))
    queries = torch.cat([near[0][:, :, pad + first :], q[:, :, first:end]])
    mask = torch.arange(end + pad) >= torch.tensor([[0], [pad]])
    return _attend(queries, torch.cat([near[1], keys]), torch.cat([near[2], values]), mask)[1]


@pytest.mark.parametrize("pad", [0, 1, 29, 128])
@pytest.mark.parametrize(("first", "end"), CHUNKS)
def test_a_chunk_behind_padding_has_the_bytes_of_the_whole(first, end, pad):
    whole = _alone(*_qkv(LENGTH, seed=11))[0, first:end]
    assert same_bytes(_chunk(first, end, pad), whole)


@torch.no_grad()
def test_padding_rows_are_zero_and_a_sequence_may_be_all_padding():
    q, k, v = (torch.cat([t] * 3) for t in _qkv(20, seed=13))
    columns = torch.arange(20)
    mask = torch.stack([columns < 0, columns >= 7, columns < 15])
    out = _attend(q, k, v, mask)
    assert not out[0].any() and not out[1, :7].any() and not out[2, 15:].any()
    for row, real in ((1, slice(7, None)), (2, slice(0, 15))):
        assert same_bytes(out[row : row + 1, real], _alone(*(t[:1, :, real] for t in (q, k, v))))


def _sequence(length: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output.  dQ does not feel what all keys share, but the parts
    that it sums do: a sum in another order shows through bf16."""
    q, k, v = _qkv(length, seed=length)
    return [q, k + 64, v, _qkv(length, seed=length + 1)[0]]


def _trained(lengths: list[int], width: int) -> list[list[torch.Tensor]]:
    """Per sequence [out, dq, dk, dv] of one micro-batch, padded on the right with NaN."""
    padded = [
        [F.pad(t, (0, 0, 0, width - length), value=torch.nan) for t in _sequence(length)]
        for length in lengths
    ]
    *leaves, dout = (torch.cat(t) for t in zip(*padded, strict=True))
    leaves = [t.requires_grad_() for t in leaves]
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    out = _attend(*leaves, mask)
    out.backward(dout.transpose(1, 2).nan_to_num(0.0))
    assert not any(t.grad.transpose(1, 2)[~mask].any() for t in leaves)
    tensors = [out.detach(), *(t.grad.transpose(1, 2) for t in leaves)]
    return [[t[row, :length] for t in tensors] for row, length in enumerate(lengths)]


def _differing(one, other) -> list[str]:
    names = ("out", "dq", "dk", "dv")
    return [n for n, a, b in zip(names, one, other, strict=True) if not same_bytes(a, b)]


def test_training_depends_on_no_neighbour_and_no_padding():
    batch = _trained([LONG, NEIGHBOUR], width=432)
    for found, length, width in ((batch[0], LONG, LONG), (batch[1], NEIGHBOUR, 144)):
        assert all(t.any() for t in found)
        assert _differing(found, _trained([length], width)[0]) == []
    assert same_bytes(batch[0][0], _alone(*_sequence(LONG)[:3])[0])


@pytest.mark.parametrize("name", ["padding_left_in_place", "sdpa_on_padded_keys"])
def test_a_mutant_that_leaves_padding_in_is_caught(monkeypatch, name):
    monkeypatch.setattr(attention, "_alone", getattr(wrong_attention, name))
    assert not same_bytes(_chunk(128, 257, 29), _alone(*_qkv(LENGTH, seed=11))[0, 128:257])


def test_a_mutant_that_splits_keys_in_decoding_is_caught(monkeypatch):
    monkeypatch.setattr(attention, "_alone", wrong_attention.keys_split_for_one_query)
    assert same_bytes(_chunk(128, 257, 29), _alone(*_qkv(LENGTH, seed=11))[0, 128:257])
    assert not same_bytes(_chunk(299, 300, 29), _alone(*_qkv(LENGTH, seed=11))[0, 299:300])


def test_a_mutant_whose_schedule_follows_the_padding_is_caught(monkeypatch):
    """dQ has up to four terms here.  Of two, as in the demo, any order gives one sum."""
    monkeypatch.setattr(attention, "_alone", wrong_attention.schedule_by_padding)
    one, other = (_trained([LONG], width)[0] for width in (LONG, 432))
    assert _differing(one, other) == ["dq"]
    assert _differing(*(_trained([NEIGHBOUR], width)[0] for width in (NEIGHBOUR, 144))) == []
