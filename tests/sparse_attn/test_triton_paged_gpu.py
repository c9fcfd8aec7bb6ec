"""Paged attention on the Triton backend of a GPU: bytes of the dense forward, graphs, repeats.

Any CUDA or ROCm device will do; the launchers are called directly.  Passed on an H100 at 1949567,
2026-11-28; on AMD: not run.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from cute_kernels.sparse_attn import masks

from . import paged_batches
from .paged_batches import Batch, Case, batch_of, same_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
REPEATS = 1000


@pytest.fixture
def cases(monkeypatch):
    """The checks of triton_paged_cases, whose dense forward runs on the GPU."""
    from . import triton_paged_cases

    forward = moved(triton_paged_cases.launch.forward)
    monkeypatch.setattr(triton_paged_cases.launch, "forward", forward)
    return triton_paged_cases


@pytest.fixture
def paged():
    """The launchers, on copies of CPU tensors on the GPU."""
    from cute_kernels.sparse_attn.triton import paged

    return SimpleNamespace(
        paged_attention=moved(paged.paged_attention), write_kv_cache=moved(paged.write_kv_cache)
    )


def on_gpu(value: object) -> object:
    """A tensor or a mask on the GPU, with the strides that it has; all else as it is."""
    if isinstance(value, masks.LoweredMask):
        tensors = {name: getattr(value, name).to(DEVICE) for name in masks.TENSORS}
        return dataclasses.replace(value, **tensors)
    if not isinstance(value, torch.Tensor):
        return value
    storage = torch.tensor([], dtype=value.dtype).set_(value.untyped_storage()).to(DEVICE)
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def moved(function):
    """``function`` on copies on the GPU; its results and what it wrote are on the CPU."""

    def run(*args):
        copies = [on_gpu(value) for value in args]
        results = function(*copies)
        for value, copy in zip(args, copies, strict=True):
            if isinstance(value, torch.Tensor):
                value.copy_(copy)
        return results if results is None else tuple(t.cpu() for t in results)

    return run


@pytest.mark.parametrize(
    "check",
    ["mixed", "more", "chunks", "places", "shared_pages", "zeros", "outside", "strided"],
)
def test_bytes(cases, paged, check):
    getattr(cases, check)(paged)


def test_writes(cases, paged):
    cases.writes(paged)


@pytest.mark.parametrize("seed", range(500))
def test_drawn_batches(cases, paged, seed):
    cases.dense(paged_batches.draw(seed), paged)


#: Decode rows, speculative rows and a chunk of a long prompt, and a short one.
LONG = ((19999, 20000, 20000), (12340, 12345, 20000), (3000, 4000, 20000), (0, 97, 97))


@pytest.mark.parametrize("window", [(None, 0), (4095, 0)])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_long_contexts(cases, paged, dim, window):
    cases.dense(Case(11, LONG, dim, heads=(8, 2), window=window), paged)


def device_batch(case: Case, order: int | None = 0) -> Batch:
    return Batch(*map(on_gpu, vars(batch_of(case, order)).values()))


def test_the_same_bytes_again_and_again():
    from cute_kernels.sparse_attn.triton import paged

    case = Case(12, paged_batches.MIXED * 20, 128, heads=(8, 2))
    batch = device_batch(case)
    want = batch.run(paged.paged_attention, case)
    beside = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(REPEATS):
        with torch.cuda.stream(beside):
            noise = (noise @ noise).tanh()
        assert all(map(same_bytes, batch.run(paged.paged_attention, case), want))


def test_a_graph_reads_other_lengths_and_pages():
    """Replays of one graph: as many sequences and tokens at most, other lengths, pages, rows."""
    from cute_kernels.sparse_attn.triton import paged

    drawn = [
        Case(13, ((150, 151, 170), (60, 131, 131), (0, 70, 70)), rest=8),
        Case(13, ((130, 131, 170), (0, 1, 1), (20, 99, 99)), rest=69),
        Case(13, ((0, 150, 170), (0, 0, 0), (0, 0, 0)), rest=0),
    ]
    batches = [device_batch(case, number) for number, case in enumerate(drawn)]
    want = [b.run(paged.paged_attention, c) for b, c in zip(batches, drawn, strict=True)]
    sizes = [max(getattr(b, name).shape[dim] for b in batches)
             for name, dim in (("k_cache", 0), ("block_table", 1))]  # fmt: skip
    held = Batch(*(None if t is None else t.clone() for t in vars(batches[0]).values()))
    shape = sizes[0], *held.k_cache.shape[1:]
    held.k_cache, held.v_cache = (held.k_cache.new_empty(shape) for _ in range(2))
    held.block_table = held.block_table.new_empty(3, sizes[1])
    held.run(paged.paged_attention, drawn[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = held.run(paged.paged_attention, drawn[0])
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
    from cute_kernels.sparse_attn.triton import paged

    case = Case(14, ((97, 98, 130), (280, 281, 281)), heads=(2, 1))
    batch = device_batch(case)
    want = batch.run(paged.paged_attention, case)
    pages, first = len(batch.k_cache), 2**31 // batch.k_cache[0].numel()
    for name in ("k_cache", "v_cache"):
        cache = getattr(batch, name)
        far = cache.new_empty(first + pages, *cache.shape[1:])
        far[first:] = cache
        setattr(batch, name, far)
    batch.block_table = torch.where(batch.block_table < 0, -1, batch.block_table + first).int()
    assert all(map(same_bytes, batch.run(paged.paged_attention, case), want))
