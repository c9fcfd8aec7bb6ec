"""Launches of the scans' Triton kernels, and the checks of both: packs, parts, gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.linear_attn import cpu_ssd, op_selective, op_ssd
from cute_kernels.linear_attn.tensors import Last, StateSpace, StateSpaceGradients, StateSpaceSaved
from tests.contract import same_bytes
from tests.runtime.cached_calls import drawn
from tests.triton_runner import INTERPRETER

from .ssd_cases import FP32, ROWS, SUMMED, Case, laid, operands, upstream
from .triton_engine import SELECTIVE, SSD

#: Whether a scan is Mamba-1's -> (its op, the runner of its forward).
OPS = {False: (op_ssd.SCAN, SSD), True: (op_selective.SCAN, SELECTIVE)}


#: Two chunks and a tail, one row, no row; rows behind the last sequence.
PACK = Case((140, 0, 1), heads=(1, 2), sizes=(16, 32), skip=2, behind=3)
SEQUENCE = Case((260,), batch=1, heads=(1, 1), sizes=(16, 16))


class Forward(NamedTuple):
    """Results of a forward: y, the last states, what is saved."""

    out: torch.Tensor
    final: torch.Tensor
    saved: StateSpaceSaved


def forward(launch, given: Case, o: StateSpace, lag: int = -1) -> Forward:
    saved = saved_of(given, o, on_cpu=launch is cpu_ssd)
    out = torch.full(o.x.shape, float("nan"), dtype=o.x.dtype)
    final = torch.full_like(upstream(given)[1], float("nan"))
    scan = getattr(launch, OPS[given.selective][0].entry)
    scan(o, given.sequences, given.options, out, Last(final, lag), saved)
    return Forward(out, final, saved)


def saved_of(given: Case, o: StateSpace, on_cpu: bool = False) -> StateSpaceSaved:
    """Tensors for what a forward saves, not written."""
    scan, _ = OPS[given.selective]
    rows = o._replace(x=laid(given, o.x), B=laid(given, o.B))
    return scan.saved_tensors(rows, given.sequences.slots(scan.chunk), on_cpu)


def slow(given: Case) -> StateSpace:
    """Operands whose decays let rows of other chunks count."""
    o = operands(given)
    return o._replace(A=o.A * 0.02)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the 2-norm."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def values(launch, given: Case) -> None:
    """y and states against the CPU backend, which test_ssd.py holds to float64."""
    o, bound = slow(given), 1e-6 if given.selective else 4e-3
    got, want = forward(launch, given, o), forward(cpu_ssd, given, o)
    assert error(got.out, want.out) < bound and error(got.final, want.final) < bound
    behind = got.out[sum(given.lengths) * max(given.batch, 1) :]
    assert not behind.float().view(torch.int32).any()


def pack_is_alone(launch, given: Case = PACK) -> None:
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
    assert not got.out[behind].float().view(torch.int32).any()
    assert not got.saved.states.isnan().any()


def nan_behind(given: Case, o: StateSpace) -> tuple[StateSpace, slice]:
    """Operands with NaN in the rows behind a pack, and these rows."""
    behind = slice(sum(given.lengths), None)
    for name in ROWS:
        if (t := getattr(o, name)) is not None:
            t[behind] = float("nan")
    return o, behind


def part(given: Case, o: StateSpace, s: int) -> tuple[Case, StateSpace]:
    """Sequence ``s`` of a pack as a batch of one."""
    first, end = given.sequences.bounds()[s]
    rows = {n: t[first:end] for n in ROWS if (t := getattr(o, n)) is not None}
    own = o._replace(**rows, initial=o.initial[s : s + 1])
    return given._replace(lengths=(end - first,), batch=1, behind=0), own


def parts(launch, given: Case = SEQUENCE) -> None:
    """Rows of a sequence that stops, and goes on from the state that the last ones leave whole."""
    length, whole_rows = given.lengths[0], 1 if given.selective else 128
    o = slow(given)
    whole = forward(launch, given, o)
    for cut, lag in (
        (1, 0),
        (length // 2 - 2, 0),
        (length // 2, 0),
        (length // 2 + 1, 5),
        (length - 1, 0),
    ):
        begun = {n: getattr(o, n)[:cut] for n in ROWS}
        first = forward(launch, given._replace(lengths=(cut,)), o._replace(**begun), lag)
        grid = max(cut - lag, 0) // whole_rows * whole_rows
        rest = {n: getattr(o, n)[grid:] for n in ROWS}
        goes_on = given._replace(lengths=(length - grid,))
        rest = forward(launch, goes_on, o._replace(**rest, initial=first.final))
        assert same_bytes(first.out, whole.out[:cut]), cut
        assert same_bytes(rest.out, whole.out[grid:]) and same_bytes(rest.final, whole.final), cut


def backward(launch, given: Case, o: StateSpace, of: Forward, slopes=None, main=None):
    """Gradients; A, D and dt_bias are added to zeros, or to ``main``."""
    d_out, d_final = upstream(given) if slopes is None else slopes
    into = StateSpaceGradients(
        *(None if t is None else torch.full_like(t, float("nan")) for t in o)
    )
    zeros = {n: torch.zeros(t.shape) for n in SUMMED if (t := getattr(o, n)) is not None}
    gradients = into._replace(**zeros | (main or {}))
    scan = getattr(launch, f"{OPS[given.selective][0].entry}_backward")
    scan(d_out, d_final, o, given.sequences, given.options, of.saved, gradients)
    return gradients


def gradients(launch, given: Case = PACK) -> None:
    """Gradients against the CPU backend's."""
    o, bound = slow(given), 2e-6 if given.selective else 1e-2
    got = backward(launch, given, o, saved_by(given, o))
    want = backward(cpu_ssd, given, o, forward(cpu_ssd, given, o))
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b) < bound, (name, error(a, b))


def gradients_of_a_pack(launch, given: Case = PACK) -> None:
    """Gradients of a sequence, and sums of all, have the bytes of sequences one by one."""
    o, behind = nan_behind(given, operands(given))
    d_out, d_final = upstream(given)
    d_out[behind] = float("nan")
    mains = [
        {n: drawn(*getattr(o, n).shape, seed=40 + i, dtype=FP32) for i, n in enumerate(SUMMED)}
        for _ in "ab"
    ]
    got = backward(launch, given, o, saved_by(given, o), (d_out, d_final), mains[0])
    for s, (first, end) in enumerate(given.sequences.bounds()):
        if end == first:
            assert same_bytes(got.initial[s], d_final[s])
            continue
        alone, own = part(given, o, s)
        slopes = d_out[first:end], d_final[s : s + 1]
        single = backward(launch, alone, own, saved_by(alone, own), slopes, mains[1])
        assert same_bytes(single.initial[0], got.initial[s])
        for name in ROWS:
            assert same_bytes(getattr(single, name), getattr(got, name)[first:end]), name
    for name in ROWS:
        assert not getattr(got, name)[behind].float().view(torch.int32).any(), name
    for name in SUMMED:
        assert same_bytes(*(main[name] for main in mains)), name


def saved_by(given: Case, o: StateSpace) -> Forward:
    """A forward in the interpreter."""
    with OPS[given.selective][1].running(INTERPRETER) as before:
        return forward(before, given, o)
