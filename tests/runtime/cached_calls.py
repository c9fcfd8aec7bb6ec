"""Calls whose plans are cached: one of each kind, and how often one takes the slow path."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch

import cute_kernels as ck
from cute_kernels.gemm import op as gemm_op
from cute_kernels.norm import op as norm_op
from cute_kernels.rowwise import op as rowwise_op
from cute_kernels.sparse_attn import api
from cute_kernels.sparse_attn import op as attention_op
from tests.anchors import replaced

BF16 = torch.bfloat16


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random tensor on the default device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    out = torch.randn(shape, generator=generator, device="cpu").to(dtype)
    return out.to(torch.get_default_device())


def rewritten(function: Callable, part: str, by: str = "") -> Callable:
    """A function whose source has ``by`` in place of its one ``part``.

    Its globals are a copy of its module's, with what is patched there now.
    """
    source = inspect.getsource(function)
    changed = dict(vars(inspect.getmodule(function)))
    exec(replaced({"": source}, part, by)[""], changed)
    return changed[function.__name__]


def counted(monkeypatch) -> dict[str, int]:
    """How often each op's calls went the whole way from now on, counted at its checks."""
    counts = dict.fromkeys(("linear", "norm", "attention", "elements"), 0)

    def count(module, function, name):
        true = getattr(module, function)

        def counted(*args, **options):
            counts[name] += 1
            return true(*args, **options)

        monkeypatch.setattr(module, function, counted)

    count(gemm_op.linear.planned, "check", "linear")
    count(norm_op.norm.planned, "check", "norm")
    for op in (attention_op.block_sparse_attention, attention_op.sequence_attention):
        count(op.planned, "check", "attention")
    for op in (rowwise_op.activation, rowwise_op.gated):
        count(op.planned, "check", "elements")
    return counts


@functools.cache
def one_mask(device: torch.device) -> ck.BlockMask:
    """One mask for all calls: another one would be another call."""
    return ck.BlockMask.causal(130, 130, device=device)


def linear(x, order="chain", bias=None):
    return ck.linear(x, drawn(64, 48, seed=1), bias, order=order)


def attention(x, **options):
    q = x.view(1, 130, -1, 64)
    return ck.block_sparse_attention(
        q, q[:, :, :1].contiguous(), q[:, :, 1:2].contiguous(), **options
    )


def spanned(x, kv_heads=1):
    """Rows of a cache of 150 keys, each at its own place, half of them behind padding."""
    q = x.view(2, -1, 2 * kv_heads, 64)
    keys = drawn(2, 150, kv_heads, 64, seed=7)
    row = torch.arange(q.shape[1]).expand(2, -1) + 100
    first = torch.tensor([[0], [40]]).expand_as(row)
    spans = torch.stack((first, torch.zeros_like(row), first, row + 1), -1).int()[:, None]
    return api.sequence_attention(q, keys, keys * 0.5, spans.to(x.device), scale=0.2)


CASES = {
    "linear": (lambda x: linear(x), (33, 48)),
    "linear of three dimensions": (lambda x: linear(x), (3, 5, 48)),
    "linear, bias": (lambda x: linear(x, bias=drawn(64, seed=2)), (33, 48)),
    "linear, tree": (lambda x: linear(x, "tree"), (33, 48)),
    "rms_norm": (lambda x: ck.rms_norm(x, drawn(64, seed=3), 1e-5, offset=1.0), (5, 64)),
    "rms_norm, residual": (
        lambda x: torch.stack(ck.rms_norm(x, drawn(64, seed=3), residual=x * 0.5)),
        (2, 3, 64),
    ),
    "layer_norm": (lambda x: ck.layer_norm(x, drawn(64, seed=3), drawn(64, seed=4)), (2, 3, 64)),
    "attention, mask": (
        lambda x: attention(x, block_mask=one_mask(x.device), softcap=30.0),
        (130, 2 * 64),
    ),
    "attention, rule": (lambda x: attention(x, causal=True, scale=0.3), (130, 2 * 64)),
    "spans": (spanned, (2, 5 * 2 * 64)),
    "spans of one row": (spanned, (2, 2 * 64)),
    "spans of one row, groups": (lambda x: spanned(x, kv_heads=3), (2, 6 * 64)),
    "attention, lse": (lambda x: attention(x, causal=True, return_lse=True)[1], (130, 2 * 64)),
}
