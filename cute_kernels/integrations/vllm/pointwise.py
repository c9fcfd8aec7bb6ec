"""Norms and gated activations, in the steps of a patched transformers model."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from ...errors import PatchError, expected
from ...norm import api as norm
from ...rowwise.op import gated_rows
from . import releases

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Norm(RMSNorm):
    """RMSNorm on `ck.rms_norm`; with a residual, (norm(x + residual), x + residual)."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.variance_size_override is not None:
            want = "None, a norm over all of a row"
            raise PatchError(expected("var_hidden_size", want, self.variance_size_override))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """Normalize rows, or heads of rows."""
        weight = self.weight if self.has_weight else None
        return norm.rms_norm(x, weight, self.variance_epsilon, residual=residual)


class GemmaNorm(GemmaRMSNorm):
    """GemmaRMSNorm, whose weight counts from 1, on `ck.rms_norm`."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """Normalize rows, or heads of rows."""
        return norm.rms_norm(x, self.weight, self.variance_epsilon, residual=residual, offset=1.0)


class Silu(SiluAndMul):
    """SiluAndMul: silu(gate) is rounded, as in the trainer, and then multiplied by up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x[..., :N]) x[..., N:]."""
        return gated_rows(x, "silu")


class Gelu(GeluAndMul):
    """GeluAndMul: gelu(gate) is rounded, as in the trainer, and then multiplied by up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """gelu(x[..., :N]) x[..., N:]."""
        return gated_rows(x, "gelu_tanh" if self.approximate == "tanh" else "gelu")


def register() -> None:
    """Put these classes in the place of vLLM's."""
    for base, ours in (
        (RMSNorm, Norm),
        (GemmaRMSNorm, GemmaNorm),
        (SiluAndMul, Silu),
        (GeluAndMul, Gelu),
    ):
        releases.register_layer(base, ours, base.__name__)
