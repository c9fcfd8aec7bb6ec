"""The gated delta rule on a CPU: values, bytes of parts and packs, gradients, what is refused."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DtypeError,
    ShapeError,
)
from cute_kernels.linear_attn import cpu_chunks, cpu_delta, op_gate
from cute_kernels.runtime import dispatch
from tests import contract
from tests.anchors import planted
from tests.contract import same_bytes
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

from .delta_cases import (
    BF16,
    CASES,
    CHANNELS,
    FP32,
    Case,
    exact,
    gate_parameters,
    operands,
    upstream,
)

NAMES = "q", "k", "v", "g", "beta", "initial_state"
#: Operands of v heads.
SERVED = "v", "g", "beta", "initial"


class Results(NamedTuple):
    """Results of both passes of a call on rows [N, ...], and all gradients."""

    out: torch.Tensor
    final: torch.Tensor
    gradients: tuple[torch.Tensor, ...]


def run(case: Case, o, slopes=None, function=None, gate=(), **options) -> Results:
    """Both passes of the public function; ``gate``: A_log and dt_bias, whose gradients are last."""
    shape = (case.batch, case.lengths[0]) if case.batch else (1, case.rows)
    rows = [t.unflatten(0, shape) for t in o[:5]]
    given = [None if t is None else t.detach().requires_grad_() for t in (*rows, o.initial, *gate)]
    options |= {"cu_seqlens": case.offsets, "initial_state": given[5], "output_final_state": True}
    if gate:
        options |= {"A_log": given[6], "dt_bias": given[7], "use_gate_in_kernel": True}
    out, final = (function or case.function)(*given[:5], **options)
    leaves = [t for t in given if t is not None]
    d_out, d_final = upstream(case) if slopes is None else slopes
    grads = torch.autograd.grad((out, final), leaves, (d_out.unflatten(0, shape), d_final))
    flat = *(t.flatten(0, 1) for t in grads[:5]), *grads[5:]
    return Results(out.flatten(0, 1).detach(), final.detach(), flat)


def same(a: Results, b: Results) -> bool:
    return all(map(same_bytes, (*a[:2], *a.gradients), (*b[:2], *b.gradients)))


def rows_of(results: Results, rows: slice, states: slice = slice(None)) -> Results:
    """Results of some rows, and of the states of some sequences."""
    of_rows = *(t[rows] for t in results.gradients[:5]), *(t[states] for t in results.gradients[5:])
    return Results(results.out[rows], results.final[states], of_rows)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES | CHANNELS)
def test_against_float64(name):
    """Rows, states and all gradients; what lies behind the pack is 0."""
    check_values((CASES | CHANNELS)[name])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_norms_and_gates_against_float64(norm, bias):
    for case in (CASES["fp32"], CHANNELS["channels, fp32"]):
        A_log, dt_bias = gate_parameters(case)
        check_values(case, norm, (A_log, dt_bias if bias else None))


def test_a_bounded_gate_against_float64():
    case = CHANNELS["channels, fp32"]
    check_values(case, False, gate_parameters(case), -5.0)


def check_values(case: Case, norm: bool = False, gate: tuple = (), bound=None) -> None:
    o, (d_out, d_final) = operands(case), upstream(case)
    options = {} if bound is None else {"lower_bound": bound}
    got = run(case, o, gate=gate, scale=0.3, use_qk_l2norm_in_kernel=norm, **options)
    want, last, leaves = exact(case, o, 0.3, norm, gate, bound)
    slopes = d_out[: len(want)].double(), d_final.double()
    wanted = torch.autograd.grad((want, last), [t for t in leaves if t is not None], slopes)
    assert got.final.dtype == FP32 and got.out.dtype == case.dtype
    pairs = [(got.out, want), (got.final, last), *zip(got.gradients, wanted, strict=True)]
    for actual, expected in pairs:
        behind, expected = actual[len(want) :], expected[: len(actual)]
        assert len(actual) != case.rows or not behind.any()
        bound = oracle.delta_bound(expected, actual.dtype, 2.0**-20 if norm else 2.0**-22)
        assert ((actual.double()[: len(expected)] - expected).abs() <= bound).all()


# ---- bytes ---------------------------------------------------------------------------------------

SEQUENCE = Case((150,), batch=1)


def parts(cuts: tuple[int, ...], channels: bool = False) -> tuple[Results, Results]:
    """(the whole, its parts by way of states and their gradients) of a sequence of 150 rows.

    Its gates are slow: the roundings of S between chunks reach the end.
    """
    case = SEQUENCE._replace(channels=channels)
    o, (d_out, d_final) = operands(case), upstream(case)
    o = o._replace(g=o.g * 0.005)
    whole, initial = run(case, o), o.initial.requires_grad_()
    state, outs, leaves = initial, [], []
    for first, end in itertools.pairwise((0, *cuts, 150)):
        rows = [t[None, first:end].detach().requires_grad_() for t in o[:5]]
        out, state = case.function(*rows, initial_state=state, output_final_state=True)
        outs.append(out[0])
        leaves.append(rows)
    out = torch.cat(outs)
    each = [t for rows in leaves for t in rows]
    *grads, d_initial = torch.autograd.grad((out, state), (*each, initial), (d_out, d_final))
    grads = [torch.cat(grads[i::5], 1)[0] for i in range(5)]
    return whole, Results(out.detach(), state.detach(), (*grads, d_initial))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("cuts", [(64,), (128,), (64, 128)], ids=str)
def test_parts_cut_at_chunks_have_the_bytes_of_the_whole(cuts, channels):
    """Both passes: the gradient of a state is the one that a part before it goes on from."""
    assert same(*parts(cuts, channels))


def test_an_initial_state_starts_a_grid_of_chunks():
    """Cut elsewhere, the rounding of S is elsewhere: right, but other bytes."""
    whole, cut = parts((50,))
    assert same_bytes(whole.out[:50], cut.out[:50]) and not same_bytes(whole.final, cut.final)
    assert (whole.final - cut.final).abs().max() < 1e-5 * whole.final.abs().max()


PACK = Case((5, 0, 66, 1, 130), behind=3)


def alone(case: Case, o, s: int) -> tuple[Results, slice]:
    """Sequence ``s`` of a pack as a batch of one, and its rows."""
    first, end = case.sequences.bounds()[s]
    rows, (d_out, d_final) = slice(first, end), upstream(case)
    part = type(o)(*(t[rows] for t in o[:5]), o.initial[s : s + 1])
    slopes = d_out[rows], d_final[s : s + 1]
    return run(case._replace(lengths=(end - first,), batch=1, behind=0), part, slopes), rows


def packs(case: Case = PACK) -> None:
    o = operands(case)
    whole = run(case, o)
    for s in range(case.count):
        single, rows = alone(case, o, s)
        assert same(rows_of(whole, rows, slice(s, s + 1)), single)


@pytest.mark.parametrize("channels", [False, True])
def test_a_sequence_of_a_pack_has_its_bytes_alone(channels):
    """Empty ones, those of one row, and those of several chunks."""
    packs(PACK._replace(channels=channels))


def test_an_empty_sequence_keeps_its_state():
    o, (_, d_final) = operands(PACK), upstream(PACK)
    results = run(PACK, o)
    assert same_bytes(results.final[1], o.initial[1])
    assert same_bytes(results.gradients[5][1], d_final[1])
    empty = Case((0,), batch=2)
    results = run(empty, operands(empty))
    assert same_bytes(results.final, operands(empty).initial) and results.out.shape == (0, 4, 24)
    assert same_bytes(results.gradients[5], upstream(empty)[1])
    zeros = ck.chunk_gated_delta_rule(
        *(t[None] for t in operands(empty)[:5]), output_final_state=True
    )[1]
    assert zeros.shape == (1, 4, 16, 24) and not zeros.any()


@pytest.mark.parametrize("channels", [False, True])
def test_a_batch_beside_nan(channels):
    """Another sequence, and what lies behind a pack, may be anything."""
    case = Case((70,), batch=2, channels=channels)
    o, slopes = operands(case), upstream(case)
    want = rows_of(run(case, o, slopes), slice(70), slice(1))
    for t in (*o[:5], slopes[0]):
        t[70:] = torch.nan
    for t in (o.initial, slopes[1]):
        t[1:] = torch.nan
    assert same(rows_of(run(case, o, slopes), slice(70), slice(1)), want)
    pack = Case((70,), behind=70, channels=channels)
    beside = o._replace(initial=o.initial[:1])
    got = run(pack, beside, (slopes[0], slopes[1][:1]))
    assert same(rows_of(got, slice(70)), want)
    assert not any(t[70:].any() for t in (got.out, *got.gradients[:5]))


def served_alone() -> None:
    """v heads of a k head: each has its bytes alone, and dq and dk add theirs, ascending.

    The first two are alike, with slopes that cancel, and so large that nothing else would be left
    of the third in another order.
    """
    case = Case((66,), batch=1, heads=(1, 3), dtype=FP32, beta=FP32)
    o, slopes = operands(case), upstream(case)
    for t in (*o[2:5], o.initial):
        t[:, 1] = t[:, 0]
    for t in slopes:
        t[:, 0] *= 2.0**40
        t[:, 1] = -t[:, 0]
    whole = run(case, o, slopes)
    for h in range(3):
        heads = slice(h, h + 1)
        part = o._replace(**{name: getattr(o, name)[:, heads] for name in SERVED})
        single = run(case._replace(heads=(1, 1)), part, [t[:, heads] for t in slopes])
        of_whole = [t[:, heads] for t in (*whole[:2], *whole.gradients[2:])]
        assert all(map(same_bytes, (*single[:2], *single.gradients[2:]), of_whole))
    for of_last, total in zip(single.gradients[:2], whole.gradients, strict=False):
        assert same_bytes(of_last + 0.0, total)


def test_v_heads_that_share_a_k_head():
    served_alone()


def test_no_bit_follows_how_much_is_computed_at_once(monkeypatch):
    case = Case((70,), batch=2, heads=(2, 6))
    want = run(case, operands(case))
    monkeypatch.setattr(cpu_chunks, "AT_ONCE", 5 * 64 * 16 * 24)
    assert same(run(case, operands(case)), want)


def test_both_names_are_one_op():
    assert ck.fused_recurrent_gated_delta_rule is ck.chunk_gated_delta_rule
    assert ck.fused_recurrent_kda is ck.chunk_kda


def test_a_gate_by_channel_of_equal_channels_is_one_of_a_head():
    case = CHANNELS["channels, fp32"]
    o = operands(case)
    of_heads = o._replace(g=o.g[..., 0])
    each = o._replace(g=of_heads.g[..., None].expand_as(o.g))
    got, want = run(case, each), run(case._replace(channels=False), of_heads)
    assert same_bytes(got.out, want.out) and same_bytes(got.final, want.final)
    others = [g for i, g in enumerate(got.gradients) if i != 3]
    assert all(map(same_bytes, others, [g for i, g in enumerate(want.gradients) if i != 3]))
    got, want = got.gradients[3].double().sum(2), want.gradients[3]
    assert (got - want).abs().max() <= 2.0**-20 * want.abs().max()


@pytest.mark.parametrize("channels", [False, True])
def test_norms_and_gates_have_the_bytes_of_their_ops(channels):
    """Both passes, those of the parameters too, of a pack; and with main_grads."""
    case = PACK._replace(channels=channels)
    o, (d_out, d_final) = operands(case), upstream(case)
    gate, offsets = gate_parameters(case), case.offsets
    got = run(case, o, gate=gate, use_qk_l2norm_in_kernel=True)
    leaves = [t.detach().requires_grad_() for t in (*(t[None] for t in o[:5]), o.initial, *gate)]
    q, k = (op_gate.l2norm(t, 1e-6) for t in leaves[:2])
    g = op_gate.decay_gate(leaves[3], *leaves[6:], offsets, None, None, None)
    results = case.function(
        q, k, leaves[2], g, leaves[4], None, leaves[5], True, cu_seqlens=offsets
    )
    slopes = d_out[None], d_final
    each = torch.autograd.grad(results, leaves, slopes)
    each = *(t.flatten(0, 1) for t in each[:5]), *each[5:]
    assert same(got, Results(results[0][0].detach(), results[1].detach(), each))


def split(groups, channels: bool) -> list[torch.Tensor]:
    """main_grads of the gate after micro-batches of groups of the pack's sequences."""
    case = PACK._replace(channels=channels)
    o, (d_out, _), bounds = operands(case), upstream(case), PACK.sequences.bounds()
    A_log, dt_bias = (t.requires_grad_() for t in gate_parameters(case))
    mains = [drawn(len(t), seed=i, dtype=FP32) for i, t in enumerate((A_log, dt_bias), 30)]
    for first, last in groups:
        rows = slice(bounds[first][0], bounds[last][1])
        out, _ = case.function(
            *(t[None, rows] for t in o[:5]),
            cu_seqlens=PACK.offsets[first : last + 2] - rows.start,
            A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True,
            A_log_main_grad=mains[0], dt_bias_main_grad=mains[1],
        )  # fmt: skip
        out.backward(d_out[None, rows])
    assert A_log.grad is dt_bias.grad is None
    return mains


@pytest.mark.parametrize("channels", [False, True])
def test_gradients_of_a_gate_are_split_invariant(channels):
    cuts = [(0, 4)], [(0, 1), (2, 2), (3, 4)], [(0, 2), (3, 3), (4, 4)]
    whole, *others = (split(groups, channels) for groups in cuts)
    assert all(all(map(same_bytes, other, whole)) for other in others)


def test_the_default_scale_is_that_of_the_size_of_k():
    case = CASES["batch"]
    assert same(run(case, operands(case), scale=0.25), run(case, operands(case)))


def sequences_of(rows: torch.Tensor) -> torch.Tensor:
    """Rows of sequences of 3 rows of one head of 8 channels, one in each row given."""
    q, k, v = rows.view(-1, 3, 3, 1, 8).unbind(2)
    g, beta = -rows[:, :3, None].float().abs(), rows[:, 3:6, None]
    return ck.chunk_gated_delta_rule(q, k, v, g, beta)[0].reshape(len(rows), 24)


def test_the_battery_of_rows():
    """A sequence is a row: batches, neighbours, NaN among them, strides, repeated calls."""
    op = contract.RowOp("chunk_gated_delta_rule", sequences_of, width=72, dtype=BF16)
    assert contract.check_rows(op, 70, seed=1) > 50


#: Mutants: a module and an edit of it.
MUTANTS = {
    "no rounding between chunks": (
        cpu_chunks, (".flatten(0, 1).clone()", ".flatten(0, 1).double()"),
    ),
    "decay after the read": (
        cpu_delta,
        ("torch.sub(v, halves(state * k, 1), out=residuals[t])",
         "torch.sub(v, halves(states[t] * k, 1), out=residuals[t])"),
    ),
    "o before the update": (
        cpu_delta, ("halves(states[1:] * rows.q", "halves(states[:-1] * rows.q"),
    ),
    "k heads by turns": (cpu_delta, ("t.repeat_interleave(times, 2)", "t.repeat(1, 1, times, 1)")),
    "one v head's gradient": (
        cpu_chunks, ("        total = total + head\n", "        total = head\n"),
    ),
    "chunks of the pack": (
        cpu_chunks,
        ("min(start + self.size, self.length)",
         "min(start + self.size, self.length) if self.first % 2 == 0 else self.length"),
    ),
    "another sequence's state": (
        cpu_chunks,
        ("return states[self.sequence : self.sequence + self.count]",
         "return states[: self.count]"),
    ),
    "another chunk's state": (
        cpu_chunks, ("return states[first::chunks]", "return states[0::chunks]"),
    ),
    "a gradient of the state that is not decayed": (
        cpu_delta, ("slope = decayed[t] * decays[t]", "slope = decayed[t]"),
    ),
    "gates of another channel": (
        cpu_delta,
        ("elementary.exp(g).view", "elementary.exp(g).flip(-1 if g.dim() == 3 else 0).view"),
    ),
    "v heads descending": (cpu_chunks, (".unbind(3)\n", ".flip(3).unbind(3)\n")),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name):
    module, edit = MUTANTS[name]
    # Second, as it imports names of the first.
    of_delta = (edit,) if module is cpu_delta else ()
    chunks = planted(cpu_chunks, *(() if of_delta else (edit,)))
    with chunks, planted(cpu_delta, *of_delta), pytest.raises(AssertionError):
        dispatch.forget()
        for case in ("batch", "pack", "channels"):
            test_against_float64(case)
        packs()
        assert same(*parts((64, 128)))
        served_alone()
    dispatch.forget()


# ---- what is refused -----------------------------------------------------------------------------

Q, V, G = drawn(2, 3, 2, 16), drawn(2, 3, 4, 16), drawn(2, 3, 4, dtype=FP32)
RIGHT = {"q": Q, "k": Q, "v": V, "g": G, "beta": G}
OFFSETS = torch.tensor([0, 2, 3])
#: Arguments of one sequence of 3 rows.
ONE = {name: t[:1] for name, t in RIGHT.items()}
STATE = torch.zeros(2, 4, 16, 16)
#: Wrong arguments -> (error, the message's beginning).
REFUSED = {
    "three dimensions": ({"q": Q[0]}, ShapeError, "q: expected 4 dimensions [B, T, H, K]"),
    "a K of 12": ({"q": Q[..., :12], "k": Q[..., :12]}, ShapeError, "q: expected K a multiple"),
    "a K of 264": (
        {"q": drawn(2, 3, 2, 264), "k": drawn(2, 3, 2, 264)}, ShapeError, "q: expected K a",
    ),
    "no heads": ({"q": Q[:, :, :0], "k": Q[:, :, :0]}, ShapeError, "q: expected H, heads,"),
    "another k": ({"k": Q[:, :, :1]}, ShapeError, "k: expected shape [2, 3, 2, 16], that of q"),
    "three v heads": ({"v": V[:, :, :3]}, ShapeError, "v: expected HV, heads, a multiple of 2"),
    "a V of 4": ({"v": V[..., :4]}, ShapeError, "v: expected V a multiple of 8"),
    "another T": ({"v": V[:, :2]}, ShapeError, "v: expected shape [2, 3, 4, 16], B and T"),
    "another dtype of v": ({"v": V.float()}, DtypeError, "v: expected one of torch.bfloat16"),
    "gates of k heads": ({"g": G[..., :2]}, ShapeError, "g: expected shape [2, 3, 4]"),
    "gates in bf16": ({"g": G.bfloat16()}, DtypeError, "g: expected one of torch.float32"),
    "beta in fp16": ({"beta": G.half()}, DtypeError, "beta: expected one of torch.bfloat16"),
    "one state": ({"initial_state": STATE[:1]}, ShapeError, "initial_state: expected shape [2, 4"),
    "a state in bf16": (
        {"initial_state": STATE.bfloat16()}, DtypeError, "initial_state: expected one of",
    ),
    "a scale of NaN": ({"scale": float("nan")}, ArgumentValueError, "scale: expected a finite"),
    "a scale in words": ({"scale": "1"}, ArgumentTypeError, "scale: expected a number"),
    "a batch and offsets": ({"cu_seqlens": OFFSETS}, ShapeError, "cu_seqlens: expected batch 1"),
    "offsets beyond q": (
        ONE | {"cu_seqlens": OFFSETS * 2}, ArgumentValueError, "cu_seqlens: expected numbers",
    ),
    "heads first": (
        {"head_first": False}, ArgumentTypeError, "head_first: expected no head_first",
    ),
    "states [V, K]": (
        {"state_v_first": True}, ArgumentTypeError, "state_v_first: expected no state_v_first",
    ),
    "a norm of K 12": (
        {"q": Q[..., :12], "use_qk_l2norm_in_kernel": True}, ShapeError, "q: expected K a multiple",
    ),
    "a norm of another k": (
        {"k": Q[:, :, :1], "use_qk_l2norm_in_kernel": True}, ShapeError, "k: expected shape [2, 3,",
    ),
    "a gate without A_log": (
        {"use_gate_in_kernel": True}, ArgumentTypeError, "A_log: expected a torch.Tensor, got None",
    ),
    "a gate of two heads": (
        {"g": G[..., :2], "use_gate_in_kernel": True, "A_log": G[0, 0, :2]},
        ShapeError, "g: expected shape [2, 3, 4]",
    ),
    "A_log of k heads": (
        {"use_gate_in_kernel": True, "A_log": G[0, 0, :2]}, ShapeError, "A_log: expected shape [4]",
    ),
    "A_log without a gate": (
        {"A_log": G[0, 0]}, ArgumentTypeError, "A_log: expected None without use_gate",
    ),
    "a main_grad without a gate": (
        {"dt_bias_main_grad": G[0, 0]}, ArgumentTypeError, "dt_bias_main_grad: expected None",
    ),
    "a main_grad of no bias": (
        {"use_gate_in_kernel": True, "A_log": G[0, 0], "dt_bias_main_grad": G[0, 0]},
        ArgumentTypeError, "dt_bias_main_grad: expected None, as there is no dt_bias",
    ),
    "gates by channel": (
        {"g": G[..., None].expand(2, 3, 4, 16)}, ShapeError, "g: expected 3 dimensions [B, T, HV]",
    ),
    "another argument": ({"u": G}, ArgumentTypeError, "u: expected an argument"),
}  # fmt: skip
#: Likewise of `chunk_kda`.
RIGHT_KDA = RIGHT | {"g": G[..., None].expand(2, 3, 4, 16)}
GATED = {"use_gate_in_kernel": True, "A_log": G[0, 0]}
REFUSED_KDA = {
    "gates of heads": ({"g": G}, ShapeError, "g: expected 4 dimensions [B, T, HV, K]"),
    "gates of another K": (
        {"g": RIGHT_KDA["g"][..., :8]}, ShapeError, "g: expected shape [2, 3, 4, 16], B, T, HV of",
    ),
    "a bias of heads": (
        GATED | {"dt_bias": G[0, 0]}, ShapeError, "dt_bias: expected shape [64], H K of a",
    ),
    "a bound without a gate": (
        {"lower_bound": -5.0}, ArgumentTypeError, "lower_bound: expected None without use_gate",
    ),
    "a bound above 0": (
        GATED | {"lower_bound": 5.0}, ArgumentValueError, "lower_bound: expected a number below 0",
    ),
    "a bound in words": (
        GATED | {"lower_bound": "-5"}, ArgumentTypeError, "lower_bound: expected a number",
    ),
    "a safe gate": ({"safe_gate": True}, ArgumentTypeError, "safe_gate: expected no safe_gate"),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED | REFUSED_KDA)
def test_refused(which):
    of_kda = which in REFUSED_KDA
    changed, error, message = (REFUSED_KDA if of_kda else REFUSED)[which]
    function, right = (ck.chunk_kda, RIGHT_KDA) if of_kda else (ck.chunk_gated_delta_rule, RIGHT)
    with pytest.raises(error) as caught:
        function(**right | changed)
    assert str(caught.value).startswith(message)
