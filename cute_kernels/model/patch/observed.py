"""Decide by what runs: a copy of the patched model is observed, and says what remains.

A module whose functions of torch are covered by ``ck.batch_invariant`` gets the forward
``invariant``, which enters that mode.  What no op of ours computes is named with its line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ...integrations import transformers as integration
from ...integrations.foreign_calls import foreign
from .. import aten
from ..observe import leaks, repeats, runs
from ..observe.watch import Observation, Site, Widths
from . import classes, decisions, families, instance, pretrained
from .checks import Options
from .classes import Action, Part
from .decisions import Decisions
from .forwards import elements
from .forwards.notes import Notes
from .report import Kind, Left
from .scan import configs

#: Kinds of forward that compute what the author's does, byte for byte, where that is left.
_OPTIONAL = frozenset({None, "attention", "residual"})
_BRANCH = "it runs for some numbers of sequences alone"
_SEQUENCE = "it reduces over the sequence, whose length differs with padding and with a cache"
#: Names of torch's softmax, and the beginning of those of its attention.
_SOFTMAXES, _ATTENTION = {"_softmax", "_safe_softmax"}, "_scaled_dot_product"


def decide(model: nn.Module, options: Options) -> Decisions:
    """Return the decisions with the forwards that the observation asks for, and what is left."""
    decided = decisions.decide(model, options)
    roots = _roots(model)
    if not roots or _runs_as_reviewed(model):
        return decided
    root = roots[0]
    reason = _why_not_observed(root)
    if reason is None:
        try:
            return _Observed(model, roots, options).decide(decided)
        except Exception as error:  # any code may run here, and fail as it likes
            reason = f"it could not be observed ({type(error).__name__}: {error})"
    return decided._replace(left=[*decided.left, root.left(reason, Kind.NOT_OBSERVED)])


def _roots(model: nn.Module) -> list[Part]:
    """Return the outermost models of transformers."""
    outermost = {id(root) for root in configs.roots(model).values()}
    return [part for part in classes.parts(model) if id(part.module) in outermost]


def _runs_as_reviewed(model: nn.Module) -> bool:
    """Whether all that runs in a transformers model lies in a reviewed file, or in a library."""
    written = {classes.user_class(module) for module in model.modules()}
    return families.run_as_reviewed(written) and instance.by_libraries(model)


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

    def __init__(self, model: nn.Module, roots: list[Part], options: Options) -> None:
        self._model, self._roots, self._options = model, roots, options
        self._parts = {part.name: part for part in classes.parts(model)}
        self._devices = aten.devices_of(model)
        self._notes = Notes(options.order, options.main_grad)

    def decide(self, decided: Decisions) -> Decisions:
        """Return what the first candidate says that runs.

        Raises whatever the last one raises.
        """
        tentative = decisions.decide(self._model, self._options, tentative=True)
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
        found = [*self._named(remaining), *self._branches(seen)]
        left = [
            one
            for one in decided.left
            if not one.moves or one in staying or (found and one.kind is Kind.ATTENTION)
        ]
        if not any(one.moves for one in left + found):
            found = list(self._leaks(seen))
        ran = dict.fromkeys((site.module, site.op) for site in seen.ours if not site.gradient)
        return result._replace(left=left + found, ran=tuple(ran))

    # ---- runs -----------------------------------------------------------------------------------

    def _observe(self, decided: Decisions, before: Observation | None = None) -> Observation:
        """Observe a copy of the model with the forwards that were decided.

        before: Another observation: of its layers that ran alike, a few run again.
        """
        copied = self._copied = runs.replica(self._model)
        copies = dict(copied.named_modules(remove_duplicate=False))
        names = {id(part.module): part.name for part in self._parts.values()}
        actions = [action._replace(module=copies[action.name]) for action in decided.actions]
        classes.apply(copied, actions)
        attentions = [
            one._replace(modules=tuple(copies[names[id(module)]] for module in one.modules))
            for one in decided.attentions
        ]
        if attentions:
            integration.register()
        configs.apply(copied, attentions)
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
                    found = leaks.leaks(self._copied, names[root.name], seen.ops)
            except Exception as error:  # any code may run here, and fail as it likes
                text = f"its rows could not be followed ({type(error).__name__}: {error})"
                found = [leaks.Leak(root.name, text)]
            for leak in found:
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
    dtype = pretrained.compute_dtype(model)
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
    return left.kind.stays or (left.kind is not Kind.ATTENTION and left.name not in seen.ran)


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
    return site.gradient or name in aten.COVERED_NAMES or name in elements.NAMES
