"""Rotary embeddings by the formula of a patched model: frequencies, tables and roundings."""

from __future__ import annotations

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding

from ...errors import PatchError, expected
from ...rowwise import api as rowwise
from . import releases

#: Attribute of a forward context: tables of this pass, by module.
_TABLES = "_cute_kernels_rotary_tables"


class _Rotation:
    """Rotation of q and k in one launch, with tables that the layers of a pass share."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if not self.is_neox_style:
            raise PatchError(expected("is_neox_style", "True (two halves)", False))
        self.frequencies = self.inverse_frequencies()

    def inverse_frequencies(self) -> torch.Tensor:
        """fp32 [rotary_dim / 2], made on the CPU, as transformers makes them."""
        with torch.device("cpu"):
            return self._compute_inv_freq(self.base)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate [T, heads · head_size] by positions [T]."""
        cos, sin = self.tables(positions, query.dtype)
        q = query.view(1, query.shape[0], -1, self.head_size)
        k = q[:, :, :1] if key is None else key.view(1, key.shape[0], -1, self.head_size)
        q, k = rowwise.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        return q.view(query.shape), None if key is None else k.view(key.shape)

    def tables(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [1, T, rotary_dim] of positions [T], made once a forward pass."""
        if positions.dim() != 1:
            raise PatchError(expected("positions", "one dimension", positions.dim()))
        if not is_forward_context_available():
            return self.new_tables(positions, dtype)
        # A pass has a context of its own; under capture the tables are in the graph.
        of_pass = vars(get_forward_context()).setdefault(_TABLES, {})
        key = id(self), positions.data_ptr(), len(positions), dtype
        if key not in of_pass:
            of_pass[key] = self.new_tables(positions, dtype)
        return of_pass[key]

    def new_tables(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions, from frequencies on their device."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        return rowwise.rotary_table(positions[None], self.frequencies, 1.0, dtype)


class Rotary(_Rotation, RotaryEmbedding):
    """RotaryEmbedding with frequencies base^(-2i / rotary_dim)."""


class Llama3Rotary(_Rotation, Llama3RotaryEmbedding):
    """Llama3RotaryEmbedding, whose low frequencies are scaled."""


class LinearRotary(_Rotation, LinearScalingRotaryEmbedding):
    """LinearScalingRotaryEmbedding of one factor, by which frequencies are divided."""

    def inverse_frequencies(self) -> torch.Tensor:
        """Frequencies of the plain embedding over the factor."""
        if len(self.scaling_factors) != 1:
            raise PatchError(expected("scaling_factors", "one factor", self.scaling_factors))
        return super().inverse_frequencies() / self.scaling_factors[0]


def register() -> None:
    """Put these classes in the place of vLLM's."""
    for base, ours in (
        (RotaryEmbedding, Rotary),
        (Llama3RotaryEmbedding, Llama3Rotary),
        (LinearScalingRotaryEmbedding, LinearRotary),
    ):
        releases.register_layer(base, ours, base.__name__)
