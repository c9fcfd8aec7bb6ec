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
from .. import contract_exchange as exchange
from ..engine_layers import require, rotate
from . import releases

#: Attribute of a forward context: tables of this pass, by module.
_TABLES = "_cute_kernels_rotary_tables"


class _Rotation:
    """Rotation of q and k in one launch, with tables that the layers of a pass share."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        require("rotary embedding", "is_neox_style", self.is_neox_style, True)
        self.frequencies = self.inverse_frequencies()

    def cute_kernels_part(self, dtype: torch.dtype) -> exchange.ContractPart:
        """What a contract says of it; dtype: of the model, and of its tables."""
        return exchange.rotary_part(dtype, self.frequencies)

    def inverse_frequencies(self) -> torch.Tensor:
        """fp32 [rotary_dim / 2], made on the CPU, as transformers makes them."""
        with torch.device("cpu"):
            return self._compute_inv_freq(self.base)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate [T, heads · head_size] by positions [T]."""
        other = query[:, : self.head_size] if key is None else key
        table = self.tables(positions, query.dtype)
        query, other = rotate(query, other, table, self.head_size)
        return query, None if key is None else other

    def tables(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [1, T, rotary_dim] of positions [T], made once a forward pass."""
        if positions.dim() != 1:
            raise PatchError(expected("positions", "one dimension", positions.dim()))
        # A pass has a context of its own; under capture the tables are in the graph.
        has_context = is_forward_context_available()
        of_pass = vars(get_forward_context()).setdefault(_TABLES, {}) if has_context else {}
        key = id(self), positions.data_ptr(), len(positions), dtype
        if key not in of_pass:
            self.frequencies = self.frequencies.to(positions.device)
            of_pass[key] = rowwise.rotary_table(positions[None], self.frequencies, 1.0, dtype)
        return of_pass[key]


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
    releases.register_layers(
        {
            RotaryEmbedding: Rotary,
            Llama3RotaryEmbedding: Llama3Rotary,
            LinearScalingRotaryEmbedding: LinearRotary,
        }
    )
