"""Launches of the recurrences' kernels on GPUs, and the checks that all of them pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.linear_attn import cpu_delta, cpu_ssd
from cute_kernels.linear_attn.tensors import DeltaSaved, Last, StateSpaceSaved
from tests.contract import same_bytes
from tests.runtime.cached_calls import drawn
from tests.triton_runner import INTERPRETER, Runner, complaints

from .recurrences import Case, laid, operands, upstream
from .recurrences import slow as slowed
from .ssd_cases import FP32
from .triton_engine import DELTA, KDA, SELECTIVE, SSD

#: They multiply; sums of one number and zeros have one result in any order.  128 columns spill.
ALLOWED = {"matrix instruction", "a sum in the order of the compiler", "spills"}


class Rule(NamedTuple):
    """What differs between kernels: their CPU backend, the factor of slow decays, errors."""

    cpu: object
    slow: float
    error: float
    gradient_error: float


_RULES = {
    "gated_delta_rule": Rule(cpu_delta, 0.05, 6e-3, 1e-2),
    "ssd_scan": Rule(cpu_ssd, 0.02, 4e-3, 1e-2),
    "selective_scan": Rule(cpu_ssd, 0.02, 1e-6, 2e-6),
}


class Forward(NamedTuple):
    """Results of a forward: rows, the last states, what is saved."""

    out: torch.Tensor
    final: torch.Tensor
    saved: DeltaSaved | StateSpaceSaved


def rule_of(given: Case) -> Rule:
    return _RULES[given.op.entry]


def runner_of(given: Case) -> Runner:
    """The runner of a case's forward."""
    if given.op.entry == "gated_delta_rule":
        return KDA if given.channels else DELTA
    return SELECTIVE if given.selective else SSD


def slow(given: Case):
    """Operands whose decays let rows of other chunks count."""
    return slowed(given, operands(given), rule_of(given).slow)


def forward(launch, given: Case, o, lag: int = -1) -> Forward:
    saved = saved_of(given, o, on_cpu=launch is rule_of(given).cpu)
    out = torch.full_like(given.op.like(o), float("nan"), memory_format=torch.contiguous_format)
    final = torch.full_like(upstream(given)[1], float("nan"))
    function = getattr(launch, given.launcher)
    function(o, given.sequences, given.options, out, Last(final, lag), saved)
    return Forward(out, final, saved)


def saved_of(given: Case, o, on_cpu: bool = False) -> DeltaSaved | StateSpaceSaved:
    """Tensors for what a forward saves, not written."""
    names = (n for n in given.op.of_rows if getattr(o, n) is not None)
    rows = o._replace(**{n: laid(given, getattr(o, n)) for n in names})
    return given.op.saved_tensors(rows, given.sequences.slots(given.op.chunk), on_cpu)


def saved_by(given: Case, o) -> Forward:
    """A forward in the interpreter."""
    with runner_of(given).running(INTERPRETER) as before:
        return forward(before, given, o)


def backward(launch, given: Case, o, of: Forward, slopes=None, main=None):
    """Gradients; sums over rows are added to zeros, or to ``main``."""
    d_out, d_final = upstream(given) if slopes is None else slopes
    into = given.op.operands(*(None if t is None else torch.full_like(t, torch.nan) for t in o))
    zeros = {n: torch.zeros(t.shape) for n in given.op.summed if (t := getattr(o, n)) is not None}
    gradients = into._replace(**zeros | (main or {}))
    function = getattr(launch, f"{given.launcher}_backward")
    function(d_out, d_final, o, given.sequences, given.options, of.saved, gradients)
    return gradients


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the 2-norm."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.float().view(torch.int32)


def values(launch, given: Case, o=None) -> None:
    """Rows and states against the CPU backend, whose tests hold it to float64."""
    o, bound = slow(given) if o is None else o, rule_of(given).error
    got, want = forward(launch, given, o), forward(rule_of(given).cpu, given, o)
    assert error(got.out, want.out) < bound and error(got.final, want.final) < bound
    assert not bits(got.out[sum(given.lengths) * max(given.batch, 1) :]).any()


def nan_behind(given: Case, o) -> tuple[object, slice]:
    """Operands with NaN in the rows behind a pack, and these rows."""
    behind = slice(sum(given.lengths), None)
    for name in given.op.of_rows:
        if (t := getattr(o, name)) is not None:
            t[behind] = float("nan")
    return o, behind


def part(given: Case, o, s: int) -> tuple[Case, object]:
    """Sequence ``s`` of a pack as a batch of one."""
    first, end = given.sequences.bounds()[s]
    alone = _rows(given, o, first, end)._replace(initial=o.initial[s : s + 1])
    return given._replace(lengths=(end - first,), batch=1, behind=0), alone


def _rows(given: Case, o, first: int, end: int | None):
    names = (n for n in given.op.of_rows if getattr(o, n) is not None)
    return o._replace(**{n: getattr(o, n)[first:end] for n in names})


def pack_is_alone(launch, given: Case) -> None:
    """A sequence has the bytes that it has alone; NaN behind the pack reaches nothing."""
    o, behind = nan_behind(given, operands(given))
    got = forward(launch, given, o)
    for s, (first, end) in enumerate(given.sequences.bounds()):
        if end == first:
            assert same_bytes(got.final[s], o.initial[s])
            continue
        alone = forward(launch, *part(given, o, s))
        assert same_bytes(alone.out, got.out[first:end])
        assert same_bytes(alone.final[0], got.final[s])
    assert not bits(got.out[behind]).any()
    if given.op.summed:  # states of slots without rows are read
        assert not got.saved.states.isnan().any()


def parts(launch, given: Case) -> None:
    """Rows computed with those of the open chunk again, from the state before it, as caches do."""
    length, chunk = given.lengths[0], 1 if given.selective else given.op.chunk
    o, half = slow(given), length // 2
    whole = forward(launch, given, o)
    cuts = (1, 0), (half - 2, 0), (half, 0), (half + 1, 5), (length - 1, 0)
    if not given.op.summed:  # three chunks
        cuts = (1, 0), (64, 0), (70, 0), (100, 0), (130, 0), (131, 5), (66, 5), (129, 1)
    for cut, lag in cuts:
        first = forward(launch, given._replace(lengths=(cut,)), _rows(given, o, 0, cut), lag)
        grid = max(cut - lag, 0) // chunk * chunk
        rest = _rows(given, o, grid, None)._replace(initial=first.final)
        rest = forward(launch, given._replace(lengths=(length - grid,)), rest)
        assert same_bytes(first.out, whole.out[:cut]), cut
        assert same_bytes(rest.out, whole.out[grid:]) and same_bytes(rest.final, whole.final), cut


def gradients(launch, given: Case, o=None, but: str = ""):
    """Gradients against the CPU backend's, all ``but`` one; they are returned."""
    o, rule = slow(given) if o is None else o, rule_of(given)
    got = backward(launch, given, o, saved_by(given, o))
    want = backward(rule.cpu, given, o, forward(rule.cpu, given, o))
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None)
        bound = rule.gradient_error
        assert a is None or name == but or error(a, b) < bound, (name, error(a, b))
    return got


def gradients_of_a_pack(launch, given: Case) -> None:
    """Gradients of a sequence, and sums of all, have the bytes of sequences one by one."""
    o, behind = nan_behind(given, operands(given))
    d_out, d_final = upstream(given)
    d_out[behind] = float("nan")
    summed, of_rows = given.op.summed, given.op.of_rows
    mains = [
        {n: drawn(*getattr(o, n).shape, seed=40 + i, dtype=FP32) for i, n in enumerate(summed)}
        for _ in "ab"
    ]
    got = backward(launch, given, o, saved_by(given, o), (d_out, d_final), mains[0])
    for s, (first, end) in enumerate(given.sequences.bounds()):
        if end == first:
            assert same_bytes(got.initial[s], d_final[s])
            continue
        alone, rows = part(given, o, s)
        slopes = d_out[first:end], d_final[s : s + 1]
        single = backward(launch, alone, rows, saved_by(alone, rows), slopes, mains[1])
        assert same_bytes(single.initial[0], got.initial[s])
        for name in of_rows:
            assert same_bytes(getattr(single, name), getattr(got, name)[first:end]), name
    for name in of_rows:
        assert not bits(getattr(got, name)[behind]).abs().any(), name
    for name in summed:
        assert same_bytes(*(main[name] for main in mains)), name


def code(runner: Runner, target: str, given: Case, allowed: frozenset[str] | set[str]) -> list:
    """All kernels of a launcher, launched but not run, have no complaints but those allowed."""
    o, launch = operands(given), runner.launch

    def call() -> None:
        saved, final = saved_of(given, o), torch.empty_like(upstream(given)[1])
        if hasattr(launch, f"{given.launcher}_backward"):
            backward(launch, given, o, Forward(given.op.like(o), final, saved))
        else:
            forward(launch, given, o)

    kernels = runner.compiled(target, call)
    assert {kernel.name for kernel in kernels} == set(runner.written)
    assert {kernel.name: set(complaints(kernel)) - allowed for kernel in kernels} == {
        kernel.name: set() for kernel in kernels
    }
    return kernels
