"""Tests of mhc on a GPU: values, the battery, schedules, streams, graphs, memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels.mhc import Options, connect, expand_combine, multilayer_recompute, sinkhorn
from cute_kernels.mhc.config import TOKENS, chunk_channels, mappings
from tests import contract
from tests.mhc import calls, cases, runs
from tests.mhc.cases import BF16, FP32, Case, Inputs
from tests.old_memory import old_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE, SEED = "cuda", 29
SHIFTED = Options(layout="nc", precision="bf16x3", form="epsilon", iterations=11, pre_eps=1e-6)
#: An odd C, which no wide access fits; whole chunks of channels; both layouts, both n.
CASES = [
    Case(1, 48, 5129, 4, "cn", (BF16, FP32), True, True),
    Case(2, 137, 7168, 4, "nc", (BF16, BF16), False, True, options=Options(layout="nc")),
    Case(3, 33, 2560, 4, "cn", (FP32, FP32), True, False, 3.0),
    Case(4, 70, 1280, 2, "nc", (BF16, FP32), True, True, options=SHIFTED),
    Case(5, 1, 4096, 2, "cn", (BF16, FP32), False, False),
    Case(6, 1043, 264, 4, "cn", (BF16, FP32), True, True),
]


def moved(tensors):
    """A tuple of tensors, or None, on the device."""
    return type(tensors)(*(None if t is None else t.to(DEVICE) for t in tensors))


@pytest.fixture(autouse=True)
def drawn_for_the_device(monkeypatch):
    """Draw the numbers of `cases` on the CPU: they are those of every other test."""
    inputs_of, upstream_of, normal = cases.inputs_of, cases.upstream_of, cases.normal
    monkeypatch.setattr(cases, "inputs_of", lambda case: moved(inputs_of(case)))
    monkeypatch.setattr(cases, "upstream_of", lambda case, x: moved(upstream_of(case, x)))
    monkeypatch.setattr(cases, "normal", lambda *a, **k: normal(*a, **k).to(DEVICE))


def site(case: Case, i: Inputs, streams: torch.Tensor | None = None) -> list[torch.Tensor]:
    """y of `connect`, and every gradient."""
    x = (i.x if streams is None else streams).detach().requires_grad_()
    weights = {
        name: t.detach().requires_grad_()
        for name in ("phi", "norm_weight", "alpha", "beta", "bias")
        if (t := getattr(i, name)) is not None
    }
    y = connect(x, lambda out: out.tanh(), **weights, options=case.options)
    d_y = cases.normal(*y.shape, seed=SEED).to(y.dtype)
    grads = torch.autograd.grad(y, (x, *weights.values()), d_y)
    return [y.detach(), *grads]


def same(got, want) -> None:
    """Whether two lists of tensors have the same bytes."""
    assert all(contract.same_bytes(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", runs.FUNCTIONS)
def test_values(name, case):
    """Results and gradients within the oracle's bounds."""
    with old_memory():
        got, want = runs.FUNCTIONS[name](case, cases.inputs_of(case))
    worst = cases.shares(got, want)
    assert worst and max(worst.values()) <= 1, worst
    if name == "projection":
        error = (got["h"].double() - want["h"].value).square().mean().sqrt()
        assert error <= 1e-5 * want["h"].value.square().mean().sqrt()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_repeat_and_no_size_of_a_grid_shows(case, monkeypatch):
    """Whatever the outputs' memory held before."""
    i = cases.inputs_of(case)
    want = site(case, i)
    assert all(t.isfinite().all() for t in want)
    for ctas in (*["132"] * 15, "1", "2", "7", "66"):
        monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", ctas)
        with old_memory():
            same(site(case, i), want)


@pytest.mark.parametrize(
    ("dtype", "n", "layout", "c"),
    [(BF16, 4, "cn", 1280), (FP32, 2, "nc", 300), (BF16, 4, "nc", 77)],
)
@pytest.mark.parametrize("name", calls.CALLS)
def test_rows(name, dtype, n, layout, c):
    """The battery; and 1, 13 and 137 rows as among 4096."""
    op = calls.row_op(name, calls.case_of(dtype, n, layout, c))
    op = dataclasses.replace(op, device=DEVICE)
    assert contract.check_rows(op, 140, SEED) > 60
    assert contract.check_population(op, 4096, SEED, (1, 13, 137)) == 3


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", calls.WEIGHED)
def test_splits(name, dtype):
    """main_grads, cut at multiples of 1024 tokens."""
    case = calls.case_of(dtype, 4, "cn", 136)._replace(m=4 * TOKENS + 77)
    assert contract.check_splits(calls.sum_op(name, case), SEED) >= 4


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sites", [1, 2, 3, 4, 9])
def test_streams_after_several_sites(case, sites):
    """The bytes of expand_combine, site by site."""
    i, layout = cases.inputs_of(case), case.options.layout
    x, want, sublayers = i.x, [], []
    for seed in range(sites):
        other = cases.inputs_of(case._replace(seed=100 + seed))
        sublayers.append((other.f, other.bias, other.post, other.res))
        x = expand_combine(*sublayers[-1][:3], x, other.res, case.n, layout=layout)
        want.append(x)
    with old_memory():
        got = multilayer_recompute(i.x, sublayers, case.n, layout=layout)
    same(got, want)


def test_streams_and_a_graph():
    """Calls on several streams at once; a captured forward, on other contents of its input."""
    case = CASES[1]
    i, other = cases.inputs_of(case), cases.inputs_of(case._replace(seed=90)).x
    want, out = site(case, i), []
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream() for _ in range(2)] * 8:
        with torch.cuda.stream(stream):
            out.append(site(case, i))
    torch.cuda.synchronize()
    for one in out:
        same(one, want)
    x = i.x.clone()

    def forward():
        with torch.no_grad():
            weights = (i.phi, i.alpha, i.beta)
            return connect(x, torch.tanh, *weights, bias=i.bias, options=case.options)

    want, graph = forward(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward()
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
        assert contract.same_bytes(got, want)
    x.copy_(other)
    graph.replay()
    assert contract.same_bytes(got, forward()) and not contract.same_bytes(got, want)


def peak(run) -> int:
    """Bytes that a call holds at its most, beside what was there before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory_of_a_site():
    """No fp32 copy of the streams: it would take twice the bytes of x."""
    case = Case(7, 8192, 2048, 4, "cn", (BF16, FP32))
    i = cases.inputs_of(case)
    x, phi = i.x.requires_grad_(), i.phi.requires_grad_()
    d_y = cases.normal(*x.shape, seed=SEED).to(BF16)

    def run():
        y = connect(x, lambda out: out * 1.5, phi, i.alpha, i.beta, options=case.options)
        return torch.autograd.grad(y, (x, phi), d_y)

    streams, k = x.numel() * 2, case.n * case.c
    columns, chunks = mappings(case.n), -(-case.c // chunk_channels(case.n, "bf16x2"))
    # y and dx; out, f, df, dout.
    kept = 2 * streams + 4 * streams // case.n
    # Parts of dpsi; psi, dphi, and each once more.
    kept += (case.m // TOKENS + 4) * columns * k * 4
    # Of a token: sums of chunks; H, pre, post, res and ms, and their gradients.
    kept += case.m * (chunks * (columns + 1) + 4 * (32 + columns + 1)) * 4
    assert peak(run) <= kept + streams // 2


def test_memory_of_sinkhorn():
    """No history: p and dz are all that is made."""
    z = cases.normal(2**16, 4, 4, seed=1).requires_grad_()
    d_p = cases.normal(2**16, 4, 4, seed=2)

    def run():
        return torch.autograd.grad(sinkhorn(z), z, d_p)

    # A history of 20 iterations is 10 times that of a tensor.
    assert peak(run) <= 3 * z.numel() * 4
