"""Forwards of transformers' mixers with a state, and what they need to know of their base models.

    projections ─> convolution, SiLU ─> rule ─> gated norm ─> projection
                   (the pack of the real tokens alone)

The rule is the gated delta rule, Kimi's too, or the scan of Mamba-2 or of Mamba, which has its
projections of steps, B and C behind the convolution and no norm.  A mixer is known by its class:
how its projections lie is in no config.  Its projections, its convolution, its norms and its gate
are modules that are called, so that adapters, hooks and FSDP see them; of Mamba's dt_proj the
weight is read, as transformers does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ....errors import ArgumentValueError, expected
from ....gemm import api as gemm
from ....integrations import mixing, packs
from ....integrations import transformers as integration
from ....linear_attn import api as linear_attn
from ....linear_attn import op_gate
from ....linear_attn.cache import LinearAttentionCache
from ....linear_attn.config import (
    CONV_WIDTHS,
    DELTA_SIZES,
    SELECTIVE_GPU_STATES,
    SELECTIVE_STATES,
    SSD_GPU_SIZES,
)
from ....rowwise import api as rowwise
from ..state import eps_of, kind_of, main_grad_of, parameter_of, sums_of, unchanged, user_class

#: Names of the forwards of the four mixers, of their convolution and of a gate; of a layer that
#: hands packs on, the base model, and the model around.
DELTA_NET, KDA, MAMBA2, MAMBA, CONVOLUTION, GATE = (
    "gated_delta_net", "kimi_delta_attention", "mamba2_mixer", "mamba_mixer", "causal_conv1d",
    "forget_gate",
)  # fmt: skip
KINDS = frozenset({DELTA_NET, KDA, MAMBA2, MAMBA})
#: Attribute of a mixer -> (the forward of what it holds, its name in words).
PARTS = {"conv1d": (CONVOLUTION, "convolution"), "forget_gate": (GATE, "gate")}
LAYER, BASE_MODEL, STATEFUL = "hybrid_layer", "hybrid_model", "hybrid"
#: What a model says of itself to `generate`: whether its cache cannot drop tokens.
STATEFUL_FLAG = "_is_stateful"


#: Inputs of a rule [B, T, ...], those of its convolution first.
Rows = tuple[torch.Tensor, ...]
#: (a mixer, rows, their sequences, a record of the rows before them) -> results of the rule.
Mix = Callable[[nn.Module, Rows, packs.Sequences, LinearAttentionCache | None], torch.Tensor]


# ---- classes ------------------------------------------------------------------------------------


def _interleaved(self: nn.Module, x: torch.Tensor) -> mixing.Projected:
    """Qwen3-Next: each k head has its q, k, v and z side by side."""
    return mixing.interleaved(self.in_proj_qkvz(x), self.in_proj_ba(x), *rule_of(self).sizes(self))


def _apart(self: nn.Module, x: torch.Tensor) -> mixing.Projected:
    """Qwen3.5: q, k and v are one projection, the others one each."""
    z = self.in_proj_z(x).unflatten(-1, (self.num_v_heads, self.head_v_dim))
    return mixing.Projected(self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x))


def _one_by_one(self: nn.Module, x: torch.Tensor) -> mixing.Projected:
    """OLMo Hybrid: a projection for each of them."""
    qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
    z = self.g_proj(x).unflatten(-1, (self.num_v_heads, self.head_v_dim))
    return mixing.Projected(qkv, z, self.b_proj(x), self.a_proj(x))


def _of_channels(self: nn.Module, x: torch.Tensor) -> mixing.Projected:
    """Kimi Linear: a projection each, of two factors for the gates, and the decay's in a part."""
    qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
    z = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (self.num_heads, self.head_dim))
    return mixing.Projected(qkv, z, self.b_proj(x), x)


class Mixer(NamedTuple):
    """A class of mixers: its forward, and the names of its norm and its last projection.

    project: Projections of a gated delta net.
    """

    kind: str = MAMBA2
    project: Callable[[nn.Module, torch.Tensor], mixing.Projected] | None = None
    norm: str = "norm"
    out: str = "out_proj"


#: (folder in transformers.models, name) of a class -> what is known of it.
_MIXERS: Mapping[tuple[str, str], Mixer] = {
    ("qwen3_next", "Qwen3NextGatedDeltaNet"): Mixer(DELTA_NET, _interleaved),
    ("qwen3_5", "Qwen3_5GatedDeltaNet"): Mixer(DELTA_NET, _apart),
    ("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"): Mixer(DELTA_NET, _apart),
    ("olmo_hybrid", "OlmoHybridGatedDeltaNet"): Mixer(DELTA_NET, _one_by_one, "o_norm", "o_proj"),
    ("kimi_linear", "KimiLinearDeltaAttention"): Mixer(KDA, _of_channels, "o_norm", "o_proj"),
    ("nemotron_h", "NemotronHMamba2Mixer"): Mixer(),
    ("granitemoehybrid", "GraniteMoeHybridMambaLayer"): Mixer(),
    ("mamba2", "Mamba2Mixer"): Mixer(),
    ("falcon_h1", "FalconH1Mixer"): Mixer(),
    ("bamba", "BambaMixer"): Mixer(),
    ("zamba2", "Zamba2MambaMixer"): Mixer(),
    ("jamba", "JambaMambaMixer"): Mixer(MAMBA),
    ("falcon_mamba", "FalconMambaMixer"): Mixer(MAMBA),
    ("mamba", "MambaMixer"): Mixer(MAMBA),
}
MIXERS: Mapping[tuple[str, str], Mixer] = {
    (f"transformers.models.{folder}.modeling_{folder}", name): mixer
    for (folder, name), mixer in _MIXERS.items()
}
#: Class of a layer that gives its mixer no keywords -> the mixer's name in it.
_SILENT = {("transformers.models.jamba.modeling_jamba", "JambaMambaDecoderLayer"): "mamba"}
#: Keywords of transformers that say where sequences are; with others a call is refused.
_KEYWORDS = (packs.OFFSETS, packs.NUMBERS, "cu_seq_lens_k", "max_length_k", "is_causal")
#: One that Zamba2 gives its mixers, which have no positions.
_KEYWORDS += ("position_embeddings",)
#: Kind -> parameters of a module whose gradients go to a main_grad in one order.  That of A_log is
#: A times a sum of the scan's.
MAIN_GRADS = {
    **dict.fromkeys((DELTA_NET, GATE), ("A_log", "dt_bias")), KDA: (), MAMBA2: ("D", "dt_bias"),
    MAMBA: ("D",), CONVOLUTION: ("weight", "bias"),
}  # fmt: skip
#: What the author's forward reads and ours does not: the activation of the convolution.
READS = (("activation", "silu"),)


def mixer_of(cls: type) -> Mixer | None:
    """Return what is known of a class of mixers; None: it is no known one."""
    return MIXERS.get((cls.__module__, cls.__name__))


class Rule(NamedTuple):
    """The recurrence of a kind of mixers, and what our ops need to know of a mixer.

    inputs: (a mixer, hidden states) -> (rows of the rule, input of its norm's gate; None: no norm).
    cache: Constructor of a record.  sizes: Its heads and sizes, (groups, heads) and (K, V).
    channels: Of the convolution.  why_not: Why an op does not take the sizes; None: it does.
    attributes: Those that the forward reads.
    """

    inputs: Callable[[nn.Module, torch.Tensor], tuple[Rows, torch.Tensor | None]]
    mix: Mix
    cache: Callable[..., LinearAttentionCache]
    sizes: Callable[[nn.Module], tuple[tuple[int, int], tuple[int, int]]]
    channels: Callable[[nn.Module], int]
    why_not: Callable[[nn.Module], str | None]
    attributes: tuple[str, ...]


def rule_of(module: nn.Module) -> Rule:
    """Return the rule of a known mixer."""
    return RULES[mixer_of(user_class(module)).kind]


def why_not(module: nn.Module) -> str | None:
    """Why our ops cannot compute a known mixer; None: they can."""
    rule = rule_of(module)
    if missing := [name for name in rule.attributes if not hasattr(module, name)]:
        return f"transformers' mixer of this version has no {', '.join(missing)}"
    if not _caches_record():
        return "transformers' caches of this version record no past of a mixer"
    channels = rule.channels(module)
    convolution = module.conv1d
    plain = type(convolution) is nn.Conv1d or user_class(convolution) is nn.Conv1d
    if not plain or convolution.groups != channels or convolution.in_channels != channels:
        return f"its convolution is no depthwise nn.Conv1d of {channels} channels"
    (width,) = convolution.kernel_size
    if width not in CONV_WIDTHS or convolution.stride != (1,) or convolution.dilation != (1,):
        return f"a convolution of width {width}; ck.causal_conv1d_fn takes {CONV_WIDTHS}"
    for name, value in READS:
        if getattr(module, name) != value:
            return f"{name} = {getattr(module, name)!r}, not {value!r}"
    return rule.why_not(module)


def _why_not_sizes(
    module: nn.Module,
    names: tuple[str, ...] = ("head_k_dim", "head_v_dim"),
    op: str = "ck.chunk_gated_delta_rule",
) -> str | None:
    """Why an op does not take the sizes of a mixer's heads; None: it does."""
    step, most = DELTA_SIZES
    sizes = {getattr(module, name) for name in names}
    if any(size % step or size > most for size in sizes):
        return f"head sizes {sorted(sizes)}; {op} takes multiples of {step} up to {most}"
    return None


def _why_not_scan(module: nn.Module) -> str | None:
    """Why Mamba-2's scan of ours cannot compute a mixer; None: it can."""
    heads, groups = module.num_heads, module.n_groups
    if module.intermediate_size != heads * module.head_dim or heads % groups:
        return f"{module.intermediate_size} channels in {heads} heads and {groups} groups"
    op, names = "ck.mamba_chunk_scan_combined", ("head_dim", "ssm_state_size")
    if (
        reason := _why_not_sizes(module, names, op)
    ) is not None or module.A_log.device.type != "cuda":
        return reason
    for name, known in zip(names, SSD_GPU_SIZES, strict=True):
        if getattr(module, name) not in known:
            sizes = ", ".join(map(str, known))
            return f"{name} = {getattr(module, name)}; on GPUs {op} takes {sizes}"
    return None


def _why_not_selective_scan(module: nn.Module) -> str | None:
    """Why Mamba's scan of ours cannot compute a mixer; None: it can."""
    if not isinstance(module.dt_proj, nn.Linear):
        return f"its dt_proj, whose weight it reads, is a {type(module.dt_proj).__name__}"
    size, on_gpu = module.ssm_state_size, module.A_log.device.type == "cuda"
    if size > SELECTIVE_STATES or (on_gpu and size not in SELECTIVE_GPU_STATES):
        known = ", ".join(map(str, SELECTIVE_GPU_STATES))
        takes = f"up to {SELECTIVE_STATES}, on GPUs {known}"
        return f"ssm_state_size = {size}; ck.selective_scan takes {takes}"
    return None


def _caches_record() -> bool:
    """Whether transformers has the layers of caches that `linear_cache` takes the place of."""
    layer = getattr(sys.modules.get("transformers.cache_utils"), "LinearAttentionLayer", None)
    if not hasattr(layer, "activate_past_recording"):
        return False
    return isinstance(layer().has_previous_state, dict)


def model_kind(module: nn.Module) -> str | None:
    """Name of our forward of a model around known mixers; None: it is none."""
    if not (mixers := mixers_in(module)):
        return None
    if _silent_mixer(user_class(module)) is not None:
        return LAYER
    layers = module._modules.get("layers")
    if isinstance(layers, nn.ModuleList):
        parts = {id(part) for layer in layers for part in layer.modules()}
        return BASE_MODEL if all(id(mixer) in parts for mixer in mixers) else None
    return STATEFUL if getattr(module, STATEFUL_FLAG, False) else None


def mixers_in(module: nn.Module) -> list[nn.Module]:
    """Return the known mixers in a module."""
    return [m for m in module.modules() if m is not module and mixer_of(user_class(m))]


def _silent_mixer(cls: type) -> str | None:
    """Name of the mixer to which a class of layers gives no keywords; None: it is no such class."""
    return _SILENT.get((cls.__module__, cls.__name__))


# ---- forwards -----------------------------------------------------------------------------------


class _PackedLayer:
    """A layer in whose author's forward the mixer gets the pack."""

    def __init__(self, layer: nn.Module, pack: dict[str, object]) -> None:
        name = _silent_mixer(user_class(layer))
        self._layer = layer
        setattr(self, name, functools.partial(getattr(layer, name), **pack))

    def __getattr__(self, name: str) -> object:
        return getattr(self._layer, name)


def handing_packs_on(author: Callable) -> Callable:
    """Return the forward of a layer that hands packs on to its mixer."""

    def forward(self, *args, **kwargs):
        names = packs.OFFSETS, packs.NUMBERS
        pack = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        return author(_PackedLayer(self, pack) if pack else self, *args, **kwargs)

    return forward


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
    out = linear_attn.causal_conv1d_fn(
        *operands, **options, main_grad=into, bias_main_grad=main_grad_of(self, self.bias)
    )
    return sequences.unpack(out.mT)


def gated_rms_norm(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """y = x / √(mean(x²) + eps) · w · silu(gate), or the norm of x silu(gate); by groups."""
    notes = self._cute_kernels
    weight = parameter_of(self, notes.weight)
    # A scan of transformers gives fp32.
    dtype = torch.promote_types(hidden_states.dtype, gate.dtype)
    out = linear_attn.gated_rms_norm(
        hidden_states.to(dtype), weight, gate.to(dtype), eps_of(self),
        norm_before_gate=notes.norm_before_gate, group_size=notes.group_size,
        activation=notes.activation,
        main_grad=main_grad_of(self, weight),
    )  # fmt: skip
    return out.to(hidden_states.dtype)


def mixer(
    self,
    hidden_states: torch.Tensor,
    cache_params: object | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Mix the tokens of each sequence: [B, T, hidden] -> [B, T, hidden].

    Rows of padding are those of a zero output of the rule, as transformers has them.
    ``time_step_limit`` holds for single tokens as well, where transformers leaves it out.

    attention_mask: [B, T], 0 where a token is padding, or None.
    cu_seq_lens_q, seq_idx: in ``kwargs``: [S + 1], where sequences of a batch of 1 begin and end;
    [B, T], a number for each sequence, of which a row has several.
    """
    unchanged(self, self._cute_kernels.reads)
    integration.check_keywords(kwargs, _KEYWORDS)
    if kwargs.get("is_causal") is False:
        raise ArgumentValueError(expected("is_causal", "True: a state goes forward", False))
    sequences = packs.sequences_of(hidden_states, attention_mask, kwargs)
    known, rule = mixer_of(user_class(self)), rule_of(self)
    rows, gate = rule.inputs(self, hidden_states)
    if cache_params is None:
        out = rule.mix(self, rows, sequences, None)
    elif sequences.offsets is not None and attention_mask is None:
        raise ArgumentValueError(expected("past_key_values", "None with a pack", "a cache"))
    else:
        out = _after_cache(self, rows, cache_params, attention_mask, sequences)
    out = out if gate is None else getattr(self, known.norm)(out, gate)
    return getattr(self, known.out)(out.flatten(2))


@torch.compiler.disable
def _after_cache(
    self: nn.Module,
    rows: Rows,
    cache: object,
    mask: torch.Tensor | None,
    sequences: packs.Sequences,
) -> torch.Tensor:
    """Results of a rule for rows of tokens after those of a cache, which keeps them."""
    from ....integrations import linear_cache

    rule, layer = rule_of(self), linear_cache.layer_of(cache, self.layer_idx)
    if mask is None and rows[0].shape[1] == 1:
        mask = layer.padding()
        sequences = sequences if mask is None else packs.sequences_of(rows[0], mask, {})
    if not layer.batch and torch.is_grad_enabled() and not layer.record_past:
        # A step of training makes a cache that is not read: its gradients are those without one.
        out = rule.mix(self, rows, sequences, None)
        layer.store(rows, mask)
        return out

    def new_record(slots: int, drafts: int) -> LinearAttentionCache:
        heads, sizes = rule.sizes(self)
        return rule.cache(
            1, slots, heads=heads, sizes=sizes,
            conv=(rows[0].shape[2], self.conv1d.kernel_size[0]), drafts=drafts,
            dtype=rows[0].dtype, device=rows[0].device,
        )  # fmt: skip

    return layer.extend(new_record, functools.partial(rule.mix, self), rows, sequences)


# ---- rules --------------------------------------------------------------------------------------


def _delta_inputs(self: nn.Module, x: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    qkv, z, b, a = mixer_of(user_class(self)).project(self, x)
    beta = rowwise.sigmoid(b)
    if getattr(self, "allow_neg_eigval", False):
        beta = beta * 2.0
    return (qkv, beta, a), z


def _delta_rule(
    self: nn.Module,
    rows: Rows,
    sequences: packs.Sequences,
    record: LinearAttentionCache | None,
) -> torch.Tensor:
    """Convolve, and apply the gated delta rule: [B, T, HV, V]."""
    qkv, beta, a = rows
    of_channels = mixer_of(user_class(self)).kind == KDA
    g = self.forget_gate(a, sequences) if of_channels else _decay(self, a, sequences)
    mixed = self.conv1d(qkv, sequences, record)
    mixed, beta, g = map(sequences.pack, (mixed, beta, g))
    operands = *mixing.delta_operands(mixed, *rule_of(self).sizes(self)), g, beta
    options = {"cu_seqlens": sequences.offsets}
    if record is not None:
        return sequences.unpack(record[0].gated_delta_rule(*operands, **options))
    rule = linear_attn.chunk_kda if of_channels else linear_attn.chunk_gated_delta_rule
    return sequences.unpack(rule(*operands, **options)[0])


def _decay(self: nn.Module, a: torch.Tensor, sequences: packs.Sequences) -> torch.Tensor:
    """The logs of the decays [B, T, ...] by parameters of a module; 0 of padding."""
    parameters = self.A_log, self.dt_bias
    into = [main_grad_of(self, parameter) for parameter in parameters]
    A_log, of_A_log = (None if t is None else t.flatten() for t in (self.A_log, into[0]))
    operands = sequences.pack(a), A_log, self.dt_bias, sequences.offsets
    return sequences.unpack(op_gate.decay_gate(*operands, of_A_log, into[1], None))


def forget_gate(self, hidden_states: torch.Tensor, sequences: packs.Sequences) -> torch.Tensor:
    """g = -e^A_log softplus(f_b(f_a(x)) + dt_bias), [B, T, H, K]; 0 of padding."""
    a = self.f_b_proj(self.f_a_proj(hidden_states)).unflatten(-1, (self.num_heads, self.head_dim))
    return _decay(self, a, sequences)


def _mamba2_inputs(self: nn.Module, x: torch.Tensor) -> tuple[Rows, torch.Tensor | None]:
    # Falcon-H1 scales its input and each projection, and may have no norm.
    multiplier = getattr(self, "ssm_in_multiplier", None)
    if multiplier is None:
        projected = self.in_proj(x)
    else:
        projected = self.in_proj(x * multiplier)
        projected = (projected * self.mup_vector).to(projected.dtype)
    sizes = [self.intermediate_size, self.conv_dim, self.num_heads]
    gate, mixed, dt = projected.split(sizes, -1)
    if getattr(self, "mamba_rms_norm", True):
        return (mixed, dt), gate
    return (mixed, dt, gate.unflatten(-1, (self.num_heads, self.head_dim))), None


def _scan(
    self: nn.Module,
    rows: Rows,
    sequences: packs.Sequences,
    record: LinearAttentionCache | None,
) -> torch.Tensor:
    """Convolve, and scan: [B, T, H P].  rows: inputs of the convolution, dt, and z if there is."""
    mixed, dt, *gate = rows
    mixed = sequences.pack(self.conv1d(mixed, sequences, record))
    x, B, C = mixing.scan_operands(mixed, *rule_of(self).sizes(self))
    A = mixing.rates(self.A_log)
    options = {
        "D": self.D, "dt_bias": self.dt_bias, "dt_softplus": True,
        "z": sequences.pack(gate[0]) if gate else None,
        "dt_limit": tuple(self.time_step_limit), "cu_seqlens": sequences.offsets,
    }  # fmt: skip
    operands = x, sequences.pack(dt), A, B, C
    if record is not None:
        out = record[0].mamba_chunk_scan_combined(*operands, **options)
    else:
        into = {f"{name}_main_grad": main_grad_of(self, options[name]) for name in ("D", "dt_bias")}
        out = linear_attn.mamba_chunk_scan_combined(*operands, **options, **into)
    return sequences.unpack(out).flatten(2)


def _selective_scan(
    self: nn.Module,
    rows: Rows,
    sequences: packs.Sequences,
    record: LinearAttentionCache | None,
) -> torch.Tensor:
    """Convolve, project steps, B and C, and scan: [B, T, D].  rows: what is convolved, and z."""
    u = self.conv1d(rows[0], sequences, record)
    parts = self.x_proj(u).split([self.time_step_rank, *2 * [self.ssm_state_size]], -1)
    # Jamba and Falcon-Mamba have norms.
    names = "dt_layernorm", "b_layernorm", "c_layernorm"
    norms = (getattr(self, name, None) for name in names)
    delta, B, C = (p if f is None else f(p) for f, p in zip(norms, parts, strict=True))
    # The scan adds the bias of the steps.
    if kind_of(self.dt_proj) is None:
        delta = nn.functional.linear(delta, self.dt_proj.weight)
    else:
        delta = gemm.linear(delta, self.dt_proj.weight, None, **sums_of(self.dt_proj))
    u, delta, B, C, z = (sequences.pack(t).mT for t in (u, delta, B, C, rows[1]))
    options = {
        "D": self.D, "z": z, "delta_bias": self.dt_proj.bias, "delta_softplus": True,
        "cu_seqlens": sequences.offsets,
    }  # fmt: skip
    operands = u, delta, mixing.rates(self.A_log), B, C
    if record is not None:
        out = record[0].selective_scan(*operands, **options)
    else:
        into = main_grad_of(self, self.D)
        out = linear_attn.selective_scan(*operands, **options, D_main_grad=into)
    return sequences.unpack(out.mT)


RULES = {
    DELTA_NET: Rule(
        _delta_inputs,
        _delta_rule,
        LinearAttentionCache,
        lambda m: ((m.num_k_heads, m.num_v_heads), (m.head_k_dim, m.head_v_dim)),
        lambda m: m.key_dim * 2 + m.value_dim,
        _why_not_sizes,
        ("conv1d", "key_dim", "value_dim", "activation", "A_log", "dt_bias", "layer_idx"),
    ),
    KDA: Rule(
        _delta_inputs,
        _delta_rule,
        LinearAttentionCache.of_kda,
        lambda m: ((m.num_heads,) * 2, (m.head_dim,) * 2),
        lambda m: m.conv_dim,
        functools.partial(_why_not_sizes, names=("head_dim",), op="ck.chunk_kda"),
        ("conv1d", "conv_dim", "num_heads", "head_dim", "forget_gate", "activation", "layer_idx"),
    ),
    MAMBA2: Rule(
        _mamba2_inputs,
        _scan,
        LinearAttentionCache.of_mamba2,
        lambda m: ((m.n_groups, m.num_heads), (m.ssm_state_size, m.head_dim)),
        lambda m: m.conv_dim,
        _why_not_scan,
        (
            "conv1d", "in_proj", "norm", "out_proj", "activation", "A_log", "D", "dt_bias",
            "layer_idx", "num_heads", "head_dim", "n_groups", "ssm_state_size",
            "intermediate_size", "conv_dim", "time_step_limit",
        ),
    ),
    MAMBA: Rule(
        lambda m, x: (m.in_proj(x).chunk(2, -1), None),
        _selective_scan,
        LinearAttentionCache.of_mamba,
        lambda m: ((1, m.intermediate_size), (m.ssm_state_size, 1)),
        lambda m: m.intermediate_size,
        _why_not_selective_scan,
        (
            "conv1d", "in_proj", "x_proj", "dt_proj", "out_proj", "activation", "A_log", "D",
            "layer_idx", "ssm_state_size", "intermediate_size", "time_step_rank",
        ),
    ),
}  # fmt: skip
