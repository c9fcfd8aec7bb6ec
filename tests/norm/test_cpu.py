"""The CPU backend: values within fp32's bounds, the battery, and mutants that it kills."""

from __future__ import annotations

import functools

import pytest
import torch

import cute_kernels as ck
from cute_kernels.norm import cpu
from cute_kernels.runtime import dispatch
from tests import contract
from tests.anchors import planted
from tests.norm import cases, contracts


@pytest.mark.parametrize("case", [*cases.kinds(), *cases.widths()], ids=str)
def test_values(case):
    inputs = cases.inputs_of(case)
    assert cases.check(cases.run(cpu, case, inputs), case, inputs) > 0.01


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_battery(at, dtype):
    assert contract.check_rows(contracts.row_ops(dtype=dtype)[at], 70, seed=at) > 50


@pytest.mark.parametrize("at", range(2))
@pytest.mark.parametrize("width", [104, 1032])
def test_splits(at, width):
    tokens = 5 * contracts.part_rows(width) + 37
    assert contract.check_splits(contracts.sum_ops(tokens, width)[at], seed=at) >= 6


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_show(threads):
    """The thread count is in the id; the bits do not follow it."""
    case = cases.Case(70, 4104, residual=True)
    inputs, before, out = cases.inputs_of(case), torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            out.append(cases.run(cpu, case, inputs))
    finally:
        torch.set_num_threads(before)
    assert all(contract.same_bytes(a, b) for a, b in zip(*out, strict=True) if a is not None)


def test_a_residual_has_the_bytes_of_adding_it_before():
    g = torch.Generator().manual_seed(5)
    x, r = (torch.randn(7, 200, generator=g).bfloat16().requires_grad_() for _ in range(2))
    weight = torch.randn(200, generator=g, requires_grad=True)
    dy, dh = (torch.randn(7, 200, generator=g).bfloat16() for _ in range(2))
    y, h = ck.rms_norm(x, weight, residual=r)
    fused = (y, h, *torch.autograd.grad((y, h), (x, r, weight), (dy, dh)))
    h = (x + r).detach().requires_grad_()
    y = ck.rms_norm(h, weight)
    of_h, of_weight = torch.autograd.grad(y, (h, weight), dy)
    assert contract.same_bytes(fused[0], y) and contract.same_bytes(fused[1], h)
    assert contract.same_bytes(fused[2], fused[3]) and contract.same_bytes(fused[4], of_weight)
    # Added before the rounding: not what two roundings give.
    assert not torch.equal(fused[2], of_h + dh)


def test_a_gradient_of_half_a_word_is_the_fp32_sum_rounded_once():
    """The parts of dweight and dbias are added in fp32, as into a main_grad of zeros."""
    g = torch.Generator().manual_seed(6)
    x, dy = (torch.randn(2600, 40, generator=g).bfloat16() for _ in range(2))  # six parts
    weight, bias = (torch.randn(40, generator=g).bfloat16().requires_grad_() for _ in range(2))
    mains = torch.zeros(40), torch.zeros(40)
    ck.layer_norm(x, weight, bias, main_grad=mains[0], bias_main_grad=mains[1]).backward(dy)
    got = torch.autograd.grad(ck.layer_norm(x, weight, bias), (weight, bias), dy)
    assert all(map(contract.same_bytes, got, [main.bfloat16() for main in mains]))


def test_the_op_runs_this_backend():
    """What the battery runs through ``ck.rms_norm`` is what the mutants replace."""
    x = torch.empty(1, 64)
    plan = dispatch.plan("norm_forward", x.device, x.dtype, x, None, None, None)
    assert plan.run is cpu.forward


# ---- mutants -------------------------------------------------------------------------------------


def values(case: cases.Case) -> None:
    inputs = cases.inputs_of(case)
    cases.check(cases.run(cpu, case, inputs), case, inputs)


def rows() -> None:
    row_op = contracts.row_ops(width=2056, dtype=torch.float32)[0]
    contract.check_rows(row_op, 20, seed=1)


def splits() -> None:
    contract.check_splits(contracts.sum_ops(357)[0], seed=1)


RESIDUAL = functools.partial(values, cases.Case(5, 96, residual=True))
OF_EPS = functools.partial(values, cases.Case(5, 96, cases.Rule(cases.RMS, 0.25)))
#: Bug -> (its text, what is in its place, the check that kills it).
MUTANTS = {
    # As torch's eager CUDA mean.
    "lanes of a row by the number of rows": (
        "room(t.shape[1]) - t.shape[1])), 1)",
        "room(t.shape[1]) - t.shape[1])).unflatten(1, (-1, 8 if len(t) > 8 else 4)).sum(1), 1)",
        rows,
    ),
    "a part of the rows for each of 132 processors": (
        "rows = part_rows(width)\n",
        "rows = 1 << (-(-m // 132) - 1).bit_length()\n",
        splits,
    ),
    "eps outside the root": (
        "(variance + rule.eps).double().sqrt().float()",
        "(variance.sqrt() + rule.eps**0.5)",
        OF_EPS,
    ),
    # Megatron-LM #6859.
    "weight twice in dx": (
        "            g = dy * (scale.weight.float() + rule.offset)",
        "            g = dy * scale.weight.float() * scale.weight.float()",
        RESIDUAL,
    ),
    "no projection": ("inner = g - x_hat *", "inner = g - 0.0 * x_hat *", RESIDUAL),
    "dh forgotten": ("dx = dx + upstream.dh.to(torch.float32)", "pass", RESIDUAL),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name):
    old, new, check = MUTANTS[name]
    check()
    with planted(cpu, (old, new)), pytest.raises(AssertionError):
        check()
