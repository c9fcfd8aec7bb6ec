"""Decide for each module: replace it, or say why not; what runs has the last word (`observed`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from ... import nn as own_modules
from ...rowwise.config import GATES
from .. import aten
from . import instance, pretrained, reading, weights
from .checks import Options
from .classes import Action, Part, parts
from .forwards import base_model, positions
from .forwards.notes import Notes
from .report import Kind, Left, Replaced
from .scan import authors, formula
from .scan.configs import Attention

_EMBEDDING_READS = tuple(weights.EMBEDDING_OPTIONS.items())


class Decisions(NamedTuple):
    """What a patch does, and what it leaves.

    softcaps: of scores, that our attention applies.  ran: of an observed model, (module, op of
    ours) that ran in it.
    """

    actions: list[Action]
    attentions: list[Attention]
    left: list[Left]
    softcaps: list[Replaced]
    ran: tuple[tuple[str, str], ...] = ()

    def with_actions(self, actions: Iterable[Action], model: nn.Module) -> Decisions:
        """Return these decisions with other actions for some modules, in the model's order."""
        chosen = {action.name: action for action in (*self.actions, *actions)}
        order = {id(module): position for position, module in enumerate(model.modules())}
        ordered = sorted(chosen.values(), key=lambda action: order[id(action.module)])
        return self._replace(actions=ordered)


class _Facts(NamedTuple):
    """Facts shared by all decisions about one model.

    whole: about its models of transformers.  rules: of formulas.  kinds: id of a module ->
    its forward of ours.
    """

    options: Options
    devices: set[str]
    whole: pretrained.Decided
    rules: formula.Rules
    kinds: dict[int, str]

    def action(self, part: Part, kind: str, **notes: object) -> Action:
        shared = Notes(self.options.order, self.options.main_grad, **notes)
        return Action(part.name, part.module, kind, shared)

    def child(self, part: Part, name: str) -> str | None:
        """Kind of the forward that a child gets."""
        return self.kinds.get(id(part.module._modules.get(name)))


def decide(model: nn.Module, options: Options, *, tentative: bool = False) -> Decisions:
    """Decide for each module of a model: replace it, or say why not.

    tentative: Whether models that do not declare so are taken to attend by the function that their
    config names, and by heads of sizes that are ours; whoever asks observes whether they do.
    """
    modules = parts(model)
    whole = pretrained.decide(model, modules, options, tentative)
    kinds = {id(action.module): action.kind for action in whole.actions}
    facts = _Facts(options, aten.devices_of(model), whole, formula.Rules(), kinds)
    actions, left, inside = list(whole.actions), list(whole.left), set()
    for part in modules:
        if id(part.module) in inside or id(part.module) in kinds:
            continue
        decided = _decided(part, facts)
        if isinstance(decided, Action):
            actions.append(decided)
            kinds[id(part.module)] = decided.kind
        else:
            left += decided
        if isinstance(part.module, nn.MultiheadAttention):
            inside |= {id(child) for child in part.module.modules()}
    for part in modules:
        if id(part.module) in kinds or isinstance(part.module, torch.jit.ScriptModule):
            continue
        kind = _kind_by_class(part, facts)
        holds = kind is not None and CONDITIONS[kind](part, facts)
        if holds and not instance.hides(part.module, kind):
            actions.append(facts.action(part, kind))
    decisions = Decisions([], whole.attentions, left, whole.softcaps)
    return decisions.with_actions(actions, model)


def _decided(part: Part, facts: _Facts) -> Action | list[Left]:
    """Return the action for one module, or the parts that are left."""
    if own_modules.kind_of(part.module) is not None:
        return []  # It calls our op already, with its own options.
    if isinstance(part.module, torch.jit.ScriptModule):
        return [part.left("TorchScript: its forward is not Python's", Kind.HIDDEN)]
    decided = _replacement(part, facts)
    if isinstance(decided, Action):
        if not instance.hides(part.module, decided.kind):
            return decided
        reason = "its forward is an attribute of its own (accelerate's hooks?): no class is asked"
        return [part.left(reason, Kind.HIDDEN)]
    if decided is None:
        return reading.left(part, facts.devices)
    return [decided, *reading.drawn(part)]


def _replacement(part: Part, facts: _Facts) -> Action | Left | None:
    """Return the replacement of a module of a known kind; None: its kind is not known."""
    known = weights.forward_of(part.module, part.cls)
    if known is not None:
        kind, reason = known
        if kind in ("linear", "conv1d"):
            return _linear(part, facts, kind, reason)
        if kind == "experts":
            return _taken(part, facts, "linear", reason, kind)
        return _taken(part, facts, "embedding", reason, kind, reads=_EMBEDDING_READS)
    rule = facts.rules.of(part.module)
    if rule is None:
        return None
    if isinstance(rule, formula.Refusal):
        if rule.kind is Kind.NAMED:
            return reading.calls(part, aten.ELEMENTWISE, facts.devices)
        return part.left(rule.text, rule.kind)
    option = "attention" if rule.kind == "rotary" else "norm"
    reason = weights.why_not_parameters(part.module)
    return _taken(part, facts, option, reason, **rule._asdict())


def _taken(
    part: Part, facts: _Facts, option: str, reason: str | None, kind: str, **notes: object
) -> Action | Left:
    """Return the action for a module, unless there is a reason against it or no option for it."""
    if not getattr(facts.options, option):
        return part.left(f"{option}=False", Kind.OPTION)
    if reason is not None:
        return part.left(reason, Kind.EXPERTS if kind == "experts" else Kind.NOT_TAKEN)
    return facts.action(part, kind, **notes)


def _linear(part: Part, facts: _Facts, kind: str, reason: str | None) -> Action | Left:
    """Return the replacement of a linear layer; a head follows the option ``logits``."""
    scores = facts.whole.heads.get(id(part.module))
    if reason is not None:
        return part.left(reason)
    if scores:
        return facts.action(part, "head", logp=True)
    if not facts.options.linear and scores is None:
        return part.left("linear=False", Kind.OPTION)
    return facts.action(part, kind)


def _kind_by_class(part: Part, facts: _Facts) -> str | None:
    """Name of our forward of what holds other modules; bytes are as without it."""
    if positions.is_known(part.cls):
        return "positions"
    if id(part.module) in facts.whole.attending and base_model.is_known(part.module, part.cls):
        return "base_model"
    return authors.kind_of(part.cls)


#: Name of such a forward -> what has to hold beside.
CONDITIONS: dict[str, Callable[[Part, _Facts], bool]] = {
    "positions": lambda part, facts: facts.options.main_grad and facts.options.embedding,
    "base_model": lambda part, facts: True,
    "attention": lambda part, facts: facts.options.attention,
    "residual": lambda part, facts: facts.child(part, authors.NORM) == "rms_norm",
    "mlp": lambda part, facts: facts.child(part, authors.ACTIVATION) in GATES,
}
