"""Sequences in key buffers, and the same ones alone: what tests on a CPU and on a card share."""

from __future__ import annotations

import functools

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import api
from tests.contract import same_bytes
from tests.sparse_attn import pack_cases

H, HKV, D, S = 2, 1, 64, 300
CACHED = 280


def inputs(length: int, seed: int = 1) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output of one sequence, where `pack_cases` has tensors."""
    return [t[None] for t in pack_cases.drawn(length, seed, heads=(H, HKV), dim=D)[:4]]


def differentiated(run, leaves, dout) -> list[torch.Tensor]:
    """[out, dq, dk, dv] of ``run(*leaves)``."""
    leaves = [t.clone().requires_grad_() for t in leaves]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def alone(length: int, seed: int = 1, window: int | None = None) -> list[torch.Tensor]:
    *leaves, dout = inputs(length, seed)
    left = None if window is None else window - 1
    mask = BlockMask.sliding_window(length, length, left=left, right=0, device=pack_cases.DEVICE)
    run = functools.partial(api.block_sparse_attention, block_mask=mask, schedule="spt")
    return differentiated(run, leaves, dout)


def behind(pads: tuple[int, ...], lengths: tuple[int, ...], width: int) -> list[list[torch.Tensor]]:
    """Per sequence its [out, dq, dk, dv] in one batch, ``pads`` columns of NaN before it."""
    batch, real = [], torch.zeros(len(pads), width, dtype=torch.bool, device=pack_cases.DEVICE)
    for b, (pad, length) in enumerate(zip(pads, lengths, strict=True)):
        full = [t.new_full((1, width, *t.shape[2:]), torch.nan) for t in inputs(length)]
        for whole, part in zip(full, inputs(length, seed=b + 1), strict=True):
            whole[:, pad : pad + length] = part
        real[b, pad : pad + length] = True
        batch.append(full)
    *leaves, dout = (torch.cat(t) for t in zip(*batch, strict=True))
    spans = api.kv_ranges(None, real, 0, 0, (len(pads), width, width))
    run = lambda *t: api.sequence_attention(*t, spans)  # noqa: E731
    tensors = differentiated(run, leaves, dout.nan_to_num(0.0))
    assert not any(t[~real].any() for t in tensors)
    return [
        [t[b : b + 1, pad : pad + length] for t in tensors]
        for b, (pad, length) in enumerate(zip(pads, lengths, strict=True))
    ]


def differing(one, other) -> list[str]:
    names = ("out", "dq", "dk", "dv")
    return [n for n, a, b in zip(names, one, other, strict=True) if not same_bytes(a, b)]


def packed(cut: int, window: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """[out, dq, dk, dv] of a pack of documents [0, cut) and [cut, S), and the documents alone."""
    parts = [inputs(cut), inputs(S - cut, seed=2)]
    *leaves, dout = (torch.cat(t, dim=1) for t in zip(*parts, strict=True))
    kv = torch.arange(S, device=pack_cases.DEVICE)
    q = kv[:, None]
    dense = (kv <= q) & ((q < cut) == (kv < cut))
    if window:
        dense &= kv > q - window
    visible = api.seen_columns(dense[None, None])
    spans = api.kv_ranges(visible, None, 0, 0, (1, S, S))
    both = differentiated(lambda *t: api.sequence_attention(*t, spans), leaves, dout)
    documents = zip(alone(cut, 1, window), alone(S - cut, 2, window), strict=True)
    return both, [torch.cat(t, dim=1) for t in documents]


def cached(window: int, pad: int, chunks: list[tuple[int, int]]) -> torch.Tensor:
    """Rows of a sequence behind ``pad`` columns, whose cache keeps the last window - 1 columns."""
    q, k, v, _ = inputs(CACHED)
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, 0, pad, 0), value=torch.nan) for t in (k, v))
    rows = []
    for first, last in chunks:
        dropped = max(pad + first - (window - 1), 0)
        keys = slice(dropped, pad + last)
        column = torch.arange(dropped, pad + last, device=pack_cases.DEVICE)
        row = torch.arange(pad + first, pad + last, device=pack_cases.DEVICE)[:, None]
        dense = (column <= row) & (column > row - window) & (column >= pad)
        padding = torch.arange(pad + last, device=pack_cases.DEVICE)[None] >= pad
        sizes = (1, last - first, pad + last - dropped)
        visible = api.seen_columns(dense[None, None])
        spans = api.kv_ranges(visible, padding, pad + first, dropped, sizes)
        cut = (q[:, first:last], k[:, keys], v[:, keys])
        rows.append(api.sequence_attention(*cut, spans))
    return torch.cat(rows, dim=1)


CHUNKS = [(0, 100), (100, 101), (101, 131), (131, 200), (200, 201), (201, 279), (279, 280)]
