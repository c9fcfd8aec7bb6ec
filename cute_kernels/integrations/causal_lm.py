"""The parts of a causal language model that log-probabilities are made of.

    wrapper(s) ─> causal LM ─> base model ─> hidden states ─> head ─> scale, soft cap ─> logits

A part that is not there, or not there once, is a TypeError of ours: a wrong guess would be a wrong
probability that looks like a right one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, PatchError, expected

#: Attributes in which base models return the last layer's output, by priority.
_NAMES = ("last_hidden_state", "hidden", "hidden_states")

#: Settings of a config by which the logits are capped: cap · tanh(logits / cap).
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
#: Settings by which they are scaled -> (the families that do, the exponent of the factor).
_SCALES = {
    "logit_scale": [("cohere", 1)],
    "lm_head_multiplier": [("falcon_h1", 1)],
    "logits_scaling": [("granite", -1), ("hyperclovax", 1)],
}
_ABOUT_LOGITS = re.compile(r"logit|lm_head|soft_?cap")
#: Settings among them that concern other logits than the head's, or which ones a caller wants.
_ELSEWHERE = re.compile(
    r"attn|attention|router|gate|mlp|keep$|^lm_head_bias$|^chunk_size|^output_logits$|renormalize"
)
#: Attribute of every module inside a model that ``ck.patch`` went over: the mark of that patch.
PATCH_MARK = "_cute_kernels_options"
_NEUTRAL = (None, False, 0, 1)


class Head(NamedTuple):
    """The last linear layer: ``module(hidden [..., D]) = hidden weightᵀ + bias``, D wide."""

    module: torch.nn.Module
    width: int


class Transform(NamedTuple):
    """Transform of the logits after the head: cap(scale · logits), cap 0: none."""

    scale: float
    softcap: float


def require_patched(name: str, model: torch.nn.Module) -> None:
    """Check that ``ck.patch`` left no part of a causal LM whose bits follow the batch.

    Modules that are registered after a patch are guarded by the patch itself.

    Raises:
        PatchError: the model was not patched, in part only, or the report was not complete.
    """
    inner = unwrapped(model)[1]
    mark, got = vars(inner).get(PATCH_MARK), f"{type(inner).__name__}, which was not patched"
    if mark is not None:
        got = f"{len(mark.moving)} parts left: {', '.join(mark.moving[:3])}"
    if mark is None or mark.moving:
        want = f"a model of which ck.patch({name}, strict=True) leaves nothing"
        raise PatchError(expected(name, want, got))


def unwrapped(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return (what to call, the causal LM inside) of DDP, a DeepSpeed engine, PEFT, torch.compile.

    A model of torch.compile is called uncompiled: its graph ends in logits.

    Raises:
        ArgumentTypeError: there is no module with ``get_output_embeddings`` inside.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(expected("model", "a torch.nn.Module", type(model).__name__))
    outer = inner = getattr(model, "_orig_mod", model)
    for _ in range(8):
        if callable(getattr(inner, "get_base_model", None)):
            inner = inner.get_base_model()
        elif callable(getattr(type(inner), "get_output_embeddings", None)):
            return outer, inner
        else:
            within = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
            if not isinstance(within, torch.nn.Module):
                break
            inner = within
    want = "a causal language model (with get_output_embeddings), or a wrapper of one"
    raise ArgumentTypeError(expected("model", want, type(inner).__name__))


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that computes the hidden states.

    Raises:
        ArgumentTypeError: there is none, or parameters outside of it and of the head take part.
    """
    base = getattr(model, "base_model", None)
    if not isinstance(base, torch.nn.Module) or base is model:
        want = "one whose base_model is a module of its own"
        raise ArgumentTypeError(expected("model", want, type(model).__name__))
    parameter_ids = {id(p) for part in (base, head(model).module) for p in part.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in parameter_ids:
            want = "parameters in base_model and in the head only"
            raise ArgumentTypeError(expected("model", want, f"{name} between or beside them"))
    return base


def head(model: torch.nn.Module) -> Head:
    """Return the output layer.

    Raises:
        ArgumentTypeError: it is no plain linear layer: one with children (an adapter, a
            parametrization), or without a floating-point weight [V, D].
    """
    module = model.get_output_embeddings()
    want = "a linear layer: a module with weight [V, D], no children, and bias [V] or none"
    if not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(expected("get_output_embeddings()", want, module))
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    other_names = {name for name, _ in module.named_parameters()} - {"weight", "bias"}
    # ZeRO-3 leaves an empty tensor in place of the parameter.
    shape = () if weight is None else tuple(getattr(weight, "ds_shape", weight.shape))
    alone = next(module.children(), None) is None and not other_names
    if not alone or len(shape) != 2 or not weight.dtype.is_floating_point:
        raise ArgumentTypeError(expected("get_output_embeddings()", want, module))
    return Head(module, shape[1])


def vocabulary(model: torch.nn.Module) -> int | None:
    """Number of input ids; None if the model does not say."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    count = getattr(embedding, "num_embeddings", None)
    return getattr(getattr(model, "config", None), "vocab_size", None) if count is None else count


def softcap(model: torch.nn.Module) -> float:
    """The soft cap of logits that a model's config sets, whatever else it sets; 0: none."""
    config = _text_config(model)
    for name in _CAPS:  # not a generator: torch 2.11 compiles no graph around one
        cap = getattr(config, name, None)
        if cap:
            return float(cap)
    return 0.0


def _text_config(model: torch.nn.Module) -> object:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def transform(model: torch.nn.Module) -> Transform:
    """Logits transform that the model's config asks for.

    Raises:
        ArgumentValueError: a setting about logits that we do not know, or two whose order we do
            not know; the message names it.
    """
    config = _text_config(model)
    family = str(getattr(config, "model_type", ""))
    scale, cap, setting_names = 1.0, 0.0, []
    for name, value in sorted(vars(config).items() if config is not None else ()):
        if not _ABOUT_LOGITS.search(name) or _ELSEWHERE.search(name) or value in _NEUTRAL:
            continue
        powers = [power for start, power in _SCALES.get(name, []) if family.startswith(start)]
        if name in _CAPS and not cap:
            cap = float(value)
        elif powers and scale == 1.0:
            # The model may have copied it from its config when it was made.
            scale = float(getattr(model, name, value)) ** powers[0]
        else:
            want = "no setting that changes logits in a way that log-probabilities do not know"
            raise ArgumentValueError(expected(f"config.{name}", want, value))
        setting_names.append(name)
    if scale != 1.0 and cap:
        want = "a scale or a soft cap of logits, not both"
        raise ArgumentValueError(expected(" and ".join(setting_names), want, f"{scale} and {cap}"))
    return Transform(scale, cap)


def hidden_states(output: object, width: int) -> torch.Tensor:
    """Return the last layer's output, [B, S, width], from what a base model returned.

    Args:
        output: A tensor; a dataclass, a mapping or an object with ``last_hidden_state``,
            ``hidden`` or ``hidden_states`` (a sequence, whose last counts), in this order; a tuple
            or a list with exactly one tensor [B, S, width].
        width: D of the head.

    Raises:
        ArgumentTypeError: there is none, or more than one could be it.
    """
    name, hidden = "the base model's output", output
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        fitting = [t for t in output if _fits(t, width)]
        if len(fitting) != 1:
            want = f"exactly one tensor [batch, sequence, {width}]"
            raise ArgumentTypeError(expected(name, want, f"{len(fitting)} of {len(output)}"))
        hidden = fitting[0]
    elif not isinstance(output, torch.Tensor):
        name, hidden = _hidden_field(output)
    if not _fits(hidden, width):
        actual = list(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden).__name__
        raise ArgumentTypeError(expected(name, f"a tensor [batch, sequence, {width}]", actual))
    return hidden


def _hidden_field(output: object) -> tuple[str, object]:
    for name in _NAMES:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if value is None:
            continue
        if name == "hidden_states" and isinstance(value, tuple | list) and value:
            return "hidden_states[-1]", value[-1]
        return name, value
    want = "one of " + ", ".join(_NAMES)
    raise ArgumentTypeError(expected("the base model's output", want, type(output).__name__))


def _fits(value: object, width: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[-1] == width


@contextlib.contextmanager
def other_forward(module: torch.nn.Module, forward: Callable) -> Iterator[None]:
    """Make calls of ``module`` run ``forward`` within its hooks: those of ZeRO-3, FSDP2 and DDP.

    They gather and release its parameters around a forward and its backward.
    """
    before, compiled = vars(module).get("forward"), module._compiled_call_impl
    # A compiled module would make a graph of a forward that serves a single call.
    module.forward, module._compiled_call_impl = forward, None
    try:
        yield
    finally:
        module._compiled_call_impl = compiled
        if before is None:
            del module.forward
        else:
            module.forward = before
