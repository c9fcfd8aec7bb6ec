"""Parts of a model that a patch leaves alone because the caller says so."""

from __future__ import annotations

import fnmatch

import torch

from ...errors import ArgumentValueError, expected
from . import families
from .classes import user_class
from .decisions import Decisions
from .report import Left, Skipped


def outermost(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Return the names of the outermost modules that patterns name: a name, or a glob of names.

    Raises:
        ArgumentValueError: a pattern names no module, or the model itself.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    chosen: set[str] = set()
    for pattern in patterns:
        matches = [name for name in names[1:] if name and fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            want = "the full name of a module inside, or a glob of such names"
            longer = [repr(name) for name in names if name.endswith(f".{pattern}")]
            want += f" (such as {longer[0]})" if longer else ""
            raise ArgumentValueError(expected("skip", want, repr(pattern)))
        chosen.update(matches)
    return [name for name in names if name in chosen and not is_inside(_parent(name), chosen)]


def is_inside(name: str, parts: set[str]) -> bool:
    """Whether a module is one of the parts, or lies in one."""
    while name:
        if name in parts:
            return True
        name = _parent(name)
    return False


def not_covered(model: torch.nn.Module, parts: list[str]) -> tuple[Left, ...]:
    """Return the first model outside of these parts that is known not to be covered."""
    chosen = set(parts)
    for name, module in model.named_modules():
        reason = families.why_not_covered(getattr(module, "config", None))
        if reason is not None and not is_inside(name, chosen):
            return (Left(name, user_class(module).__name__, reason),)
    return ()


def without(decided: Decisions, parts: list[str]) -> Decisions:
    """Return decisions that neither change nor name what is in these parts."""
    chosen = set(parts)

    def kept(entries: list) -> list:
        return [entry for entry in entries if not is_inside(entry.name, chosen)]

    return decided._replace(
        actions=kept(decided.actions),
        attentions=kept(decided.attentions),
        left=kept(decided.left),
        softcaps=kept(decided.softcaps),
        ran=tuple(one for one in decided.ran if not is_inside(one[0], chosen)),
    )


def entries(model: torch.nn.Module, parts: list[str]) -> tuple[Skipped, ...]:
    """Return the entries of a report for skipped parts."""
    modules = [(name, model.get_submodule(name)) for name in parts]
    return tuple(
        Skipped(
            name, user_class(module).__name__, any(p.requires_grad for p in module.parameters())
        )
        for name, module in modules
    )


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
