"""Packs, and their sequences one by one: on the CPU backend, in simulated kernels or on a card."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch

import cute_kernels as ck
from cute_kernels.runtime import dispatch
from cute_kernels.runtime.plan_cache import Plan
from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import launch
from cute_kernels.sparse_attn import op as attention_op
from cute_kernels.sparse_attn.config import VALUE_DIMS
from cute_kernels.sparse_attn.op import NAME
from tests.contract import same_bytes
from tests.sparse_attn import simulated

NAMES = ("out", "lse", "dq", "dk", "dv")
#: (causal, window_size)
RULES = [(True, (None, None)), (False, (None, None)), (True, (70, None)), (False, (40, 9))]
DEVICE = "cpu"
#: Whether simulated kernels read packs where they lie.
IN_PLACE = True


def drawn(
    tokens: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (2, 1),
    dim: int = 64,
) -> list[torch.Tensor]:
    """Random q, k, v and gradients of out and lse.

    dQ does not feel what all keys share, but the parts that it sums do: their order shows.
    """
    g = torch.Generator().manual_seed(seed)
    wide = VALUE_DIMS[dim]
    shapes = [(tokens, heads[0], dim), (tokens, heads[1], dim)]
    shapes += [(tokens, heads[1], wide), (tokens, heads[0], wide)]
    q, k, v, dout = (torch.randn(shape, generator=g) for shape in shapes)
    q, k, v, dout = (t.to(DEVICE, dtype) for t in (q, k + 64, v, dout))
    return [q, k, v, dout, torch.randn(heads[0], tokens, generator=g).to(DEVICE)]


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=dtype)


def differentiated(run, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results of ``run(q, k, v)``, (out, lse), and dq, dk, dv."""
    *leaves, dout, dlse = tensors
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    results = run(*leaves)
    return [t.detach() for t in results] + list(torch.autograd.grad(results, leaves, (dout, dlse)))


def packed(tensors, lengths, causal=True, window_size=(None, None), **options):
    """All in one call."""
    options |= {"causal": causal, "window_size": window_size, "return_lse": True}
    cu_seqlens = offsets(lengths)
    return differentiated(
        lambda *t: ck.block_sparse_attention_varlen(*t, cu_seqlens, **options), tensors
    )


def trusted(tensors, cu_seqlens, window=(None, 0), sinks=None, softcap=0.0):
    """All in one call of the op with offsets that nobody looks at, as those on a GPU are."""
    numbers = *window, tensors[0].shape[2] ** -0.5, softcap

    def run(q, k, v):
        inputs = (t[None] for t in (q, k, v))
        out, lse = attention_op.varlen_attention(*inputs, cu_seqlens, *numbers, sinks)
        return out[0], lse[0]

    return differentiated(run, tensors)


def alone(tensors, lengths, causal=True, window_size=(None, None), **options):
    """Results of each sequence by a call of its own, put one behind another."""
    parts, begin = [], 0
    for n in lengths:
        sequence_tensors = cut(tensors, slice(begin, begin + n))
        begin += n
        if n:
            parts.append(differentiated(_one(n, causal, window_size, options), sequence_tensors))
    dims = (0, 1, 0, 0, 0)
    return [torch.cat(part, dim) for part, dim in zip(zip(*parts, strict=True), dims, strict=True)]


def _one(n: int, causal: bool, window_size: tuple, options: dict):
    left, right = window_size
    mask = None
    if left is not None or right is not None:
        mask = BlockMask.sliding_window(n, n, left=left, right=right, device=DEVICE)

    def run(q, k, v):
        inputs = (t[None] for t in (q, k, v))
        chosen = options | {"causal": causal, "return_lse": True, "schedule": "spt"}
        out, lse = ck.block_sparse_attention(*inputs, mask, **chosen)
        return out[0], lse[0]

    return run


def cut(tensors: list[torch.Tensor], tokens) -> list[torch.Tensor]:
    """Tokens of (q, k, v, dout, dlse) or of (out, lse, dq, dk, dv)."""
    return [t[:, tokens] if t.dim() == 2 else t[tokens] for t in tensors]


def differing(one, other) -> list[str]:
    return [n for n, a, b in zip(NAMES, one, other, strict=True) if not same_bytes(a, b)]


def lengths_of(seed: int) -> list[int]:
    """Sequences of 1 to 300 tokens, some empty, some of whole blocks."""
    g = np.random.default_rng(seed)
    kinds = g.integers(0, 8, g.integers(1, 6))
    fixed = {0: 0, 1: 128, 2: 1, 3: 127}
    out = [fixed.get(int(kind), int(g.integers(1, 300))) for kind in kinds]
    return out if sum(out) else [5]


@contextlib.contextmanager
def launched(forward, backward, in_place: bool = False) -> Iterator[None]:
    """Attention takes CPU tensors by the launchers of a GPU backend.

    in_place: Whether they read varlen batches where they lie.
    """
    out = {NAME: forward, f"{NAME}_backward": backward}
    with (
        mock.patch.object(dispatch, "plan", lambda op, *rest: Plan(out[op], fresh=False)),
        mock.patch.object(attention_op, "is_one_launch", lambda t: True),
        mock.patch.object(attention_op, "reads_keys_on_device", lambda device: in_place),
    ):
        yield


@contextlib.contextmanager
def on_sm90(**options) -> Iterator[list]:
    """Results in the simulator; ``options``: see `simulated.simulated`."""
    launchers = launched(launch.forward, launch.backward, IN_PLACE)
    with simulated.simulated(**options) as used, launchers:
        yield used
