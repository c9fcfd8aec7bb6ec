"""Calls of every system whose results have parts that no formula fills."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import cute_kernels as ck
from cute_kernels import mhc

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed + 100)
    return torch.randn(shape, generator=g).to(dtype).requires_grad_()


def backward(results: object) -> None:
    """Run the backward of all results that have one."""
    found = [t for t in results if t is not None] if isinstance(results, tuple) else [results]
    found = [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad]
    upstream = [leaf(*t.shape, seed=i, dtype=t.dtype).detach() for i, t in enumerate(found)]
    torch.autograd.backward(found, upstream)


def linear(m: int, n: int, k: int, order: str = "chain", main_grad: bool = False) -> None:
    state = torch.ones(n, k) if main_grad else None
    options = {"order": order, "main_grad": state}
    backward(ck.linear(leaf(m, k), leaf(n, k, seed=1), leaf(n, seed=2), **options))


def grouped(*counts: int, strays: int = 0, order: str = "chain", main_grad: bool = False) -> None:
    """Strays: rows behind the last offset, whose values are undefined on a GPU."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    weight, rows = leaf(len(counts), 24, 40, seed=1), sum(counts) + strays
    state = torch.ones(weight.shape) if main_grad else None
    y = ck.grouped_linear(
        leaf(rows, 40), weight, offsets, leaf(len(counts), 24, seed=2), order=order, main_grad=state
    )
    backward(y)


def moe(indices: list[list[int]], width: int = 24, weighted: bool = True) -> None:
    """A layer of one product, with strays, experts without tokens, or no tokens."""
    chosen = torch.tensor(indices, dtype=INT32).view(-1, 2)
    logits = leaf(len(chosen), 4, seed=1, dtype=FP32)
    routing = ck.moe.route(logits, 2, indices=chosen)
    rows, permutation = ck.moe.permute(leaf(len(chosen), 40), chosen, 4)
    y = ck.grouped_linear(rows, leaf(4, width, 40, seed=2), permutation.offsets)
    backward(ck.moe.combine(y, routing.weights if weighted else None, permutation))


def logp(tokens: int, vocab: int, width: int, ignored: slice, order: str = "chain") -> None:
    target = torch.arange(tokens) % max(vocab, 1)
    target[ignored] = -100
    hidden, weight = leaf(tokens, width), leaf(vocab, width, seed=1)
    backward(ck.linear_logp(hidden, weight, target, order=order, return_entropy=True))


def policy(tokens: int, masked: slice, **options) -> None:
    target = torch.arange(tokens)[None] % 50
    mask = torch.ones(1, tokens, dtype=torch.bool)
    mask[:, masked] = False
    advantages, old = (leaf(1, tokens, seed=i, dtype=FP32).detach() for i in (2, 3))
    out = ck.linear_policy_loss(
        leaf(1, tokens, 40), leaf(50, 40, seed=1), target,
        loss="grpo", advantages=advantages, old_logp=old, mask=mask, return_entropy=True, **options,
    )  # fmt: skip
    out.loss.backward()


def log_probs(tokens: int, vocab: int) -> None:
    backward(ck.log_probs(leaf(tokens, vocab), torch.arange(tokens) % vocab, return_entropy=True))


def norm(op: Callable, rows: int, width: int) -> None:
    bias = (leaf(width, seed=2),) if op is ck.layer_norm else ()
    backward(op(leaf(rows, width), leaf(width, seed=1), *bias, residual=leaf(rows, width, seed=3)))


def rowwise(rows: int, width: int) -> None:
    for op in (ck.softmax, ck.log_softmax, ck.silu, ck.gelu, ck.sigmoid, ck.tanh):
        backward(op(leaf(rows, width)))
    for op in (ck.silu_mul, ck.gelu_mul):
        backward(op(leaf(rows, width), leaf(rows, width, seed=1)))


def embedding(ids: list[int]) -> None:
    """Rows of the table that no id reads get zeros."""
    backward(ck.embedding(torch.tensor(ids, dtype=torch.int64), leaf(9, 40)))


def attention(q_len: int, keys: int, heads: int = 2, batch: int = 1, **options) -> None:
    q = leaf(batch, q_len, heads, 64)
    k, v = (leaf(batch, keys, 1, 64, seed=i) for i in (1, 2))
    backward(ck.block_sparse_attention(q, k, v, return_lse=True, **options))


def pack(*ends: int, tokens: int, **options) -> None:
    q, k, v = (leaf(tokens, heads, 64, seed=i) for i, heads in enumerate((2, 1, 1)))
    offsets = torch.tensor([0, *ends])
    backward(ck.block_sparse_attention_varlen(q, k, v, offsets, return_lse=True, **options))


def paged(*lengths: tuple[int, int], padding: int = 0, **options) -> None:
    """(queries, keys) of each sequence; padding: tokens of none."""
    counts = [rows for rows, _ in lengths]
    pages = max((-(-keys // 16) for _, keys in lengths), default=0)
    caches = [leaf(len(lengths) * pages + 1, 16, 1, 64, seed=i).detach() for i in (1, 2)]
    table = torch.arange(len(lengths) * pages, dtype=INT32).view(len(lengths), pages)
    keys = torch.tensor([keys for _, keys in lengths], dtype=INT32)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    q = leaf(sum(counts) + padding, 2, 64).detach()
    ck.paged_attention(q, *caches, table, keys, starts, return_lse=True, **options)


def conv(*ends: int, tokens: int) -> None:
    """A pack; rows behind its last sequence belong to none."""
    x, weight, bias = leaf(1, 24, tokens), leaf(24, 4, seed=1), leaf(24, seed=2)
    offsets = torch.tensor([0, *ends], dtype=INT32)
    states = leaf(len(ends), 24, 3, seed=3)
    options = {"activation": "silu", "cu_seqlens": offsets, "return_final_states": True}
    backward(ck.causal_conv1d_fn(x, weight, bias, states, **options)[0])


def delta(*ends: int, tokens: int, channels: tuple[int, ...] = ()) -> None:
    """A pack; rows behind its last sequence belong to none.  channels: Those of a gate."""
    q, k, v = (leaf(1, tokens, heads, 8, seed=i) for i, heads in enumerate((1, 1, 2)))
    beta, g = leaf(1, tokens, 2, seed=3), leaf(1, tokens, 2, *channels, seed=4, dtype=FP32)
    state = leaf(len(ends), 2, 8, 8, seed=5, dtype=FP32)
    options = {
        "cu_seqlens": torch.tensor([0, *ends], dtype=INT32), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": leaf(2, seed=6),
    }  # fmt: skip
    rule = ck.chunk_kda if channels else ck.chunk_gated_delta_rule
    backward(rule(q, k, v, g, beta, None, state, **options))


def scan(*ends: int, tokens: int) -> None:
    """A pack; rows behind its last sequence belong to none."""
    x, z = (leaf(1, tokens, 2, 8, seed=i) for i in (0, 1))
    dt = leaf(1, tokens, 2, seed=2)
    B, C = (leaf(1, tokens, 1, 16, seed=i) for i in (3, 4))
    A, D, dt_bias = leaf(2, seed=5, dtype=FP32), leaf(2, 8, seed=6), leaf(2, seed=7)
    states = leaf(len(ends), 2, 8, 16, seed=8, dtype=FP32)
    options = {
        "cu_seqlens": torch.tensor([0, *ends], dtype=INT32), "return_final_states": True,
        "dt_softplus": True,
    }  # fmt: skip
    backward(ck.mamba_chunk_scan_combined(x, dt, A, B, C, 128, D, z, dt_bias, states, **options))


def selective(*ends: int, tokens: int) -> None:
    """A pack; rows behind its last sequence belong to none."""
    u, delta, z = (leaf(1, 6, tokens, seed=i) for i in (0, 1, 2))
    B, C = (leaf(1, 8, tokens, seed=i) for i in (3, 4))
    A, D, bias = leaf(6, 8, seed=5, dtype=FP32), leaf(6, seed=6), leaf(6, seed=7)
    states = leaf(len(ends), 6, 8, seed=8, dtype=FP32)
    options = {"cu_seqlens": torch.tensor([0, *ends], dtype=INT32), "initial_state": states}
    backward(ck.selective_scan(u, delta, A, B, C, D, z, bias, True, True, **options))


def gated_norm(rows: int, width: int, first: bool) -> None:
    x, weight, gate = leaf(rows, width), leaf(width, seed=1), leaf(rows, width, seed=2)
    backward(ck.gated_rms_norm(x, weight, gate, 1e-6, norm_before_gate=first))


def site(tokens: int, n: int, width: int) -> None:
    """Widths that are no multiple of a tile; no tokens."""
    size = 2 * n + n * n
    x = leaf(tokens, width, n, dtype=FP32)
    weights = (leaf(size, n * width, seed=1), leaf(3, seed=2), leaf(size, seed=3))
    weights = [t.detach().float().requires_grad_() for t in weights]
    backward(mhc.connect(x, lambda f: f * 0.5, *weights, options=mhc.Options(iterations=3)))


STRAYS = [[0, 3], [-1, 4], [2, 9], [3, 3], [-7, 0]]
#: System -> its cases.  Backends of GPUs run those by night.
CASES: dict[str, dict[str, Callable[[], None]]] = {
    system: {name: functools.partial(*call[:-1], **call[-1]) for name, call in cases.items()}
    for system, cases in {
        "gemm": {
            "no rows": (linear, 0, 24, 40, {}),
            "no columns": (linear, 3, 0, 40, {}),
            "no products": (linear, 3, 24, 0, {}),
            "one of each": (linear, 1, 1, 1, {}),
            "tails": (linear, 131, 137, 73, {}),
            "tails in leaves": (linear, 67, 72, 1100, {"order": "tree"}),
            "main_grad of no rows": (linear, 0, 24, 40, {"main_grad": True}),
            "main_grad of tails": (linear, 19, 24, 40, {"main_grad": True}),
        },
        "moe": {
            "no tokens": (grouped, 0, 0, {}),
            "empty experts": (grouped, 0, 5, 0, 130, 0, {}),
            "empty experts, tree": (grouped, 0, 5, 0, 130, 0, {"order": "tree"}),
            "main_grad of empty experts": (grouped, 0, 3, 0, {"main_grad": True}),
            "route no tokens": (moe, [], {}),
            "strays": (moe, STRAYS, {}),
            "strays without weights": (moe, STRAYS, {"weighted": False}),
            "strays alone": (moe, [[-1, 4], [5, -2]], {}),
            "wide": (moe, STRAYS, {"width": 1030}),
        },
        "logp": {
            "no tokens": (logp, 0, 50, 40, slice(0), {}),
            "some ignored": (logp, 7, 50, 40, slice(2, 5), {}),
            "all ignored": (logp, 7, 50, 40, slice(None), {}),
            "tails": (logp, 67, 131, 73, slice(60, None), {}),
            "tails in leaves": (logp, 5, 72, 1100, slice(1), {"order": "tree"}),
            "log_probs": (log_probs, 5, 73, {}),
            "policy": (policy, 7, slice(2, 5), {}),
            "policy, all masked": (policy, 7, slice(None), {}),
            "policy, kept logits": (policy, 7, slice(3), {"logits_memory": 1 << 20}),
        },
        "norm": {
            f"{op.__name__}, {rows} x {width}": (norm, op, rows, width, {})
            for op in (ck.rms_norm, ck.layer_norm)
            for rows, width in ((0, 64), (1, 1), (5, 73), (130, 40), (3, 1100))
        },
        "rowwise": {
            "no rows": (rowwise, 0, 40, {}),
            "tails": (rowwise, 3, 73, {}),
            "wide": (rowwise, 2, 1100, {}),
            "no ids": (embedding, [], {}),
            "some ids": (embedding, [3, 3, 8], {}),
        },
        "linear_attn": {
            "no rows": (conv, 0, {"tokens": 0}),
            "rows of no sequence": (conv, 3, 3, 70, {"tokens": 90}),
            "delta, no rows": (delta, 0, {"tokens": 0}),
            "delta, rows of no sequence": (delta, 3, 3, 70, {"tokens": 90}),
            "delta, channels": (delta, 3, 3, 70, {"tokens": 90, "channels": (8,)}),
            "scan, no rows": (scan, 0, {"tokens": 0}),
            "selective scan, no rows": (selective, 0, {"tokens": 0}),
            "selective scan, rows of no sequence": (selective, 3, 3, 40, {"tokens": 70}),
            "scan, rows of no sequence": (scan, 3, 3, 140, {"tokens": 160}),
            "gated norm of no rows": (gated_norm, 0, 40, True, {}),
            "gated norm, tails": (gated_norm, 67, 73, False, {}),
        },
        "sparse_attn": {
            "rows without keys": (attention, 150, 70, {"causal": True}),
            "tails": (attention, 131, 140, {"causal": True, "heads": 3, "batch": 2}),
            "one query": (attention, 1, 300, {}),
            "empty documents": (pack, 0, 5, 5, 40, {"tokens": 40, "causal": True}),
            "tokens of no document": (pack, 5, 30, {"tokens": 30, "window_size": (3, 0)}),
            "paged": (paged, (3, 20), (1, 131), {"padding": 2}),
            "paged, a sequence without queries": (paged, (0, 20), (1, 5), {}),
        },
        "mhc": {
            "no tokens": (site, 0, 2, 6, {}),
            "one": (site, 1, 4, 5, {}),
            "tails": (site, 67, 4, 20, {}),
        },
    }.items()
}
