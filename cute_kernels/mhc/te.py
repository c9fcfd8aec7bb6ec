"""``ck.mhc.te``: the functions of TransformerEngine's mHC, by its names and with its arguments.

For code that calls ``transformer_engine.pytorch.triton.mhc``: import these names from here.  They
compute with the functions of `ck.mhc`, with their guarantees, and differ from those in dtypes
alone: coefficients may be bf16 (H, ms, H_pre, H_post, H_res), and results have the dtypes that
TransformerEngine gives them.  n is 4; streams are [s, b, C, n].

TransformerEngine's functions changed their arguments between versions.  Behind the tensors that all
versions share, options are therefore taken by name, so that none is read as another:

    use_tf32                         one precision is computed; it errs less than TF32
    recompute_hist, fuse_grad_x_acc, no effect: nothing is kept, no buffer is handed around, and
    use_split_k                      there is one order of every sum
    fused_grad_x_acc_buffer          None; ``ck.mhc.connect`` adds the gradients of x in one pass
"""

from __future__ import annotations

import torch

from . import api, checks, nodes


def mhc_generate_mix_and_aggregate(
    x: torch.Tensor,
    phi: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    use_tf32: bool = True,
    *,
    fused_grad_x_acc_buffer: None = None,
    use_split_k: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run a site up to its sublayer: `ck.mhc.mix_and_aggregate`.

    Args:
        x: [s, b, C, 4].  phi: [24, 4 C].  alpha: [3].  beta: [1, 24].  norm_weight: [4 C] or None.

    Returns:
        (out [s, b, C] in x's dtype, H_post fp32 [s, b, 4], H_res fp32 [s, b, 4, 4]).
    """
    checks.te_options(fused_grad_x_acc_buffer, use_tf32=use_tf32, use_split_k=use_split_k)
    checks.te_phi(phi)
    return api.mix_and_aggregate(x, phi, alpha, beta, norm_weight=norm_weight)


def mhc_fused_projection(
    x: torch.Tensor,
    phi: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    use_tf32: bool = True,
    fused_grad_x_acc_buffer: None = None,
    use_split_k: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return H fp32 [M, 32], zeros in its last 8 columns, and ms fp32 [M]: `ck.mhc.projection`.

    Args:
        x: [M, 4 C].  phi: [24, 4 C].  norm_weight: [4 C] or None, by name: TransformerEngine's
            versions have it third or fourth.
    """
    checks.te_options(fused_grad_x_acc_buffer, use_tf32=use_tf32, use_split_k=use_split_k)
    checks.te_phi(phi)
    return api.projection(x, phi, norm_weight=norm_weight)


def mhc_fused_scale(
    H: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, ms: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return H_pre [M, 4], H_post [M, 4] and logits [M, 16], in H's dtype: `ck.mhc.scale`.

    Args:
        H: [M, 32].  alpha: [3].  beta: [1, 24].  ms: [M].
    """
    checks.te_streams(n)
    results = api.scale(_fp32("H", H), alpha, beta, _fp32("ms", ms), n)
    pre, post, res = results
    logits = nodes.shaped(res, res.shape[0], n * n)
    return tuple(t.to(H.dtype) for t in (pre, post, logits))


def mhc_fused_sinkhorn(
    H_res: torch.Tensor, n: int = 4, recompute_hist: bool = True, iters: int = 20
) -> torch.Tensor:
    """Sinkhorn-Knopp of logits [s, b, 4, 4], in their dtype: `ck.mhc.sinkhorn`."""
    checks.te_options(None, recompute_hist=recompute_hist)
    checks.te_streams(n)
    checks.sinkhorn(iters, "log", 0.0, iterations_name="iters")
    return api.sinkhorn(_fp32("H_res", H_res), n, iterations=iters).to(H_res.dtype)


def mhc_fused_aggregate(
    x: torch.Tensor,
    H_pre: torch.Tensor,
    n: int,
    use_tf32: bool = True,
    *,
    fused_grad_x_acc_buffer: None = None,
) -> torch.Tensor:
    """Return out [s, b, C] of x [s, b, C, 4] and H_pre [s, b, 4]: `ck.mhc.aggregate`."""
    checks.te_options(fused_grad_x_acc_buffer, use_tf32=use_tf32)
    checks.te_streams(n)
    return api.aggregate(x, _fp32("H_pre", H_pre), n)


def mhc_fused_expand_combine(
    f: torch.Tensor,
    bias: torch.Tensor | None,
    H_post: torch.Tensor,
    x: torch.Tensor,
    H_res: torch.Tensor,
    n: int = 4,
    use_tf32: bool = True,
    *,
    fuse_grad_x_acc: bool = False,
    fused_grad_x_acc_buffer: None = None,
) -> torch.Tensor:
    """Return y [s, b, C, 4] of a sublayer's output and the streams: `ck.mhc.expand_combine`.

    Args:
        f: [s, b, C].  bias: [C] or None.  H_post: [s, b, 4].  x: [s, b, C, 4].
        H_res: [s, b, 4, 4].  n: 4; versions without it have ``use_tf32`` in its place: give that
            by name.
    """
    checks.te_options(fused_grad_x_acc_buffer, use_tf32=use_tf32, fuse_grad_x_acc=fuse_grad_x_acc)
    checks.te_streams(n)
    post, res = _fp32("H_post", H_post), _fp32("H_res", H_res)
    return api.expand_combine(f, bias, post, x, res, n)


def _fp32(name: str, t: torch.Tensor) -> torch.Tensor:
    """Convert coefficients of bf16 or fp32 to fp32, exactly."""
    checks.mixed_dtype(name, t)
    return t.to(torch.float32)
