"""Arguments of ``ck.patch`` and ``ck.unpatch`` -> `Options`, or one exception that names one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...errors import ArgumentTypeError, ArgumentValueError, PatchError, expected, one_of
from ...gemm.config import ORDERS
from ...integrations.transformers import NAME as ATTENTION
from ...runtime import checking
from .. import aten
from .report import Left

LOGP, LOGITS = "linear_logp", "linear"
#: Attribute of a module that is cut over the ranks of a mesh (../parallel).
CUT = "_cute_kernels_parallel"
#: Beginnings of the reason why a model was not observed.
NOT_OBSERVED = (
    "it could not be observed",
    "an encoder-decoder is not observed",
    "a model of other inputs than token ids is not observed",
)
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
    skip: tuple[str, ...] = ()


def model(value: object) -> None:
    """Check that the model is a module with a Python forward, on devices with a backend."""
    if not isinstance(value, torch.nn.Module):
        raise ArgumentTypeError(expected("model", "a torch.nn.Module", type(value).__name__))
    if isinstance(value, torch.jit.ScriptModule):
        want = "a torch.nn.Module whose forward is Python's"
        raise ArgumentTypeError(expected("model", want, f"TorchScript ({type(value).__name__})"))


def options(patch_options: Options, strict: object) -> None:
    """Check that each option has its type, and one of its values."""
    for name, value in {**patch_options._asdict(), "strict": strict}.items():
        if name not in (*CHOICES, "skip") and not isinstance(value, bool):
            raise ArgumentTypeError(expected(name, "True or False", repr(value)))
    for name, choices in CHOICES.items():
        value = getattr(patch_options, name)
        if not isinstance(value, str):
            raise ArgumentTypeError(expected(name, "a string", repr(value)))
        if value not in choices:
            raise ArgumentValueError(one_of(name, choices, value))


def devices(value: torch.nn.Module) -> None:
    """Check that a backend may run our ops on the parameters' devices."""
    for device in {p.device for p in value.parameters()}:
        checking.supported("linear", device)


def not_cut(value: torch.nn.Module) -> None:
    """Refuse to patch a model that is cut over a mesh without that mesh."""
    for name, module in value.named_modules():
        if CUT in vars(module):
            want = f"the mesh that {name or 'the model'} is cut over (or ck.unpatch it first)"
            raise ArgumentValueError(expected("mesh", want, None))


def skipped(value: object) -> tuple[str, ...]:
    """Check patterns of module names, and return them as a tuple."""
    patterns = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
        raise ArgumentTypeError(expected("skip", "names of modules", repr(value)))
    return tuple(patterns)


def no_mesh(mesh: object, patterns: tuple[str, ...]) -> None:
    """Refuse to leave parts of a model that is cut over a mesh."""
    if mesh is not None and patterns:
        raise ArgumentValueError(expected("skip", "none with a mesh", list(patterns)))


def complete(moving: tuple[Left, ...]) -> None:
    """Check, for ``strict``, that no part is left whose bits follow the batch.

    The message has a line for a class and reason, three at most, each class before a second reason.
    """
    if not moving:
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for part in moving:
        names = groups.setdefault((part.part, part.known), [])
        names.append(part.name or "the model")
    first = dict(reversed(groups))

    def rank(group: tuple[str, str]) -> int:
        part, known = group
        read = known.partition(":")[0] in aten.CALLED  # a name in bytecode is no proof
        return (
            0 if known.startswith(NOT_OBSERVED) else 1 if first[part] == known and not read else 2
        )

    order = sorted(groups, key=rank)
    lines = []
    for part, known in order[:_REASONS]:
        names = groups[part, known]
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
