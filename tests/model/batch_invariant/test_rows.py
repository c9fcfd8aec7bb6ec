"""Rows alone, in batches, among other rows, in any memory: the battery on torch's functions."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.model.aten import COVERED
from tests import contract
from tests.contract import ContractViolation
from tests.model.batch_invariant.cases import BF16, CASES, FP32, drawn, gradient, inside, row_op

#: Without the mode, in fp32: what this kind of CPU is known to show.
SHOWN = ("linear", "mv", "silu", "sigmoid")


def sizes(rows: int) -> list[int]:
    return sorted({1, 2, 3, rows // 2, rows - 1, rows})


def test_every_covered_op_has_a_case():
    assert {case.op for case in CASES.values()} == {row.op for row in COVERED}


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_rows_keep_their_bits(name, dtype):
    rows = CASES[name].rows
    op = row_op(name, dtype)
    assert contract.check_rows(op, rows, seed=7, sizes=sizes(rows)) > 30


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gradient])
def test_gradients_of_rows_keep_their_bits(name):
    case = CASES[name]
    op = row_op(name, BF16, gradient(case.call))
    inputs = op.rows(case.rows, 3)
    base = op.run(inputs)
    done = contract.check_population(op, case.rows, 3, sizes(case.rows))
    done += contract.check_chunks(op, inputs, base, 3)
    done += contract.check_transform(op, "T2 position", inputs, base, 3)
    assert done >= 10


@pytest.mark.parametrize("name", SHOWN)
def test_without_the_mode_they_do_not(name):
    """The battery notices torch's own, where this CPU has such an op."""
    op = row_op(name, FP32, CASES[name].call)
    try:
        contract.check_rows(op, 67, seed=7, sizes=sizes(67))
    except ContractViolation:
        return
    pytest.skip("this CPU's torch keeps the bits of these rows")


#: Llama's norm rounds to fp32 in the middle, in fp64 too.
COMPARED = [n for n, case in CASES.items() if case.gradient and n != "llama's norm"]


@pytest.mark.parametrize("name", COMPARED)
def test_values_and_gradients_are_those_of_torch(name):
    """In fp64, outside the mode."""
    case = CASES[name]
    rows = row_op(name, FP32).rows(case.rows, 13)
    leaf = rows.double().requires_grad_()
    got, want = inside(case.call, rows), case.call(leaf)
    want.backward(got.double() * 0.75 + 0.5)
    assert got.dtype == FP32 and got.shape == want.shape
    # Sums of at most 256 terms in fp32, whose terms are not larger than the largest result's.
    for one, exact, bound in ((got, want, -15), (gradient(case.call)(rows), leaf.grad, -13)):
        limit = 2.0**bound * exact.abs().amax().clamp(min=1.0)
        assert (one.double() - exact).abs().max() <= limit


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
@pytest.mark.parametrize("scale", [1e-2, 1.0])
def test_an_rms_norm_without_an_eps_has_that_of_fp32(dtype, scale):
    """At 0.01 the epsilon of bf16 would make elements of 1 smaller by a factor of 9."""
    x = (scale * drawn(8, 64)).to(dtype)
    y = inside(torch.nn.RMSNorm(64, eps=None, dtype=dtype), x)
    mean = x.double().square().mean(-1, keepdim=True)
    want = x.double() * (mean + torch.finfo(FP32).eps).rsqrt()
    assert ((y.double() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 1e-6).all()
