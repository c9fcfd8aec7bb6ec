"""The scans on a CPU: values, bytes of parts and packs, gradients; what Mamba-2's refuses."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import pytest
import torch

import cute_kernels as ck
from cute_kernels.cpu.ieee import halves
from cute_kernels.errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    DtypeError,
    ShapeError,
)
from cute_kernels.linear_attn import cpu_chunks, cpu_ssd
from cute_kernels.runtime import dispatch
from tests import contract
from tests.anchors import planted
from tests.contract import same_bytes
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

from .ssd_cases import (
    BF16,
    FP32,
    INF,
    NAMES,
    ROWS,
    SCANS,
    SELECTIVE_CASES,
    SUMMED,
    Case,
    called,
    exact,
    given,
    laid,
    operands,
    rows_in,
    upstream,
)
from .ssd_cases import CASES as SSD_CASES

CASES = SSD_CASES | SELECTIVE_CASES
scan = ck.mamba_chunk_scan_combined
#: Operands of heads, and the dimension that they lie along.
OF_HEADS = {"x": 1, "dt": 1, "A": 0, "D": 0, "z": 1, "dt_bias": 0, "initial": 1}


class Results(NamedTuple):
    """Results of both passes of a call on rows [N, ...], and the gradient of each operand."""

    out: torch.Tensor
    final: torch.Tensor
    gradients: dict[str, torch.Tensor]


def run(case: Case, o, slopes=None, **more) -> Results:
    """Both passes of the public function; main_grads where they are given."""
    leaves, others = given(case, o)
    out, final = called(case, leaves, **others, **more)
    d_out, d_final = upstream(case) if slopes is None else slopes
    torch.autograd.backward((out, final), (laid(case, d_out), d_final))
    grads = {
        name: rows_in(case, t.grad, name in ("B", "C")) if name in ROWS else t.grad
        for name, t in leaves.items()
        if f"{name}_main_grad" not in more
    }
    return Results(rows_in(case, out).detach(), final.detach(), grads)


def same(a: Results, b: Results, names=NAMES) -> bool:
    assert a.gradients.keys() == b.gradients.keys()
    pairs = [(a.gradients[name], b.gradients[name]) for name in names if name in a.gradients]
    return all(same_bytes(*each) for each in [*zip(a[:2], b[:2], strict=True), *pairs])


def rows_of(results: Results, rows: slice, states: slice = slice(None)) -> Results:
    """Results of some rows, and of the states of some sequences."""
    parts = dict.fromkeys(ROWS, rows) | {"initial": states}
    grads = {name: t[parts[name]] for name, t in results.gradients.items() if name in parts}
    return Results(results.out[rows], results.final[states], grads)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    """Rows, states and all gradients; what lies behind the pack is 0."""
    case, o = CASES[name], operands(CASES[name])
    d_out, d_final = upstream(case)
    got = run(case, o)
    want, last, leaves = exact(case, o)
    count, leaves = len(want), dict(zip(NAMES, leaves, strict=True))
    leaves = {n: t for n, t in leaves.items() if t is not None}
    slopes = d_out[:count].double(), d_final.double()
    wanted = torch.autograd.grad((want, last), list(leaves.values()), slopes)
    assert got.final.dtype == FP32 and got.out.dtype == case.dtype
    assert got.gradients.keys() == leaves.keys()
    pairs = {n: (got.gradients[n], t) for n, t in zip(leaves, wanted, strict=True)}
    for n, (actual, expected) in (pairs | {"z.": (got.out, want), "S": (got.final, last)}).items():
        if n in ROWS or n == "z.":
            assert not actual[count:].any()
            actual, expected = actual[:count], expected[:count]
        # Terms of sums over rows are larger than they are.
        inside = 2.0**-18 if n in SUMMED else 2.0**-22
        bound = oracle.delta_bound(expected, actual.dtype, inside)
        assert ((actual.double() - expected).abs() <= bound).all(), n


def test_steps_at_their_limits():
    """A step at a limit has a gradient, one beyond it none; softplus is linear above 20."""
    x = torch.ones(1, 5, 1, 8)
    dt = torch.tensor([0.5, 2.0, 0.499, 2.001, 1.0]).view(1, 5, 1).requires_grad_()
    B = torch.zeros(1, 5, 1, 8)
    B[..., 0] = 1
    y = scan(x, dt, torch.zeros(1), B, B, dt_limit=(0.5, 2))
    assert y[0, :, 0, 0].tolist() == [0.5, 2.5, 3.0, 5.0, 6.0]
    (d_dt,) = torch.autograd.grad(y.sum(), dt)
    assert (d_dt[0, :, 0] == 8 * torch.tensor([5.0, 4, 0, 0, 1])).all()
    y = scan(x[:, :1], dt[:, :1] * 0 + 20.5, torch.zeros(1), B[:, :1], B[:, :1], dt_softplus=True)
    assert y[0, 0, 0, 0].item() == 20.5


# ---- bytes ---------------------------------------------------------------------------------------

SEQUENCE = Case((290,), batch=1, heads=(1, 2), sizes=(8, 16))
CHANNELS = SELECTIVE_CASES["channels"]._replace(lengths=(70,), batch=1)


def parts(cuts: tuple[int, ...], case: Case = SEQUENCE) -> tuple[Results, Results]:
    """(the whole, its parts by way of states and their gradients) of a sequence.

    Its decays are slow: the roundings of S between chunks reach the end.
    """
    o = operands(case)
    o = o._replace(A=o.A * 0.001)
    whole = run(case, o)
    leaves, others = given(case, o)
    state, outs, axis = leaves["initial"], [], 2 if case.selective else 1
    fixed = {name: leaves[name] for name in SUMMED}
    for first, end in itertools.pairwise((0, *cuts, case.rows)):
        rows = {name: leaves[name].narrow(axis, first, end - first) for name in ROWS}
        out, state = called(case, rows | fixed, initial=state, **others)
        outs.append(out)
    d_out, d_final = upstream(case)
    torch.autograd.backward((torch.cat(outs, axis), state), (laid(case, d_out), d_final))
    grads = {
        name: rows_in(case, t.grad, name in ("B", "C")) if name in ROWS else t.grad
        for name, t in leaves.items()
    }
    out = rows_in(case, torch.cat(outs, axis)).detach()
    return whole, Results(out, state.detach(), grads)


#: What has the same bytes in parts: sums over rows start from zero in each.
OF_ROWS = (*ROWS, "initial")


@pytest.mark.parametrize("cuts", [(128,), (256,), (128, 256)], ids=str)
def test_parts_cut_at_chunks_have_the_bytes_of_the_whole(cuts):
    """Both passes: the gradient of a state is the one that a part before it goes on from."""
    assert same(*parts(cuts), OF_ROWS)


@pytest.mark.parametrize("cuts", [(1,), (32,), (33, 34, 50), range(60, 70)], ids=str)
def test_parts_of_channels_have_the_bytes_of_the_whole(cuts):
    """Mamba-1's sequence cut anywhere, row by row too."""
    assert same(*parts(tuple(cuts), CHANNELS), OF_ROWS)


def test_an_initial_state_starts_a_grid_of_chunks():
    """Cut elsewhere, the rounding of S is elsewhere: right, but other bytes."""
    whole, cut = parts((50,))
    assert same_bytes(whole.out[:50], cut.out[:50]) and not same_bytes(whole.final, cut.final)
    assert (whole.final - cut.final).abs().max() < 1e-5 * whole.final.abs().max()


PACK = Case((5, 0, 130, 1, 260), behind=3)
CHANNELS_PACK = SELECTIVE_CASES["channels of a pack"]
both = pytest.mark.parametrize("case", [PACK, CHANNELS_PACK], ids=["heads", "channels"])


def alone(case: Case, o, s: int, **more) -> tuple[Results, slice]:
    """Sequence ``s`` of a pack as a batch of one, and its rows."""
    first, end = case.sequences.bounds()[s]
    rows, (d_out, d_final) = slice(first, end), upstream(case)
    part = {n: t[rows] for n in ROWS if (t := getattr(o, n)) is not None}
    part = o._replace(**part, initial=o.initial[s : s + 1])
    slopes = d_out[rows], d_final[s : s + 1]
    return run(case._replace(lengths=(end - first,), batch=1, behind=0), part, slopes, **more), rows


def mains(case: Case) -> dict[str, torch.Tensor]:
    """main_grads that are not zero."""
    o = operands(case)
    shapes = (getattr(o, name).shape for name in SUMMED)
    return {
        f"{name}_main_grad": drawn(*shape, seed=30 + i, dtype=FP32)
        for i, (name, shape) in enumerate(zip(SUMMED, shapes, strict=True))
    }


def packs(case: Case = PACK) -> None:
    """Each sequence alone; sums over rows go on from micro-batch to micro-batch."""
    o, of_whole, of_parts = operands(case), mains(case), mains(case)
    whole = run(case, o, **of_whole)
    for s in range(case.count):
        single, rows = alone(case, o, s, **of_parts)
        assert same(rows_of(whole, rows, slice(s, s + 1)), single)
    assert all(map(same_bytes, of_whole.values(), of_parts.values()))
    assert not any(map(same_bytes, of_whole.values(), mains(case).values()))


@both
def test_a_sequence_of_a_pack_has_its_bytes_alone(case):
    """Empty ones, those of one row, and those of several chunks; main_grads of any split."""
    packs(case)


BATCH, CHANNELS_BATCH = Case((140,), batch=2, skip=2), CHANNELS._replace(batch=2)


def batches(case: Case = BATCH) -> None:
    """Sequences of a batch one by one: main_grads too."""
    o, (d_out, d_final), of_whole, of_parts = (
        operands(case),
        upstream(case),
        *map(mains, [case] * 2),
    )
    whole, length = run(case, o, **of_whole), case.lengths[0]
    for s in range(2):
        rows, states = slice(length * s, length * (s + 1)), slice(s, s + 1)
        part = o._replace(**{n: getattr(o, n)[rows] for n in ROWS}, initial=o.initial[states])
        slopes = d_out[rows], d_final[states]
        assert same(
            run(case._replace(batch=1), part, slopes, **of_parts), rows_of(whole, rows, states)
        )
    assert all(map(same_bytes, of_whole.values(), of_parts.values()))


@pytest.mark.parametrize("case", [BATCH, CHANNELS_BATCH], ids=["heads", "channels"])
def test_a_sequence_of_a_batch_has_its_bytes_alone(case):
    batches(case)


def chunks_of_sums(case: Case) -> None:
    """dD is Σ dy x of chunks of rows, each rounded to fp32, added one by one."""
    o, (d_out, d_final), main = operands(case), upstream(case), mains(case)["D_main_grad"]
    want = main.clone()
    run(case, o, (d_out, d_final), D_main_grad=main)
    terms = d_out.double() * o.x.double()
    for rows in (terms if case.selective else halves(terms, 2)).split(SCANS[case.selective][2]):
        want += functools.reduce(torch.add, rows).float()
    assert same_bytes(main, want)


SUMS = Case((260,), batch=1, gate=False), CHANNELS._replace(gate=False)


@pytest.mark.parametrize("case", SUMS, ids=["heads", "channels"])
def test_sums_over_rows_are_added_by_chunk(case):
    chunks_of_sums(case)


@both
def test_an_empty_sequence_keeps_its_state(case):
    o, (_, d_final) = operands(case), upstream(case)
    results = run(case, o)
    assert same_bytes(results.final[1], o.initial[1])
    assert same_bytes(results.gradients["initial"][1], d_final[1])
    empty = case._replace(lengths=(0,), batch=2, behind=0)
    results, initial = run(empty, operands(empty)), operands(empty).initial
    assert same_bytes(results.final, initial) and results.out.shape == (0, *o.x.shape[1:])
    assert same_bytes(results.gradients["initial"], upstream(empty)[1])
    assert not any(results.gradients[name].any() for name in SUMMED)
    leaves, others = given(empty, operands(empty)._replace(initial=None))
    zeros = called(empty, leaves, **others)[1]
    assert zeros.shape == initial.shape and not zeros.any()


@both
def test_a_batch_beside_nan(case):
    """Another sequence, and what lies behind a pack, may be anything."""
    case = case._replace(lengths=(140,), batch=2, behind=0)
    o, slopes = operands(case), upstream(case)
    want = rows_of(run(case, o, slopes), slice(140), slice(1))
    for t in (*(getattr(o, n) for n in ROWS), slopes[0]):
        t[140:] = torch.nan
    for t in (o.initial, slopes[1]):
        t[1:] = torch.nan
    assert same(rows_of(run(case, o, slopes), slice(140), slice(1)), want)
    pack = case._replace(batch=0, behind=140)
    beside, slopes = o._replace(initial=o.initial[:1]), (slopes[0], slopes[1][:1])
    got = run(pack, beside, slopes)
    assert same(rows_of(got, slice(140)), want)
    assert not any(t[140:].any() for t in (got.out, *(got.gradients[n] for n in ROWS)))
    single = {n: getattr(o, n)[:140] for n in ROWS}
    sums = run(case._replace(batch=1), beside._replace(**single), (slopes[0][:140], slopes[1]))
    assert all(same_bytes(got.gradients[n], sums.gradients[n]) for n in SUMMED)


SHARED = Case((130,), batch=1, heads=(1, 3), dtype=FP32, dt=FP32)
SHARED_BY_CHANNELS = CHANNELS._replace(heads=(1, 3), dtype=FP32, dt=FP32)


def served_alone(case: Case) -> None:
    """Heads of a group: each has its bytes alone, and dB and dC add theirs, ascending.

    The first two are alike, with slopes that cancel, and so large that nothing else would be left
    of the third in another order.
    """
    o, slopes = operands(case), upstream(case)
    for name, axis in OF_HEADS.items():
        t = getattr(o, name)
        t.select(axis, 1).copy_(t.select(axis, 0))
    for t in slopes:
        t[:, 0] *= 2.0**40
        t[:, 1] = -t[:, 0]
    whole = run(case, o, slopes)
    for h in range(3):
        of_head = {n: getattr(o, n).narrow(axis, h, 1) for n, axis in OF_HEADS.items()}
        slope = [t[:, h : h + 1] for t in slopes]
        single = run(case._replace(heads=(1, 1)), o._replace(**of_head), slope)
        pairs = [(single.out, whole.out[:, h : h + 1]), (single.final, whole.final[:, h : h + 1])]
        for n, axis in OF_HEADS.items():
            pairs.append((single.gradients[n], whole.gradients[n].narrow(axis, h, 1)))
        assert all(same_bytes(*each) for each in pairs)
    for name in ("B", "C"):
        assert same_bytes(single.gradients[name] + 0.0, whole.gradients[name])


@pytest.mark.parametrize("case", [SHARED, SHARED_BY_CHANNELS], ids=["heads", "channels"])
def test_heads_that_share_a_group(case):
    served_alone(case)


@pytest.mark.parametrize("case", [Case((140,), batch=2, heads=(2, 6)), CHANNELS_BATCH], ids=str)
def test_no_bit_follows_how_much_is_computed_at_once(monkeypatch, case):
    want = run(case, operands(case))
    monkeypatch.setattr(cpu_chunks, "AT_ONCE", 5 * SCANS[case.selective][2] * math.prod(case.sizes))
    assert same(run(case, operands(case)), want)


def sequences_of(rows: torch.Tensor) -> torch.Tensor:
    """Rows of sequences of 3 rows of one head of 8 channels, one in each row given."""
    x, B, C = rows.view(-1, 3, 3, 1, 8).unbind(2)
    out = scan(x, rows[:, :3, None], -torch.ones(1), B, C, dt_softplus=True, z=x)
    return out.reshape(len(rows), 24)


def sequences_of_channels(rows: torch.Tensor) -> torch.Tensor:
    """Rows of sequences of 3 rows of 8 channels, one in each row given."""
    u, B, C = rows.view(-1, 3, 3, 8).transpose(2, 3).unbind(1)
    A = -torch.arange(1, 65).view(8, 8) / 32.0
    return ck.selective_scan(u, u, A, B, C, delta_softplus=True, z=u).reshape(len(rows), 24)


@pytest.mark.parametrize(
    ("name", "call"),
    [("mamba_chunk_scan_combined", sequences_of), ("selective_scan", sequences_of_channels)],
)
def test_the_battery_of_rows(name, call):
    """A sequence is a row: batches, neighbours, NaN among them, strides, repeated calls."""
    op = contract.RowOp(name, call, width=72, dtype=BF16)
    assert contract.check_rows(op, 70, seed=1) > 50


def test_n_ascends():
    """Mamba-1's S C is a chain: what cancels first leaves the rest."""
    B = torch.tensor([2.0**60, -(2.0**60), 1.0, 3.0]).view(1, 4, 1)
    one = torch.ones(1, 1, 1)
    y = ck.selective_scan(one, one, torch.zeros(1, 4), B, torch.ones(1, 4, 1))
    assert y.item() == 4.0


#: Edits of cpu_ssd.py.
MUTANTS = {
    "no limit": ("step.clamp(options.low, options.high)", "step"),
    "a gradient beyond the limits": ("torch.where(inside, opening, 0.0)", "opening"),
    "a bias in bf16": (
        "dt.double() + operands.dt_bias.double()", "dt + operands.dt_bias.to(dt.dtype)",
    ),
    "softplus of every dt": ("if options.softplus:", "if True:"),
    "decay after the update": (
        "states[t + 1] += states[t] * decay", "states[t + 1] = (states[t + 1] + states[t]) * decay",
    ),
    "y before the update": ("state(states[1:] * rows.C", "state(states[:-1] * rows.C"),
    "groups by turns": ("t.repeat_interleave(times, 2)", "t.repeat(1, 1, times, 1)"),
    "D of another head": ("repeat(count, 1)[None]", "repeat(count, 1).flip(0)[None]"),
    "a gradient of the state that is not decayed": (
        "slope = self.round(after[t] * rows.decay[t, :, None])", "slope = after[t]",
    ),
    "no gradient of the decay in dt": ("over_state(rows.A * d_decay)", "over_state(0.0 * d_decay)"),
    "dz of the gated rows": (
        "slopes * self.ungated(rows, states) *",
        "slopes * _gated(rows, self.ungated(rows, states)) *",
    ),
    "sums of a batch, chunk by chunk": (
        "for first, end in sequences.bounds():", "for first, end in [(0, len(terms))]:",
    ),
    "sums by chunks of 64": ("terms[first:end], self.chunk)", "terms[first:end], 64)"),
    "a state that is rounded where a chunk ends": (
        "return state.float().double()", "return state",
    ),
    "a gradient of the state that is not rounded": (
        "slope = self.round(after[t] * rows.decay[t, :, None])",
        "slope = after[t] * rows.decay[t, :, None]",
    ),
    "n in halves": ("functools.reduce(torch.add, t.unbind(-1))", "halves(t, t.dim() - 1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name):
    with planted(cpu_ssd, MUTANTS[name]), pytest.raises(AssertionError):
        dispatch.forget()
        for case in ("plain", "batch", "pack"):
            test_against_float64(case)
        packs()
        batches()
        assert same(*parts((128, 256)), OF_ROWS)
        assert same(*parts((33, 34), CHANNELS), OF_ROWS)
        chunks_of_sums(SUMS[0])
        test_n_ascends()
    dispatch.forget()


# ---- what is refused -----------------------------------------------------------------------------

X, DT, BC = drawn(2, 3, 4, 16), drawn(2, 3, 4), drawn(2, 3, 2, 16)
RIGHT = {"x": X, "dt": DT, "A": -torch.ones(4), "B": BC, "C": BC, "D": torch.ones(4)}
OFFSETS = torch.tensor([0, 2, 3])
#: Arguments of one sequence of 3 rows.
ONE = {name: t[:1] if t.dim() > 1 else t for name, t in RIGHT.items()}
STATE = torch.zeros(2, 4, 16, 16)
MAIN = torch.zeros(4)
#: Wrong arguments -> (error, the message's beginning).
REFUSED = {
    "three dimensions": ({"x": X[0]}, ShapeError, "x: expected 4 dimensions [B, T, H, P]"),
    "a P of 12": ({"x": X[..., :12]}, ShapeError, "x: expected P a multiple of 8"),
    "an N of 12": ({"B": BC[..., :12], "C": BC[..., :12]}, ShapeError, "B: expected N a multiple"),
    "no heads": ({"x": X[:, :, :0]}, ShapeError, "x: expected H, heads,"),
    "another C": ({"C": BC[:, :, :1]}, ShapeError, "C: expected shape [2, 3, 2, 16], that of B"),
    "three groups": (
        {"B": BC[:, :, :1].repeat(1, 1, 3, 1)}, ShapeError, "B: expected G, groups, a divisor of",
    ),
    "another T": ({"B": BC[:, :2]}, ShapeError, "B: expected shape [2, 3, 2, 16], B and T"),
    "another dtype of B": ({"B": BC.float()}, DtypeError, "B: expected one of torch.bfloat16"),
    "steps of groups": ({"dt": DT[..., :2]}, ShapeError, "dt: expected shape [2, 3, 4]"),
    "A in bf16": ({"A": RIGHT["A"].bfloat16()}, DtypeError, "A: expected one of torch.float32"),
    "A of states": ({"A": torch.ones(4, 16)}, ShapeError, "A: expected 1 dimension [H]"),
    "D of groups": ({"D": torch.ones(2)}, ShapeError, "D: expected shape [4]"),
    "D of three dimensions": ({"D": torch.ones(4, 16, 1)}, ShapeError, "D: expected 2 dimensions"),
    "z of a head": ({"z": X[:, :, :1]}, ShapeError, "z: expected shape [2, 3, 4, 16]"),
    "z in fp32": ({"z": X.float()}, DtypeError, "z: expected one of torch.bfloat16"),
    "a bias of groups": ({"dt_bias": torch.ones(2)}, ShapeError, "dt_bias: expected shape [4]"),
    "one state": ({"initial_states": STATE[:1]}, ShapeError, "initial_states: expected shape [2,"),
    "a state in bf16": (
        {"initial_states": STATE.bfloat16()}, DtypeError, "initial_states: expected one of",
    ),
    "limits that cross": ({"dt_limit": (2.0, 1.0)}, ArgumentValueError, "dt_limit: expected (low"),
    "one limit": ({"dt_limit": 1.0}, ArgumentTypeError, "dt_limit: expected two numbers"),
    "a limit of NaN": ({"dt_limit": (float("nan"), INF)}, ArgumentValueError, "dt_limit: expected"),
    "softplus in words": ({"dt_softplus": "yes"}, ArgumentTypeError, "dt_softplus: expected True"),
    "chunks of 256": ({"chunk_size": 256}, ArgumentValueError, "chunk_size: expected 128"),
    "chunks in words": ({"chunk_size": "128"}, ArgumentTypeError, "chunk_size: expected an int"),
    "a batch and offsets": ({"cu_seqlens": OFFSETS}, ShapeError, "cu_seqlens: expected batch 1"),
    "offsets beyond x": (
        ONE | {"cu_seqlens": OFFSETS * 2}, ArgumentValueError, "cu_seqlens: expected numbers",
    ),
    "a main_grad in bf16": (
        {"A_main_grad": MAIN.bfloat16()}, DtypeError, "A_main_grad: expected torch.float32",
    ),
    "a main_grad of no bias": (
        {"dt_bias_main_grad": MAIN}, ArgumentTypeError, "dt_bias_main_grad: expected None",
    ),
    "one main_grad for two": (
        {"A_main_grad": MAIN, "D_main_grad": MAIN}, AliasError, "A_main_grad: expected memory",
    ),
    "a main_grad that is read": (
        {"A_main_grad": RIGHT["A"]}, AliasError, "A_main_grad: expected memory of its own",
    ),
    "seq_idx": ({"seq_idx": None}, ArgumentTypeError, "seq_idx: expected no seq_idx (packs"),
    "states of a pack": (
        {"return_varlen_states": True}, ArgumentTypeError, "return_varlen_states: expected no",
    ),
    "another argument": ({"u": DT}, ArgumentTypeError, "u: expected an argument"),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_refused(which):
    changed, error, message = REFUSED[which]
    with pytest.raises(error) as caught:
        scan(**RIGHT | changed)
    assert str(caught.value).startswith(message)
