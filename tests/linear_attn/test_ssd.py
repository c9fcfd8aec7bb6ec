"""The scans on a CPU: values, sums over rows; what they refuse."""

from __future__ import annotations

import functools

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
from cute_kernels.linear_attn import cpu_ssd
from cute_kernels.runtime import dispatch
from tests.anchors import planted
from tests.contract import same_bytes
from tests.runtime.cached_calls import drawn

from .recurrences import (
    mains,
    parts_are_whole,
    run,
    sequences_are_alone,
    within_bounds,
)
from .ssd_cases import CASES as SSD_CASES
from .ssd_cases import INF, SCANS, SELECTIVE_CASES, Case, exact, operands, upstream

CASES = SSD_CASES | SELECTIVE_CASES
scan = ck.mamba_chunk_scan_combined


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    """Rows, states and all gradients; what lies behind the pack is 0."""
    case, o = CASES[name], operands(CASES[name])
    *exactly, leaves = exact(case, o)
    leaves = {n: t for n, t in zip(o._fields, leaves, strict=True) if t is not None}
    # Terms of sums over rows are larger than they are.
    within_bounds(run(case, o), (*exactly, leaves), case, 2.0**-22, 2.0**-18)


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
        for case in (Case((5, 0, 130, 1, 260), behind=3), Case((140,), batch=2, skip=2)):
            sequences_are_alone(case)
        assert parts_are_whole((128, 256), SEQUENCE)
        assert parts_are_whole((33, 34), CHANNELS)
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


#: Operands of `selective_scan`, whose rows are u.
U, BN, AN = drawn(2, 6, 3), drawn(2, 8, 3), -torch.ones(6, 8)
U_RIGHT = {"u": U, "delta": U.float(), "A": AN, "B": BN, "C": BN, "D": torch.ones(6)}
U_STATE, U_MAIN = torch.zeros(2, 6, 8), torch.zeros(6)
#: Arguments of one sequence of 3 rows.
U_ONE = {n: t[:1] if t.dim() > 2 else t for n, t in U_RIGHT.items()}
#: Wrong arguments -> (error, the message's beginning).
U_REFUSED = {
    "two dimensions": ({"u": U[0]}, ShapeError, "u: expected 3 dimensions [B, D, T]"),
    "no channels": ({"u": U[:, :0]}, ShapeError, "u: expected D, channels,"),
    "steps of a channel": ({"delta": U[:, :1]}, ShapeError, "delta: expected shape [2, 6, 3]"),
    "A in bf16": ({"A": AN.bfloat16()}, DtypeError, "A: expected one of torch.float32"),
    "A of heads": ({"A": AN[:, 0]}, ShapeError, "A: expected 2 dimensions [D, N]"),
    "A of one channel": ({"A": AN[:1]}, ShapeError, "A: expected shape [6, 8], D of u, and N"),
    "a complex A": ({"A": AN.to(torch.complex64)}, DtypeError, "A: expected one of torch.float32"),
    "an N of 300": ({"A": -torch.ones(6, 300)}, ShapeError, "A: expected N a multiple of 1"),
    "B of no tokens": ({"B": BN[0, :, :1]}, ShapeError, "B: expected 3 dimensions [B, N, T]"),
    "another N": ({"B": BN[:, :4]}, ShapeError, "B: expected shape [2, 8, 3], B and T of u"),
    "another dtype of B": ({"B": BN.float()}, DtypeError, "B: expected one of torch.bfloat16"),
    "four groups": (
        {n: BN[:, None].repeat(1, 4, 1, 1) for n in "BC"}, ShapeError,
        "B: expected G, groups, a divisor of D = 6",
    ),
    "groups of B": ({"B": BN[:, None]}, ShapeError, "C: expected 4 dimensions [B, G, N, T]"),
    "another C": ({"C": BN[..., :2]}, ShapeError, "C: expected shape [2, 8, 3], that of B"),
    "D of two dimensions": ({"D": AN}, ShapeError, "D: expected 1 dimension [D]"),
    "z in fp32": ({"z": U.float()}, DtypeError, "z: expected one of torch.bfloat16"),
    "a long bias": ({"delta_bias": torch.ones(7)}, ShapeError, "delta_bias: expected shape [6]"),
    "one state": ({"initial_state": U_STATE[:1]}, ShapeError, "initial_state: expected shape [2,"),
    "a state in bf16": (
        {"initial_state": U_STATE.bfloat16()}, DtypeError, "initial_state: expected one of",
    ),
    "softplus in words": (
        {"delta_softplus": "yes"}, ArgumentTypeError, "delta_softplus: expected True",
    ),
    "a batch and offsets": ({"cu_seqlens": OFFSETS}, ShapeError, "cu_seqlens: expected batch 1"),
    "offsets beyond u": (
        U_ONE | {"cu_seqlens": OFFSETS * 2}, ArgumentValueError, "cu_seqlens: expected numbers",
    ),
    "a main_grad of no bias": (
        {"delta_bias_main_grad": U_MAIN}, ArgumentTypeError, "delta_bias_main_grad: expected None",
    ),
    "a main_grad that is read": (
        {"D_main_grad": U_RIGHT["D"]}, AliasError, "D_main_grad: expected memory of its own",
    ),
    "another argument": ({"x": U}, ArgumentTypeError, "x: expected an argument"),
}  # fmt: skip


#: Whether of channels -> (function, right arguments, wrong ones).
TABLES = {
    False: (scan, RIGHT, REFUSED),
    True: (ck.selective_scan, U_RIGHT, U_REFUSED),
}


@pytest.mark.parametrize(
    ("of_channels", "which"), [(t, which) for t in (False, True) for which in TABLES[t][2]]
)
def test_refused(of_channels, which):
    function, right, table = TABLES[of_channels]
    changed, error, message = table[which]
    with pytest.raises(error) as caught:
        function(**right | changed)
    assert str(caught.value).startswith(message)


def test_layouts():
    """Channel-last or not, one group or none: the same bytes, in channel-last memory."""
    rows = {n: t.mT.contiguous().mT if t.dim() > 2 else t for n, t in U_RIGHT.items()}
    groups = {n: rows[n][:, None] for n in "BC"}
    want = ck.selective_scan(**U_RIGHT)
    for out in (ck.selective_scan(**rows), ck.selective_scan(**rows | groups)):
        assert out.mT.is_contiguous() and same_bytes(out, want)
