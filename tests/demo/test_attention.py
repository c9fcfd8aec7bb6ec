"""attention.py: right, and the same bytes with a cache, in chunks, with padding, in any batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cute_kernels.demo.attention import attention

CAPACITY, HEADS, GROUPS, DIM = 128, 4, 2, 32
MODULE = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=CAPACITY))
LENGTH = 90


@pytest.fixture
def qkv():
    torch.manual_seed(11)
    heads = (HEADS, GROUPS, GROUPS)
    return [torch.randn(1, h, LENGTH, DIM).to(torch.bfloat16) for h in heads]


def _attend(q, k, v, positions):
    return attention(MODULE, q, k, v, None, position_ids=positions, scaling=DIM**-0.5)[0]


def _bytes(t):
    return t.detach().contiguous().view(torch.uint8)


@torch.no_grad()
def test_it_is_causal_attention(qkv):
    q, k, v = qkv
    got = _attend(q, k, v, torch.arange(LENGTH)[None])
    wide = [t.double().repeat_interleave(HEADS // t.shape[1], dim=1) for t in qkv]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    # bf16 scores and weights: 2^-8 relative each, weights sum to 1.
    bound = 2.0**-5 * wide[2].abs().amax()
    assert (got.double() - want.transpose(1, 2)).abs().max() < bound


@torch.no_grad()
@pytest.mark.parametrize("first,end", [(0, 1), (0, 50), (49, 50), (17, 64), (89, 90), (33, 90)])
@pytest.mark.parametrize("pad", [0, 1, 29])
def test_a_chunk_behind_padding_has_the_bytes_of_the_whole(qkv, first, end, pad):
    q, k, v = qkv
    whole = _attend(q, k, v, torch.arange(LENGTH)[None])[:, first:end]
    junk = torch.full((1, GROUPS, pad, DIM), torch.nan, dtype=torch.bfloat16)
    keys, values = (torch.cat([junk, t[:, :, :end]], dim=2) for t in (k, v))
    chunk = _attend(q[:, :, first:end], keys, values, torch.arange(first, end)[None])
    assert _bytes(chunk).equal(_bytes(whole))


@torch.no_grad()
def test_padding_rows_are_zero_and_a_sequence_may_be_all_padding(qkv):
    q, k, v = (torch.cat([t[:, :, :20]] * 2) for t in qkv)
    positions = torch.stack([torch.arange(20) - 20, torch.arange(20) - 7])
    out = _attend(q, k, v, positions)
    assert not out[0].any() and not out[1, :7].any()
    alone = _attend(q[:1, :, 7:], k[:1, :, 7:], v[:1, :, 7:], torch.arange(13)[None])
    assert _bytes(out[1, 7:]).equal(_bytes(alone[0]))


def test_training_has_the_bytes_of_rollout_and_gradients_ignore_the_tail(qkv):
    """Under grad queries fill fixed slots; right padding by 16 leaves dq, dk, dv as they are."""
    dy = torch.randn(1, LENGTH, HEADS, DIM).to(torch.bfloat16)
    grads = []
    for tail in (0, 16):
        inputs = [torch.nn.functional.pad(t, (0, 0, 0, tail)).requires_grad_() for t in qkv]
        out = _attend(*inputs, torch.arange(LENGTH + tail)[None])
        out[:, :LENGTH].backward(dy)
        grads.append([_bytes(t.grad[:, :, :LENGTH]) for t in inputs])
        with torch.no_grad():
            silent = _attend(*inputs, torch.arange(LENGTH + tail)[None])
        assert _bytes(out).equal(_bytes(silent))
    for one, other in zip(*grads, strict=True):
        assert one.any() and one.equal(other)
