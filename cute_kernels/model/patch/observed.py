"""Decide by what runs: a copy of the planned model is observed, and the plan follows.

A module whose functions of torch are covered by ``ck.batch_invariant`` gets the forward
``invariant``, which enters that mode.  What no op of ours computes is named with its line.
"""

from __future__ import annotations

import contextlib
import inspect

import torch
from torch import nn

from ...integrations import experts
from ...integrations import transformers as integration
from ...integrations.foreign_calls import foreign, foreign_global
from .. import aten
from ..observe import leaks, runs
from ..observe.watch import Observation, Site, Widths
from . import checks, classes, families, rope_types
from . import instance as own_forwards
from . import plan as patch_plan
from .checks import Options
from .classes import user_class
from .forwards import elements, rotary
from .forwards.layers import Notes
from .plan import Action, Plan
from .report import Left
from .scan import bytecode, configs

#: Kinds of forward that compute what the author's does, byte for byte, where that is left.
_OPTIONAL = frozenset({"attention", "residual"})
#: Functions whose numbers are drawn, or moved, by the place in the batch.
_TWO_INPUTS = f"{checks.NOT_OBSERVED[1]} (it needs ids of its decoder as well)"
_BRANCH = "it runs for some numbers of sequences alone"
_SEQUENCE = "it reduces over the sequence, whose length differs with padding and with a cache"


def decide(model: nn.Module, options: Options) -> Plan:
    """Return the plan with the forwards that the observation asks for, and what is left then."""
    plan = patch_plan.plan(model, options)
    roots = _roots(model)
    reviewed = _is_reviewed(model)
    if not roots or (reviewed and not _is_added_to(model)):
        return plan
    name, root = roots[0]
    takes = inspect.signature(user_class(root).forward).parameters
    if (two := "decoder_input_ids" in takes) or "input_ids" not in takes:
        text = _TWO_INPUTS if two else checks.NOT_OBSERVED[2]
        return plan._replace(left=[*plan.left, Left(name, user_class(root).__name__, text)])
    plans, error = [plan], None
    if not reviewed:
        tentative = patch_plan.plan(model, options, tentative=True)
        plans = [tentative, _with_scores(tentative, model, options), *plans]
        plans += [plan] * bool(plan.attentions)
    for number, candidate in enumerate(plans):
        if candidate is None:
            continue
        if number == 3:
            candidate = _without_attention(plan, error)
        decision = _Decision(model, roots, options)
        try:
            decided = decision.decide(candidate)
        except Exception as raised:  # any code may run here, and fail as it likes
            error = raised
            continue
        if not reviewed:
            return decided
        # What was read stays: a forward may have ways through it that were not run.
        read = {one.name for one in plan.left if one.moves}
        seen = [one for one in decided.left if one.moves and one.name not in read]
        return decided._replace(left=[*plan.left, *seen])
    if reviewed and any(one.moves for one in plan.left):
        return plan
    text = f"{checks.NOT_OBSERVED[0]} ({type(error).__name__}: {error})"
    return plan._replace(left=[*plan.left, Left(name, user_class(root).__name__, text)])


def _roots(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost models of transformers."""
    outermost = {id(root) for root in configs.roots(model).values()}
    return [(name, module) for name, module in model.named_modules() if id(module) in outermost]


def _is_reviewed(model: nn.Module) -> bool:
    """Whether every class of a transformers model lies in a reviewed file, or in torch."""
    return families.run_as_reviewed({user_class(module) for module in model.modules()})


def _is_added_to(model: nn.Module) -> bool:
    """Whether hooks, or forwards of modules themselves, of unknown authors run in a model."""
    if any(foreign_global()):
        return True
    hooked = any(any(foreign(module)) for module in model.modules())
    return hooked or not all(map(own_forwards.by_libraries, model.modules()))


class _Decision:
    """Observations of one model."""

    def __init__(self, model: nn.Module, roots: list, options: Options) -> None:
        self._model, self._roots, self._options = model, roots, options
        self._modules = dict(model.named_modules())
        self._devices = aten.devices_of(model)

    def decide(self, plan: Plan) -> Plan:
        """Observe the planned model, and again with what is mended."""
        seen = self._observe(plan)
        sites = _moving(seen)
        staying = [left for left in plan.left if left.moves and _stays(left, seen, self._modules)]
        mended, unmended = self._mend(plan, sites, {left.name for left in staying})
        if mended is not plan:
            seen = self._observe(mended)
            unmended = {**unmended, **_moving(seen)}
        named = _named(unmended, self._modules) + _branches(seen, self._modules)
        attention = [one for one in plan.left if one.part.startswith("attention (") and named]
        left = [one for one in plan.left if not one.moves or one in staying or one in attention]
        if not any(one.moves for one in left + named):
            left += self._leaks(seen)
        ran = dict.fromkeys((site.module, site.op) for site in seen.ours if not site.gradient)
        return mended._replace(left=left + named, ran=tuple(ran))

    def _leaks(self, seen: Observation) -> list[Left]:
        """Return the modules of the observed copy whose rows follow more than their sequences."""
        names = dict(self._copied.named_modules(remove_duplicate=False))
        entries: dict[Left, None] = {}
        for name, root in self._roots:
            try:
                with _precision(root):
                    found = leaks.leaks(self._copied, names[name], seen.ops)
            except Exception as error:  # any code may run here, and fail as it likes
                text = f"its rows could not be followed ({type(error).__name__}: {error})"
                found = [leaks.Leak(name, text)]
            for leak in found:
                module = self._modules[leak.module]
                # The gradient of a part may be named by what holds it.
                near = (module, *module.children())
                hooks = "".join(f"; {hook.text}" for one in near for hook in foreign(one))
                entries[Left(leak.module, user_class(module).__name__, leak.text + hooks)] = None
        return list(entries)

    def _observe(self, plan: Plan) -> Observation:
        """Observe a copy of the model with the planned forwards."""
        copied = self._copied = runs.replica(self._model)
        copies = dict(copied.named_modules(remove_duplicate=False))
        names = {id(module): name for name, module in self._modules.items()}
        for module in copied.modules():
            classes.restore(module)
            rotary.undo(module)
        configs.restore(copied)
        for action in plan.actions:
            classes.exchange(copies[action.name], action.kind, action.notes)
            if action.kind == "rotary":
                rotary.restore_frequencies(copies[action.name])
        groups = [tuple(copies[names[id(m)]] for m in one.modules) for one in plan.attentions]
        if groups:
            integration.register()
        configs.attend(copied, groups)
        seen = Observation()
        for name, root in self._roots:
            with _precision(root):
                part = runs.observe(copied, copies[name], self._devices)
            seen.sites |= part.sites
            seen.ours |= part.ours
            seen.ran |= part.ran
            seen.branches |= part.branches
            for module, names_of_ops in part.ops.items():
                seen.ops.setdefault(module, set()).update(names_of_ops)
        return seen

    def _mend(self, plan: Plan, sites: dict[Site, Widths], staying: set[str]):
        """Return (the plan with invariant forwards, the sites that none can mend)."""
        by_module: dict[str, list[Site]] = {}
        for site in sites:
            by_module.setdefault(site.module, []).append(site)
        planned = {action.name: action.kind for action in plan.actions}
        mended: list[Action] = []
        unmended: dict[Site, Widths] = {}
        for name, group in by_module.items():
            module = self._modules[name]
            free = planned.get(name) is None or planned[name] in _OPTIONAL
            hidden = "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule)
            covered = all(_is_covered(site, sites[site]) for site in group)
            if covered and free and not hidden and name not in staying:
                notes = Notes(self._options.order, self._options.main_grad)
                mended.append(Action(name, module, "invariant", notes))
            else:
                unmended |= {site: sites[site] for site in group}
        if not mended:
            return plan, unmended
        names = {action.name for action in mended}
        actions = [action for action in plan.actions if action.name not in names] + mended
        return plan._replace(actions=_in_order(actions, self._model)), unmended


def _precision(model: nn.Module) -> contextlib.AbstractContextManager:
    """Context in which a CPU copy of fp32 masters computes in the model's dtype."""
    dtype = patch_plan.compute_dtype(model)
    mixed = dtype != model.dtype and dtype in (torch.bfloat16, torch.float16)
    return torch.autocast("cpu", dtype) if mixed else contextlib.nullcontext()


def _with_scores(plan: Plan, model: nn.Module, options: Options) -> Plan | None:
    """Return the plan in which attention that modules spell out is ours; None: none does."""
    taken = {id(action.module): action for action in plan.actions}
    notes = Notes(options.order, options.main_grad)
    spelled = []
    for name, module in model.named_modules():
        action = taken.get(id(module))
        free = action is None or action.kind in _OPTIONAL
        if (
            free
            and "forward" not in vars(module)
            and bytecode.spells_out_attention(user_class(module), module)
        ):
            spelled.append(Action(name, module, "scores", notes))
    if not spelled or not plan.attentions:
        return None
    ids = {id(action.module) for action in spelled}
    actions = [action for action in plan.actions if id(action.module) not in ids] + spelled
    return plan._replace(actions=_in_order(actions, model))


def _in_order(actions: list[Action], model: nn.Module) -> list[Action]:
    order = {id(m): position for position, m in enumerate(model.modules())}
    return sorted(actions, key=lambda action: order[id(action.module)])


def _without_attention(plan: Plan, error: Exception) -> Plan:
    """Return the plan in which attention stays torch's, as the model does not run with ours."""
    text = f"{type(error).__name__} with ck.block_sparse_attention: {error}"
    left = [Left(one.name, "attention (not replaced)", text) for one in plan.attentions]
    return plan._replace(attentions=[], softcaps=[], left=[*plan.left, *left])


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


def _stays(left: Left, seen: Observation, modules: dict[str, nn.Module]) -> bool:
    """Whether a part that is left moves bits though the observation did not say so."""
    if left.part.startswith("attention ("):
        return False
    chosen = left.known.endswith("=False")
    drawn = left.known.startswith("p = ") or left.part == "attention"
    hidden = own_forwards.REASON in left.known or "attribute of its own" in left.known
    follows = left.known.startswith(rope_types.FOLLOWS)
    reviewed = left.known.endswith(families.HYBRID) or left.known == families.ON_PARAMETERS
    routed = experts.is_experts(modules[left.name])
    ran = left.name in seen.ran
    return chosen or drawn or hidden or follows or reviewed or routed or not ran


def _named(sites: dict[Site, Widths], modules: dict[str, nn.Module]) -> list[Left]:
    """Return what is left: one entry for each module, op and line."""
    entries = {}
    for site, sizes in sites.items():
        fact = aten.CALLED.get(site.op.removeprefix("_").removesuffix("_"))
        text = _SEQUENCE if len(sizes) > 1 else fact.text if fact else "not known to be exact"
        where = ", in the gradient" if site.gradient else ""
        cls = user_class(modules[site.module]).__name__
        one = Left(site.module, cls, f"{site.op} ({site.line}{where}): {text}")
        entries[one] = None
    return list(entries)


def _branches(seen: Observation, modules: dict[str, nn.Module]) -> list[Left]:
    """Return the modules whose formula follows the number of sequences, each by its first line."""
    first: dict[str, Site] = {}
    for site in sorted(seen.branches, key=lambda site: (site.module, site.line, site.op)):
        first.setdefault(site.module, site)
    return [
        Left(name, user_class(modules[name]).__name__, f"{site.op} ({site.line}): {_BRANCH}")
        for name, site in first.items()
    ]
