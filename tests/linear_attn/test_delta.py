"""The gated delta rule on a CPU: values, norms and gates before it, what is refused."""

from __future__ import annotations

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
from tests.anchors import planted
from tests.contract import same_bytes
from tests.runtime.cached_calls import drawn

from .delta_cases import (
    CASES,
    CHANNELS,
    FP32,
    SHARED,
    Case,
    exact,
    gate_parameters,
    operands,
    upstream,
)
from .recurrences import (
    Results,
    called,
    given,
    heads_are_alone,
    parts_are_whole,
    rows_in,
    run,
    same,
    sequences_are_alone,
    within_bounds,
)

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
    options = {"use_qk_l2norm_in_kernel": norm, "use_gate_in_kernel": bool(gate)}
    options |= {} if bound is None else {"lower_bound": bound}
    parameters = {n: t for n, t in zip(("A_log", "dt_bias"), gate, strict=False) if t is not None}
    o, names = operands(case), (*case.op.operands._fields, "A_log", "dt_bias")
    got = run(case, o, parameters=parameters, scale=0.3, **options)
    *exactly, leaves = exact(case, o, 0.3, norm, gate, bound)
    leaves = {n: t for n, t in zip(names, leaves, strict=False) if t is not None}
    inside = 2.0**-20 if norm else 2.0**-22
    within_bounds(got, (*exactly, leaves), case, inside, inside)


# ---- bytes ---------------------------------------------------------------------------------------

PACK = Case((5, 0, 66, 1, 130), behind=3)


@pytest.mark.parametrize(
    ("case", "name", "other"),
    [
        (CASES["batch"], "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        (CHANNELS["channels"], "chunk_kda", "fused_recurrent_kda"),
    ],
    ids=["gated_delta_rule", "kda"],
)
def test_both_names_are_one_op(monkeypatch, case, name, other):
    want = run(case, operands(case))
    monkeypatch.setattr(ck, name, getattr(ck, other))
    assert same(run(case, operands(case)), want)


def test_a_gate_by_channel_of_equal_channels_is_one_of_a_head():
    case = CHANNELS["channels, fp32"]
    o = operands(case)
    of_heads = o._replace(g=o.g[..., 0])
    each = o._replace(g=of_heads.g[..., None].expand_as(o.g))
    got, want = run(case, each), run(case._replace(channels=False), of_heads)
    assert same(got, want, want.gradients.keys() - {"g"})
    got, want = got.gradients["g"].double().sum(2), want.gradients["g"]
    assert (got - want).abs().max() <= 2.0**-20 * want.abs().max()


@pytest.mark.parametrize("channels", [False, True])
def test_norms_and_gates_have_the_bytes_of_their_ops(channels):
    """Both passes, those of the parameters too, of a pack."""
    case = PACK._replace(channels=channels)
    o, (d_out, d_final) = operands(case), upstream(case)
    parameters = dict(zip(("A_log", "dt_bias"), gate_parameters(case), strict=True))
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
    got = run(case, o, parameters=parameters, **options)
    leaves, others = given(case, o)
    leaves |= {n: t.detach().requires_grad_() for n, t in parameters.items()}
    inputs = {n: op_gate.l2norm(leaves[n], 1e-6) for n in "qk"}
    gate = leaves["g"], leaves["A_log"], leaves["dt_bias"], case.offsets
    inputs["g"] = op_gate.decay_gate(*gate, None, None, None)
    rows = {n: inputs.get(n, leaves[n]) for n in case.op.operands._fields}
    out, final = called(case, rows, **others)
    torch.autograd.backward((out, final), (d_out[None], d_final))
    grads = {n: rows_in(case, t.grad) if n in case.op.of_rows else t.grad
             for n, t in leaves.items()}  # fmt: skip
    assert same(got, Results(rows_in(case, out).detach(), final.detach(), grads))


def split(groups, channels: bool) -> list[torch.Tensor]:
    """main_grads of the gate after micro-batches of groups of the pack's sequences."""
    case = PACK._replace(channels=channels)
    o, (d_out, _), bounds = operands(case), upstream(case), PACK.sequences.bounds()
    A_log, dt_bias = (t.requires_grad_() for t in gate_parameters(case))
    mains = [drawn(len(t), seed=i, dtype=FP32) for i, t in enumerate((A_log, dt_bias), 30)]
    for first, last in groups:
        rows = slice(bounds[first][0], bounds[last][1])
        out, _ = getattr(ck, case.public[0])(
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
        sequences_are_alone(PACK)
        assert parts_are_whole((64, 128), PACK._replace(lengths=(150,), batch=1, behind=0))
        heads_are_alone(SHARED)
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
