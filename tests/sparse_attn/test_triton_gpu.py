"""Block-sparse attention on the Triton backend of a GPU: values, the battery, orders, a graph.

Any CUDA or ROCm device will do; an SM90 GPU is asked for the other bits by the environment.  Passed
on an H200 (docs/attention.md); D = 192 and 256, and on AMD: not run.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels import contracts
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import op
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import same_bytes
from tests.oracles import sparse_attn as reference

from . import against_float64, cases, cpu_battery
from .sequences import SequenceOp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = 1000
REPEATS = 1000


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "triton")
    assert contracts.contract_id(op.NAME, "cuda").split("/")[1] == "triton"


def on_gpu(q, k, v, mask=None, **options):
    """The op on copies on the GPU, its results on the CPU."""
    mask = None if mask is None else mask.to("cuda")
    results = block_sparse_attention(*(t.cuda() for t in (q, k, v)), mask, **options)
    return tuple(t.cpu() for t in results)


@pytest.mark.parametrize("seed", range(96))
def test_drawn_cases_against_float64(seed):
    case = cases.draw(seed)
    x, allowed = cases.inputs_of(case), case.allowed()
    plain = [t.detach() for t in x.leaves()]
    bounds = reference.error_bounds(
        *plain, x.dout, allowed, dlse=x.dlse, scores=reference.Scores(softcap=case.softcap)
    )
    options = {"causal": case.causal, "softcap": case.softcap, "schedule": case.schedule}
    results = on_gpu(*x.leaves(), case.mask, return_lse=True, **options)
    grads = torch.autograd.grad(results, x.leaves(), (x.dout, x.dlse))
    exact = against_float64.exact_of(x, allowed, case.softcap)
    excess = against_float64.excess((*(t.detach() for t in results), *grads), exact, bounds)
    assert max(excess.values()) <= 1, f"{case}: {excess}"


@pytest.mark.parametrize("mask", cpu_battery.MASKS)
@pytest.mark.parametrize(
    ("dim", "softcap"), [(64, 0.0), (96, 4.0), (128, 0.0), (192, 0.0), (256, 4.0)]
)
def test_battery(mask, dim, softcap):
    sequence = SequenceOp(mask, on_gpu, cpu_battery.MASKS[mask], {"softcap": softcap})
    assert cpu_battery.battery(sequence, cpu_battery.sequence(dim=dim)) > 50


def gradients(x: cases.Inputs, mask: BlockMask, schedule) -> tuple[torch.Tensor, ...]:
    out = block_sparse_attention(*x.leaves(), mask, schedule=schedule)
    return torch.autograd.grad(out, x.leaves(), x.dout)


@pytest.fixture(scope="module", params=[64, 128, 192, 256])
def problem(request) -> cases.Inputs:
    x = cases.inputs(2, 4, 2, SIZE, SIZE, request.param, seed=9)
    leaves = [t.detach().cuda().requires_grad_() for t in x.leaves()]
    return cases.Inputs(*leaves, x.dout.cuda(), x.dlse.cuda())


def test_gradients_follow_the_schedule_and_nothing_else(problem):
    mask = BlockMask.causal(SIZE, SIZE, device="cuda")
    order = [3, 0, 7, 5, 1, 4, 2, 6]
    schedule = kinds.permutation(mask, heads=4, order=order)
    want = gradients(problem, mask, schedule)
    flight = kinds.permutation(mask, heads=4, order=order, heads_in_flight=3)
    for _ in range(REPEATS):
        for chosen in (schedule, flight):
            assert all(map(same_bytes, gradients(problem, mask, chosen), want))
    other = gradients(problem, mask, list(range(8)))
    assert list(map(same_bytes, other, want)) == [False, True, True]


def test_a_graph_replays_the_same_bytes(problem):
    q, k, v = (t.detach() for t in problem.leaves())
    want = block_sparse_attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_sparse_attention(q, k, v, causal=True)
    for _ in range(100):
        out.fill_(float("nan"))
        graph.replay()
        assert same_bytes(out, want)
