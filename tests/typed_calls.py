"""Public calls and their types, for mypy and pyright: tests/test_typing.py.  Nothing runs this."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import assert_type

import cute_kernels as ck

Pair = tuple[Tensor, Tensor]


def norms(x: Tensor, w: Tensor, residual: Tensor, maybe: Tensor | None) -> None:
    assert_type(ck.rms_norm(x, w).sum(), Tensor)
    assert_type(ck.rms_norm(x, w, 1e-5, residual=None), Tensor)
    assert_type(ck.rms_norm(x, None, residual=residual), Pair)
    assert_type(ck.rms_norm(x, w, residual=maybe), Tensor | Pair)
    ck.rms_norm(x, w, residual=residual).sum()  # type: ignore[attr-defined]
    assert_type(ck.layer_norm(x, w, w), Tensor)
    assert_type(ck.layer_norm(x, residual=residual), Pair)
    assert_type(ck.layer_norm(x, residual=maybe), Tensor | Pair)


def losses(h: Tensor, w: Tensor, target: Tensor, flag: bool) -> None:
    assert_type(ck.linear_logp(h, w, target).sum(), Tensor)
    assert_type(ck.linear_logp(h, w, target, temperature=0.7, return_entropy=False), Tensor)
    assert_type(ck.linear_logp(h, w, target, return_entropy=True), Pair)
    ck.linear_logp(h, w, target, return_entropy=True).sum()  # type: ignore[attr-defined]
    assert_type(ck.log_probs(h, target).sum(), Tensor)
    assert_type(ck.log_probs(h, target, return_entropy=True), Pair)
    out = ck.linear_policy_loss(h, w, target, loss="dapo", advantages=h, return_entropy=flag)
    assert_type(out.loss, Tensor)
    assert_type(out.logp, Tensor)
    assert_type(out.entropy, Tensor | None)
    assert_type(out.metrics.clip_fraction, Tensor | None)
    ck.linear_policy_loss(h, w, target, loss=lambda logp, entropy: -logp)


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
    assert_type(ck.block_sparse_attention(q, k, v, causal=True), Tensor)
    assert_type(ck.block_sparse_attention(q, k, v, return_lse=True), Pair)
    varlen = ck.block_sparse_attention_varlen
    assert_type(varlen(q, k, v, cu_seqlens), Tensor)
    assert_type(varlen(q, k, v, cu_seqlens, return_lse=True), Pair)
    lists = cu_seqlens, cu_seqlens, cu_seqlens
    assert_type(ck.paged_attention(q, k, v, *lists), Tensor)
    assert_type(ck.paged_attention(q, k, v, *lists, return_lse=True), Pair)
    assert_type(ck.write_kv_cache(k, v, k, v, cu_seqlens), None)


def modules(x: Tensor, ids: Tensor, residual: Tensor) -> None:
    """Of ``module(x)`` torch says Any."""
    assert_type(ck.nn.Linear(8, 8).forward(x), Tensor)
    assert_type(ck.nn.Embedding(8, 8).forward(ids), Tensor)
    assert_type(ck.nn.RMSNorm(8).forward(x), Tensor)
    assert_type(ck.nn.RMSNorm((2, 4)).forward(x, residual=residual), Pair)
    assert_type(ck.nn.LayerNorm(8).forward(x, residual=residual), Pair)
    head = ck.nn.LinearLogp(8, 16, order="tree")
    assert_type(head.forward(x, ids), Tensor)
    assert_type(head.forward(x, ids, return_entropy=True), Pair)
    assert_type(head.logits(x), Tensor)


def others(x: Tensor, w: Tensor, ids: Tensor) -> None:
    assert_type(ck.linear(x, w).sum(), Tensor)
    assert_type(ck.matmul(x, w), Tensor)
    assert_type(ck.embedding(ids, w), Tensor)
    assert_type(ck.apply_rotary(x, x, x, x), Pair)
    assert_type(ck.apply_rotary_pos_emb(x, x, x, x), Pair)
    assert_type(ck.mhc.aggregate(x, w, 4), Tensor)
