"""Arguments of ``ck.patch`` and ``ck.unpatch`` -> `Options`, or one exception that names one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...errors import ArgumentTypeError, ArgumentValueError, PatchError, expected, one_of
from ...gemm.config import ORDERS
from ...integrations.transformers import NAME as ATTENTION
from ...runtime import checking
from .report import Kind, Left

LOGP, LOGITS = "linear_logp", "linear"
#: Attribute of a module that is cut over the ranks of a mesh (../parallel).
CUT = "_cute_kernels_parallel"
#: Lines of reasons in a refusal, and what follows them.
_REASONS = 3
_ADVICE = (
    "Complete models: docs/model_families.md. Without strict the rest is patched, and "
    "ck.audit(model, ids) shows what differs; skip= leaves out parts that are not run."
)
#: Options with a fixed set of names.
CHOICES = {"logits": (LOGP, LOGITS), "order": ORDERS}


class Absent:
    """Sentinel for an attribute that a module does not have."""


class Options(NamedTuple):
    """Options of a patch; see `patch.patch`."""

    linear: bool
    norm: bool
    attention: bool
    embedding: bool
    logits: str
    order: str
    main_grad: bool
    skip: str | Sequence[str] | None = ()


def arguments(model: object, options: Options, strict: object, mesh: object) -> Options:
    """Check the arguments of a patch; return its options, with a tuple of names to skip."""
    patterns = _patterns(options.skip)
    options = options._replace(skip=patterns)
    module(model)
    for name, value in {**options._asdict(), "strict": strict}.items():
        if name not in (*CHOICES, "skip") and not isinstance(value, bool):
            raise ArgumentTypeError(expected(name, "True or False", repr(value)))
    for name, choices in CHOICES.items():
        value = getattr(options, name)
        if not isinstance(value, str):
            raise ArgumentTypeError(expected(name, "a string", repr(value)))
        if value not in choices:
            raise ArgumentValueError(one_of(name, choices, value))
    for device in {p.device for p in model.parameters()}:
        checking.supported("linear", device)
    if mesh is not None and patterns:
        raise ArgumentValueError(expected("skip", "none with a mesh", list(patterns)))
    for name, part in model.named_modules():
        if mesh is None and CUT in vars(part):
            want = f"the mesh that {name or 'the model'} is cut over (or ck.unpatch it first)"
            raise ArgumentValueError(expected("mesh", want, None))
    return options


def module(value: object) -> None:
    """Check that a model is a module with a Python forward."""
    if not isinstance(value, torch.nn.Module):
        raise ArgumentTypeError(expected("model", "a torch.nn.Module", type(value).__name__))
    if isinstance(value, torch.jit.ScriptModule):
        want = "a torch.nn.Module whose forward is Python's"
        raise ArgumentTypeError(expected("model", want, f"TorchScript ({type(value).__name__})"))


def _patterns(value: object) -> tuple[str, ...]:
    patterns = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
        raise ArgumentTypeError(expected("skip", "names of modules", repr(value)))
    return tuple(patterns)


def complete(moving: tuple[Left, ...]) -> None:
    """Check, for ``strict``, that no part is left whose bits follow the batch.

    The message has a line for a class and reason, three at most, each class before a second reason.
    """
    if not moving:
        return
    groups: dict[tuple[str, str, Kind], list[str]] = {}
    for part in moving:
        names = groups.setdefault((part.part, part.known, part.kind), [])
        names.append(part.name or "the model")
    first = dict(reversed([(part, known) for part, known, _ in groups]))

    def rank(group: tuple[str, str, Kind]) -> int:
        part, known, kind = group
        if kind is Kind.NOT_OBSERVED:
            return 0
        # A name in bytecode is no proof.
        return 1 if first[part] == known and kind is not Kind.NAMED else 2

    order = sorted(groups, key=rank)
    lines = []
    for part, known, kind in order[:_REASONS]:
        names = groups[part, known, kind]
        others = f"; also in {len(names) - 1} more, {names[1]}" if len(names) > 1 else ""
        lines.append(f"  {names[0]} ({part}): {known}{others}")
    if len(order) > _REASONS:
        lines.append(f"  {len(order) - _REASONS} more reasons: print(ck.patch(model))")
    want = f"no part left whose bits follow the batch, got {len(moving)}"
    raise PatchError("\n".join([f"strict: expected {want}:", *lines, _ADVICE]))


def not_patched(name: str, module: torch.nn.Module, args: tuple) -> None:
    """Refuse to run a module added to a patched model: its forward pre-hook."""
    want = "a module that ck.patch has seen (patch the model again after resize_token_embeddings,"
    want += " adapters or an assignment)"
    raise PatchError(expected(name, want, f"a new {type(module).__name__}"))


def not_observed(name: str, hook: str) -> None:
    """Refuse to run a patched model with a hook that was added after the patch."""
    want = "only hooks that change nothing, after ck.patch (patch the model again: it is observed)"
    raise PatchError(expected(name or "the model", want, hook))


def attends(value: torch.nn.Module) -> None:
    """Check that a patched model of transformers still has our attention."""
    name = value.config._attn_implementation
    if name != ATTENTION:
        want = f"{ATTENTION!r}, as ck.patch has set it (patch again; ck.unpatch takes it back)"
        raise PatchError(expected("attn_implementation", want, repr(name)))


def unchanged(module: torch.nn.Module, reads: tuple[tuple[str, object], ...]) -> None:
    """Check that attributes which the author's forward reads are unchanged since the patch."""
    for name, value in reads:
        now = getattr(module, name, Absent)
        if now is not value and now != value:
            want = f"{_describe(value)}, as when it was patched (patch again)"
            raise PatchError(expected(f"{type(module).__name__}.{name}", want, _describe(now)))


def _describe(value: object) -> str:
    return "no value" if value is Absent else repr(value)
