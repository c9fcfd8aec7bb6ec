"""Attention over key buffers that tell no position: windows and padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.errors import BatchVariantError
from cute_kernels.sparse_attn.kv_ranges import ranges
from tests.contract import same_bytes
from tests.model.batch_invariant.cases import BF16, FP32, drawn

#: Beyond one block of 128 keys; a window that is no multiple of anything.
LENGTH, WINDOW = 150, 101


def strict():
    return ck.batch_invariant(strict=True)


def windowed(rows: int, window: int) -> torch.Tensor:
    index = torch.arange(rows)
    return (index[:, None] >= index) & (index[:, None] - index < window)


@pytest.mark.parametrize(("dtype", "dim"), [(BF16, 24), (FP32, 264)], ids=str)
def test_a_row_has_the_bytes_that_its_keys_alone_give(dtype, dim):
    """Whatever columns lie in front and behind: a row under a window, and that row cut out."""
    q, k, v = (drawn(2, 2, LENGTH, dim, seed=s, dtype=dtype) for s in (1, 2, 3))
    before, after = 45, 90
    padded = [F.pad(t, (0, 0, before, after), value=3.0) for t in (q, k, v)]
    wide = F.pad(windowed(LENGTH, WINDOW), (before, after, before, after))
    with strict():
        whole = F.scaled_dot_product_attention(q, k, v, attn_mask=windowed(LENGTH, WINDOW))
        shifted = F.scaled_dot_product_attention(*padded, attn_mask=wide[None, None])
        assert same_bytes(shifted[:, :, before : before + LENGTH], whole)
        for row in (0, WINDOW - 1, WINDOW, 128, LENGTH - 1):
            seen = slice(max(0, row + 1 - WINDOW), row + 1)
            one = q[:, :, row : row + 1], k[:, :, seen], v[:, :, seen]
            alone = F.scaled_dot_product_attention(*one)
            assert same_bytes(alone, whole[:, :, row : row + 1]), row
    assert same_bytes(shifted[:, :, :before], torch.zeros_like(shifted[:, :, :before]))


def test_sequences_of_a_batch_have_windows_of_their_own():
    """fp32, where rows of one batch begin at other columns."""
    q, k, v = (drawn(2, 2, LENGTH, 24, seed=s, dtype=FP32) for s in (1, 2, 3))
    mask = torch.stack([windowed(LENGTH, WINDOW), windowed(LENGTH, 120)])[:, None]
    with strict():
        both = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        for b in range(2):
            one = (t[b : b + 1] for t in (q, k, v))
            alone = F.scaled_dot_product_attention(*one, attn_mask=mask[b : b + 1])
            assert same_bytes(alone, both[b : b + 1])


def test_positions_from_a_rows_first_key_are_what_decides(monkeypatch):
    """Positions from the batch's first key, as before: the window shows in the bits."""
    true = ranges.anchored

    def of_the_batch(seen):
        spans = true(seen)
        spans[..., 1] = 0
        return spans

    monkeypatch.setattr(ranges, "anchored", of_the_batch)
    with pytest.raises(AssertionError):
        test_a_row_has_the_bytes_that_its_keys_alone_give(BF16, 24)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gradients_under_a_window(dtype):
    """Against float64; a key's gradient is a sum over rows of other classes, in fp32."""
    tensors = [drawn(2, 2, LENGTH, 24, seed=s, dtype=dtype) for s in (1, 2, 3, 4)]
    *leaves, dout = (t.clone().requires_grad_() for t in tensors)
    *exact, dexact = (t.double().requires_grad_() for t in tensors)
    mask = windowed(LENGTH, WINDOW)
    want = F.scaled_dot_product_attention(*exact, attn_mask=mask)
    with strict():
        got = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        first = torch.autograd.grad(got, leaves, dout, retain_graph=True)
        second = torch.autograd.grad(got, leaves, dout)
    step = 2.0**-8 if dtype == BF16 else 2.0**-21
    assert (got.double() - want).abs().max() < 4 * step
    for a, b, c in zip(first, second, torch.autograd.grad(want, exact, dexact), strict=True):
        assert same_bytes(a, b) and a.dtype == dtype
        assert (a.double() - c).abs().max() < 4 * step * c.abs().max()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_rows_in_a_graph(dtype):
    """A window in a graph is the eager one; what a graph cannot count by keys strict refuses."""
    q, k, v = (drawn(1, 2, LENGTH, 24, seed=s, dtype=dtype) for s in (1, 2, 3))
    mask = windowed(LENGTH, WINDOW)
    run = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    with strict(), torch.no_grad():
        if dtype == FP32:
            with pytest.raises(Exception) as caught:
                run(q, k, v, mask)
            assert BatchVariantError.__name__ in repr(caught.value) + str(caught.value)
            mask = None
        assert same_bytes(run(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))


def test_heads_of_several_sizes_in_one_graph():
    """Sizes that vary are symbolic in the second graph, and so is the scale."""
    run = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    for size in (24, 40, 56):
        q, k, v = (drawn(1, 2, 30, size, seed=s, dtype=BF16) for s in (1, 2, 3))
        mask = windowed(30, 7)
        with strict(), torch.no_grad():
            assert same_bytes(run(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
