"""gated_rms_norm on a CPU: values, bytes of rows, sums over rows, what is refused."""

from __future__ import annotations

import functools

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DtypeError,
    ShapeError,
)
from cute_kernels.linear_attn import cpu_gated_norm as cpu
from cute_kernels.linear_attn.config import group_part_rows
from tests import contract
from tests.anchors import planted
from tests.contract import same_bytes
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

from .cases import one_sum_a_micro_batch
from .gated_norm_cases import BF16, CASES, FP32, Case, Operands, operands, run, share


def call(case: Case, x, weight, gate, **options) -> torch.Tensor:
    rule = case.rule
    return ck.gated_rms_norm(
        x, weight, gate, rule.eps, norm_before_gate=rule.norm_before_gate,
        activation=rule.activation, group_size=rule.group_size, **options,
    )  # fmt: skip


def by_autograd(case: Case, o: Operands) -> list[torch.Tensor]:
    """[y, dx, dgate, dweight] in float64, by torch."""
    leaves = [t.double().requires_grad_() for t in (o.x, o.gate)]
    weight = torch.ones(case.width) if o.weight is None else o.weight
    leaves.append(weight.double().requires_grad_())
    x, gate, w = leaves
    value = torch.sigmoid(gate) if case.activation == "sigmoid" else gate * torch.sigmoid(gate)
    rows = (x if case.norm_before_gate else x * value).view(case.rows, case.groups, -1)
    normed = rows * (rows.pow(2).mean(2, keepdim=True) + case.rule.eps).rsqrt()
    y = normed.view_as(x) * w
    y = y * value if case.norm_before_gate else y
    return [y.detach(), *torch.autograd.grad(y, leaves, o.dy.double())]


# ---- values --------------------------------------------------------------------------------------


def within_bounds(name: str) -> None:
    """Both passes within the bound of fp32 of torch's float64."""
    case = CASES[name]
    o = operands(case)
    want = oracle.gated_norm(*o[:4], case.rule)
    names = [name for name in want if o.weight is not None or name != "dweight"]
    for exact, label in zip(by_autograd(case, o), want, strict=True):
        assert (exact - want[label].value).abs().max() <= 1e-12 * exact.abs().max()
    got = run(cpu, case, o)
    shares = {label: share(t, want[label]) for label, t in zip(names, got, strict=True)}
    assert max(shares.values()) <= 1, shares


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    within_bounds(name)


@pytest.mark.parametrize("name", CASES)
def test_the_public_function(name):
    """Rows of three dimensions, and gradients by autograd, have the backend's bytes."""
    case = CASES[name]
    case = case._replace(rows=2 * case.rows)
    o = operands(case)
    leaves = [None if t is None else t.requires_grad_() for t in (o.x, o.weight, o.gate)]
    x, weight, gate = (
        t if t is None or t.dim() == 1 else t.view(2, -1, case.width) for t in leaves
    )
    y = call(case, x, weight, gate)
    y.backward(o.dy.view_as(y))
    want = run(cpu, case, Operands(*(t if t is None else t.detach() for t in o)))
    got = [y.detach().view_as(o.x), leaves[0].grad, leaves[2].grad]
    assert all(map(same_bytes, got, want)) and y.is_contiguous()
    if weight is not None:
        assert same_bytes(weight.grad, want[3].to(weight.dtype))


# ---- bytes ---------------------------------------------------------------------------------------

WIDTH = 48
OF_ROWS = Case(1, WIDTH, False, groups=3)
WEIGHT = operands(OF_ROWS).weight


def rows_and_gradients(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """[y, dx, dgate] of rows [x, gate, dy]; all of them have strides between rows."""
    x, gate, dy = rows.unflatten(1, (3, WIDTH)).unbind(1)
    leaves = [t.detach().requires_grad_() for t in (x, gate)]
    y = call(case, leaves[0], WEIGHT, leaves[1])
    return torch.cat([y.detach(), *torch.autograd.grad(y, leaves, dy)], 1)


@pytest.mark.parametrize("first", [True, False])
def test_the_battery_of_rows(first):
    """Batches, neighbours, NaN among them, strides, repeated calls: y, dx and dgate of a row."""
    run_rows = functools.partial(rows_and_gradients, OF_ROWS._replace(norm_before_gate=first))
    op = contract.RowOp("gated_rms_norm", run_rows, width=3 * WIDTH, dtype=BF16)
    assert contract.check_rows(op, 33, seed=1) > 50


def test_a_group_has_the_bytes_of_a_row():
    case = Case(5, 72, False, 3)
    o = operands(case)
    whole = run(cpu, case, o)
    for i in range(3):
        part = slice(24 * i, 24 * (i + 1))
        alone = Operands(o.x[:, part], o.weight[part], o.gate[:, part], o.dy[:, part])
        got = run(cpu, Case(5, 24, False), alone)
        assert all(same_bytes(t, w[..., part]) for t, w in zip(got, whole, strict=True))


# ---- sums over rows ------------------------------------------------------------------------------

HEADS = 16
NARROW = Case(0, 128)
#: Tokens of HEADS rows: a part is 64 of them.
TOKENS, CUT = 230, group_part_rows(128) // HEADS


def accumulated(cuts: tuple[int, ...]) -> torch.Tensor:
    """main_grad after micro-batches of tokens [T, HEADS, 128]."""
    o = operands(NARROW._replace(rows=TOKENS * HEADS))
    x, gate, dy = (t.view(TOKENS, HEADS, 128) for t in (o.x, o.gate, o.dy))
    main, weight = drawn(128, seed=5, dtype=FP32), o.weight.requires_grad_()
    for first, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
        y = call(NARROW, x[first:end], weight, gate[first:end], main_grad=main)
        y.backward(dy[first:end])
    assert weight.grad is None
    return main


def split_invariant() -> bool:
    whole = accumulated(())
    return all(
        same_bytes(accumulated(cuts), whole)
        for cuts in ((CUT,), (2 * CUT,), (CUT, 2 * CUT, 3 * CUT))
    )


def test_dweight_is_split_invariant():
    assert split_invariant()


def test_a_cut_within_a_part_shows():
    """So the rows of a part are data that these bytes depend on."""
    assert not same_bytes(accumulated((CUT // 2 + 1,)), accumulated(()))


def test_one_sum_a_micro_batch_is_killed():
    with one_sum_a_micro_batch(cpu, "gated_norm_backward", "weight"):
        assert not split_invariant()


#: Edits of cpu_gated_norm.py.
MUTANTS = {
    "eps outside the root": (
        "(squares / rule.group_size + rule.eps).sqrt()",
        "((squares / rule.group_size).sqrt() + rule.eps)",
    ),
    "the gate is normalised too": (
        "        normed = x if rule.norm_before_gate else x * value\n",
        "        normed = x * value\n",
    ),
    "the mean of the row": (
        "        mean = halves(_by_group(g * hat, rule), 2) / rule.group_size\n",
        "        mean = (g * hat).mean(1, keepdim=True).expand(-1, rstd.shape[1])\n",
    ),
    "no projection": ("(g - hat * _spread(mean, rule))", "g"),
    "the value for the slope": ("elementary.derivative(", "elementary.value("),
    "the gate missing in dweight": (
        "dy * hat * value if rule.norm_before_gate else dy * hat", "dy * hat",
    ),
    "the weight missing in dgate": ("(weighted * hat if", "(dy * hat if"),
    "a rounded row": ("return x.double().contiguous()", "return x.bfloat16().double()"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name):
    with planted(cpu, MUTANTS[name]), pytest.raises(AssertionError):
        for case in ("heads", "gate first", "gate first, groups", "norm first, groups"):
            within_bounds(case)


# ---- what is refused -----------------------------------------------------------------------------

X, W = torch.zeros(2, 12), torch.zeros(12)
#: Wrong arguments -> (error, the message's beginning).
REFUSED = {
    "a number": ({"x": X[0, 0]}, ShapeError, "x: expected shape [..., D]"),
    "no elements of a row": ({"x": X[:, :0]}, ShapeError, "x: expected shape [..., D]"),
    "another D": ({"weight": W[:4]}, ShapeError, "weight: expected shape [12]"),
    "a weight of rows": ({"weight": X}, ShapeError, "weight: expected 1 dimension"),
    "no gate": ({"gate": None}, ArgumentTypeError, "gate: expected a torch.Tensor"),
    "a gate of fewer rows": ({"gate": X[:1]}, ShapeError, "gate: expected shape [2, 12]"),
    "a gate of another dtype": ({"gate": X.bfloat16()}, DtypeError, "gate: expected"),
    "an activation": ({"activation": "relu"}, ArgumentValueError, "activation: expected one of"),
    "no activation": ({"activation": None}, ArgumentValueError, "activation: expected one of"),
    "no order": ({"norm_before_gate": None}, ArgumentTypeError, "norm_before_gate: expected True"),
    "no factor": ({"group_size": 5}, ShapeError, "group_size: expected a factor of 12"),
    "an empty group": ({"group_size": 0}, ShapeError, "group_size: expected a factor of 12"),
    "half a group": ({"group_size": 6.0}, ArgumentTypeError, "group_size: expected an int"),
    "a wide group": (
        {"x": torch.empty(1, 8193, device="meta"), "weight": None,
         "gate": torch.empty(1, 8193, device="meta")},
        ShapeError, "group_size: expected at most 8192",
    ),
    "a negative eps": ({"eps": -1e-6}, ArgumentValueError, "eps: expected 0, or a number"),
    "a subnormal eps": ({"eps": 1e-40}, ArgumentValueError, "eps: expected 0, or a number"),
    "eps that is NaN": ({"eps": float("nan")}, ArgumentValueError, "eps: expected 0, or"),
    "a main_grad of no weight": (
        {"weight": None, "main_grad": W}, ArgumentTypeError, "main_grad: expected None",
    ),
    "a residual": ({"residual": X}, ArgumentTypeError, "residual: expected an argument in gated"),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_refused(which):
    changed, error, message = REFUSED[which]
    right = {"x": X, "weight": W, "gate": X, "eps": 1e-6, "norm_before_gate": True}
    with pytest.raises(error) as caught:
        ck.gated_rms_norm(**right | changed)
    assert str(caught.value).startswith(message)


def test_nothing():
    x, weight = torch.zeros(0, 12).requires_grad_(), W.clone().requires_grad_()
    y = ck.gated_rms_norm(x, weight, x.detach(), 1e-6, norm_before_gate=False, group_size=4)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 12) and not weight.grad.any()


# ---- models --------------------------------------------------------------------------------------

MODELS = {
    "qwen3_next": ("Qwen3NextRMSNormGated", {}, Case(6, 64)),
    "kimi_linear": ("KimiLinearRMSNormGated", {}, Case(6, 64, activation="sigmoid")),
    "zamba2": ("Zamba2RMSNormGated", {"group_size": 16}, Case(6, 64, False, 4)),
    "falcon_h1": ("FalconH1RMSNormGated", {"n_groups": 2}, Case(6, 64, True, 2)),
}


@pytest.mark.nightly  # transformers is imported
@pytest.mark.parametrize("model", MODELS)
def test_transformers_in_fp32(model):
    """Orders, groups and activations are those of the models, within their fp32."""
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    name, options, case = MODELS[model]
    case = case._replace(dtype=FP32, weight=FP32)
    o = operands(case)
    norm = getattr(modeling, name)(case.width, eps=case.rule.eps, **options)
    norm.weight.data.copy_(o.weight)
    want = norm(o.x[None], o.gate[None])[0]
    exact = oracle.gated_norm(*o[:4], case.rule)["y"]
    assert share(want.detach(), exact) <= 2
    assert share(run(cpu, case, o)[0], exact) <= 1
