"""Attention on the Triton backend of a GPU, dense and paged: values, the battery, orders, graphs.

Any CUDA or ROCm device will do; an SM90 GPU is asked for the other bits by the environment, and
launchers of paged caches are called directly.  Passed on an H200 (docs/attention.md), of paged
caches on an H100 at 1949567, 2026-11-28; D = 192 and 256, and on AMD: not run.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import contracts
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.order import kinds
from cute_kernels.sparse_attn import masks, op
from cute_kernels.sparse_attn.api import block_sparse_attention
from tests.contract import same_bytes

from . import against_float64, battery, cases, paged_cases
from .battery import SequenceOp
from .paged_cases import Engine, drawn, on_card

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
    excess = against_float64.checked(case, "cuda")
    assert max(excess.values()) <= 1, f"{case}: {excess}"


@pytest.mark.parametrize("mask", battery.MASKS)
@pytest.mark.parametrize(
    ("dim", "softcap"), [(64, 0.0), (96, 4.0), (128, 0.0), (192, 0.0), (256, 4.0)]
)
def test_battery(mask, dim, softcap):
    sequence = SequenceOp(mask, on_gpu, battery.MASKS[mask], {"softcap": softcap})
    assert battery.battery(sequence, battery.sequence(dim=dim)) > 50


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


# ---- paged caches --------------------------------------------------------------------------------


def moved(value: object) -> object:
    """A tensor or a mask on the GPU, with the strides that it has; all else as it is."""
    if isinstance(value, masks.LoweredMask):
        tensors = {name: getattr(value, name).cuda() for name in masks.TENSORS}
        return dataclasses.replace(value, **tensors)
    if not isinstance(value, torch.Tensor):
        return value
    storage = torch.tensor([], dtype=value.dtype).set_(value.untyped_storage()).cuda()
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def on_copies(function):
    """``function`` on copies on the GPU; its results and what it wrote are on the CPU."""

    def run(*args):
        copies = [moved(value) for value in args]
        results = function(*copies)
        for value, copy in zip(args, copies, strict=True):
            if isinstance(value, torch.Tensor):
                value.copy_(copy)
        return results if results is None else tuple(t.cpu() for t in results)

    return run


def engine(wrap=on_copies) -> Engine:
    from cute_kernels.sparse_attn.triton import launch, paged

    return Engine(*map(wrap, (paged.paged_attention, launch.forward, paged.write_kv_cache)))


CHECKS = [check for check in paged_cases.CHECKS if check is not paged_cases.given_out]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_paged_bytes(check):
    check(engine())


@pytest.mark.parametrize("seed", range(500))
def test_drawn_paged_batches(seed):
    engine().check(drawn(**paged_cases.draw(seed)))


@pytest.mark.parametrize("window", [(None, 0), (4095, 0)])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_long_contexts(dim, window):
    """Decode rows, speculative rows, a chunk of a long prompt, and a short one."""
    lengths = [(1, 20000), (5, 12345), (1000, 4000), (97, 97)]
    engine().check(drawn(lengths, (8, 2, dim), 16, window=window))


def test_paged_rows_have_the_same_bytes_again_and_again():
    run = engine(lambda function: function).attend
    batch = on_card(drawn(paged_cases.MIXED * 20, (8, 2, 128), 16))
    want, beside = run(batch), torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    for _ in range(REPEATS):
        with torch.cuda.stream(beside):
            noise = (noise @ noise).tanh()
        assert all(map(same_bytes, run(batch), want))


def test_a_graph_reads_other_lengths_and_pages():
    """Replays of one graph: as many sequences and tokens at most, other lengths, pages, rows."""
    run = engine(lambda function: function).attend
    lengths = (
        [(1, 151), (71, 131), (70, 70)],
        [(1, 131), (1, 1), (79, 99)],
        [(150, 150), (0, 0), (0, 0)],
    )
    batches = [
        on_card(drawn(some, (4, 2, 64), 16, seed=n, padding=rest))
        for n, (some, rest) in enumerate(zip(lengths, (8, 69, 0), strict=True))
    ]
    want = [run(batch) for batch in batches]
    pages, columns = (
        max(getattr(batch, name).shape[dim] for batch in batches)
        for name, dim in (("k_cache", 0), ("block_table", 1))
    )
    first = batches[0]
    held = first.changed(
        k_cache=first.k_cache.new_zeros(pages, *first.k_cache.shape[1:]),
        v_cache=first.v_cache.new_zeros(pages, *first.v_cache.shape[1:]),
        block_table=first.block_table.new_zeros(3, columns),
        **{name: getattr(first, name).clone() for name in ("q", "seqlens_k", "cu_seqlens_q")},
    )
    run(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(held)
    for number in (0, 1, 2, 1, 0):
        batch = batches[number]
        for cache, source in ((held.k_cache, batch.k_cache), (held.v_cache, batch.v_cache)):
            cache.fill_(torch.nan)[: len(source)] = source
        held.block_table.fill_(-1)[:, : batch.block_table.shape[1]] = batch.block_table
        for name in ("q", "seqlens_k", "cu_seqlens_q"):
            getattr(held, name).copy_(getattr(batch, name))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert same_bytes(out, want[number][0]) and same_bytes(lse, want[number][1])


def test_pages_beyond_32_bits():
    """Caches of more than 2³¹ elements: 4 GiB each."""
    run = engine(lambda function: function).attend
    batch = on_card(drawn([(1, 98), (1, 281)], (2, 1, 64), 16))
    first = 2**31 // batch.k_cache[0].numel()
    far = {"block_table": batch.block_table + first}
    for name in ("k_cache", "v_cache"):
        cache = getattr(batch, name)
        far[name] = cache.new_empty(first + len(cache), *cache.shape[1:])
        far[name][first:] = cache
    assert all(map(same_bytes, run(batch.changed(**far)), run(batch)))
