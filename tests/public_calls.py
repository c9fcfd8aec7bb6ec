"""A differentiable call of each public op, on small leaves."""

from __future__ import annotations

import torch

import cute_kernels as ck
from cute_kernels import mhc
from tests.runtime.cached_calls import drawn

FP32 = torch.float32
IDS = torch.tensor([[3, 1, 4], [1, 5, 0]])
OFFSETS = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
SITE = mhc.Options(iterations=3)
ADVANTAGES, BOUNDS = torch.tensor([1.0, -2.0]), torch.tensor([0, 2, 5])
MASK = ck.BlockMask.from_dense(torch.arange(25, device="cpu").view(5, 5) % 3 > 0)
TABLE, SCALES = (drawn(1, 3, 8, seed=8), drawn(1, 3, 8, seed=9)), torch.tensor([1.0, 2.0, 3.0])


def delta_rule(q, k, v, g, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and last state of a gated delta rule."""
    rule = ck.chunk_gated_delta_rule if g.dim() == 3 else ck.chunk_kda
    return rule(q, k, v, g.float(), beta, initial_state=state.float(), output_final_state=True)


def gated_delta_rule(q, k, v, g, beta, A_log, dt_bias) -> torch.Tensor:
    """Rows of a gated delta rule behind norms and a gate."""
    rule, options = ck.fused_recurrent_gated_delta_rule, {}
    if g.dim() == 4:
        rule, options = ck.fused_recurrent_kda, {"lower_bound": -5.0}
    options |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
    return rule(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **options)[0]


#: Name -> a call on leaves, and their shapes; fp32 for mhc.
CASES = {
    "linear": (ck.linear, (2, 3, 16), (8, 16), (8,)),
    "matmul": (ck.matmul, (6, 16), (16, 8)),
    "skinny_linear": (ck.skinny_linear, (2, 3, 16), (8, 16), (8,)),
    "grouped_linear": (
        lambda x, w, b: ck.grouped_linear(x, w, OFFSETS, b), (6, 16), (3, 8, 16), (3, 8),
    ),
    "linear_logp": (
        lambda x, w: ck.linear_logp(x, w, IDS, return_entropy=True), (2, 3, 16), (8, 16),
    ),
    "linear_policy_loss": (
        lambda x, w: ck.linear_policy_loss(
            x, w, IDS, loss="dapo", advantages=ADVANTAGES, return_entropy=True
        )[:3],
        (2, 3, 16), (8, 16),
    ),
    "causal_conv1d_fn": (
        lambda x, w, b: ck.causal_conv1d_fn(x, w, b, activation="silu"), (2, 16, 3), (16, 4), (16,),
    ),
    "chunk_gated_delta_rule": (
        delta_rule, *[(1, 5, 1, 8)] * 2, (1, 5, 2, 8), *[(1, 5, 2)] * 2, (1, 2, 8, 8),
    ),
    "fused_recurrent_gated_delta_rule": (
        gated_delta_rule,
        *[(1, 5, 1, 8)] * 2, (1, 5, 2, 8), *[(1, 5, 2)] * 2, (2,), (2,),
    ),
    "chunk_kda": (
        delta_rule, *[(1, 5, 1, 8)] * 2, *[(1, 5, 2, 8)] * 2, (1, 5, 2), (1, 2, 8, 8),
    ),
    "fused_recurrent_kda": (
        gated_delta_rule, *[(1, 5, 1, 8)] * 2, *[(1, 5, 2, 8)] * 2, (1, 5, 2), (2,), (16,),
    ),
    "mamba_chunk_scan_combined": (
        lambda x, dt, A, B, C, D, z, dt_bias, states: ck.mamba_chunk_scan_combined(
            x, dt, A.float(), B, C, 128, D, z, dt_bias, states.float(),
            dt_softplus=True, return_final_states=True,
        ),
        (1, 5, 2, 8), (1, 5, 2), (2,), *[(1, 5, 1, 16)] * 2, (2,), (1, 5, 2, 8), (2,),
        (1, 2, 8, 16),
    ),
    "selective_scan": (
        lambda u, delta, A, B, C, D, z, delta_bias, state: ck.selective_scan(
            u, delta, A.float(), B, C, D, z, delta_bias, True, True, initial_state=state.float()
        ),
        *[(1, 4, 5)] * 2, (4, 8), *[(1, 8, 5)] * 2, (4,), (1, 4, 5), (4,), (1, 4, 8),
    ),
    "gated_rms_norm": (
        lambda x, w, z: ck.gated_rms_norm(x, w, z, 1e-6, norm_before_gate=False, group_size=8),
        (2, 3, 16), (16,), (2, 3, 16),
    ),
    "log_probs": (lambda x: ck.log_probs(x, IDS, return_entropy=True), (2, 3, 8)),
    "rms_norm": (lambda x, w: ck.rms_norm(x, w), (2, 3, 16), (16,)),
    "rms_norm, residual": (
        lambda x, r, w: ck.rms_norm(x, w, residual=r), (2, 3, 16), (2, 3, 16), (16,),
    ),
    "layer_norm": (ck.layer_norm, (2, 3, 16), (16,), (16,)),
    "layer_norm, residual": (
        lambda x, r, w: ck.layer_norm(x, w, residual=r), (2, 3, 16), (2, 3, 16), (16,),
    ),
    "embedding": (lambda w: ck.embedding(IDS, w), (8, 16)),
    "softmax": (ck.softmax, (2, 3, 8)),
    "log_softmax": (ck.log_softmax, (2, 3, 8)),
    "silu": (ck.silu, (2, 3, 8)),
    "gelu": (ck.gelu, (2, 3, 8)),
    "sigmoid": (ck.sigmoid, (2, 3, 8)),
    "tanh": (ck.tanh, (2, 3, 8)),
    "silu_mul": (ck.silu_mul, (2, 3, 8), (2, 3, 8)),
    "gelu_mul": (ck.gelu_mul, (2, 3, 8), (2, 3, 8)),
    "apply_rotary": (
        lambda q, k: ck.apply_rotary(q, k, *TABLE),
        (1, 2, 3, 8), (1, 1, 3, 8),
    ),
    "apply_rotary_pos_emb": (
        lambda q, k: ck.apply_rotary_pos_emb(q, k, *TABLE),
        (1, 2, 3, 8), (1, 1, 3, 8),
    ),
    "block_sparse_attention": (
        lambda q, k, v: ck.block_sparse_attention(q, k, v, causal=True, return_lse=True),
        (1, 5, 2, 64), (1, 5, 1, 64), (1, 5, 1, 64),
    ),
    "block_sparse_attention, mask": (
        lambda q, k, v: ck.block_sparse_attention(q, k, v, MASK, return_lse=True),
        (1, 5, 2, 64), (1, 5, 1, 64), (1, 5, 1, 64),
    ),
    "block_sparse_attention_varlen": (
        lambda q, k, v: ck.block_sparse_attention_varlen(q, k, v, BOUNDS, return_lse=True),
        (5, 2, 64), (5, 1, 64), (5, 1, 64),
    ),
    "mhc.projection": (mhc.projection, (2, 3, 6, 2), (8, 12)),
    "mhc.scale": (
        lambda h, a, b: mhc.scale(h, a, b, SCALES, 2), (3, 8), (3,), (8,),
    ),
    "mhc.sinkhorn": (lambda z: mhc.sinkhorn(z, 2, iterations=3), (2, 3, 2, 2)),
    "mhc.aggregate": (lambda x, p: mhc.aggregate(x, p, 2), (2, 3, 6, 2), (2, 3, 2)),
    "mhc.expand_combine": (
        lambda f, p, x, r: mhc.expand_combine(f, None, p, x, r, 2),
        (2, 3, 6), (2, 3, 2), (2, 3, 6, 2), (2, 3, 2, 2),
    ),
    "mhc.mix_and_aggregate": (
        lambda *args: mhc.mix_and_aggregate(*args, options=SITE), (2, 3, 6, 2), (8, 12), (3,), (8,),
    ),
    "mhc.connect": (
        lambda x, *args: mhc.connect(x, lambda f: f * 0.5, *args, options=SITE),
        (2, 3, 6, 2), (8, 12), (3,), (8,),
    ),
    "mhc.post_pre": (
        lambda f, p, x, r, *args: mhc.post_pre(f, None, p, x, r, *args, options=SITE),
        (2, 3, 6), (2, 3, 2), (2, 3, 6, 2), (2, 3, 2, 2), (8, 12), (3,), (8,),
    ),
    "mhc.head": (
        lambda *args: mhc.head(*args, options=SITE), (2, 3, 6, 2), (2, 12), (1,), (2,),
    ),
    "mhc.expand_from_embedding": (lambda e: mhc.expand_from_embedding(e, 2), (2, 3, 6)),
}  # fmt: skip


#: Positions of leaves that are fp32 among others of bf16.
OF_FP32 = {
    "chunk_gated_delta_rule": (3, 5),
    "chunk_kda": (3, 5),
    "mamba_chunk_scan_combined": (2, 8),
    "selective_scan": (2, 8),
}


def leaves_of(name: str) -> list[torch.Tensor]:
    shapes, of_fp32 = CASES[name][1:], OF_FP32.get(name, ())
    dtypes = [
        FP32 if name.startswith("mhc.") or i in of_fp32 else torch.bfloat16
        for i in range(len(shapes))
    ]
    pairs = enumerate(zip(shapes, dtypes, strict=True))
    return [drawn(*s, seed=i, dtype=dtype).requires_grad_() for i, (s, dtype) in pairs]


def results_of(name: str, leaves) -> list[torch.Tensor]:
    results = CASES[name][0](*leaves)
    return list(results) if isinstance(results, tuple) else [results]


def upstream_of(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Random gradients of results."""
    return [drawn(*t.shape, seed=20 + i, dtype=t.dtype) for i, t in enumerate(results)]


def both_passes(name: str, leaves, upstream=None) -> list[torch.Tensor]:
    """Results and the gradients of all leaves that need one."""
    out = results_of(name, leaves)
    upstream = upstream_of(out) if upstream is None else upstream
    pairs = [pair for pair in zip(out, upstream, strict=True) if pair[0].requires_grad]
    needed = [t for t in leaves if t.requires_grad]
    given, upstream = zip(*pairs, strict=True)
    grads = torch.autograd.grad(given, needed, upstream, materialize_grads=True)
    return [*(t.detach() for t in out), *grads]
