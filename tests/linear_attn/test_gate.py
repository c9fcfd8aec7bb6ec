"""l2norm and the decay on a CPU: values, bytes of rows, packs and micro-batches, refusals."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    DtypeError,
    ShapeError,
    UnsupportedTransformError,
)
from cute_kernels.linear_attn import cpu, cpu_gate, op_delta, op_gate  # noqa: F401  (a contract)
from tests import contract
from tests.anchors import planted
from tests.contract import same_bytes
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

from .cases import (
    BF16,
    FP32,
    GATES,
    WIDTHS,
    Case,
    GateOperands,
    decay,
    gate_operands,
    norm_rows,
    one_sum_a_micro_batch,
)
from .cases import l2norm as both_passes

FP16 = torch.float16
EPS = 1e-6


def rounded_once(
    actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, more: float = 0.0
) -> bool:
    """Whether the error is that of one rounding to the dtype, and ``more`` of the value."""
    finite = torch.finfo(dtype)
    bound = exact.abs() * (finite.eps * 0.501 + more) + finite.smallest_normal * finite.eps
    return bool(((actual.double() - exact).abs() <= bound).all())


# ---- l2norm --------------------------------------------------------------------------------------


def norm_values(width: int, dtype: torch.dtype) -> None:
    """Both passes against float64; dx against its largest term."""
    x, dy = norm_rows(width, dtype)
    exact_x = x.double().requires_grad_()
    exact = oracle.l2norm(exact_x, EPS)
    exact.backward(dy.double())
    y, dx = both_passes(cpu_gate, x, dy)
    assert rounded_once(y, exact.detach(), dtype, 2.0**-24)  # rstd is of fp32
    scale = torch.finfo(dtype).eps * exact_x.grad.abs().amax(-1, keepdim=True)
    assert ((dx.double() - exact_x.grad).abs() <= scale).all()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_against_float64(width, dtype):
    norm_values(width, dtype)


def test_strides_have_the_same_bytes():
    """q of a convolution's [B, T, D]; a dimension with gaps; rows [K] alone."""
    wide = drawn(2, 9, 5 * 64, dtype=BF16)
    x = wide[..., 64 : 64 * 4].view(2, 9, 3, 64)
    assert not x.is_contiguous()
    dy = drawn(2, 9, 3, 64, seed=3)
    want = None
    for view in (
        x,
        x.contiguous(),
        x.mT.contiguous().mT,
        x.transpose(0, 1).clone().transpose(0, 1),
    ):
        leaf = view.detach().requires_grad_()
        y = op_gate.l2norm(leaf, EPS)
        (dx,) = torch.autograd.grad(y, leaf, dy.mT.contiguous().mT)
        want = want or (y, dx)
        assert y.is_contiguous() and all(map(same_bytes, (y, dx), want))
    assert same_bytes(op_gate.l2norm(x[1, 4, 2], EPS), want[0][1, 4, 2])
    assert same_bytes(op_gate.l2norm(x[1, :, 1], EPS), want[0][1, :, 1])


def test_the_battery_of_norms():
    """Batches, neighbours, NaN among them, strides, repeated calls."""
    op = contract.RowOp("l2norm", lambda x: op_gate.l2norm(x, EPS), width=128, dtype=BF16)
    assert contract.check_rows(op, 70, seed=1) > 50


def test_a_norms_gradient_is_its_row_alone():
    x, dy = norm_rows(64)
    want = both_passes(cpu_gate, x, dy)
    beside = torch.full_like(x, float("nan"))
    beside[4] = x[4]
    got = both_passes(cpu_gate, beside, dy)
    alone = both_passes(cpu_gate, x[4:5], dy[4:5])
    for a, b, c in zip(want, got, alone, strict=True):
        assert same_bytes(a[4], b[4]) and same_bytes(a[4], c[0])


# ---- decay ---------------------------------------------------------------------------------------


def decay_values(name: str) -> None:
    """Both passes of a batch or pack against float64; sums onto what is there."""
    case, o = GATES[name], gate_operands(GATES[name], seed=3)
    end = case.sequences.bounds()[-1][1]
    leaves = [None if t is None else t.double().requires_grad_() for t in o[:3]]
    exact = oracle.decay(leaves[0][:end], *leaves[1:], case.bound)
    exact.backward(o.dg[:end].double())
    sizes = case.channels, case.channels * case.each
    start = [drawn(size, seed=i, dtype=FP32) for i, size in enumerate(sizes, 5)]
    g, da, *sums = decay(cpu_gate, case, o, [t.clone() for t in start])
    assert rounded_once(g[:end], exact.detach(), FP32) and g.isfinite().all()
    # torch's slope is 1 above 20.
    bound = leaves[0].grad.abs() * torch.finfo(case.dtype).eps * 0.501 + 1e-7
    assert ((da.double() - leaves[0].grad).abs() <= bound).all()
    assert not g[end:].view(torch.int32).any() and not da[end:].any()
    for total, before, leaf in zip(sums, start, leaves[1:], strict=True):
        grad = 0 if leaf is None else leaf.grad
        terms = (o.dg[:end].double() * exact.detach()).abs().sum(0)
        scale = terms.view(len(before), -1).sum(1) + before.abs() + 1
        assert ((total.double() - before - grad).abs() <= scale * 2.0**-21).all()


@pytest.mark.parametrize("name", GATES)
def test_decay_against_float64(name):
    decay_values(name)


def test_ends_of_the_formulas():
    """-inf: -0, above 20 the input itself; slopes 0 and 1."""
    x = torch.tensor([[[float("-inf")], [20.5], [float("inf")], [0.0], [float("nan")]]])
    leaf = x.requires_grad_()
    g = op_gate.decay_gate(leaf, torch.zeros(1), *[None] * 5)
    g.backward(torch.ones_like(g))
    assert g.flatten()[:3].tolist() == [0.0, -20.5, float("-inf")]
    assert g[0, 3, 0].item() == pytest.approx(-0.6931471805599453, rel=2**-24)
    assert leaf.grad.flatten()[:4].tolist() == [0.0, -1.0, -1.0, -0.5] and g[0, 4].isnan()


def pack_is_alone(launch=cpu_gate, name: str = "pack") -> None:
    """Each sequence's rows, and its chunks of the sums, have the bytes that they have alone."""
    case = GATES[name]
    o = gate_operands(case)
    behind = o.a.clone()
    behind[-case.behind :] = float("nan")
    g, da, *sums = decay(launch, case, o._replace(a=behind))
    totals = [torch.zeros_like(t) for t in sums]
    for first, end in case.sequences.bounds():
        if end > first:
            part = o._replace(a=o.a[first:end], dg=o.dg[first:end])
            one = case._replace(lengths=(end - first,), batch=1, behind=0)
            alone = decay(launch, one, part, totals)
            assert same_bytes(alone[0], g[first:end]) and same_bytes(alone[1], da[first:end])
    assert all(map(same_bytes, sums, totals))
    assert not g[-case.behind :].any() and not da[-case.behind :].any()


@pytest.mark.parametrize("name", ["pack", "channels"])
def test_a_sequence_has_its_bytes_in_a_pack_beside_nan(name):
    pack_is_alone(name=name)


def test_strides_of_a_gate_have_the_same_bytes():
    """a of a projection to [b, a]; a head dimension with gaps."""
    o = gate_operands(GATES["batch"])
    a = o.a.view(2, 21, 6)
    want = op_gate.decay_gate(a, o.A_log, o.dt_bias, *[None] * 4)
    for view in (torch.cat([a, a], 2)[..., 6:], a.mT.contiguous().mT):
        assert not view.is_contiguous()
        got = op_gate.decay_gate(view, o.A_log, o.dt_bias, *[None] * 4)
        assert same_bytes(got, want)


#: Cuts of eight sequences into 1, 2 and 4 micro-batches.
GROUPS = [(0, 8)], [(0, 3), (3, 8)], [(0, 1), (1, 4), (4, 7), (7, 8)]


def accumulated(groups, o: GateOperands, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """main_grads after micro-batches of groups of sequences."""
    mains = drawn(6, seed=5, dtype=FP32), drawn(6, seed=6, dtype=FP32)
    A_log, dt_bias = (t.detach().requires_grad_() for t in o[1:3])
    for first, last in groups:
        begin, end = offsets[first].item(), offsets[last].item()
        cu = offsets[first : last + 1] - begin
        g = op_gate.decay_gate(o.a[None, begin:end], A_log, dt_bias, cu, *mains, None)
        g.backward(o.dg[None, begin:end])
    assert A_log.grad is dt_bias.grad is None
    return mains


def split_invariant() -> bool:
    lengths = (70, 3, 64, 129, 1, 0, 65, 2)
    o = gate_operands(Case(lengths, channels=6))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    whole, *parts = (accumulated(groups, o, offsets) for groups in GROUPS)
    return all(all(map(same_bytes, part, whole)) for part in parts)


def test_gradients_of_parameters_are_split_invariant():
    assert split_invariant()


@pytest.mark.parametrize(
    "edit",
    [
        ("    for chunk in rows.split(size) if len(rows) else ():\n        into +=",
         "    for chunk in [rows] if len(rows) else ():\n        into +="),
        ("into += _chain(chunk).float()", "into.copy_((into.double() + _chain(chunk)).float())"),
    ],
)  # fmt: skip
def test_the_chunk_shows_in_the_sums(edit):
    """Chunks of another size, and sums of another dtype, have other bytes."""
    case = Case((300,), batch=1, channels=6)
    o, sums = gate_operands(case), [[drawn(6, seed=i, dtype=FP32) for i in (5, 6)] for _ in "ab"]
    decay(cpu_gate, case, o, sums[0])
    with planted(cpu, edit):
        mutant = cpu.add_chunks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_gate, "add_chunks", mutant)
            decay(cpu_gate, case, o, sums[1])
    assert not all(map(same_bytes, *sums))


def test_one_sum_a_micro_batch_is_killed():
    with one_sum_a_micro_batch(cpu_gate, "decay_gate_backward", "A_log", "dt_bias"):
        assert not split_invariant()


def test_gradients_that_nobody_needs_are_not_made():
    o = gate_operands(GATES["batch"])
    operands = o.dg.view(2, 21, 6), o.a.view(2, 21, 6), o.A_log, o.dt_bias, None
    main = torch.zeros(6)
    whole = op_gate.decay_gate_backward(*operands, *[None] * 3, [True, True, True])
    da, *none = op_gate.decay_gate_backward(*operands, None, main, None, [True, False, True])
    assert same_bytes(da, whole[0]) and same_bytes(main, whole[2].float())
    assert not any(t.numel() for t in none)


#: Edits of cpu_gate.py -> the check that they fail.
MUTANTS = {
    "another eps": ("halves(x * x, -1) + eps", "halves(x * x, -1) + eps * 1.0001"),
    "eps under the root of each": (
        "1.0 / (halves(x * x, -1) + eps).sqrt()", "1.0 / (halves(x * x, -1).sqrt() + eps)",
    ),
    "a norm of fp32": ("out.copy_(x * _rstd(x, eps))", "out.copy_(x.bfloat16() * _rstd(x, eps))"),
    "x_hat rounded": ("x_hat = x * rstd\n", "x_hat = (x * rstd).half().double()\n"),
    "softplus without its end": ("torch.where(x > SOFTPLUS_LINEAR, x, ", "torch.where(x > 25, 0, "),
    "no bias": ("x = x + gate.dt_bias.double()", "x = x + 0"),
    "the slope of a head": ("* elementary.value(", "* elementary.derivative("),
    "rows behind are gates": ("end = sequences.bounds()[-1][1]", "end = sequences.rows"),
    "da behind": (
        "            da[first:end] = upstream * slope\n",
        "            da[first:] = dg[first:] * _values(gate, lower_bound, first, None)[1]\n",
    ),
    "the bound of a head": ("(\"sigmoid\", rate * x) * lower_bound, slope",
                            "(\"sigmoid\", x) * lower_bound, slope"),
    "A_log by turns": (".repeat_interleave(", ".repeat("),
    "sums exchanged": ("(upstream * of_A_log).unflatten", "(upstream * slope).unflatten"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name):
    with planted(cpu_gate, MUTANTS[name]), pytest.raises(AssertionError):
        norm_values(24, FP32)
        decay_values("pack")
        decay_values("channels")
        decay_values("bounded")
        pack_is_alone()


# ---- what is refused -----------------------------------------------------------------------------

A, H, MAIN = torch.zeros(1, 5, 8), torch.zeros(8), torch.zeros(8)
OFFSETS = torch.tensor([0, 2, 5])
#: Wrong arguments of decay_gate -> (error, the message's beginning).
REFUSED = {
    "two dimensions": ({0: A[0]}, ShapeError, "a: expected 3 dimensions [B, T, H]"),
    "another H": ({1: H[:4]}, ShapeError, "A_log: expected shape [8], H of a"),
    "a bias of another H": ({2: H[:4]}, ShapeError, "dt_bias: expected shape [8], H of a"),
    "float64": ({1: H.double()}, DtypeError, "A_log: expected one of"),
    "a batch and offsets": ({0: A.expand(2, 5, 8)}, ShapeError, "cu_seqlens: expected batch 1"),
    "offsets that descend": (
        {3: OFFSETS.flip(0)}, ArgumentValueError, "cu_seqlens: expected numbers",
    ),
    "a main_grad of bf16": ({4: H.bfloat16()}, DtypeError, "A_log_main_grad: expected torch"),
    "a main_grad of no bias": ({2: None, 5: H}, ArgumentTypeError, "dt_bias_main_grad: expected"),
    "a K of 12": ({0: A[..., None].expand(1, 5, 8, 12)}, ShapeError, "a: expected K a multiple"),
    "a bias of heads": (
        {0: A[..., None].expand(1, 5, 8, 16)}, ShapeError, "dt_bias: expected shape [128], H K of",
    ),
    "a bound of 0": ({6: 0.0}, ArgumentValueError, "lower_bound: expected a number below 0"),
    "one main_grad of both": ({4: MAIN, 5: MAIN}, AliasError, "A_log_main_grad: expected memory"),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_a_decay_is_refused(which):
    changed, error, message = REFUSED[which]
    arguments = [A, H, H, OFFSETS, None, None, None]
    for i, value in changed.items():
        arguments[i] = value
    with pytest.raises(error) as caught:
        op_gate.decay_gate(*arguments)
    assert str(caught.value).startswith(message)


X = torch.zeros(3, 16)
NORMS = {
    "a width of 12": ((X[:, :12], EPS), ShapeError, "x: expected a last dimension that is a mul"),
    "a width of 264": ((torch.zeros(264), EPS), ShapeError, "x: expected a last dimension"),
    "float64": ((X.double(), EPS), DtypeError, "x: expected one of"),
    "eps 0": ((X, 0.0), ArgumentValueError, "eps: expected a number from 2^-126 to 2^40"),
}


@pytest.mark.parametrize("which", NORMS)
def test_a_norm_is_refused(which):
    arguments, error, message = NORMS[which]
    with pytest.raises(error) as caught:
        op_gate.l2norm(*arguments)
    assert str(caught.value).startswith(message)


def test_second_gradients_are_refused():
    x, a, A_log = (t.clone().requires_grad_() for t in (X, A, H))
    for y, leaf in (
        (op_gate.l2norm(x, EPS), x),
        (op_gate.decay_gate(a, A_log, *[None] * 5), a),
    ):
        with pytest.raises(UnsupportedTransformError, match="double backward"):
            torch.autograd.grad(y.sum(), leaf, create_graph=True)


def test_nothing():
    x, a, A_log = (t.requires_grad_() for t in (torch.zeros(2, 0, 16), A[:, :0].clone(), H.clone()))
    op_gate.l2norm(x, EPS).sum().backward()
    op_gate.decay_gate(a, A_log, *[None] * 5).sum().backward()
    assert x.grad.shape == x.shape and a.grad.shape == a.shape and not A_log.grad.any()
