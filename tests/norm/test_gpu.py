"""Tests of norm on a GPU: values, the battery, splits, grids, streams, graphs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import cute_kernels as ck
from cute_kernels.norm.triton import launch as triton_launch
from tests import contract, on_gpu
from tests.norm import cases, contracts, triton_checks
from tests.norm.cases import BF16, FP16, FP32, LAYER, Case, Inputs, Rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE, SEED = "cuda", 31
LAYERS = Rule(LAYER, 1e-5)
CASES = [
    *cases.kinds(),
    *cases.widths(),
    Case(1043, 4096, residual=True),
    Case(517, 7168, LAYERS, bias=True),
    Case(4096, 128),
    Case(3, 16384, dtype=FP16, weight=FP32, residual=True),
    Case(2, 65536, LAYERS, FP32, FP32, bias=True),
]


@pytest.mark.parametrize(
    "of", [*triton_checks.SMALL, *triton_checks.PARTS, *cases.kinds(), *cases.widths()], ids=str
)
def test_the_written_order_of_triton(of):
    """And rows of blocks, sums of parts, rows alone."""
    there = on_gpu.launcher(triton_launch)
    triton_checks.values(there, of)
    cases.few_rows(there, of)


def test_blocks_and_parts_of_triton():
    there = on_gpu.launcher(triton_launch)
    triton_checks.parts_are_added(there)
    for of in triton_checks.WIDE:
        triton_checks.of_blocks(there, triton_checks.values, of)


def moved(value):
    """A tensor, None, or a tuple of them, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    return None if value is None else type(value)(*map(moved, value))


def run(case: Case, given: Inputs) -> cases.Results:
    """Through the public functions; gradients of vectors into main_grads of zeros."""
    x = given.x.detach().requires_grad_()
    residual = given.residual
    weight, bias = (t if t is None else t.detach().requires_grad_() for t in given.scale)
    into = [None if t is None else torch.zeros_like(t, dtype=FP32) for t in (weight, bias)]
    rule = case.rule
    if rule.kind == LAYER:
        options = {"main_grad": into[0], "bias_main_grad": into[1]}
        out = ck.layer_norm(x, weight, bias, rule.eps, residual=residual, **options)
    else:
        options = {"offset": rule.offset, "main_grad": into[0]}
        out = ck.rms_norm(x, weight, rule.eps, residual=residual, **options)
    out = (out,) if residual is None else out
    grads = [g for g in given.upstream if g is not None]
    torch.autograd.backward(out, grads)
    h = x.detach() if residual is None else out[1].detach()
    d_weight = torch.zeros(case.width, device=DEVICE) if into[0] is None else into[0]
    return cases.Results(out[0].detach(), h, x.grad, d_weight, into[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case):
    case = case._replace(weight=case.weight or BF16)
    inputs = moved(cases.inputs_of(case))
    assert cases.check(run(case, inputs), case, inputs) > 0.01


@pytest.mark.parametrize("width", [64, 128, 1000, 4096, 7168])
@pytest.mark.parametrize("at", range(6))
def test_battery(at, width):
    op = contracts.row_ops(width, device=DEVICE)[at]
    assert contract.check_rows(op, 140, SEED) > 60
    assert contract.check_population(op, 4096, SEED, (1, 2, 5, 13, 137)) == 5


@pytest.mark.parametrize("width", [64, 128, 1000, 4096])
@pytest.mark.parametrize("at", range(2))
def test_splits(at, width):
    tokens = 9 * contracts.part_rows(width) + 77
    assert contract.check_splits(contracts.sum_ops(tokens, width, device=DEVICE)[at], SEED) >= 6


@pytest.mark.parametrize("case", CASES[-5:], ids=str)
def test_no_repeat_and_no_size_of_a_grid_shows(case, monkeypatch):
    """Into junk: torch fills new memory with NaN."""
    inputs = moved(cases.inputs_of(case))
    want = run(case, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        for ctas in (*["132"] * 15, "1", "2", "7", "66"):
            monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", ctas)
            cases.same(run(case, inputs), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_streams_and_a_graph():
    case = Case(1043, 4096, residual=True)
    inputs = moved(cases.inputs_of(case))
    want, out = run(case, inputs), []
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream() for _ in range(2)] * 8:
        with torch.cuda.stream(stream):
            out.append(run(case, inputs))
    torch.cuda.synchronize()
    for one in out:
        cases.same(one, want)

    def forward():
        with torch.no_grad():
            return ck.rms_norm(inputs.x, inputs.scale.weight, residual=inputs.residual)[0]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward()
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
        assert contract.same_bytes(got, want.y)


def test_a_graph_of_a_backward():
    """The sum of the parts, which is launched while they are made, waits for them there too."""
    case = Case(8192, 4096)
    inputs = moved(cases.inputs_of(case))
    x, weight = (t.detach().requires_grad_() for t in (inputs.x, inputs.scale.weight))

    def gradients():
        y = ck.rms_norm(x, weight, case.rule.eps, offset=case.rule.offset)
        return torch.autograd.grad(y, (x, weight), inputs.upstream.dy)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        want = gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        got = gradients()
    for _ in range(20):
        for t in got:
            t.fill_(torch.nan)
        graph.replay()
        assert all(map(contract.same_bytes, got, want))


def test_rows_beyond_2_31_elements():
    """The last rows of a tensor of more than 2^31 elements have the bytes that they have alone."""
    x = torch.randn(2**31 // 4096 + 8, 4096, device=DEVICE, dtype=BF16)
    weight = torch.randn(4096, device=DEVICE, dtype=BF16)
    with torch.no_grad():
        assert contract.same_bytes(ck.rms_norm(x, weight)[-8:], ck.rms_norm(x[-8:], weight))
