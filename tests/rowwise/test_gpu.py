"""rowwise on a GPU: what the simulator was asked, and the battery.  `make gpu-test`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import cute_kernels as ck
from cute_kernels.rowwise import config
from cute_kernels.rowwise.triton import launch
from cute_kernels.runtime import dispatch
from tests import contract, on_gpu
from tests.contract import RowOp, same_bytes

from . import rotary_cases, triton_cases
from .cases import BF16, CALLS, DTYPES, FP32, RUNS, drawn, indices, spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEED = 37
#: Those whose tables and weights the runs make are of the CPU.
ROWS = [name for name in RUNS if "inside" not in name and name not in ("rotary_table", "embedding")]


@pytest.mark.parametrize("check", list(triton_cases.CHECKS))
def test_checks_of_launchers(check):
    triton_cases.CHECKS[check](on_gpu.launcher(launch))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions(dtype):
    there = on_gpu.launcher(launch)
    for kind in config.KINDS:
        triton_cases.activations(there, kind, dtype)
    for width, _ in triton_cases.WIDTHS:
        triton_cases.softmax(there, width, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_battery(name, dtype):
    run, width = RUNS[name]
    op = RowOp(name, run, width, dtype, "cuda")
    assert contract.check_rows(op, 70, SEED) > 60
    assert contract.check_population(op, 4096, SEED, (1, 2, 5, 13, 137)) == 5


def test_repeats_of_hot_entries():
    """Half of 8192 tokens are of one entry: 20 gradients, one set of bytes."""
    ids, dy = indices(500, 8192, seed=1), spread(8192, 256, dtype=BF16)
    ids[::2] = 7
    ids, dy = ids.cuda(), dy.cuda()
    weight = drawn(500, 256).bfloat16().cuda().requires_grad_()
    gradients = [torch.autograd.grad(ck.embedding(ids, weight), weight, dy)[0] for _ in range(20)]
    assert all(same_bytes(one, gradients[0]) for one in gradients)


def test_the_clipped_norm_is_the_cpus():
    weights = [drawn(300, 77, seed=s).requires_grad_() for s in range(5)]
    for s, weight in enumerate(weights):
        weight.grad = drawn(300, 77, seed=10 + s)
    there = [weight.detach().cuda().requires_grad_() for weight in weights]
    for weight, other in zip(weights, there, strict=True):
        other.grad = weight.grad.cuda()
    norms = [ck.clip_grad_norm_(group, 1.0) for group in (weights, there)]
    assert same_bytes(norms[0], norms[1].cpu())
    for weight, other in zip(weights, there, strict=True):
        assert same_bytes(weight.grad, other.grad.cpu())


def test_rows_beyond_2_31_elements():
    x = torch.randn(2**31 // 8192 + 8, 8192, device="cuda", dtype=BF16)
    for function in (ck.silu, ck.softmax):
        assert same_bytes(function(x)[-8:], function(x[-8:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (1, 1, 8192), (3, 1030), (70, 4096)], ids=str)
@pytest.mark.parametrize("name", list(CALLS))
def test_a_remembered_call_has_the_bytes_of_the_whole_way(monkeypatch, name, shape, dtype):
    """Also in a CUDA graph, and on another stream."""
    run = CALLS[name]
    one, other = (spread(*shape, seed=s, dtype=dtype).cuda() for s in (1, 2))
    want = [run(one), run(other)]
    monkeypatch.setattr(dispatch, "plan", None)  # a call that plans again fails
    assert same_bytes(run(one), want[0]) and same_bytes(run(other), want[1])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert same_bytes(run(other), want[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(one)
    one.copy_(other)
    graph.replay()
    assert same_bytes(made, want[1]) and not same_bytes(*want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_q_and_k_have_the_bytes_of_torchs_ops(monkeypatch, dtype):
    """Of a model's sizes, by a new plan and by a cached one, forward and backward."""
    q, k = (spread(2, 1024, h, 128, seed=h, dtype=dtype).transpose(1, 2).cuda() for h in (32, 8))
    cos, sin = (drawn(2, 1024, 128, seed=s, dtype=dtype).cuda() for s in (1, 2))
    up = [spread(*t.shape, seed=9, dtype=dtype).cuda() for t in (q, k)]

    def both_passes(function):
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        made = function(*leaves, cos, sin)
        return [*(t.detach() for t in made), *torch.autograd.grad(made, leaves, up)]

    want = both_passes(rotary_cases.whole)
    assert all(map(same_bytes, both_passes(ck.apply_rotary_pos_emb), want))
    monkeypatch.setattr(launch, "plan_rotary_pair", None)  # a call that plans again fails
    assert all(map(same_bytes, both_passes(ck.apply_rotary_pos_emb), want))
