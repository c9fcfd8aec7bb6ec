"""Programs of plans: calls.c launches what the functions that they stand for launch.

Kernels are `reporting.reporter`'s, which write down their arguments, on CPU tensors.
"""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import pytest
import torch

from cute_kernels.compile import extension
from cute_kernels.compile.call import ROWS, TRANSPOSED, Program
from cute_kernels.gemm import launch as gemm_launch
from cute_kernels.gemm import op as gemm_op
from cute_kernels.norm import launch as norm_launch
from cute_kernels.norm import op as norm_op
from tests.compile import reporting
from tests.compile.toy import needs_linker
from tests.contract import same_bytes
from tests.runtime.pretended_sm90 import pretended

pytestmark = needs_linker

CPU, BF16 = torch.device("cpu"), torch.bfloat16
X = torch.arange(24.0).view(2, 3, 4)


def bound(calls, program: Program):
    with mock.patch.object(extension, "calls", lambda: calls):
        return program.bind()


def test_a_program_allocates_launches_and_returns(calls, report):
    operands = (-1, 0), (0, ROWS), (1, TRANSPOSED), (0, ROWS | TRANSPOSED), None, 7, 0.5, (-2, 0)
    outputs = (lambda: reporting.empty(len(operands) - 1)), (lambda: torch.zeros(2))
    program = Program(None, CPU, outputs, ((report, operands),), (0, None, 1))
    matrix = X[0]
    out, nothing, zeros = bound(calls, program)(X, matrix, "not taken")
    rows = X.view(6, 4)
    args = rows, matrix.mT, rows.mT, None, 7, 0.5, zeros
    want = reporting.empty(len(args))
    report(want, *args)
    assert nothing is None and same_bytes(out, want)
    assert bound(calls, program._replace(results=1))(X, matrix).tolist() == [0, 0]


def test_programs_after_one_another(calls, report):
    """The second takes an output of the first, and one of its arguments transposed."""
    first = Program(None, CPU, (lambda: reporting.empty(1),), ((report, ((-1, 0), (0, ROWS))),), 0)
    both = first.then(first, (-1, 0))
    out, other = bound(calls, both._replace(results=(0, 1)))(X)
    want = reporting.empty(1)
    report(want, out)
    assert same_bytes(other, want)
    turned = Program(None, CPU, first.outputs, ((report, ((-1, 0), (0, TRANSPOSED))),), 0)
    assert same_bytes(
        bound(calls, turned.with_arguments(len, (1, ROWS | TRANSPOSED)))(None, X),
        bound(calls, first)(X),
    )
    assert first.with_arguments(len, (0, TRANSPOSED)) is None
    assert first.with_arguments(len, (0, 0)).run is len


def test_bad_programs_are_refused(calls, report):
    make = torch.empty
    good = 1, (make,), ((report, ((-1, 0), (0, 0))),), 0
    calls.program(*good)
    for i, bad in (
        (0, -1), (0, 0), (1, ()), (1, (make,) * 25), (2, ((report,),)), (2, ((report, ((0, 4),)),)),
        (2, ((report, ((-2, 0),)),)), (2, ((report, ("x",)),)), (2, ((report, (None,) * 25),)),
        (2, ((make, ()),)), (3, 1), (3, (0, 1)), (3, "x"), (3, None),
    ):  # fmt: skip
        with pytest.raises((TypeError, AttributeError)):
            calls.program(*good[:i], bad, *good[i + 1 :])
    with pytest.raises(TypeError, match="fewer arguments"):
        calls.program(*good)()
    with pytest.raises(TypeError, match="a matrix can be transposed"):
        calls.program(1, (dict,), ((report, ((0, TRANSPOSED),)),), 0)(X)


def test_no_reference_is_lost_or_kept(calls, report):
    def make():
        return out

    out = reporting.empty(1)
    operands = (-1, 0), (0, ROWS)
    run = calls.program(1, (make, make), ((report, operands),), (0, None, 1))
    failing = calls.program(1, (make,), ((report, ((0, 0), (0, ROWS))), (report, (3,))), 0)
    watched = out, X, report, make, None, run
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(500):
        run(X)
        with pytest.raises(RuntimeError):
            failing(out)
    after = [sys.getrefcount(thing) for thing in watched]
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) < 100


def test_another_device_goes_to_python(calls, report, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    there = torch.device("cuda", 1)
    in_python = []
    program = Program(
        lambda *args: in_python.append(args), there, (lambda: reporting.empty(1),),
        ((report, ((-1, 0), (0, 0))),), 0,
    )  # fmt: skip
    run = bound(calls, program)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert run(X).shape == (1, reporting.WORDS) and not in_python
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    assert run(X) is None and len(in_python) == 1


# ---- plans ---------------------------------------------------------------------------------------


def words(report, args: tuple) -> torch.Tensor:
    out = reporting.empty(len(args))
    report(out, *args)
    return out


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def linear(order="chain", rows=(2, 48)):
    return gemm_op._plan_linear, (x(*rows, 64), x(96, 64), None, None, order)


def gradients(rows=(2, 48), needs=(True, True, True)):
    args = x(*rows, 96), x(*rows, 64), x(96, 64), "chain", list(needs)
    return gemm_op._plan_linear_gradients, args


def norm(kind="rms", residual=False, bias=False):
    args = x(2, 5, 64), x(2, 5, 64) if residual else None, x(64), x(64) if bias else None
    return norm_op._plan, (*args, None, None, kind, 1e-6, 0.0)


def norm_gradients(kind="rms", needs=(True, True, False), dh=False):
    rows, layer = x(2, 5, 64), kind == "layer"
    stats = torch.randn(10) if layer else None, torch.randn(10)
    args = rows, x(2, 5, 64) if dh else None, x(2, 5, 64), *stats, x(64), x(64) if layer else None
    return norm_op._plan_backward_alone, (*args, kind, 1e-6, 0.0, list(needs))


PLANS = {
    "linear": linear,
    "linear of a matrix": lambda: linear(rows=(96,)),
    "linear, tree": lambda: linear("tree"),
    "linear, few rows": lambda: linear(rows=(3,)),
    "linear, bias": lambda: (gemm_op._plan_linear, (x(2048, 64), x(96, 64), x(96), None, "chain")),
    "dx": lambda: (gemm_op._plan_dx, (x(2, 48, 96), x(96, 64), "chain")),
    "dw": lambda: (gemm_op._plan_dw, (x(2, 48, 96), x(2, 48, 64), "chain")),
    "dbias": lambda: (gemm_op._plan_dbias, (x(2, 48, 96), "chain")),
    "gradients": gradients,
    "gradients, no dx": lambda: gradients(needs=(False, True, False)),
    "norm": norm,
    "norm, residual": lambda: norm(residual=True),
    "layer norm, residual": lambda: norm("layer", residual=True, bias=True),
    "norm_gradients": norm_gradients,
    "norm_gradients, rows alone": lambda: norm_gradients(needs=(True, False, False)),
    "norm_gradients, layer": lambda: norm_gradients("layer", (True, True, True), dh=True),
    "norm_gradients, bias alone": lambda: norm_gradients("layer", (True, False, True)),
}
#: Plans without a program, as an operand or a result is copied.
WITHOUT = {
    "linear of rows that are copied": lambda: linear()[0:1]
    + ((x(2, 48, 65)[..., 1:], x(96, 64), None, None, "chain"),),
    "linear of 3 columns": lambda: (
        gemm_op._plan_linear, (x(96, 64), x(3, 64), None, None, "chain")),
    "dw of rows that are no view": lambda: (
        gemm_op._plan_dw, (x(48, 2, 96).transpose(0, 1), x(2, 48, 64), "chain")),
    "linear, main_grad": lambda: (
        gemm_op._plan_linear, (x(96, 64), x(96, 64), None, torch.zeros(96, 64), "chain")),
    "norm of 5 columns": lambda: (
        norm_op._plan, (x(4, 5), None, x(5), None, None, None, "rms", 1e-6, 0.0)),
}  # fmt: skip


@contextlib.contextmanager
def kernels(report, monkeypatch, launches: list):
    """Kernels that record their arguments, from C and from Python; allocations that are counted."""

    def kernel(*args):
        launches.append(words(report, args))

    products = ("gemm_kernel", "skinny_kernel", "_column_sum_kernel")
    names = dict.fromkeys(products, lambda *a: kernel)
    names |= dict.fromkeys(("most_ctas", "max_clusters"), lambda *a: 8)
    with (
        pretended(monkeypatch),
        mock.patch.multiple(gemm_launch, **names),
        mock.patch.multiple(norm_launch, _kernel=lambda *a: kernel, most_ctas=lambda *a: 8),
    ):
        yield kernel


def in_python(program: Program, args: tuple) -> object:
    """Run a program as calls.c does, by torch's views."""
    outputs = [make() for make in program.outputs]

    def value(operand):
        if type(operand) is not tuple:
            return operand
        source, layout = operand
        t = args[source] if source >= 0 else outputs[-1 - source]
        if layout & ROWS:
            assert t.is_contiguous()
            t = t.view(-1, t.shape[-1])
        return t.mT if layout & TRANSPOSED else t

    for kernel, operands in program.launches:
        kernel(*map(value, operands))
    if type(program.results) is int:
        return outputs[program.results]
    return tuple([None if p is None else outputs[p] for p in program.results])


def launched(run, launches: list, args: tuple, results: list) -> list[torch.Tensor]:
    """Words of each launch of ``run(*args)``; of an output its position in place of an address."""
    launches.clear()
    out = run(*args)
    out = out if isinstance(out, tuple) else (out,)
    results[:] = [None if t is None else (t.shape, t.stride(), t.dtype) for t in out]
    inputs = {t.data_ptr() for t in args if isinstance(t, torch.Tensor)}
    names: dict[int, int] = {}
    for each in launches:
        for row in each:
            if row[0] == reporting.TENSOR and int(row[1]) not in inputs:
                row[1] = names.setdefault(int(row[1]), len(names))
    return list(launches)


@pytest.mark.parametrize("name", PLANS)
def test_a_program_launches_what_python_does(report, monkeypatch, name):
    make, args = PLANS[name]()
    launches, results, others = [], [], []
    with kernels(report, monkeypatch, launches):
        plan = make(*args)
        assert plan.program is not None and plan.program.run is plan.run
        want = launched(plan.run, launches, args, results)
        got = launched(lambda *args: in_python(plan.program, args), launches, args, others)
    assert len(want) == len(got) > 0 and results == others
    assert all(map(same_bytes, got, want))


@pytest.mark.parametrize("name", WITHOUT)
def test_plans_without_a_program(report, monkeypatch, name):
    make, args = WITHOUT[name]()
    with kernels(report, monkeypatch, []):
        plan = make(*args)
        assert plan.program is None or plan.program.run is not plan.run
        assert plan.bound() is plan.run
