"""Forwards of authors that are known, by their bytecode or class, and ours in their place.

A function is a formula of this file if its instructions are, with any names of local variables, and
so are those of the functions of its own file that the formula calls.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import NamedTuple

import torch

from ....integrations import packs
from ....integrations import transformers as integration
from ....norm import op as norm_op
from ....norm.config import RMS
from ....rowwise import op
from ..bytecode import global_function, is_formula
from ..state import Part, eps_of, main_grad_of, parameter_of
from . import mixers
from .layers import gate_product, is_ours, is_plain_pair

#: Module of transformers whose `GradientCheckpointingLayer` wraps the forwards of its subclasses.
_CHECKPOINTING = "transformers.modeling_layers"
#: Modules inside whose forwards must be ours: the norm of a layer's sum, and an MLP's activation.
NORM, ACTIVATION = "post_attention_layernorm", "act_fn"
#: Function that transformers' models have each in their own file.
POS_EMB = "apply_rotary_pos_emb"


def forward_kind(part: Part, attends: bool) -> str | None:
    """Name of our forward in place of that of a module's class; None: there is none.

    attends: Whether the module's config is going to name our attention.
    """
    cls = part.cls
    if (cls.__module__, cls.__name__) in _BROADCASTS:
        return "positions"
    if attends and is_base_model(part.module, cls):
        return "base_model"
    if (kind := mixers.model_kind(part.module)) is not None:
        return kind
    return _kind_by_formula(cls)


def _kind_by_formula(cls: type) -> str | None:
    if is_pre_norm(cls):
        return "residual"
    if is_gated(cls):
        return "mlp"
    return "attention" if pos_emb(cls) is not None else None


class PosEmb(NamedTuple):
    """A known function.

    function: The author's.  partial: Whether columns beyond those of cos and sin are copied; else
    there must be none.  keeps_dtype: Whether results are rounded to the dtype of q.
    """

    function: Callable
    partial: bool
    keeps_dtype: bool


def pos_emb(cls: type) -> PosEmb | None:
    """Return the function that the forward of a class calls; None: it is not known."""
    function = global_function(cls.forward, POS_EMB)
    for formula, partial, keeps_dtype in _FORMULAS:
        if _agrees(function, formula):
            return PosEmb(function, partial, keeps_dtype)
    return None


def _agrees(function: object, formula: FunctionType) -> bool:
    """Whether a function has the instructions of a formula, and calls the same ``rotate_half``."""
    if not is_formula(function, formula):
        return False
    rotate = function.__globals__.get("rotate_half")
    return is_formula(rotate, rotate_half) and rotate.__globals__.get("torch") is torch is (
        function.__globals__.get("torch", torch)
    )


def is_pre_norm(cls: type) -> bool:
    """Whether the forward of a class is `_pre_norm`, arguments named alike."""
    forward = _inside_checkpointing(cls.forward)
    return is_formula(forward, _pre_norm, named_arguments=True)


def is_gated(cls: type) -> bool:
    """Whether the forward of a class is `_gated`."""
    return is_formula(cls.forward, _gated)


def _inside_checkpointing(forward: object) -> object:
    """Return the forward inside what transformers puts around it for gradient checkpointing.

    A subclass gets one of its own around its own forward; those inside do nothing then.
    """
    while isinstance(forward, FunctionType) and hasattr(forward, "__wrapped__"):
        if forward.__globals__.get("__name__") != _CHECKPOINTING:
            break
        forward = forward.__wrapped__
    return forward


# ---- formulas -----------------------------------------------------------------------------------


def _pre_norm(
    self,
    hidden_states,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    use_cache=False,
    position_embeddings=None,
    **kwargs,
):
    # The author's: Llama, Mistral, Qwen2, Qwen3 and about seventy more
    start = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = start + hidden_states
    start = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = start + hidden_states
    return hidden_states


def _gated(self, x):
    # The author's: Llama, Mistral, Qwen2, Qwen3, Gemma, OLMo 2 and many more
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y


def rotate_half(x):
    """(-x2, x1) of the halves (x1, x2)."""
    low = x[..., : x.shape[-1] // 2]
    high = x[..., x.shape[-1] // 2 :]
    return torch.cat((-high, low), dim=-1)


def _whole(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_out = (q * cos) + (rotate_half(q) * sin)
    k_out = (k * cos) + (rotate_half(k) * sin)
    return q_out, k_out


def _keeping_dtype(q, k, cos, sin, unsqueeze_dim=1):
    q_dtype, k_dtype = q.dtype, k.dtype
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_out = (q * cos) + (rotate_half(q) * sin)
    k_out = (k * cos) + (rotate_half(k) * sin)
    return q_out.to(q_dtype), k_out.to(k_dtype)


def _partial(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    q_turned, q_rest = q[..., :width], q[..., width:]
    k_turned, k_rest = k[..., :width], k[..., width:]
    q_out = (q_turned * cos) + (rotate_half(q_turned) * sin)
    k_out = (k_turned * cos) + (rotate_half(k_turned) * sin)
    q_out = torch.cat([q_out, q_rest], dim=-1)
    k_out = torch.cat([k_out, k_rest], dim=-1)
    return q_out, k_out


def _partial_in_one_step(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    q_turned, q_rest = q[..., :width], q[..., width:]
    k_turned, k_rest = k[..., :width], k[..., width:]
    q_out = torch.cat([(q_turned * cos) + (rotate_half(q_turned) * sin), q_rest], dim=-1)
    k_out = torch.cat([(k_turned * cos) + (rotate_half(k_turned) * sin), k_rest], dim=-1)
    return q_out, k_out


def _partial_in_place_of_q(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    q, q_rest = q[..., :width], q[..., width:]
    k, k_rest = k[..., :width], k[..., width:]
    q_out = (q * cos) + (rotate_half(q) * sin)
    k_out = (k * cos) + (rotate_half(k) * sin)
    return torch.cat((q_out, q_rest), dim=-1), torch.cat((k_out, k_rest), dim=-1)


#: (formula, partial, keeps_dtype)
_FORMULAS = (
    (_whole, False, False),
    (_keeping_dtype, False, True),
    (_partial, True, False),
    (_partial_in_one_step, True, False),
    (_partial_in_place_of_q, True, False),
)


# ---- residual, then norm -------------------------------------------------------------------------

#: Arguments of `_pre_norm` after the first, and their defaults.
_ATTENTION_INPUTS = dict(
    zip(_pre_norm.__code__.co_varnames[2:], _pre_norm.__defaults__, strict=False)
)


def _fused_layer(self, hidden_states, *args, **kwargs):
    inputs = _ATTENTION_INPUTS | dict(zip(_ATTENTION_INPUTS, args, strict=False)) | kwargs
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(hidden_states=hidden_states, **inputs)
    norm = self.post_attention_layernorm
    fused = _add_rms_norm(norm, residual, hidden_states)
    if fused is None:
        residual = residual + hidden_states
        hidden_states = norm(residual)
    else:
        hidden_states, residual = fused
    return residual + self.mlp(hidden_states)


def _add_rms_norm(
    module: torch.nn.Module, residual: torch.Tensor, update: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    # (norm(h), h), h = residual + update, in one launch; None: hooks or operands want two steps.
    if not (is_ours(module, ("rms_norm",)) and is_plain_pair(residual, update)):
        return None
    notes = module._cute_kernels
    weight = parameter_of(module, notes.weight)
    operands = update, residual, weight, None, main_grad_of(module, weight), None
    y, h, _, _ = norm_op.norm_in_steps(*operands, RMS, eps_of(module), notes.offset)
    return y, h


# ---- activation, times up ------------------------------------------------------------------------


def _fused_mlp(self, x):
    # down(f(gate(x)) · up(x))
    gate, up = self.gate_proj(x), self.up_proj(x)
    product = gate_product(self.act_fn, gate, up) if is_plain_pair(gate, up) else None
    return self.down_proj(self.act_fn(gate) * up if product is None else product)


# ---- rotation ------------------------------------------------------------------------------------
# Forward of an attention module that rotates q and k by ck.apply_rotary_pos_emb.
#
# It is the author's code, in which one global name is ours: other modules of the class, and of the
# author's file, are as they were.


class _Globals(dict):
    """Names of our own in front of the globals of a function, which stay live."""

    def __init__(self, names: dict[str, object], author: dict[str, object]) -> None:
        # The interpreter reads dunder names past `__missing__`.
        super().__init__({k: v for k, v in author.items() if k.startswith("__")} | names)
        self._author = author

    def __missing__(self, name: str) -> object:
        return self._author[name]


def _rotating(cls: type) -> Callable:
    """Return the author's forward, in which q and k are rotated in one launch."""
    author, known = cls.forward, pos_emb(cls)
    names, rotation = author.__globals__, _rotation(known)
    rotating = _with_globals(author, _Globals({POS_EMB: rotation}, names))
    # Dynamo reads no missing names: those that the forward has are looked up once.
    used = {n: names[n] for n in ("__builtins__", *author.__code__.co_names) if n in names}
    traced = _with_globals(author, used | {POS_EMB: rotation})

    def is_current() -> bool:
        return all(names.get(name) is value for name, value in used.items())

    # Asked while a graph is traced; `POS_EMB` itself is guarded below.
    is_current._dynamo_marked_constant = True

    def forward(self, *args, **kwargs):
        if names.get(POS_EMB) is not known.function:
            return author(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            return rotating(self, *args, **kwargs)
        return (traced if is_current() else author)(self, *args, **kwargs)

    return forward


def _with_globals(author: FunctionType, names: dict[str, object]) -> FunctionType:
    """Return a function of the author's code with other globals."""
    function = FunctionType(
        author.__code__, names, author.__name__, author.__defaults__, author.__closure__
    )
    function.__kwdefaults__ = author.__kwdefaults__
    return function


def _rotation(known: PosEmb) -> Callable:
    """Return what a model calls in place of the author's function: the same bytes in one launch."""
    author, partial, keeps_dtype = known

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        if partial or cos.shape[-1] == q.shape[-1] == k.shape[-1]:
            dtype = q.dtype if keeps_dtype else None
            result = op.rotate_if_taken(q, k, cos, sin, unsqueeze_dim, dtype)
            if result is not None:
                return result
        return author(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


# ---- positions -----------------------------------------------------------------------------------
# Learned positions that are looked up once and broadcast over the batch.
#
# autograd then adds the gradients of the sequences before ck.embedding sees them, and rounds the
# sum: main_grad would follow the split into micro-batches. Where the model is known, each sequence
# looks its positions up, so that ck.embedding adds all of them in the order of the tokens.

#: Classes of transformers whose forward broadcasts position_ids of its own, and takes others.
_BROADCASTS = {
    ("transformers.models.gpt2.modeling_gpt2", "GPT2Model"),
    ("transformers.models.gpt_bigcode.modeling_gpt_bigcode", "GPTBigCodeModel"),
    ("transformers.models.gpt_neo.modeling_gpt_neo", "GPTNeoModel"),
    ("transformers.models.bert.modeling_bert", "BertEmbeddings"),
}
#: Names of embeddings that other models may look up once for a batch.
_OF_POSITIONS = re.compile(r"(^|_)(wpe|pos|positions?|positional|relative)(_|$)")


def broadcast_embeddings(
    embeddings: Iterable[tuple[str, torch.nn.Module]], position_modules: Iterable[torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the embeddings whose look-ups may be broadcast, by name, outside of known modules."""
    inside = {id(part) for module in position_modules for part in module.modules()}
    for name, module in embeddings:
        if id(module) not in inside and _OF_POSITIONS.search(name.rpartition(".")[2]):
            yield name, module


def _with_positions(self, arguments: dict[str, object]) -> dict[str, object]:
    """Return position_ids [B, T] as an argument, if gradients go to a main_grad."""
    if not (self._cute_kernels.main_grad and torch.is_grad_enabled()):
        return {}
    return {"position_ids": _for_each_sequence(arguments)}


def _for_each_sequence(arguments: dict[str, object]) -> torch.Tensor | None:
    """Return position_ids [B, T] of a call that passes [1, T] or none."""
    tokens, embedded, ids = (
        arguments.get(name) for name in ("input_ids", "inputs_embeds", "position_ids")
    )
    if tokens is None and embedded is None:
        return ids
    like = tokens if tokens is not None else embedded[..., 0]
    rows = like.reshape(-1, like.shape[-1])
    if ids is None:
        cache = arguments.get("past_key_values")
        past = arguments.get("past_key_values_length", 0)
        past = past if cache is None else cache.get_seq_length()
        ids = torch.arange(rows.shape[1], device=rows.device) + past
    return ids.expand_as(rows) if ids.dim() == 1 or ids.shape[0] == 1 else ids


# ---- masks ---------------------------------------------------------------------------------------
# Forward of a base model that tells its attention where no batch holds padding, packs or a cache.
#
# Without position ids transformers makes them, and then looks in them for packed sequences: in
# eager mode the host waits for the device's answer, and a compiled graph makes a dense mask, as it
# cannot wait, of which our attention has to read the ranges. Position ids that the model makes have
# no packs, so the layers get the mask that says so.

#: Arguments that say something about the mask.
_OF_MASKS = ("attention_mask", "position_ids", "past_key_values", "cu_seq_lens_q", "cu_seq_lens_k")
#: Families whose base model takes one mask for all layers: without a window; or with the config's.
_FULL, _SLIDING = {"llama", "olmo2", "gpt_neox"}, {"mistral", "phi3"}
#: Families whose base model takes one mask for each type of layer.
_BY_TYPE = {"qwen2", "qwen3", "gemma2", "gemma3_text"}


def is_base_model(model: torch.nn.Module, cls: type) -> bool:
    """Whether a module is the base model of a family whose masks are known."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    known = model_type in _FULL | _SLIDING | _BY_TYPE
    return known and cls.__name__.endswith("Model") and "forward" in vars(cls)


def _masks(model: torch.nn.Module, arguments: dict[str, object]) -> dict[str, object]:
    """Return the mask of a call without padding, packs and cache as an argument, or nothing.

    A cache that the model itself makes is empty: all keys are those of the call.
    """
    config = model.config
    causal = (
        arguments.get("is_causal") is not False
        and getattr(config, "is_causal", True) is not False
        and not getattr(config, "use_bidirectional_attention", False)
    )
    ours = config._attn_implementation == integration.NAME
    if not causal or not ours or any(arguments.get(n) is not None for n in _OF_MASKS):
        return {}
    whole, family = integration.whole_sequences, config.model_type
    window = None if family in _FULL else getattr(config, "sliding_window", None)
    if window is not None and not (isinstance(window, int) and window > 1):
        return {}
    if family not in _BY_TYPE:
        return {"attention_mask": whole(window or 0)}
    sliding = {} if window is None else {"sliding_attention": whole(window)}
    return {"attention_mask": {"full_attention": whole(), **sliding}}


# ---- all of them ---------------------------------------------------------------------------------

_BY_FORMULA = {"residual": _fused_layer, "mlp": _fused_mlp}
#: Name of a forward of ours -> the arguments of the author's forward that it changes.
_CHANGED = {
    "positions": _with_positions,
    "base_model": _masks,
    mixers.BASE_MODEL: packs.with_sequences,
}


def forward_of(kind: str, cls: type) -> Callable:
    """Return the forward of ours for a class, by the name that `forward_kind` has for it.

    It is the author's own where his formula is not known: a pickle may come from another version of
    transformers.
    """
    author = cls.forward
    if kind in ("attention", *_BY_FORMULA):
        if _kind_by_formula(cls) != kind:
            return author
        return _BY_FORMULA.get(kind) or _rotating(cls)
    if kind == mixers.STATEFUL:
        return author
    if kind == mixers.LAYER:
        return mixers.handing_packs_on(_inside_checkpointing(author))
    names = list(inspect.signature(author).parameters)[1:]
    changed = _CHANGED[kind]

    def forward(self, *args, **kwargs):
        arguments = dict(zip(names, args, strict=False)) | kwargs
        return author(self, **arguments | changed(self, arguments))

    return forward
