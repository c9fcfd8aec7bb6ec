"""Arguments of ``ck.audit`` -> a frozen Problem, or one exception that names the argument."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    DtypeError,
    ShapeError,
    expected,
    one_of,
)
from ...runtime import checking
from .probe import SEQUENCE, Facts

#: Transforms of outputs, of gradients, and the comparison with torch.compile.
OUTPUTS = ("repeat", "batch", "compositions", "left_padding", "right_padding", "chunks", "decode")
GRADIENTS = ("gradient_repeat", "micro_batches")
COMPILE = "compile"
TRANSFORMS = (*OUTPUTS, *GRADIENTS, COMPILE)

#: Class, anywhere among those of a module, that cannot be followed -> what is expected instead.
_NOT_WHOLE = {
    **dict.fromkeys(
        (
            "DistributedDataParallel",
            "DataParallel",
            "FullyShardedDataParallel",
            "FSDPModule",
            "DeepSpeedEngine",
        ),
        "a model that is not distributed (audit it before it is wrapped)",
    ),
    "OptimizedModule": "the model itself (compile=True compares it with what torch.compile makes)",
    "ScriptModule": "a model whose modules can be followed",
}


@dataclass(frozen=True)
class Problem:
    """One audit: a model, its sequences of ids, and what its forward takes.

    facts: of `probe`; None before it ran.
    """

    model: nn.Module
    sequences: tuple[torch.Tensor, ...]
    pad: int
    device: torch.device
    accepts: frozenset[str]
    facts: Facts | None = None

    @property
    def all(self) -> tuple[int, ...]:
        """Every sequence."""
        return tuple(range(len(self.sequences)))

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Number of tokens before each sequence, then in all: cell = start + position."""
        return tuple(itertools.accumulate(map(len, self.sequences), initial=0))

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.starts[-1]

    @property
    def even(self) -> bool:
        """Whether all sequences are of one length."""
        return len(set(map(len, self.sequences))) == 1

    @property
    def pads_right(self) -> bool:
        """Whether sequences can be padded on the right."""
        return self.facts.scope != SEQUENCE or "attention_mask" in self.accepts

    @property
    def joinable(self) -> bool:
        """Whether the sequences can be in one batch."""
        return self.even or self.pads_right

    @property
    def joinable_left(self) -> bool:
        """Whether they can end in one column."""
        return self.even or "attention_mask" in self.accepts


def problem(model: nn.Module, inputs: object, pad_token: int | None) -> Problem:
    """Check the arguments; return the problem without its scope."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(expected("model", "a torch.nn.Module", type(model).__name__))
    _check_whole(model)
    _check_not_random(model)
    device = _device(model)
    sequences = _sequences(inputs)
    limit = vocabulary(model)
    for i, sequence in enumerate(sequences):
        _ids(f"inputs[{i}]", sequence, limit)
    pad = _pad(model, pad_token, limit)
    accepts = _accepts(model)
    ids = tuple(sequence.to(device, torch.int64) for sequence in sequences)
    return Problem(model, ids, pad, device, accepts)


def chosen(
    requested: object, gradients: object, compile: object, problem: Problem
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return (the transforms to run, the reason why each other one is skipped)."""
    for name, value in (("gradients", gradients), ("compile", compile)):
        if not isinstance(value, bool):
            raise ArgumentTypeError(expected(name, "True or False", type(value).__name__))
    refused = _refusals(problem)
    if requested is None:
        skipped = refused
        if not gradients:
            skipped |= dict.fromkeys(GRADIENTS, "gradients=False")
        if not compile:
            skipped[COMPILE] = "compile=False"
        return tuple(name for name in TRANSFORMS if name not in skipped), skipped
    if not gradients and (clash := sorted(set(requested) & set(GRADIENTS))):
        raise ArgumentValueError(expected("gradients", f"True for transforms {clash}", "False"))
    for name in requested:
        if name in refused:
            want = f"transforms that this model and these inputs allow ({refused[name]})"
            raise ArgumentValueError(expected("transforms", want, repr(name)))
    wanted = {*requested, *((COMPILE,) if compile else ())}
    return tuple(name for name in TRANSFORMS if name in wanted), {}


def names(requested: object) -> None:
    """Check that ``transforms`` are known names."""
    if isinstance(requested, str) or not isinstance(requested, Collection):
        want = "a list of names, or None for all that apply"
        raise ArgumentTypeError(expected("transforms", want, repr(requested)))
    for name in requested:
        if name not in TRANSFORMS:
            raise ArgumentValueError(one_of("transforms", TRANSFORMS, name))
    if not list(requested):
        raise ArgumentValueError(expected("transforms", "at least one name", "none"))


#: Parameters of a forward that pass a cache other than ``past_key_values``.
_OTHER_CACHES = frozenset(("use_cache", "cache_params", "state", "mems", "past_buckets_states"))


def unrecognised(skipped: Collection[str], problem: Problem) -> tuple[str, ...]:
    """Skipped transforms whose reason is a cache that the audit cannot drive."""
    if "past_key_values" in problem.accepts or not problem.accepts & _OTHER_CACHES:
        return ()
    return tuple(name for name in ("chunks", "decode") if name in skipped)


def _refusals(problem: Problem) -> dict[str, str]:
    """Return the transforms that cannot run -> why."""
    facts, accepts = problem.facts, problem.accepts
    cached = ("chunks", "decode")
    trained = any(p.requires_grad for p in problem.model.parameters())
    longest = max(map(len, problem.sequences))
    rules = (
        (GRADIENTS, trained, "no parameter requires a gradient"),
        (("batch", "micro_batches"), len(problem.all) > 1, "there is one sequence"),
        (("batch", *GRADIENTS), problem.joinable, _WHOLE),
        (("left_padding",), "attention_mask" in accepts, "forward takes no attention_mask"),
        (("right_padding",), problem.pads_right, _WHOLE),
        (cached, {"past_key_values", "use_cache"} <= accepts, _NO_CACHE),
        (cached, facts.caches, "it returns no past_key_values for use_cache=True"),
        (cached, facts.scope != SEQUENCE, "a token's row depends on tokens behind it"),
        (cached, longest > 1, "no sequence has 2 tokens"),
    )
    refused: dict[str, str] = {}
    for transforms, holds, reason in rules:
        for name in transforms if not holds else ():
            refused.setdefault(name, reason)
    return {name: refused[name] for name in TRANSFORMS if name in refused}


_NO_CACHE = "forward takes no past_key_values and use_cache"
_WHOLE = "a token's row depends on tokens behind it, and forward takes no attention_mask"


def _check_whole(model: nn.Module) -> None:
    """Check that the modules hold whole tensors and run as they are."""
    for name, module in model.named_modules():
        location = f" at {name!r}" if name else ""
        for base in type(module).__mro__:
            if want := _NOT_WHOLE.get(base.__name__):
                raise ArgumentTypeError(expected("model", want, base.__name__ + location))
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            want = "parameters that are whole tensors"
            raise ArgumentTypeError(expected("model", want, f"a DTensor, {name!r}"))


def _check_not_random(model: nn.Module) -> None:
    """Check that nothing in the model is random or changes from call to call by intent."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            want = "no active dropout (model.eval(), or p = 0)"
            dropout = f"{type(module).__name__} {name!r} with p = {module.p}"
            raise ArgumentValueError(expected("model", want, dropout))
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            want = "no batch norm in training mode, which is a sum over the batch (model.eval())"
            raise ArgumentValueError(expected("model", want, f"{type(module).__name__} {name!r}"))
    if model.training:
        settings = getattr(getattr(model, "config", None), "__dict__", {})
        for name, value in settings.items():
            if name.endswith(("dropout", "pdrop")) and isinstance(value, float) and value > 0:
                want = "no active dropout (model.eval(), or 0 in its config)"
                raise ArgumentValueError(expected("model", want, f"config.{name} = {value}"))


def _device(model: nn.Module) -> torch.device:
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise DeviceError(expected("model", "all of it on one device", listed))
    device = devices.pop() if devices else torch.device("cpu")
    if device.type == "meta":
        raise DeviceError(expected("model", "a device with memory", "meta"))
    return device


def _sequences(inputs: object) -> list[torch.Tensor]:
    """Convert [B, T] or a list to 1-D tensors."""
    if isinstance(inputs, torch.Tensor):
        if inputs.dim() != 2:
            want = "2 dimensions [B, T], or a list of 1-D sequences"
            raise ShapeError(expected("inputs", want, f"shape {list(inputs.shape)}"))
        if 0 in inputs.shape:
            raise ShapeError(expected("inputs", "at least one token", list(inputs.shape)))
        return list(inputs)
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        want = "ids: a tensor [B, T] or a list of 1-D sequences"
        raise ArgumentTypeError(expected("inputs", want, type(inputs).__name__))
    if not inputs:
        raise ShapeError(expected("inputs", "at least one sequence", "an empty list"))
    return [_sequence(f"inputs[{i}]", sequence) for i, sequence in enumerate(inputs)]


def _sequence(name: str, sequence: object) -> torch.Tensor:
    if isinstance(sequence, torch.Tensor):
        return sequence
    is_list = isinstance(sequence, Sequence) and not isinstance(sequence, str)
    if not is_list or not all(type(value) is int for value in sequence):
        want = "a 1-D tensor or a list of whole numbers"
        raise ArgumentTypeError(expected(name, want, type(sequence).__name__))
    return torch.tensor(sequence, dtype=torch.int64, device="cpu")


def _ids(name: str, sequence: torch.Tensor, limit: int | None) -> None:
    if sequence.dim() != 1:
        raise ShapeError(expected(name, "1 dimension [T]", f"shape {list(sequence.shape)}"))
    if sequence.dtype not in (torch.int64, torch.int32):
        raise DtypeError(expected(name, "token ids, torch.int64 or torch.int32", sequence.dtype))
    if not len(sequence):
        raise ShapeError(expected(name, "at least one token", "none"))
    if sequence.device.type == "meta":
        raise DeviceError(expected(name, "ids with values", "a meta tensor"))
    low, high = int(sequence.min()), int(sequence.max())
    if low < 0 or (limit is not None and high >= limit):
        want = f"ids from 0 to {limit - 1}" if limit else "ids of at least 0"
        raise ArgumentValueError(expected(name, want, low if low < 0 else high))


def vocabulary(model: nn.Module) -> int | None:
    """Number of ids that the model knows, or None."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    return getattr(embedding, "num_embeddings", None)


def _pad(model: nn.Module, pad_token: object, limit: int | None) -> int:
    if pad_token is None:
        pad = getattr(getattr(model, "config", None), "pad_token_id", None)
        known = isinstance(pad, int) and pad >= 0 and (not limit or pad < limit)
        return pad if known else 0
    checking.integer("pad_token", pad_token, "an id or None")
    if pad_token < 0 or (limit is not None and pad_token >= limit):
        want = f"an id from 0 to {limit - 1}" if limit else "an id of at least 0"
        raise ArgumentValueError(expected("pad_token", want, pad_token))
    return pad_token


def _accepts(model: nn.Module) -> frozenset[str]:
    """Names of forward's parameters, the wrapped model's where a wrapper takes anything."""
    names = set(inspect.signature(model.forward).parameters)
    if hasattr(model, "get_base_model"):  # PEFT's
        names |= set(inspect.signature(model.get_base_model().forward).parameters)
    return frozenset(names)


def after_probe(problem: Problem, facts: Facts) -> Problem:
    """Return the problem with the results of the probe."""
    if not facts.outputs:
        want = "an output with a row for each token, [B, T, ...]"
        raise ArgumentValueError(
            expected("model", want, f"none from {type(problem.model).__name__}")
        )
    return dataclasses.replace(problem, facts=facts)


def with_a_way_back(outputs: Sequence[torch.Tensor]) -> None:
    """Check that an output with rows leads back to parameters."""
    if not outputs:
        want = "an output with rows that a gradient comes through, or gradients=False"
        raise ArgumentValueError(expected("model", want, "none that requires a gradient"))
