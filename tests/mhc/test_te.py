"""`ck.mhc.te`: TransformerEngine's names and arguments give the bytes of `ck.mhc`'s functions."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import mhc
from cute_kernels.mhc import te
from tests.contract import same_bytes
from tests.mhc import cases

S, B, C, N = 3, 2, 10, 4
BF16, FP32 = torch.bfloat16, torch.float32


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {
        "x": (S, B, C, N), "phi": (24, N * C), "alpha": (3,), "beta": (1, 24), "bias": (C,),
        "norm_weight": (N * C,), "f": (S, B, C), "H": (S * B, 32),
        "H_pre": (S, B, N), "H_post": (S, B, N), "H_res": (S, B, N, N),
    }  # fmt: skip
    drawn = {name: cases.normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    kept = ("phi", "alpha", "beta", "norm_weight")
    return {name: t if name in kept else t.to(dtype) for name, t in drawn.items()}


def with_gradients(function, *args: torch.Tensor) -> list[torch.Tensor]:
    """Results, and gradients of every argument that has one."""
    leaves = [a.clone().requires_grad_() for a in args]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    upstream = [cases.normal(*t.shape, seed=31 + i).to(t.dtype) for i, t in enumerate(out)]
    torch.autograd.backward(out, upstream)
    return [*out, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_site_and_its_parts(dtype):
    """Coefficients of bf16 are those of fp32, rounded once on the way in and out."""
    t = tensors(dtype)
    ms = t["H"].float().square().mean(1).to(dtype)
    pairs = [
        (
            te.mhc_generate_mix_and_aggregate,
            lambda x, phi, a, b, w: mhc.mix_and_aggregate(x, phi, a, b, norm_weight=w),
            [t[name] for name in ("x", "phi", "alpha", "beta", "norm_weight")],
        ),
        (te.mhc_fused_projection, mhc.projection, [t["x"].flatten(2).flatten(0, 1), t["phi"]]),
        (
            lambda H, a, b, ms: te.mhc_fused_scale(H, a, b, ms, n=N),
            lambda H, a, b, ms: tuple(
                r.flatten(1).to(dtype) for r in mhc.scale(H.float(), a, b, ms.float(), N)
            ),
            [t["H"], t["alpha"], t["beta"], ms],
        ),
        (
            lambda z: te.mhc_fused_sinkhorn(z, N, recompute_hist=False, iters=7),
            lambda z: mhc.sinkhorn(z.float(), N, iterations=7).to(dtype),
            [t["H_res"]],
        ),
        (
            lambda x, pre: te.mhc_fused_aggregate(x, pre, N, use_tf32=False),
            lambda x, pre: mhc.aggregate(x, pre.float(), N),
            [t["x"], t["H_pre"]],
        ),
        (
            lambda *args: te.mhc_fused_expand_combine(*args, n=N, fuse_grad_x_acc=True),
            lambda f, b, post, x, res: mhc.expand_combine(f, b, post.float(), x, res.float(), N),
            [t[name] for name in ("f", "bias", "H_post", "x", "H_res")],
        ),
    ]
    for ours, theirs, args in pairs:
        got, want = with_gradients(ours, *args), with_gradients(theirs, *args)
        assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))
