"""Forward of transformers' gated delta nets, and what it needs to know of their base models.

    projections ─> convolution, SiLU ─> l2norm, gate, rule ─> gated norm ─> projection
                   (the pack of the real tokens alone)

A mixer is known by its class: how its projections lie is in no config.  Its projections, its
convolution and its norm are modules that are called, so that adapters, hooks and FSDP see them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ....errors import ArgumentValueError, expected
from ....integrations import packs
from ....integrations import transformers as integration
from ....linear_attn import api as linear_attn
from ....linear_attn import op_gate
from ....linear_attn.cache import LinearAttentionCache
from ....linear_attn.config import CONV_WIDTHS, DELTA_SIZES, L2NORM_EPS
from ....rowwise import api as rowwise
from ..state import eps_of, main_grad_of, parameter_of, unchanged, user_class

#: Names of the forwards of a mixer, its convolution, the base model, and the model around it.
MIXER, CONVOLUTION = "gated_delta_net", "causal_conv1d"
BASE_MODEL, STATEFUL = "hybrid_model", "hybrid"
#: What a model says of itself to `generate`: whether its cache cannot drop tokens.
STATEFUL_FLAG = "_is_stateful"


class Projected(NamedTuple):
    """Projections of hidden states [B, T, hidden].

    qkv: [B, T, 2 H K + HV V], inputs of the convolution.  z: [B, T, HV, V], input of the output's
    gate.  b, a: [B, T, HV], inputs of beta and of the decay.
    """

    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


#: qkv [B, T, 2 H K + HV V], beta and a [B, T, HV].
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# ---- classes ------------------------------------------------------------------------------------


def _interleaved(self: nn.Module, x: torch.Tensor) -> Projected:
    """Qwen3-Next: each k head has its q, k, v and z side by side."""
    group = self.num_v_heads // self.num_k_heads
    wide = self.head_v_dim * group
    sizes = [self.head_k_dim, self.head_k_dim, wide, wide]
    heads = self.in_proj_qkvz(x).unflatten(-1, (self.num_k_heads, sum(sizes)))
    *qkv, z = heads.split(sizes, -1)
    b, a = self.in_proj_ba(x).unflatten(-1, (self.num_k_heads, 2 * group)).split(group, -1)
    qkv = torch.cat([t.flatten(2) for t in qkv], -1)
    z = z.unflatten(-1, (group, self.head_v_dim)).flatten(2, 3)
    return Projected(qkv, z, b.flatten(2), a.flatten(2))


def _apart(self: nn.Module, x: torch.Tensor) -> Projected:
    """Qwen3.5: q, k and v are one projection, the others one each."""
    z = self.in_proj_z(x).unflatten(-1, (self.num_v_heads, self.head_v_dim))
    return Projected(self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x))


def _one_by_one(self: nn.Module, x: torch.Tensor) -> Projected:
    """OLMo Hybrid: a projection for each of them."""
    qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
    z = self.g_proj(x).unflatten(-1, (self.num_v_heads, self.head_v_dim))
    return Projected(qkv, z, self.b_proj(x), self.a_proj(x))


class Mixer(NamedTuple):
    """A class of mixers: its projections, and the names of its norm and its last projection."""

    project: Callable[[nn.Module, torch.Tensor], Projected]
    norm: str = "norm"
    out: str = "out_proj"


_MODELS = "transformers.models"
#: (module, name) of a class -> what is known of it.
MIXERS: Mapping[tuple[str, str], Mixer] = {
    (f"{_MODELS}.qwen3_next.modeling_qwen3_next", "Qwen3NextGatedDeltaNet"): Mixer(_interleaved),
    (f"{_MODELS}.qwen3_5.modeling_qwen3_5", "Qwen3_5GatedDeltaNet"): Mixer(_apart),
    (f"{_MODELS}.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"): Mixer(_apart),
    (f"{_MODELS}.olmo_hybrid.modeling_olmo_hybrid", "OlmoHybridGatedDeltaNet"): Mixer(
        _one_by_one, "o_norm", "o_proj"
    ),
}
#: Keywords of transformers that say where sequences are; with others a call is refused.
_KEYWORDS = (packs.OFFSETS, packs.NUMBERS, "cu_seq_lens_k", "max_length_k", "is_causal")
#: What the author's forward reads and ours does not: the activation of the convolution.
READS = (("activation", "silu"),)


def mixer_of(cls: type) -> Mixer | None:
    """Return what is known of a class of mixers; None: it is no known one."""
    return MIXERS.get((cls.__module__, cls.__name__))


def why_not(module: nn.Module) -> str | None:
    """Why our ops cannot compute a known mixer; None: they can."""
    names = "conv1d", "key_dim", "value_dim", "activation", "A_log", "dt_bias", "layer_idx"
    if missing := [name for name in names if not hasattr(module, name)]:
        return f"transformers' mixer of this version has no {', '.join(missing)}"
    if not _caches_record():
        return "transformers' caches of this version record no past of a mixer"
    convolution, channels = module.conv1d, module.key_dim * 2 + module.value_dim
    plain = type(convolution) is nn.Conv1d or user_class(convolution) is nn.Conv1d
    if not plain or convolution.groups != channels or convolution.in_channels != channels:
        return f"its convolution is no depthwise nn.Conv1d of {channels} channels"
    (width,) = convolution.kernel_size
    if width not in CONV_WIDTHS or convolution.stride != (1,) or convolution.dilation != (1,):
        return f"a convolution of width {width}; ck.causal_conv1d_fn takes {CONV_WIDTHS}"
    for name, value in READS:
        if getattr(module, name) != value:
            return f"{name} = {getattr(module, name)!r}, not {value!r}"
    step, most = DELTA_SIZES
    sizes = {module.head_k_dim, module.head_v_dim}
    if any(size % step or size > most for size in sizes):
        want = f"multiples of {step} up to {most}"
        return f"head sizes {sorted(sizes)}; ck.chunk_gated_delta_rule takes {want}"
    return None


def _caches_record() -> bool:
    """Whether transformers has the layers of caches that `linear_cache` takes the place of."""
    layer = getattr(sys.modules.get("transformers.cache_utils"), "LinearAttentionLayer", None)
    if not hasattr(layer, "activate_past_recording"):
        return False
    return isinstance(layer().has_previous_state, dict)


def model_kind(module: nn.Module) -> str | None:
    """Name of our forward of a model around known mixers; None: it is none."""
    if not (mixing := mixers_in(module)):
        return None
    layers = module._modules.get("layers")
    if isinstance(layers, nn.ModuleList):
        parts = {id(part) for layer in layers for part in layer.children()}
        return BASE_MODEL if all(id(mixer) in parts for mixer in mixing) else None
    return STATEFUL if getattr(module, STATEFUL_FLAG, False) else None


def mixers_in(module: nn.Module) -> list[nn.Module]:
    """Return the known mixers in a module."""
    return [m for m in module.modules() if m is not module and mixer_of(user_class(m))]


# ---- forwards -----------------------------------------------------------------------------------


def causal_conv1d(
    self,
    rows: torch.Tensor,
    sequences: packs.Sequences,
    record: LinearAttentionCache | None = None,
) -> torch.Tensor:
    """y[t, d] = silu(b[d] + Σ_w weight[d, w] x[t - W + 1 + w, d]) of rows [B, T, D].

    Rows of padding are 0.  record: of what is before them.
    """
    operands = sequences.pack(rows).mT, self.weight[:, 0], self.bias
    options = {"activation": "silu", "cu_seqlens": sequences.offsets}
    if record is not None:
        return sequences.unpack(record[0].causal_conv1d(*operands, **options).mT)
    into = main_grad_of(self, self.weight)
    into = None if into is None else into[:, 0]
    out = linear_attn.causal_conv1d_fn(*operands, **options, main_grad=into)
    return sequences.unpack(out.mT)


def gated_rms_norm(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """y = x / √(mean(x²) + eps) · w · silu(gate)."""
    weight = parameter_of(self, self._cute_kernels.weight)
    return linear_attn.gated_rms_norm(
        hidden_states, weight, gate, eps_of(self), norm_before_gate=True,
        main_grad=main_grad_of(self, weight),
    )  # fmt: skip


def gated_delta_net(
    self,
    hidden_states: torch.Tensor,
    cache_params: object | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Mix the tokens of each sequence: [B, T, hidden] -> [B, T, hidden].

    Rows of padding are those of a zero output of the rule, as transformers has them.

    attention_mask: [B, T], 0 where a token is padding, or None.
    cu_seq_lens_q, seq_idx: in ``kwargs``: [S + 1], where sequences of a batch of 1 begin and end;
    [B, T], a number for each sequence, of which a row has several.
    """
    unchanged(self, self._cute_kernels.reads)
    integration.check_keywords(kwargs, _KEYWORDS)
    if kwargs.get("is_causal") is False:
        raise ArgumentValueError(expected("is_causal", "True: a state goes forward", False))
    known = mixer_of(user_class(self))
    sequences = packs.sequences_of(hidden_states, attention_mask, kwargs)
    qkv, z, b, a = known.project(self, hidden_states)
    beta = rowwise.sigmoid(b)
    if getattr(self, "allow_neg_eigval", False):
        beta = beta * 2.0
    rows = qkv, beta, a
    if cache_params is None:
        out = _mix(self, rows, sequences)
    else:
        if sequences.offsets is not None and attention_mask is None:
            raise ArgumentValueError(expected("past_key_values", "None with a pack", "a cache"))
        out = _mix_cached(self, cache_params, rows, attention_mask, sequences)
    out = getattr(self, known.norm)(out, z).flatten(2)
    return getattr(self, known.out)(out)


def _mix(
    self: nn.Module,
    rows: Rows,
    sequences: packs.Sequences,
    record: LinearAttentionCache | None = None,
) -> torch.Tensor:
    """Convolve, and apply the rule: [B, T, HV, V].  record: of what is before the rows."""
    qkv, beta, a = rows
    mixed = self.conv1d(qkv, sequences, record)
    mixed, beta, a = map(sequences.pack, (mixed, beta, a))
    q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
    q, k = (t.unflatten(-1, (self.num_k_heads, self.head_k_dim)) for t in (q, k))
    v = v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
    q, k = op_gate.l2norm(q, L2NORM_EPS), op_gate.l2norm(k, L2NORM_EPS)
    parameters = self.A_log, self.dt_bias
    into = (main_grad_of(self, parameter) for parameter in parameters)
    g = op_gate.decay_gate(a, *parameters, sequences.offsets, *into)
    operands, options = (q, k, v, g, beta), {"cu_seqlens": sequences.offsets}
    if record is not None:
        return sequences.unpack(record[0].gated_delta_rule(*operands, **options))
    out, _ = linear_attn.chunk_gated_delta_rule(*operands, **options)
    return sequences.unpack(out)


@torch.compiler.disable
def _mix_cached(
    self: nn.Module,
    cache: object,
    rows: Rows,
    mask: torch.Tensor | None,
    sequences: packs.Sequences,
) -> torch.Tensor:
    """As `_mix`, of tokens behind those of a cache, which keeps them."""
    from ....integrations import linear_cache

    layer = linear_cache.layer_of(cache, self.layer_idx)
    if not layer.batch and torch.is_grad_enabled() and not layer.record_past:
        # A step of training makes a cache that is not read: its gradients are those without one.
        out = _mix(self, rows, sequences)
        layer.store(rows, mask)
        return out

    def new_record(slots: int, drafts: int) -> LinearAttentionCache:
        return LinearAttentionCache(
            1, slots, heads=(self.num_k_heads, self.num_v_heads),
            sizes=(self.head_k_dim, self.head_v_dim),
            conv=(rows[0].shape[2], self.conv1d.kernel_size[0]), drafts=drafts,
            dtype=rows[0].dtype, device=rows[0].device,
        )  # fmt: skip

    return layer.extend(new_record, functools.partial(_mix, self), rows, sequences)
