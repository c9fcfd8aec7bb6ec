"""Run every case of every transform against the reference, and once more where bytes differ.

The first time digests are compared.  The second one keeps the bytes of the culprits' rows, and
judges again: what does not come again is not random memory, but a difference from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from . import details, gradients, plans
from .calls import Key
from .checks import COMPILE, GRADIENTS, OUTPUTS, Problem
from .compare import Verdict, compare
from .plans import Case
from .probe import Facts
from .report import Finding, Victim
from .trace import Trace, record, record_whole

#: Function that runs a case and stores the bytes of the requested rows.
Runner = Callable[[Case, dict[Key, torch.Tensor]], Trace]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one case: a verdict on each call, and how many of its bytes were compared.

    unfollowed: modules that ran and had no rows to compare.
    """

    case: Case
    run: Runner
    verdicts: dict[Key, Verdict]
    of_bytes: dict[Key, int]
    unfollowed: tuple[str, ...]

    @property
    def culprits(self) -> dict[Key, torch.Tensor]:
        """Key -> tokens [N]."""
        return {key: v.culprit for key, v in self.verdicts.items() if bool(v.culprit.any())}


def outputs(problem: Problem, facts: Facts, names: Sequence[str]) -> tuple[list[Outcome], Trace]:
    """Return the outcomes of the transforms of outputs, and the reference trace."""
    follow = _follower(problem, facts)
    want = follow(plans.alone(problem), {})
    outcomes = []
    for name in names:
        if name in OUTPUTS:
            runs = [(case, follow) for case in plans.cases(problem, name)]
        elif name == COMPILE:
            runs = [(plans.alone(problem, COMPILE), _compiled(problem, facts))]
        else:
            continue
        outcomes += [_outcome(case, run, want, (problem, facts)) for case, run in runs]
    return outcomes, want


def findings(
    problem: Problem, facts: Facts, outcomes: Sequence[Outcome], reference: Trace
) -> list[Finding]:
    """Run the cases with culprits again; return them with their bytes, in execution order."""
    tokens_by_call: dict[Key, torch.Tensor] = {}
    for outcome in outcomes:
        for key, mask in outcome.culprits.items():
            tokens_by_call[key] = tokens_by_call.get(key, torch.zeros_like(mask)) | mask
    if not tokens_by_call:
        return []
    want = _follower(problem, facts)(plans.alone(problem), tokens_by_call)
    merged: dict[tuple[Key, str], Finding] = {}
    for outcome in outcomes:
        if not outcome.culprits:
            continue
        trace = outcome.run(outcome.case, outcome.culprits)
        verdicts = compare(want, trace, facts, problem.starts)
        for key, mask in outcome.culprits.items():
            still = mask & verdicts[key].culprit if key in verdicts else torch.zeros_like(mask)
            tables = want.entries[key].outs, trace.entries[key].outs
            count = details.of_rows(*tables, still, problem.starts)
            finding = _finding(key, outcome, count, facts)
            slot = (key, outcome.case.transform)
            merged[slot] = _joined(merged[slot], finding) if slot in merged else finding
    order = {key: position for position, key in enumerate(reference.entries)}
    return [merged[pair] for pair in sorted(merged, key=lambda pair: order[pair[0]])]


def victims(outcomes: Iterable[Outcome], facts: Facts) -> list[Victim]:
    """Return the calls whose rows differ without being culprits, by transform."""
    counts: dict[tuple[Key, str], int] = {}
    for outcome in outcomes:
        for key, verdict in outcome.verdicts.items():
            count = int((verdict.differs & ~verdict.culprit).sum())
            if count:
                pair = (key, outcome.case.transform)
                counts[pair] = counts.get(pair, 0) + count
    return [
        Victim(key[0], facts.kinds.get(key[0], ""), key[1], transform, count)
        for (key, transform), count in counts.items()
    ]


def of_gradients(
    problem: Problem, facts: Facts, names: Sequence[str], reference: Trace
) -> tuple[list[Finding], dict[str, tuple[str, ...]], int]:
    """Return (differing gradients in backward order, cases by transform, number compared)."""
    requested = [name for name in GRADIENTS if name in names]
    if not requested:
        return [], {}, 0
    want = gradients.gradients(problem, facts, gradients.one_shot(problem))
    cases = {
        "gradient_repeat": {"one batch, again": gradients.one_shot(problem)},
        "micro_batches": gradients.splits(problem) if len(problem.all) > 1 else {},
    }
    merged: dict[tuple[str, str], Finding] = {}
    compared = 0
    for transform in requested:
        for label, calls in cases[transform].items():
            repeated = gradients.gradients(problem, facts, calls)
            compared += len(want)
            for name, t in want.items():
                count = details.of_gradient(t, repeated[name])
                if count.differing:
                    finding = _parameter_finding(name, (transform, label), count, t, facts)
                    slot = (name, transform)
                    merged[slot] = _joined(merged[slot], finding) if slot in merged else finding
                elif (name, transform) in merged:
                    merged[name, transform] = _longer(merged[name, transform], t)
    last = gradients.backward_order(problem.model, [key[0] for key in reference.entries])

    def place(pair: tuple[str, str]) -> int:
        name = pair[0]
        return -last.get(name, last.get(name.removesuffix(".main_grad"), -1))

    ran = {transform: tuple(cases[transform]) for transform in requested}
    return [merged[pair] for pair in sorted(merged, key=place)], ran, compared


def _follower(problem: Problem, facts: Facts) -> Runner:
    return lambda case, keep: record(problem.model, case, facts, problem.count, keep)


def _compiled(problem: Problem, facts: Facts) -> Runner:
    compiled = torch.compile(problem.model)
    return lambda case, keep: record_whole(compiled, case, facts, problem.count, keep)


def _outcome(
    case: Case, run: Runner, want: Trace, problem_and_facts: tuple[Problem, Facts]
) -> Outcome:
    problem, facts = problem_and_facts
    trace = run(case, {})
    verdicts = compare(want, trace, facts, problem.starts)
    sizes = {key: _bytes_compared(want, trace, key) for key in verdicts}
    unfollowed = tuple(dict.fromkeys(key[0] for key in trace.entries if key not in verdicts))
    return Outcome(case, run, verdicts, sizes, unfollowed)


def _bytes_compared(want: Trace, got: Trace, key: Key) -> int:
    ours, theirs = want.entries[key].outs, got.entries[key].outs
    return sum(
        int((ours[path].seen & theirs[path].seen).sum()) * ours[path].width
        for path in ours.keys() & theirs.keys()
    )


def _finding(key: Key, outcome: Outcome, count: details.Count, facts: Facts) -> Finding:
    verdict = outcome.verdicts[key]
    return Finding(
        module=key[0],
        kind=facts.kinds[key[0]],
        call=key[1],
        ops=facts.ops.get(key, ()),
        transform=outcome.case.transform,
        case=outcome.case.label,
        tensor=count.tensor,
        rows=int(verdict.culprit.sum()),
        of_rows=int(verdict.compared.sum()),
        bytes=count.differing,
        of_bytes=outcome.of_bytes[key],
        first=count.first,
        want=count.want,
        got=count.got,
    )


def _parameter_finding(
    name: str, case: tuple[str, str], count: details.Count, t: torch.Tensor, facts: Facts
) -> Finding:
    owner = name.removesuffix(".main_grad")  # of a module, or of a parameter
    owner = owner if owner in facts.kinds else owner.rpartition(".")[0]
    return Finding(
        module=owner,
        kind=facts.kinds[owner],
        call=0,
        ops=(),
        transform=case[0],
        case=case[1],
        tensor=name,
        rows=0,
        of_rows=0,
        bytes=count.differing,
        of_bytes=t.numel() * t.element_size(),
        first=count.first,
        want=count.want,
        got=count.got,
    )


def _joined(first: Finding, second: Finding) -> Finding:
    """Join two cases of one transform: counts added, the first position kept."""
    both = {
        name: getattr(first, name) + getattr(second, name)
        for name in ("rows", "of_rows", "bytes", "of_bytes")
    }
    located = first if first.first is not None else second
    return replace(located, **both)


def _longer(finding: Finding, t: torch.Tensor) -> Finding:
    """Add the bytes of a case in which the gradient did not differ."""
    return replace(finding, of_bytes=finding.of_bytes + t.numel() * t.element_size())
