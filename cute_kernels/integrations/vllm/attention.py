"""The attention backend: `ck.paged_attention` and `ck.write_kv_cache` over vLLM's pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ...errors import PatchError, expected
from ...sparse_attn import config
from ...sparse_attn.paged import api as paged
from ..contract_exchange import attention_part
from ..engine_layers import require
from . import model_check, releases

#: Head sizes whose values have the same size.
HEAD_SIZES = tuple(d for d, dv in config.VALUE_DIMS.items() if d == dv)
CACHE_DTYPES = ("auto", "bfloat16", "float16")


@dataclass
class Metadata:
    """Lists of one batch, as `ck.paged_attention` takes them; tokens: those that have a query."""

    tokens: int
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    block_table: torch.Tensor


class Builder(AttentionMetadataBuilder[Metadata]):
    """Builds `Metadata`: views of vLLM's lists, and no number that the host reads.

    The kernels' grids follow from shapes, so that a CUDA graph may hold any batch.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model_check.require_checked()

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        """Lists of this batch."""
        batch = common_attn_metadata
        require("attention", "causal", batch.causal, True)
        return Metadata(
            batch.num_actual_tokens,
            batch.query_start_loc[: batch.num_reqs + 1],
            batch.seq_lens[: batch.num_reqs],
            batch.block_table_tensor[: batch.num_reqs],
        )


class Impl(AttentionImpl):
    """Attention of one layer."""

    cute_kernels_part = attention_part()

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: object,
    ) -> None:
        require("attention", "alibi_slopes", alibi_slopes)
        require("attention", "kv_sharing_target_layer_name", kv_sharing_target_layer_name)
        for name, value in others.items():
            require("attention", name, value)
        require("attention", "attn_type", attn_type, AttentionType.DECODER)
        for name, value, taken in (
            ("head_size", head_size, HEAD_SIZES),
            ("kv_cache_dtype", kv_cache_dtype, CACHE_DTYPES),
        ):
            if value not in taken:
                raise PatchError(
                    expected(f"attention: {name}", " or ".join(map(str, taken)), value)
                )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.softcap = kv_cache_dtype, float(logits_soft_cap or 0.0)
        self.sliding_window = sliding_window
        # vLLM counts the token itself.
        left = None if sliding_window is None else sliding_window - 1
        self.window_size = left, None if left is None else 0

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write keys and values of the batch's tokens; slots of padding are negative."""
        if not kv_cache.numel():
            return
        k_cache, v_cache, layout = releases.split_cache(kv_cache)
        tokens = len(slot_mapping)
        paged.write_kv_cache(
            key[:tokens], value[:tokens], k_cache, v_cache, slot_mapping, layout=layout
        )

    def forward(
        self,
        layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend the batch's queries to the keys in their sequences' pages, into ``output``."""
        if output_scale is not None or output_block_scale is not None:
            raise PatchError(expected("output_scale", "None", "a quantized output"))
        if attn_metadata is None:  # a pass that measures memory
            return output.zero_()
        k_cache, v_cache, layout = releases.split_cache(kv_cache)
        tokens, heads, dim = attn_metadata.tokens, self.num_heads, self.head_size
        paged.paged_attention(
            query[:tokens].view(tokens, heads, dim),
            k_cache,
            v_cache,
            attn_metadata.block_table,
            attn_metadata.seqlens_k,
            attn_metadata.cu_seqlens_q,
            scale=self.scale,
            window_size=self.window_size,
            softcap=self.softcap,
            layout=layout,
            out=output[:tokens].view(tokens, heads, dim),
        )
        return output


class Backend(AttentionBackend):
    """Paged attention in the order of training."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

    get_name = staticmethod(releases.attention_name)

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int]:
        return list(config.PAGE_SIZES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Page size where the user names none: a tile of keys is read in two pieces."""
        return 64

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Shape of a layer's cache, where vLLM asks for it (0.25)."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Order of its dimensions in memory (0.25): pages first, with or without layers."""
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A row's bits follow its own sequence alone."""
        return True


def register() -> None:
    """Take the entry of vLLM's registry that this platform asks for."""
    entry = AttentionBackendEnum[releases.attention_name()]
    register_backend(entry, f"{Backend.__module__}.{Backend.__qualname__}")
