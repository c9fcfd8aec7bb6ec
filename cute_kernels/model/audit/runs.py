"""Run every case of every transform against the reference, and once more where bytes differ.

The first time digests are compared.  The second one keeps the bytes of the culprits' rows, and
judges again: what does not come again is not random memory, but a difference from run to run.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..observe.calls import Key
from . import cases, details, gradients
from .cases import Case
from .checks import COMPILE, GRADIENTS, Problem
from .compare import Verdict, compare
from .report import Finding, Victim
from .trace import Trace, record

#: Function that runs a case and stores the bytes of the requested rows.
Runner = Callable[[Case, Mapping[Key, torch.Tensor]], Trace]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one case: a verdict on each call.

    unfollowed: modules that ran and had no rows to compare.
    """

    case: Case
    run: Runner
    verdicts: dict[Key, Verdict]
    unfollowed: tuple[str, ...]

    @property
    def culprits(self) -> dict[Key, torch.Tensor]:
        """Key -> tokens [N]."""
        return {key: v.culprit for key, v in self.verdicts.items() if bool(v.culprit.any())}


def outputs(problem: Problem, names: Sequence[str]) -> tuple[list[Outcome], Trace]:
    """Return the outcomes of the transforms of outputs, and the reference trace."""
    eager = functools.partial(record, problem)
    want, outcomes = eager(cases.alone(problem), {}), []
    for name in names:
        if name in GRADIENTS:
            continue
        run = eager
        if name == COMPILE:
            run = functools.partial(record, problem, compiled=torch.compile(problem.model))
        for case in cases.cases(problem, name):
            trace = run(case, {})
            verdicts = compare(want, trace, problem.facts, problem.starts)
            bare = dict.fromkeys(key[0] for key in trace if key not in verdicts)
            outcomes.append(Outcome(case, run, verdicts, tuple(bare)))
    return outcomes, want


def findings(problem: Problem, outcomes: Sequence[Outcome], reference: Trace) -> list[Finding]:
    """Run the cases with culprits again; return them with their bytes, in execution order."""
    tokens_by_call: dict[Key, torch.Tensor] = {}
    for outcome in outcomes:
        for key, mask in outcome.culprits.items():
            tokens_by_call[key] = tokens_by_call.get(key, torch.zeros_like(mask)) | mask
    if not tokens_by_call:
        return []
    want = record(problem, cases.alone(problem), tokens_by_call)
    merged: dict[tuple[Key, str], Finding] = {}
    for outcome in outcomes:
        if not outcome.culprits:
            continue
        case, trace = outcome.case, outcome.run(outcome.case, outcome.culprits)
        verdicts = compare(want, trace, problem.facts, problem.starts)
        for key, mask in outcome.culprits.items():
            still = mask & verdicts[key].culprit if key in verdicts else torch.zeros_like(mask)
            finding = Finding(
                module=key[0],
                kind=problem.facts.kinds[key[0]],
                call=key[1],
                ops=problem.facts.ops.get(key, ()),
                transform=case.transform,
                case=case.label,
                rows=int(mask.sum()),
                of_rows=int(outcome.verdicts[key].compared.sum()),
                **vars(details.of_rows(want[key].outs, trace[key].outs, still, problem.starts)),
            )
            _add(merged, (key, case.transform), finding)
    order = {key: position for position, key in enumerate(reference)}
    return [merged[pair] for pair in sorted(merged, key=lambda pair: order[pair[0]])]


def victims(problem: Problem, outcomes: Iterable[Outcome]) -> list[Victim]:
    """Return the calls whose rows differ without being culprits, by transform."""
    counts = Counter[tuple[Key, str]]()
    for outcome in outcomes:
        for key, verdict in outcome.verdicts.items():
            if rows := int((verdict.differs & ~verdict.culprit).sum()):
                counts[key, outcome.case.transform] += rows
    kinds = problem.facts.kinds
    return [
        Victim(name, kinds.get(name, ""), call, transform, rows)
        for ((name, call), transform), rows in counts.items()
    ]


def of_gradients(
    problem: Problem, names: Sequence[str], reference: Trace
) -> tuple[list[Finding], dict[str, tuple[str, ...]], int]:
    """Return (differing gradients in backward order, cases by transform, number compared)."""
    requested, kinds = [name for name in GRADIENTS if name in names], problem.facts.kinds
    if not requested:
        return [], {}, 0
    want = gradients.gradients(problem, cases.micro_batches(problem, [problem.all]))
    merged: dict[tuple[str, str], Finding] = {}
    ran: dict[str, tuple[str, ...]] = {}
    for transform in requested:
        cuts = gradients.cuts(problem, transform)
        ran[transform] = tuple(cuts)
        for label, calls in cuts.items():
            got = gradients.gradients(problem, calls)
            for name, t in want.items():
                count = details.of_gradient(name, t, got[name])
                if count.bytes or (name, transform) in merged:
                    owner = name.removesuffix(".main_grad")  # of a module, or of a parameter
                    owner = owner if owner in kinds else owner.rpartition(".")[0]
                    facts = {"module": owner, "kind": kinds[owner], "transform": transform}
                    finding = Finding(**facts, case=label, **vars(count))
                    _add(merged, (name, transform), finding)
    # Later modules of the forward come first in the backward.
    ended = {name: position for position, (name, _) in enumerate(reference)}
    findings = sorted(merged.values(), key=lambda finding: -ended.get(finding.module, -1))
    return findings, ran, len(want) * sum(map(len, ran.values()))


def _add(merged: dict[Hashable, Finding], slot: Hashable, second: Finding) -> None:
    """Join two cases of one transform: counts added, the first position kept."""
    first = merged.get(slot)
    if first is not None:
        counts = ("rows", "of_rows", "bytes", "of_bytes")
        both = {name: getattr(first, name) + getattr(second, name) for name in counts}
        second = replace(first if first.first is not None else second, **both)
    merged[slot] = second
