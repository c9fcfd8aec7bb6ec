"""Every case of every transform against the reference; a second time where something differs.

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

#: Runs a case, keeping the bytes of the rows asked for.
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
    """Every case of the transforms of outputs, and the reference they were compared with."""
    follow = _follower(problem, facts)
    want = follow(plans.alone(problem), {})
    made = []
    for name in names:
        if name in OUTPUTS:
            runs = [(case, follow) for case in plans.cases(problem, name)]
        elif name == COMPILE:
            runs = [(plans.alone(problem, COMPILE), _compiled(problem, facts))]
        else:
            continue
        made += [_outcome(case, run, want, (problem, facts)) for case, run in runs]
    return made, want


def findings(
    problem: Problem, facts: Facts, outcomes: Sequence[Outcome], reference: Trace
) -> list[Finding]:
    """The culprits with their bytes, in the order in which they ran: the runs once more."""
    wanted: dict[Key, torch.Tensor] = {}
    for outcome in outcomes:
        for key, mask in outcome.culprits.items():
            wanted[key] = wanted.get(key, torch.zeros_like(mask)) | mask
    if not wanted:
        return []
    want = _follower(problem, facts)(plans.alone(problem), wanted)
    made: dict[tuple[Key, str], Finding] = {}
    for outcome in outcomes:
        if not outcome.culprits:
            continue
        got = outcome.run(outcome.case, outcome.culprits)
        again = compare(want, got, facts, problem.starts)
        for key, mask in outcome.culprits.items():
            still = mask & again[key].culprit if key in again else torch.zeros_like(mask)
            tables = want.entries[key].outs, got.entries[key].outs
            count = details.of_rows(*tables, still, problem.starts)
            one = _finding(key, outcome, count, facts)
            same = (key, outcome.case.transform)
            made[same] = _joined(made[same], one) if same in made else one
    order = {key: place for place, key in enumerate(reference.entries)}
    return [made[pair] for pair in sorted(made, key=lambda pair: order[pair[0]])]


def victims(outcomes: Iterable[Outcome], facts: Facts) -> list[Victim]:
    """Calls whose rows differ where they are no culprits, by transform."""
    made: dict[tuple[Key, str], int] = {}
    for outcome in outcomes:
        for key, verdict in outcome.verdicts.items():
            count = int((verdict.differs & ~verdict.culprit).sum())
            if count:
                pair = (key, outcome.case.transform)
                made[pair] = made.get(pair, 0) + count
    return [
        Victim(key[0], facts.kinds.get(key[0], ""), key[1], transform, count)
        for (key, transform), count in made.items()
    ]


def of_gradients(
    problem: Problem, facts: Facts, names: Sequence[str], reference: Trace
) -> tuple[list[Finding], dict[str, tuple[str, ...]], int]:
    """(gradients that differ in backward order, the cases of each transform, how many compared)."""
    asked = [name for name in GRADIENTS if name in names]
    if not asked:
        return [], {}, 0
    want = gradients.gradients(problem, facts, gradients.one_shot(problem))
    cases = {
        "gradient_repeat": {"one batch, again": gradients.one_shot(problem)},
        "micro_batches": gradients.splits(problem) if len(problem.all) > 1 else {},
    }
    made: dict[tuple[str, str], Finding] = {}
    compared = 0
    for transform in asked:
        for label, calls in cases[transform].items():
            got = gradients.gradients(problem, facts, calls)
            compared += len(want)
            for name, t in want.items():
                count = details.of_gradient(t, got[name])
                if count.differing:
                    one = _of_parameter(name, (transform, label), count, t, facts)
                    same = (name, transform)
                    made[same] = _joined(made[same], one) if same in made else one
                elif (name, transform) in made:
                    made[name, transform] = _longer(made[name, transform], t)
    last = gradients.backward_order(problem.model, [key[0] for key in reference.entries])

    def place(pair: tuple[str, str]) -> int:
        name = pair[0]
        return -last.get(name, last.get(name.removesuffix(".main_grad"), -1))

    ran = {transform: tuple(cases[transform]) for transform in asked}
    return [made[pair] for pair in sorted(made, key=place)], ran, compared


def _follower(problem: Problem, facts: Facts) -> Runner:
    return lambda case, keep: record(problem.model, case, facts, problem.count, keep)


def _compiled(problem: Problem, facts: Facts) -> Runner:
    compiled = torch.compile(problem.model)
    return lambda case, keep: record_whole(compiled, case, facts, problem.count, keep)


def _outcome(case: Case, run: Runner, want: Trace, of: tuple[Problem, Facts]) -> Outcome:
    problem, facts = of
    got = run(case, {})
    verdicts = compare(want, got, facts, problem.starts)
    sizes = {key: _bytes_compared(want, got, key) for key in verdicts}
    left = tuple(dict.fromkeys(key[0] for key in got.entries if key not in verdicts))
    return Outcome(case, run, verdicts, sizes, left)


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


def _of_parameter(
    name: str, case: tuple[str, str], count: details.Count, t: torch.Tensor, facts: Facts
) -> Finding:
    owner = name.removesuffix(".main_grad")  # a module's own, or a parameter's
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


def _joined(one: Finding, other: Finding) -> Finding:
    """Join two cases of one transform: counts added, the first position kept."""
    both = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("rows", "of_rows", "bytes", "of_bytes")
    }
    shown = one if one.first is not None else other
    return replace(shown, **both)


def _longer(one: Finding, t: torch.Tensor) -> Finding:
    """After a case in which it did not differ."""
    return replace(one, of_bytes=one.of_bytes + t.numel() * t.element_size())
