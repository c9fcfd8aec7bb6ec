"""Decide for each module: replace it, or say why not; what runs has the last word (`decide`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from ... import nn as own_modules
from ...integrations.foreign_calls import foreign
from ...rowwise.config import GATES
from .. import aten
from ..observe import leaks, repeats, runs
from ..observe.watch import Observation, Site, Widths
from .bytecode import OPS, named
from .classes import prepare
from .formula import Refusal, Rule, rule_of
from .forwards import authors, mixers
from .forwards.elements import NAMES
from .pretrained import (
    EMBEDDING_OPTIONS,
    OWN_FORWARD,
    Decisions,
    compute_dtype,
    decide_wholes,
    forward_by_class,
    hides,
    is_reviewed,
    why_not_parameters,
    wrapping_forwards,
)
from .report import STAYING, Kind, Left, Options
from .state import Action, Notes, Part, Survey, apply, survey

#: Forwards without which a part cannot be covered -> the kind of a reason against them.
_STAYS = {"experts": Kind.EXPERTS, **dict.fromkeys(mixers.KINDS, Kind.NOT_COVERED)}
_EMBEDDING_READS = tuple(EMBEDDING_OPTIONS.items())


class _Facts(NamedTuple):
    """Facts shared by all decisions about one model.

    heads: as in `Decisions`.  by_class, kinds: id of a module -> `forward_by_class`, its forward of
    ours.  rules: As `formula.rule_of` knows them.
    """

    options: Options
    devices: set[str]
    heads: dict[int, bool]
    by_class: dict[int, tuple[str, str | None] | None]
    kinds: dict[int, str]
    rules: dict[tuple, Rule | Refusal]

    def action(self, part: Part, kind: str, **notes: object) -> Action:
        shared = Notes(self.options.order, self.options.main_grad, **notes)
        return Action(part.name, part.module, kind, shared)

    def mix(self, part: Part) -> bool:
        """Whether all mixers in a model are ours."""
        mixing = mixers.mixers_in(part.module)
        return all(self.kinds.get(id(mixer)) in mixers.KINDS for mixer in mixing)

    def child(self, part: Part, name: str) -> str | None:
        """Kind of the forward that a child gets."""
        return self.kinds.get(id(part.module._modules.get(name)))


def by_modules(survey: Survey, options: Options, *, tentative: bool = False) -> Decisions:
    """Decide for each module of a model: replace it, or say why not.

    tentative: Whether models that do not declare so are taken to attend by the function that their
    config names, and by heads of sizes that are ours; whoever asks observes whether they do.
    """
    decisions = decide_wholes(survey, options, tentative)
    kinds = {id(action.module): action.kind for action in decisions.actions}
    single, inside = [], set()
    for part in survey.parts:
        if id(part.module) in inside or id(part.module) in kinds:
            continue
        single.append(part)
        if isinstance(part.module, nn.MultiheadAttention):
            inside |= {id(child) for child in part.module.modules()}
    # Modules of ck.nn call our ops already, with their own options.
    single = [part for part in single if own_modules.kind_of(part.module) is None]
    scripts = {id(p.module) for p in survey.parts if isinstance(p.module, torch.jit.ScriptModule)}
    by_class = {id(part.module): forward_by_class(part.module, part.cls) for part in single}
    by_class |= _parts_of_mixers(single, by_class)
    facts = _Facts(options, survey.devices, decisions.heads, by_class, kinds, {})
    actions: list[Action] = []
    for part in single:
        decided = _decided(part, facts)
        if isinstance(decided, Action):
            actions.append(decided)
            kinds[id(part.module)] = decided.kind
        else:
            decisions.left.extend(decided)
    for part in survey.parts:
        if id(part.module) in scripts or id(part.module) in kinds:
            continue
        kind = authors.forward_kind(part, id(part.module) in decisions.attending)
        holds = kind is not None and CONDITIONS[kind](part, facts)
        if holds and not hides(part.module, kind):
            actions.append(facts.action(part, kind))
    return decisions.with_actions(actions, survey.model)


def _decided(part: Part, facts: _Facts) -> Action | list[Left]:
    """Return the action for one module, or the parts that are left."""
    if isinstance(part.module, torch.jit.ScriptModule):
        return [part.left("TorchScript: its forward is not Python's", Kind.HIDDEN)]
    decided = _replacement(part, facts)
    if isinstance(decided, Action):
        if not hides(part.module, decided.kind):
            return decided
        reason = "its forward is an attribute of its own (accelerate's hooks?): no class is asked"
        return [part.left(reason, Kind.HIDDEN)]
    if decided is None:
        return _left_by_names(part, facts.devices)
    return [decided, *_drawn(part)]


def _replacement(part: Part, facts: _Facts) -> Action | Left | None:
    """Return the replacement of a module of a known kind; None: its kind is not known."""
    known = facts.by_class[id(part.module)]
    if known is not None:
        kind, reason = known
        if kind in ("linear", "conv1d"):
            return _linear(part, facts, kind, reason)
        if kind == "experts":
            return _taken(part, facts, "linear", reason, kind)
        if kind in mixers.KINDS or kind in (part for part, _ in mixers.PARTS.values()):
            reads = mixers.READS if kind in mixers.KINDS else ()
            return _taken(part, facts, "attention", reason, kind, reads=reads)
        return _taken(part, facts, "embedding", reason, kind, reads=_EMBEDDING_READS)
    rule = rule_of(part, facts.rules)
    if rule is None:
        return None
    if isinstance(rule, Refusal):
        if rule.kind is Kind.NAMED:
            return _calls(part, aten.ELEMENTWISE, facts.devices)
        return part.left(rule.text, rule.kind)
    option = "attention" if rule.kind == "rotary" else "norm"
    reason = why_not_parameters(part.module)
    return _taken(part, facts, option, reason, **rule._asdict())


def _taken(
    part: Part, facts: _Facts, option: str, reason: str | None, kind: str, **notes: object
) -> Action | Left:
    """Return the action for a module, unless there is a reason against it or no option for it."""
    if not getattr(facts.options, option):
        return part.left(f"{option}=False", Kind.OPTION)
    if reason is not None:
        return part.left(reason, _STAYS.get(kind, Kind.NOT_TAKEN))
    return facts.action(part, kind, **notes)


def _linear(part: Part, facts: _Facts, kind: str, reason: str | None) -> Action | Left:
    """Return the replacement of a linear layer; a head follows the option ``logits``."""
    scores = facts.heads.get(id(part.module))
    if reason is not None:
        return part.left(reason)
    if scores:
        return facts.action(part, "head", logp=True)
    if not facts.options.linear and scores is None:
        return part.left("linear=False", Kind.OPTION)
    return facts.action(part, kind)


def _parts_of_mixers(
    parts: list[Part], by_class: dict[int, tuple[str, str | None] | None]
) -> dict[int, tuple[str, str | None]]:
    """Return id of each convolution or gate that a mixer of ours calls -> its forward."""
    kinds = [(part.module, *(by_class[id(part.module)] or (None, None))) for part in parts]
    mixing = [module for module, kind, reason in kinds if kind in mixers.KINDS and reason is None]
    return {
        id(part): (kind, why_not_parameters(part))
        for mixer in mixing
        for name, (kind, _) in mixers.PARTS.items()
        if (part := getattr(mixer, name, None)) is not None
    }


#: Name of a forward of what holds other modules (bytes are as without it) -> what has to hold.
CONDITIONS: dict[str, Callable[[Part, _Facts], bool]] = {
    "positions": lambda part, facts: facts.options.main_grad and facts.options.embedding,
    "base_model": lambda part, facts: True,
    **{
        kind: lambda part, facts: facts.mix(part)
        for kind in (mixers.LAYER, mixers.BASE_MODEL, mixers.STATEFUL)
    },
    "attention": lambda part, facts: facts.options.attention,
    "residual": lambda part, facts: facts.child(part, authors.NORM) == "rms_norm",
    "mlp": lambda part, facts: facts.child(part, authors.ACTIVATION) in GATES,
}


# ---- ops that a module names ---------------------------------------------------------------------
# Ops of torch that a module names: what is known of it where it does not run.
#
# A module that is not run may call anything. What is read is its forward, the methods that it calls
# on itself, and the functions of its own file that it names.
#: Class of PEFT that adapts a parameter, as experts have them -> why it is left.
_OF_PARAMETERS = ("peft.tuners.lora.layer", "ParamWrapper")
_ON_PARAMETERS = (
    "LoRA on a parameter (target_parameters): its products are torch's; adapt linear layers instead"
)
_DRAWN = "in training, if it runs there: random numbers by the place in the batch"


def _calls(
    part: Part, cause: aten.Cause, devices: set[str], start: str = "", kind: Kind = Kind.NAMED
) -> Left:
    """Return the reason of a module that calls a function of torch, or may."""
    moves = cause is not aten.LOSS and cause.applies(devices)
    return part.left(f"{start}{cause.text}", kind, moves)


def _left_by_names(part: Part, devices: set[str]) -> list[Left]:
    """Say what a module that is not replaced names."""
    _, module, cls = part
    functions = wrapping_forwards(module, cls)
    if functions is None:
        return [part.left(f"{OWN_FORWARD}: what it computes is not known", Kind.HIDDEN)]
    kind = Kind.WRAPPED
    if not _is_of_reviewed_file(cls):
        kind = Kind.NAMED
        if (cls.__module__, cls.__name__) == _OF_PARAMETERS:
            return [part.left(_ON_PARAMETERS, Kind.NOT_COVERED)]
        functions = [inspect.unwrap(cls.forward), *functions]
    if (cause := aten.of_module(module)) is not None:
        return [_calls(part, cause, devices)]
    if isinstance(module, nn.modules.dropout._DropoutNd):
        reason = f"p = {module.p}: in training, random numbers by the place in the batch"
        return [part.left(reason, Kind.DRAWN, module.training)] if module.p else []
    ops = named(functions, cls, module, OPS) if functions else ()
    left = [_calls(part, OPS[op], devices, f"{op}: ", kind) for op in sorted(ops)]
    return left + _drawn(part)


def _drawn(part: Part) -> list[Left]:
    """Say what a module draws in training; an observation in training names what runs."""
    if _is_of_reviewed_file(part.cls):
        return []
    forward = inspect.unwrap(part.cls.forward)
    draws = named([forward], part.cls, part.module, aten.DRAWS)
    return [part.left(f"{op}: {_DRAWN}", Kind.DRAWN, False) for op in sorted(draws)]


def _is_of_reviewed_file(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.") or is_reviewed(cls)


# ---- by what runs --------------------------------------------------------------------------------
# Decide by what runs: a copy of the patched model is observed, and says what remains.
#
# A module whose functions of torch are covered by ``ck.batch_invariant`` gets the forward
# ``invariant``, which enters that mode. What no op of ours computes is named with its line.

#: Kinds of forward that compute what the author's does, byte for byte, where that is left.
_OPTIONAL = frozenset({None, "attention", "residual"})
_BRANCH = "it runs for some numbers of sequences alone"
_SEQUENCE = "it reduces over the sequence, whose length differs with padding and with a cache"
#: Names of torch's softmax, and the beginning of those of its attention.
_SOFTMAXES, _ATTENTION = {"_softmax", "_safe_softmax"}, "_scaled_dot_product"


def decide(model: nn.Module, options: Options) -> Decisions:
    """Return the decisions with the forwards that the observation asks for, and what is left."""
    modules = survey(model)
    decided = by_modules(modules, options)
    if not modules.roots or decided.reviewed:
        return decided
    root = modules.roots[0]
    reason = _why_not_observed(root)
    if reason is None:
        try:
            return _Observed(modules, options).decide(decided)
        except Exception as error:  # any code may run here, and fail as it likes
            reason = f"it could not be observed ({type(error).__name__}: {error})"
    return decided._replace(left=[*decided.left, root.left(reason, Kind.NOT_OBSERVED)])


def _why_not_observed(root: Part) -> str | None:
    """Why a model of transformers cannot be observed; None: it takes ids alone."""
    takes = inspect.signature(root.cls.forward).parameters
    if "decoder_input_ids" in takes:
        return "an encoder-decoder is not observed (it needs ids of its decoder as well)"
    return (
        None if "input_ids" in takes else "a model of other inputs than token ids is not observed"
    )


class _Observed:
    """Observations of one model."""

    def __init__(self, modules: Survey, options: Options) -> None:
        self._modules, self._options = modules, options
        self._model, self._roots, self._devices = modules.model, modules.roots, modules.devices
        self._parts = {part.name: part for part in modules.parts}
        self._notes = Notes(options.order, options.main_grad)

    def decide(self, decided: Decisions) -> Decisions:
        """Return what the first candidate says that runs.

        Raises whatever the last one raises.
        """
        tentative = by_modules(self._modules, self._options, tentative=True)
        spelled = functools.partial(self._with_scores, tentative)
        error = None
        for candidate in (lambda: tentative, spelled, lambda: decided.attentions and decided):
            try:
                if chosen := candidate():
                    return self._confirm(chosen)
            except Exception as raised:  # any code may run here, and fail as it likes
                error = raised
        return self._confirm(_without_attention(decided, error))

    def _confirm(self, decided: Decisions) -> Decisions:
        """Observe the model as decided, and again with the forwards that this asks for."""
        seen = self._observe(decided)
        sites = _moving(seen)
        staying = [one for one in decided.left if one.moves and _stays(one, seen)]
        known = {one.name for one in staying}
        result, remaining = self._add_invariant_forwards(decided, sites, known)
        if result is not decided:
            seen = self._observe(result, seen)
            remaining |= _moving(seen)
        variant = [*self._named(remaining), *self._branches(seen)]
        left = [
            one
            for one in decided.left
            if not one.moves or one in staying or (variant and one.kind is Kind.ATTENTION)
        ]
        if not any(one.moves for one in left + variant):
            variant = list(self._leaks(seen))
        ran = dict.fromkeys((site.module, site.op) for site in seen.ours if not site.gradient)
        return result._replace(left=left + variant, ran=tuple(ran))

    # ---- runs -----------------------------------------------------------------------------------

    def _observe(self, decided: Decisions, before: Observation | None = None) -> Observation:
        """Observe a copy of the model with the forwards that were decided.

        before: Another observation: of its layers that ran alike, a few run again.
        """
        copied = self._copied = runs.replica(self._model)
        copies = dict(copied.named_modules(remove_duplicate=False))
        names = {id(part.module): part.name for part in self._parts.values()}
        actions = [action._replace(module=copies[action.name]) for action in decided.actions]
        attentions = [
            one._replace(modules=tuple(copies[names[id(module)]] for module in one.modules))
            for one in decided.attentions
        ]
        apply(copied, prepare(actions), attentions)
        passed = {} if before is None else repeats.pass_over(copied, _steps(before))
        seen = Observation()
        for root in self._roots:
            with _precision(root.module):
                part = runs.observe(copied, copies[root.name], self._devices)
            seen.sites |= part.sites
            seen.ours |= part.ours
            seen.ran |= part.ran
            seen.branches |= part.branches
            for module, names_of_ops in part.ops.items():
                seen.ops.setdefault(module, set()).update(names_of_ops)
        if passed:
            _add_passed_over(seen, before, passed)
        return seen

    def _leaks(self, seen: Observation) -> Iterator[Left]:
        """Yield the modules of the observed copy whose rows follow more than their sequences."""
        names = dict(self._copied.named_modules(remove_duplicate=False))
        entries: dict[Left, None] = {}
        for root in self._roots:
            try:
                with _precision(root.module):
                    following = leaks.leaks(self._copied, names[root.name], seen.ops)
            except Exception as error:  # any code may run here, and fail as it likes
                text = f"its rows could not be followed ({type(error).__name__}: {error})"
                following = [leaks.Leak(root.name, text)]
            for leak in following:
                part = self._parts[leak.module]
                # The gradient of a part may be named by what holds it.
                near = (part.module, *part.module.children())
                hooks = "".join(f"; {hook.text}" for one in near for hook in foreign(one))
                entries[part.left(leak.text + hooks, Kind.ROWS)] = None
        yield from entries

    # ---- forwards that are added ----------------------------------------------------------------

    def _add_invariant_forwards(
        self, decided: Decisions, sites: dict[Site, Widths], staying: set[str]
    ) -> tuple[Decisions, dict[Site, Widths]]:
        """Return (decisions with invariant forwards, the sites in which none helps)."""
        by_module: dict[str, dict[Site, Widths]] = {}
        for site, widths in sites.items():
            by_module.setdefault(site.module, {})[site] = widths
        kinds = {action.name: action.kind for action in decided.actions}
        added: list[Action] = []
        remaining: dict[Site, Widths] = {}
        for name, group in by_module.items():
            module = self._parts[name].module
            hidden = "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule)
            free = kinds.get(name) in _OPTIONAL and not hidden and name not in staying
            if free and all(_is_covered(*each) for each in group.items()):
                added.append(Action(name, module, "invariant", self._notes))
            else:
                remaining |= group
        return (decided.with_actions(added, self._model) if added else decided), remaining

    def _with_scores(self, decided: Decisions) -> Decisions | None:
        """Return decisions in which attention that modules spell out is ours; None: none may.

        Those may that attend by themselves where attention is torch's.
        """
        if not decided.attentions:
            return None
        seen = self._observe(decided._replace(attentions=[]))
        kinds = {action.name: action.kind for action in decided.actions}
        spelled = [
            Action(name, part.module, "scores", self._notes)
            for name, part in self._parts.items()
            if kinds.get(name) in _OPTIONAL
            and "forward" not in vars(part.module)
            and _attends(seen.ops.get(name, set()))
        ]
        return decided.with_actions(spelled, self._model) if spelled else None

    # ---- what is left ---------------------------------------------------------------------------

    def _named(self, sites: dict[Site, Widths]) -> Iterable[Left]:
        """Return one entry for each module, op and line."""
        entries = {}
        for site, sizes in sites.items():
            fact = aten.CALLED.get(site.op.removeprefix("_").removesuffix("_"))
            text = _SEQUENCE if len(sizes) > 1 else fact.text if fact else "not known to be exact"
            where = ", in the gradient" if site.gradient else ""
            text = f"{site.op} ({site.line}{where}): {text}"
            entries[self._parts[site.module].left(text, Kind.RUNS)] = None
        return entries

    def _branches(self, seen: Observation) -> Iterator[Left]:
        """Yield modules whose formula follows the number of sequences, each by its first line."""
        first: dict[str, Site] = {}
        for site in sorted(seen.branches, key=lambda site: (site.module, site.line, site.op)):
            first.setdefault(site.module, site)
        for name, site in first.items():
            yield self._parts[name].left(f"{site.op} ({site.line}): {_BRANCH}", Kind.RUNS)


def _precision(model: nn.Module) -> contextlib.AbstractContextManager:
    """Context in which a CPU copy of fp32 masters computes in the model's dtype."""
    dtype = compute_dtype(model)
    mixed = dtype != model.dtype and dtype in (torch.bfloat16, torch.float16)
    return torch.autocast("cpu", dtype) if mixed else contextlib.nullcontext()


def _without_attention(decided: Decisions, error: Exception) -> Decisions:
    """Return the decisions in which attention stays torch's, as it does not run with ours."""
    text = f"{type(error).__name__} with ck.block_sparse_attention: {error}"
    left = [
        Left(one.name, "attention (not replaced)", text, kind=Kind.ATTENTION)
        for one in decided.attentions
    ]
    return decided._replace(attentions=[], softcaps=[], left=[*decided.left, *left])


def _steps(seen: Observation) -> dict[str, set[str]]:
    """Return what ran in each module: ops, and steps that some numbers of sequences take alone."""
    steps = {module: set(names) for module, names in seen.ops.items()}
    for site in seen.branches:
        steps.setdefault(site.module, set()).add(f"{site.op} ({site.line})")
    return steps


def _add_passed_over(seen: Observation, before: Observation, passed: dict[str, str]) -> None:
    """Add what layers that were passed over do: what those did of their kind that ran."""

    def alike(sites: Iterable[Site]) -> Iterator[tuple[Site, Site]]:
        for site in list(sites):
            for layer, ran in passed.items():
                if f"{site.module}.".startswith(f"{ran}."):
                    name = layer + site.module.removeprefix(ran)
                    yield site, dataclasses.replace(site, module=name)

    for sites in (seen.sites, seen.ours):
        sites.update({other: sites[site] for site, other in alike(sites)})
    seen.branches |= {other for _, other in alike(seen.branches)}
    seen.ran |= before.ran
    seen.ops = before.ops | seen.ops


def _stays(left: Left, seen: Observation) -> bool:
    """Whether a part is left whatever else ran: by the kind of its reason, or as it did not run."""
    return left.kind in STAYING or (left.kind is not Kind.ATTENTION and left.name not in seen.ran)


def _attends(ops: set[str]) -> bool:
    """Whether a module that runs these ops attends."""
    spelled = "bmm" in ops and not ops.isdisjoint(_SOFTMAXES)
    return spelled or any(op.startswith(_ATTENTION) for op in ops)


def _moving(seen: Observation) -> dict[Site, Widths]:
    """Return the sites that are not exact, those of ours that reduce over the sequence included."""
    return seen.sites | {site: sizes for site, sizes in seen.ours.items() if len(sizes) > 1}


def _is_covered(site: Site, sizes: Widths) -> bool:
    """Whether an op of ours can stand in, and reads as much in every surrounding."""
    if len(sizes) > 1:
        return False
    # The gradient of what stands in is ours as well; the second observation says so.
    name = site.op.removesuffix("_")
    return site.gradient or name in aten.COVERED_NAMES or name in NAMES
