"""The CPU backend: values within fp32's bounds, the battery, and mutants that it kills."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.norm import cpu
from cute_kernels.runtime import dispatch
from tests import contract
from tests.norm import cases, contracts


@pytest.mark.parametrize("case", [*cases.kinds(), *cases.widths()], ids=str)
def test_values(case):
    inputs = cases.inputs_of(case)
    assert cases.check(cases.run(cpu, case, inputs), case, inputs) > 0.01


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_battery(at, dtype):
    row_op = contracts.row_ops(dtype=dtype)[at]
    assert contract.check_rows(row_op, 70, seed=at) > 50


@pytest.mark.parametrize("at", range(2))
@pytest.mark.parametrize("width", [104, 1032])
def test_splits(at, width):
    tokens = 5 * contracts.part_rows(width) + 37
    assert contract.check_splits(contracts.sum_ops(tokens, width)[at], seed=at) >= 6


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_show(threads):
    """The thread count is in the id; the bits do not follow it."""
    case = cases.Case(70, 4104, residual=True)
    inputs = cases.inputs_of(case)
    want = cases.run(cpu, case, inputs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = cases.run(cpu, case, inputs)
    finally:
        torch.set_num_threads(before)
    assert all(contract.same_bytes(a, b) for a, b in zip(got, want, strict=True) if a is not None)


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
    # Added before the rounding: within one of it, and not what two roundings give.
    twice = of_h + dh
    assert not torch.equal(fused[2], twice)
    torch.testing.assert_close(fused[2], twice, rtol=2**-7, atol=2**-7)


def test_a_gradient_of_half_a_word_is_the_fp32_sum_rounded_once():
    """The parts of dweight and dbias are added in fp32, as into a main_grad of zeros."""
    g = torch.Generator().manual_seed(6)
    x, dy = (torch.randn(2600, 40, generator=g).bfloat16() for _ in range(2))  # six parts
    weight, bias = (torch.randn(40, generator=g).bfloat16().requires_grad_() for _ in range(2))
    mains = torch.zeros(40), torch.zeros(40)
    ck.layer_norm(x, weight, bias, main_grad=mains[0], bias_main_grad=mains[1]).backward(dy)
    got = torch.autograd.grad(ck.layer_norm(x, weight, bias), (weight, bias), dy)
    assert all(map(contract.same_bytes, got, [main.bfloat16() for main in mains]))


# ---- mutants -------------------------------------------------------------------------------------


def lanes_by_rows(t):
    """As torch's eager CUDA mean: lanes of a row follow from how many rows there are."""
    lanes = max(32, 512 >> (t.shape[0] - 1).bit_length())
    t = torch.nn.functional.pad(t, (0, -t.shape[1] % lanes))
    total = t[:, :lanes].clone()
    for first in range(lanes, t.shape[1], lanes):
        total += t[:, first : first + lanes]
    return cpu.halves(torch.nn.functional.pad(total, (0, 512 - lanes)), 1)


def parts_by_threads(t):
    """As one partial a processor: so many rows a part as there are rows for each of 132."""
    rows = max(1, -(-t.shape[0] // 132))
    return torch.stack([part.sum(0) for part in t.split(rows)])


def test_lanes_that_follow_the_rows_are_killed(monkeypatch):
    monkeypatch.setattr(cpu, "_row_sum", lanes_by_rows)
    row_op = contracts.row_ops(width=2056, dtype=torch.float32)[0]
    with pytest.raises(contract.ContractViolation):
        contract.check_rows(row_op, 20, seed=1)


def test_parts_that_follow_the_processors_are_killed(monkeypatch):
    monkeypatch.setattr(cpu, "_parts", parts_by_threads)
    with pytest.raises(contract.ContractViolation):
        contract.check_splits(contracts.sum_ops(357)[0], seed=1)


def eps_outside_the_root(forward):
    def mutant(x, residual, scale, rule):
        out = forward(x, residual, scale, rule._replace(eps=0.0))
        rstd = 1 / (1 / out.rstd + rule.eps**0.5)
        return out._replace(y=(x.float() * rstd[:, None] * scale.weight.float()).to(x.dtype))

    return mutant


def test_an_eps_outside_the_root_is_killed(monkeypatch):
    case = cases.Case(5, 96, cases.Rule(cases.RMS, 0.25))
    inputs = cases.inputs_of(case)
    monkeypatch.setattr(cpu, "forward", eps_outside_the_root(cpu.forward))
    with pytest.raises(AssertionError):
        cases.check(cases.run(cpu, case, inputs), case, inputs)


@pytest.mark.parametrize("wrong", ["weight twice", "no projection", "dh forgotten"])
def test_wrong_gradients_are_killed(monkeypatch, wrong):
    """The weight applied twice in dx is Megatron-LM #6859."""
    true = cpu.backward

    def backward(upstream, h, stats, scale, rule, parts):
        dx, out = true(upstream, h, stats, scale, rule, parts)
        if wrong == "weight twice":
            twice = upstream._replace(dy=upstream.dy * scale.weight)
            dx, _ = true(twice, h, stats, scale, rule, False)
        elif wrong == "no projection":
            g = upstream.dy.float() * scale.weight.float() * stats[1][:, None]
            dx = (g + upstream.dh.float()).to(dx.dtype)
        else:
            dx, _ = true(upstream._replace(dh=None), h, stats, scale, rule, False)
        return dx, out

    case = cases.Case(5, 96, residual=True)
    inputs = cases.inputs_of(case)
    monkeypatch.setattr(cpu, "backward", backward)
    with pytest.raises(AssertionError):
        cases.check(cases.run(cpu, case, inputs), case, inputs)


def test_the_op_runs_this_backend():
    """What the battery runs through ``ck.rms_norm`` is what the mutants replace."""
    x = torch.empty(1, 64)
    plan = dispatch.plan("norm_forward", x.device, x.dtype, x, None, None, None)
    assert plan.run is cpu.forward
