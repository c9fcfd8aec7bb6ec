"""`HyperConnection`: hyper-connections around a sublayer; `HyperHead`: the final collapse.

How a site starts: every gate is a constant, but for alpha times a number near N(0, 1).

    H_pre    1/n, so that out is the mean of the streams (1/2 + pre_eps, if pre_eps is 1/n or more)
    H_post   post_scale / 2: 1, as of a plain residual connection, with the paper's post_scale of 2
    H_res    0.99 on the diagonal, the rest of each row and column even

Streams that are equal, as `expand_from_embedding` makes them, go on as x + F(x) but for alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import nn

from . import api, checks
from .checks import Options
from .config import mappings

#: alpha starts small, so that gates begin where beta puts them.
_ALPHA = 0.01
#: H_res on the diagonal.  The differences of n streams shrink by (0.99 n - 1) / (n - 1) a site:
#: to 0.45 through 60 sites of 4 streams.
_KEPT = 0.99


def _weight(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None
) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


class _Gated(nn.Module):
    """Base with the weights phi [rows, K], alpha, beta [rows] and optional norm_weight [K]."""

    def __init__(
        self,
        rows: int,
        gates: int,
        channels: int,
        n: int,
        norm_weight: bool,
        options: Options,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        checks.module(n, channels, options, dtype)
        super().__init__()
        self.channels, self.n, self.options = channels, n, options
        k = n * channels
        self.phi = _weight((rows, k), dtype, device)
        self.alpha = _weight((gates,), dtype, device)
        self.beta = _weight((rows,), dtype, device)
        parameter = _weight((k,), dtype, device) if norm_weight else None
        self.register_parameter("norm_weight", parameter)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the weights as the class documents.

        phi: N(0, 1/K), so that H / r of a row is near N(0, 1).
        """
        self.phi.normal_(0.0, self.phi.shape[1] ** -0.5)
        self.alpha.fill_(_ALPHA)
        self.beta.zero_()
        mean = 1.0 / self.n - self.options.pre_eps
        if mean > 0.0:
            self.beta[: self.n] = math.log(mean / (1.0 - mean))
        if self.norm_weight is not None:
            self.norm_weight.fill_(1.0)

    def _main_grads(self) -> dict[str, torch.Tensor]:
        """Return the main_grads of the weights that have one (Megatron, TransformerEngine)."""
        parameters = self.named_parameters(recurse=False)
        mains = {name: getattr(weight, "main_grad", None) for name, weight in parameters}
        return {name: main for name, main in mains.items() if main is not None}

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        """Note the options in the state's metadata, which adds no key to it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            metadata = destination._metadata.setdefault(prefix[:-1], {})
            metadata["mhc_options"] = asdict(self.options)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args) -> None:
        """Refuse a state whose options, where it has them, are not the module's."""
        checks.state_options(local_metadata, self.options)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def extra_repr(self) -> str:
        """Return sizes, optional weights and options for ``repr``."""
        present = [
            name for name in ("bias", "norm_weight") if getattr(self, name, None) is not None
        ]
        also = "".join(f", {name}=True" for name in present)
        return f"channels={self.channels}, n={self.n}{also}, {self.options}"


class HyperConnection(_Gated):
    """Manifold-constrained hyper-connections around one sublayer: y of x, both n streams.

    Takes the place of ``x + sublayer(x)``.  Computes `connect`: out of the streams goes through the
    sublayer, and what it gives back is spread over the streams, which are mixed.  Around a stack of
    them, `recompute_streams` keeps x of every few sites only.

    Args:
        sublayer: A module or a function, from [..., C] to one tensor [..., C] of the same dtype.
            A tuple is refused: give a function that takes what is wanted out of it.
        channels: C.
        n: Streams, 2 or 4.
        bias: Whether there is a bias [C], added to what the sublayer gives.
        norm_weight: Whether phi's columns have a weight [K] of the norm.
        options: Layout, precision, epsilons and Sinkhorn-Knopp.
        dtype: Of the weights, fp32 or bf16.  x may have another; the bias is rounded to x's.
        device: Of the weights.

    Weights: phi [N, K], alpha [3], beta [N], and bias [C], norm_weight [K] if asked for.  A weight
    with an attribute ``main_grad`` has its gradient added there, as in ``ck.linear``.

    Starts near a plain residual connection: with equal streams, y is x + sublayer(x) in each, but
    for alpha = 0.01 (``post_scale`` / 2 is the factor of the sublayer, 1 by default).

    Example:
        >>> site = ck.mhc.HyperConnection(torch.nn.Linear(64, 64), channels=64)
        >>> site(torch.randn(5, 64, 4)).shape
        torch.Size([5, 64, 4])
    """

    def __init__(
        self,
        sublayer: Callable[..., torch.Tensor],
        channels: int,
        n: int = 4,
        *,
        bias: bool = False,
        norm_weight: bool = False,
        options: Options = Options(),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        checks.sublayer(sublayer)
        checks.streams(n)
        super().__init__(mappings(n), 3, channels, n, norm_weight, options, dtype, device)
        self.sublayer = sublayer
        parameter = _weight((channels,), dtype, device) if bias else None
        self.register_parameter("bias", parameter)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw phi from N(0, 1/K) and set the other weights; the sublayer is not reset."""
        super().reset_parameters()
        n = self.n
        # Softmax of (t, 0, ..., 0) has 0.99 at t; rows and columns of it already sum to 1.
        diagonal = math.log(_KEPT * (n - 1) / (1.0 - _KEPT))
        self.beta[2 * n :: n + 1] = diagonal
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: torch.Tensor, /, *args: object, **kwargs: object) -> torch.Tensor:
        """Return y, shaped like x: [..., C, n] or [..., n, C] as ``options.layout`` says.

        Other arguments go to the sublayer, behind its input.
        """
        return api.connect(
            x,
            lambda out: self.sublayer(out, *args, **kwargs),
            self.phi,
            self.alpha,
            self.beta,
            bias=None if self.bias is None else self.bias.to(x.dtype),
            norm_weight=self.norm_weight,
            options=self.options,
            main_grads=self._main_grads(),
        )


class HyperHead(_Gated):
    """Collapse of n streams after the last site to [..., C]: `head`.

    Args:
        channels, n, norm_weight, options, dtype, device: As in `HyperConnection`.

    Weights: phi [n, K], alpha [1], beta [n], and norm_weight [K] if asked for; ``main_grad`` as in
    `HyperConnection`.  Starts as the mean of the streams, but for alpha = 0.01.

    Example:
        >>> ck.mhc.HyperHead(channels=64)(torch.randn(5, 64, 4)).shape
        torch.Size([5, 64])
    """

    def __init__(
        self,
        channels: int,
        n: int = 4,
        *,
        norm_weight: bool = False,
        options: Options = Options(),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(n, 1, channels, n, norm_weight, options, dtype, device)
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Collapse x to [..., C]: x [..., C, n] or [..., n, C]."""
        return api.head(
            x,
            self.phi,
            self.alpha,
            self.beta,
            norm_weight=self.norm_weight,
            options=self.options,
            main_grads=self._main_grads(),
        )
