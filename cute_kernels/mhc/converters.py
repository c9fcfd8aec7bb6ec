"""Weights of other libraries for `HyperConnection` and `HyperHead`, and the options they ran under.

All of them order the rows of phi and beta alike: n of pre, n of post, n² of res, row-major.  They
differ in the order of phi's columns, in epsilons and in the form of Sinkhorn-Knopp.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict

import torch

from . import checks
from .checks import Options


def permute_columns(weight: torch.Tensor, n: int, *, source: str, target: str) -> torch.Tensor:
    """Permute the columns of phi [..., K] or norm_weight [K] to another layout.

    Args:
        weight: Its last dimension is K = n C, in the order of ``source``.
        n: 2 or 4.
        source, target: ``"cn"``, k = c n + i, or ``"nc"``, k = i C + c.

    Returns:
        A new tensor, also where the two layouts are one.

    Example:
        >>> weight = torch.randn(24, 4 * 64)
        >>> ck.mhc.permute_columns(weight, 4, source='nc', target='cn').shape
        torch.Size([24, 256])
    """
    checks.layout(source, "source")
    checks.layout(target, "target")
    checks.columns(weight, n)
    if source == target:
        return weight.clone()
    last = (-1, n) if source == "cn" else (n, weight.shape[-1] // n)
    return weight.unflatten(-1, last).mT.flatten(-2)


def from_transformer_engine(
    phi: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    layout: str = "cn",
) -> tuple[dict[str, torch.Tensor], Options]:
    """Weights of TransformerEngine's ``mhc_generate_mix_and_aggregate``.

    Args:
        phi: [N, K], columns in the order of (C, n).  alpha: [3].  beta: [1, N].
        norm_weight: [K] in phi's order, or None.
        layout: Of the streams that the module will take; phi's columns are put in its order.

    Returns:
        (a state dict, options): the options have TransformerEngine's epsilon (that of fp32), factor
        of H_post (2), iterations (20) and form (log).  Weights keep their dtypes.

    Example:
        >>> phi, alpha, beta = torch.randn(24, 256), torch.ones(3), torch.zeros(24)
        >>> parameters, options = ck.mhc.from_transformer_engine(phi, alpha, beta)
        >>> sorted(parameters)
        ['alpha', 'beta', 'phi']
    """
    weights = {"phi": phi, "alpha": alpha, "beta": beta, "norm_weight": norm_weight}
    options = checks.options(Options(layout=layout))
    return _state(checks.converted(weights), "cn", options), options


def from_tilekernels(
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    layout: str = "nc",
) -> tuple[dict[str, torch.Tensor], Options]:
    """Weights of TileKernels' ``mhc_pre``, or of its ``mhc_head``.

    Args:
        fn: [N, K], columns in the order of (n, C); or [n, K], of a head.
        scale: [3]; [1] or a scalar of a head.  base: [N]; [n] of a head.
        norm_weight: [K] in fn's order, or None.
        norm_eps, post_mult_value, pre_eps, sinkhorn_eps, sinkhorn_repeat: What ``mhc_pre`` was
            called with; the defaults are its own, not DeepSeek-V4's, which are post_mult_value=2.0
            and sinkhorn_repeat=20, the epsilons 1e-6.
        layout: Of the streams that the module will take; fn's columns are put in its order.

    Returns:
        (a state dict, options), for a `HyperConnection` or, of a head, for a `HyperHead`.

    Example:
        >>> fn, scale, base = torch.randn(24, 256), torch.ones(3), torch.zeros(24)
        >>> parameters, options = ck.mhc.from_tilekernels(fn, scale, base)
        >>> options.layout
        'nc'
    """
    weights = {"fn": fn, "scale": scale, "base": base, "norm_weight": norm_weight}
    unchecked = Options(
        layout=layout,
        eps=norm_eps,
        pre_eps=pre_eps,
        post_scale=post_mult_value,
        iterations=sinkhorn_repeat,
        form="epsilon",
        form_eps=sinkhorn_eps,
    )
    options = checks.options(unchecked)
    return _state(checks.converted(weights, head=True), "nc", options), options


def _state(
    converted: tuple[int, dict[str, torch.Tensor]], source: str, options: Options
) -> dict[str, torch.Tensor]:
    """Return a state dict of copies in the layout of the options, which its metadata holds."""
    n, weights = converted
    for name in weights.keys() & {"phi", "norm_weight"}:
        weights[name] = permute_columns(weights[name], n, source=source, target=options.layout)
    contiguous = torch.contiguous_format
    state = OrderedDict(
        (name, t.detach().clone(memory_format=contiguous)) for name, t in weights.items()
    )
    state._metadata = OrderedDict({"": {"mhc_options": asdict(options)}})
    return state
