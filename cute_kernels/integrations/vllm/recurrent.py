"""vLLM's layers with a state on the ops of a patched model's mixers, and their metadata.

    projections ─> convolution, SiLU ─> rule ─> gated norm ─> projection

A layer keeps a record for each request that runs: `ck.LinearAttentionCache`, of which `slots` says
which slot is whose.  vLLM's pages keep states at the ends of blocks, for the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
)

from ...errors import PatchError, expected
from ...linear_attn import api as linear_attn
from ...linear_attn import op_gate
from ...linear_attn.cache import LayerCache, LinearAttentionCache
from ...rowwise import api as rowwise
from .. import contract_exchange as exchange
from .. import mixing
from ..engine_layers import require
from . import model_check, refusals, releases
from .slots import Slots, StatefulLayer, spare_slots, watch

#: Ops of the rules.
DELTA_RULE, SCAN = "chunk_gated_delta_rule", "mamba_chunk_scan_combined"
Parts = tuple[exchange.ContractPart, ...]

# ---- metadata -----------------------------------------------------------------------------------


@dataclass
class Metadata:
    """Sequences of one batch.

    slots: [sequences].  single: how many sequences have one row each, in front of all others.
    cu_seqlens: [others + 1], where the others begin and the last one ends, from the first on; None:
    there are none.
    """

    slots: torch.Tensor
    single: int
    cu_seqlens: torch.Tensor | None


class Builder(AttentionMetadataBuilder[Metadata]):
    """Builds `Metadata`: slots by the blocks of vLLM's block table, which no host reads."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model_check.require_checked()
        self.shared = Slots.of(vllm_config)
        self.block_size = kv_cache_spec.block_size
        self.by_position = vllm_config.cache_config.mamba_cache_mode != "none"
        # A CUDA graph reads these.
        self.slots = torch.zeros(self.shared.count, dtype=torch.int64, device=device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        """Sequences of this batch."""
        batch = common_attn_metadata
        count, table = batch.num_reqs, batch.block_table_tensor[: batch.num_reqs]
        last = torch.zeros_like(batch.seq_lens[:count], dtype=torch.int64)
        if self.by_position:
            last = ((batch.seq_lens[:count] - 1) // self.block_size).clamp(min=0).long()
        blocks = table.gather(1, last[:, None])[:, 0]
        slots = self.slots[:count]
        slots.copy_(self.shared.of_blocks(blocks))
        if batch.max_query_len == 1:
            return Metadata(slots, count, None)
        rows = batch.query_start_loc_cpu[: count + 1].diff()
        single = int((rows != 1).int().argmax())
        cu_seqlens = batch.query_start_loc[single : count + 1] - single
        return Metadata(slots, single, cu_seqlens)


class Backend(AttentionBackend):
    """Layers with a state in the order of training."""

    @staticmethod
    def get_name() -> str:
        return "CK_RECURRENT"

    @staticmethod
    def get_impl_cls() -> type:
        raise PatchError(expected("mixer", "a layer that mixes by itself", "a call for attention"))

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


# ---- layers -------------------------------------------------------------------------------------


class Recurrent(StatefulLayer):
    """A layer with a state, of either kind.

    heads, sizes: As `ck.LinearAttentionCache` has them.
    """

    heads: mixing.Pair
    sizes: mixing.Pair

    def get_attn_backend(self) -> type[Backend]:
        """Return the backend whose builder makes our metadata."""
        return Backend

    def get_kv_cache_spec(self, vllm_config) -> object:
        """Pages with states at the ends of steps: layers of newer releases have them inside too."""
        return MambaBase.get_kv_cache_spec(self, vllm_config)

    def make_record(self, make: type[LinearAttentionCache], eps: float) -> None:
        """Allocate the record, which vLLM counts as memory of the model; eps: of the norm."""
        config = get_current_vllm_config()
        require("mixer", "activation", self.activation, "silu")
        self.norm.cute_kernels_part = exchange.norm_part("rms_norm", eps)
        self.cache = make(
            1,
            config.scheduler_config.max_num_seqs + spare_slots(config),
            heads=self.heads,
            sizes=self.sizes,
            conv=(self.conv_dim, self.conv_kernel_size),
            dtype=config.model_config.dtype,
        )

    @staticmethod
    def parts(mixer: exchange.ContractPart) -> Parts:
        """Return the parts of a contract for this layer, without its norm."""
        return mixer, exchange.activation_part("silu")

    @property
    def record(self) -> LayerCache:
        """The record of this layer."""
        return self.cache[0]

    @property
    def rate(self) -> torch.Tensor:
        """A_log, rounded as `from_pretrained` rounds it for a trainer."""
        return self.A_log.to(self.dt_bias.dtype)

    def mix(self, *rows: torch.Tensor) -> torch.Tensor:
        """Run the rule on rows [T, ...] of this pass: [T, heads, ...]."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a pass that measures memory
            return rows[0].new_zeros(len(rows[0]), self.heads[1], self.sizes[1])
        batch: Metadata = metadata[self.prefix]
        single, outs = batch.single, []
        if single:
            first = [t[:single, None] for t in rows]
            outs.append(self.rule(*first, slots=batch.slots[:single])[:, 0])
        if batch.cu_seqlens is not None:
            others = [t[None, single:] for t in rows]
            options = {"cu_seqlens": batch.cu_seqlens, "slots": batch.slots[single:]}
            outs.append(self.rule(*others, **options)[0])
        elif len(rows[0]) > single:  # padding
            outs.append(outs[0].new_zeros(len(rows[0]) - single, *outs[0].shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def convolved(self, rows: torch.Tensor, **sequences: torch.Tensor) -> torch.Tensor:
        """silu of the convolution of rows [B, T, channels]."""
        operands = rows.mT, self.conv1d.weight[:, 0], self.conv1d.bias
        return self.record.causal_conv1d(*operands, "silu", **sequences).mT


class DeltaNet(Recurrent, QwenGatedDeltaNetAttention):
    """QwenGatedDeltaNetAttention on `ck.chunk_gated_delta_rule`."""

    cute_kernels_ops = DELTA_RULE, "causal_conv1d_fn", "gated_rms_norm", "sigmoid"

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.heads = self.num_k_heads, self.num_v_heads
        self.sizes = self.head_k_dim, self.head_v_dim
        require("mixer", "output gate", self.norm.activation, "silu")
        self.make_record(LinearAttentionCache, self.layer_norm_epsilon)

    @property
    def cute_kernels_part(self) -> Parts:
        return self.parts(exchange.mixer_part(DELTA_RULE, self.heads, self.sizes))

    def forward(
        self, hidden_states: torch.Tensor, output: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Mix the tokens [T, hidden] of each sequence; ``output``: where the rows go (0.25)."""
        qkvz, ba = (
            self.in_proj_qkvz(hidden_states)[0][None],
            self.in_proj_ba(hidden_states)[0][None],
        )
        if self.gqa_interleaved_layout:
            projected = mixing.interleaved(qkvz, ba, self.heads, self.sizes)
        else:
            qkv, z = qkvz.split([self.conv_dim, self.value_dim], -1)
            projected = mixing.Projected(
                qkv, z.unflatten(-1, (-1, self.head_v_dim)), *ba.chunk(2, -1)
            )
        qkv, z, b, a = (t[0] for t in projected)
        out = self.mix(qkv, rowwise.sigmoid(b), a)
        out = linear_attn.gated_rms_norm(
            out, self.norm.weight, z, self.layer_norm_epsilon, norm_before_gate=True
        )
        out, _ = self.out_proj(out.flatten(1))
        if output is None:
            return out
        output[: len(out)] = out
        return None

    def rule(self, qkv, beta, a, **sequences: torch.Tensor) -> torch.Tensor:
        """The gated delta rule of rows [B, T, ...]: [B, T, HV, V]."""
        g = op_gate.decay_gate(
            a, self.rate, self.dt_bias, sequences.get("cu_seqlens"), None, None, None
        )
        q, k, v = mixing.delta_operands(self.convolved(qkv, **sequences), self.heads, self.sizes)
        return self.record.gated_delta_rule(q, k, v, g, beta, **sequences)


class Scan(Recurrent, MambaMixer2):
    """MambaMixer2 on `ck.mamba_chunk_scan_combined`."""

    cute_kernels_ops = SCAN, "causal_conv1d_fn", "gated_rms_norm"

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.heads = self.n_groups, self.num_heads
        self.sizes = self.ssm_state_size, self.head_dim
        require("mixer", "use_rms_norm", self.use_rms_norm, True)
        # vLLM would load -e^A_log, by another formula.
        self.A.weight_loader = self.dt_bias.weight_loader
        self.step_limit = refusals.step_limit(get_current_vllm_config().model_config)
        self.make_record(LinearAttentionCache.of_mamba2, self.norm.variance_epsilon)

    @property
    def A_log(self) -> torch.Tensor:
        """The parameter that vLLM calls `A`: the checkpoint's A_log is loaded into it."""
        return self.A

    @property
    def cute_kernels_part(self) -> Parts:
        return self.parts(exchange.mixer_part(SCAN, self.heads, self.sizes, self.step_limit))

    def forward(
        self, hidden_states: torch.Tensor, mup_vector: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Mix the tokens [T, hidden] of each sequence."""
        if mup_vector is not None:
            raise PatchError(expected("mixer: mup_vector", "None", "a tensor"))
        widths = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, mixed, dt = self.in_proj(hidden_states)[0].split(widths, -1)
        out = self.mix(mixed, dt).flatten(1)
        out = linear_attn.gated_rms_norm(
            out, self.norm.weight, gate, self.norm.variance_epsilon, norm_before_gate=False,
            group_size=self.norm.group_size,
        )  # fmt: skip
        return self.out_proj(out)[0]

    def rule(self, mixed, dt, **sequences: torch.Tensor) -> torch.Tensor:
        """The scan of rows [B, T, ...]: [B, T, H, P]."""
        x, B, C = mixing.scan_operands(self.convolved(mixed, **sequences), self.heads, self.sizes)
        return self.record.mamba_chunk_scan_combined(
            x, dt, mixing.rates(self.rate), B, C, D=self.D, dt_bias=self.dt_bias, dt_softplus=True,
            dt_limit=self.step_limit, **sequences,
        )  # fmt: skip


def gated_attention(
    self,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    output: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Forward of ``Qwen3NextAttention``, whose gate's sigmoid is that of the trainer."""
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v, gate = self._project_qkv_gate(qkv, positions)
    rows, _ = self.o_proj(self.attn(q, k, v) * rowwise.sigmoid(gate))
    if output is None:
        return rows
    output[:] = rows
    return None


def register() -> None:
    """Put these classes in the place of vLLM's, and watch what a worker is told to run."""
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

    Qwen3NextAttention.forward = gated_attention
    Qwen3NextAttention.cute_kernels_part = exchange.activation_part("sigmoid")
    releases.register_layers({QwenGatedDeltaNetAttention: DeltaNet, MambaMixer2: Scan})
    from vllm.v1.worker.gpu_worker import Worker

    watch(Worker)
