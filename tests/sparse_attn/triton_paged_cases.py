"""Checks of the Triton launcher of paged attention: every row is a row of the dense forward.

Each takes the launcher's module and options for both launchers, and runs in Triton's interpreter,
in the simulator or on a GPU, as they do.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import torch

import cute_kernels.sparse_attn.triton as package
from cute_kernels.sparse_attn.triton import launch
from tests import triton_copies
from tests.contract import same_bytes
from tests.sparse_attn import paged_batches as cases
from tests.sparse_attn.paged_batches import HND, NHD, Case, batch_of

copy_of = functools.partial(
    triton_copies.copy_of, package, files=("kernel_paged", "paged"), beside=("kernel_softmax",)
)

#: Mixed batches: a window whose edge lies in a block, one with keys after a query, sinks, a
#: softcap, groups that do not divide a tile, tokens of no sequence.
BATCHES = (
    Case(1),
    Case(2, window=(40, 0), heads=(3, 1), page=32, layout=HND, rest=3, sinks=True),
    Case(3, window=(70, 5), heads=(2, 2), page=128, dtype=torch.float16, softcap=2.0),
    Case(4, window=(None, None), heads=(5, 1), page=256, sinks=True, layout=HND, rest=200),
)


def dense(case: Case, module: ModuleType, **options) -> None:
    """Every row has the bytes of its row in a dense forward."""
    forward = functools.partial(launch.forward, **options)
    cases.check(module.paged_attention, forward, case, **options)


def mixed(module: ModuleType, **options) -> None:
    for case in BATCHES[:2]:
        dense(case, module, **options)


def more(module: ModuleType, **options) -> None:
    for case in BATCHES[2:]:
        dense(case, module, **options)


def chunks(module: ModuleType, **options) -> None:
    """A prompt in chunks of any length; two rows on either side of the edge of a block of keys."""
    for size in (7, 16, 97):
        ends = [*range(0, 150, size), 150]
        parts = tuple(zip(ends, ends[1:], [150] * len(ends), strict=False))
        dense(Case(5, parts, heads=(2, 1)), module, **options)
    dense(Case(5, ((63, 65, 150), (127, 129, 150)), heads=(2, 1)), module, **options)


def places(module: ModuleType, **options) -> None:
    """Other pages, page sizes, layouts and neighbours of a row: the same bytes."""
    case = Case(6, ((96, 97, 130), (0, 9, 9)))
    want = batch_of(case).run(module.paged_attention, case, **options)
    for page, layout, order, last in (
        *((16, NHD, None, 9), (16, HND, 1, 10), (64, HND, 2, 9), (256, NHD, 3, 70)),
    ):
        other = replace(case, page=page, layout=layout, sequences=((96, 97, 130), (0, last, last)))
        out, lse = batch_of(other, order).run(module.paged_attention, other, **options)
        assert same_bytes(out[:1], want[0][:1]) and same_bytes(lse[:, :1], want[1][:, :1]), other
    alone = replace(case, sequences=case.sequences[:1])
    out, lse = batch_of(alone).run(module.paged_attention, alone, **options)
    assert same_bytes(out, want[0][:1]) and same_bytes(lse, want[1][:, :1])


def shared_pages(module: ModuleType, **options) -> None:
    """A prefix that is in another sequence's pages, and nowhere else."""
    case = Case(7, ((0, 64, 130), (64, 130, 130), (129, 130, 130)))
    batch = batch_of(case)
    for sequence in (1, 2):
        for cache in (batch.k_cache, batch.v_cache):
            cache[batch.block_table[sequence, :4].long()] = torch.nan
        batch.block_table[sequence, :4] = batch.block_table[0, :4]
    out, lse = batch.run(module.paged_attention, case, **options)
    want = cases.wanted(case, functools.partial(launch.forward, **options))
    assert same_bytes(out, want[0]) and same_bytes(lse, want[1])


def zeros(module: ModuleType, **options) -> None:
    """A sum that underflows to -0 is +0, as it is where a neighbour needs another block."""
    case = Case(8, ((127, 128, 128),), heads=(1, 1))
    batch = batch_of(case)
    batch.q[:] = 8.0
    pages = batch.block_table[0, :8].long()
    batch.k_cache[pages] = 0.0
    batch.k_cache[pages, :, 0, 0] = -30.0 / (8 * case.scale * 1.4427)
    batch.k_cache[pages[4], 0] = 0.0
    batch.v_cache[pages] = -(2.0**-133)
    batch.v_cache[pages[4], 0] = 0.0
    out, _ = batch.run(module.paged_attention, case, **options)
    assert same_bytes(out, torch.zeros_like(out))


def outside(module: ModuleType, **options) -> None:
    """Pages that the cache has not, and keys that the table has not: zeros, and no key."""
    case = Case(9, ((0, 40, 40), (30, 31, 31)))
    batch, zero = batch_of(case), batch_of(case)
    for cache in (zero.k_cache, zero.v_cache):
        cache[zero.block_table[0, 1].long()] = 0.0
    zero.block_table = zero.block_table[:, :2]
    zero.seqlens_k[0], zero.cu_seqlens_q[1:] = 32, torch.tensor([32, 33])
    zero.q = torch.cat([zero.q[8:40], zero.q[40:]])
    batch.block_table = batch.block_table[:, :2].clone()
    batch.block_table[0, 1] = len(batch.k_cache)
    batch.q = batch.q[8:]
    batch.seqlens_k[0], batch.cu_seqlens_q[1:] = 2000, torch.tensor([32, 33])
    got = batch.run(module.paged_attention, case, **options)
    assert all(map(same_bytes, got, zero.run(module.paged_attention, case, **options)))


def given_out(module: ModuleType, **options) -> None:
    """The result goes where the caller says, and to nothing around it."""
    case = replace(BATCHES[1], sequences=cases.MIXED[:2])
    batch = batch_of(case)
    tokens, heads, dim = batch.q.shape
    room = torch.full((tokens, heads + 1, dim), 7.0, dtype=case.dtype)
    tail = case.scale, case.window, case.softcap, batch.sinks
    tensors = list(vars(batch).values())[:-1]
    tensors[1:3] = cases.by_key(case.layout, *tensors[1:3])
    want, _ = module.paged_attention(*tensors, *tail, **options)
    out, _ = module.paged_attention(*tensors, *tail, room[:, :heads], **options)
    assert out.data_ptr() == room.data_ptr() and same_bytes(out.contiguous(), want)
    assert (room[:, heads] == 7).all()


def strided(module: ModuleType, **options) -> None:
    """Queries and sinks that are not contiguous, K and V of a page side by side, a wider table."""
    case = BATCHES[1]
    batch = batch_of(case)
    want = batch.run(module.paged_attention, case, **options)
    fused = torch.full((len(batch.q), 9, 65), torch.nan, dtype=case.dtype)
    fused[:, 3:6, :64] = batch.q
    batch.q = fused[:, 3:6, :64]
    batch.sinks = torch.stack([batch.sinks, batch.sinks + 1], 1)[:, 0]
    batch.block_table = torch.cat([batch.block_table, batch.block_table - 1], 1)[
        :, : batch.block_table.shape[1]
    ]
    batch.k_cache, batch.v_cache = torch.stack([batch.k_cache, batch.v_cache], 1).unbind(1)
    batch.seqlens_k, batch.cu_seqlens_q = batch.seqlens_k.long(), batch.cu_seqlens_q.long()
    assert all(map(same_bytes, batch.run(module.paged_attention, case, **options), want))


def writes(module: ModuleType) -> None:
    """Each token goes to its slot, byte for byte; nothing else is written."""
    for dim, wide, heads, dtype, layout in (
        (64, 64, 2, torch.bfloat16, NHD),
        (192, 128, 11, torch.float16, HND),
        (96, 96, 1, torch.bfloat16, HND),
    ):
        g = torch.Generator().manual_seed(dim)
        fused = torch.randn(23, heads, dim + wide, generator=g).to(dtype)
        fused[3] = torch.nan
        key, value = fused[..., :dim], fused[..., dim:]
        slots = torch.randperm(9 * 16, generator=g)[:21]
        slots[5], slots[8], slots[9] = -1, -17, 9 * 16
        caches = [torch.randn(9, 16, heads, d, generator=g).to(dtype) for d in (dim, wide)]
        want = [cache.clone() for cache in caches]
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < 9 * 16:
                want[0][slot // 16, slot % 16] = key[token]
                want[1][slot // 16, slot % 16] = value[token]
        if layout == HND:
            caches = [t.transpose(1, 2).contiguous() for t in caches]
            want = [t.transpose(1, 2).contiguous() for t in want]
        views = cases.by_key(layout, *caches)
        module.write_kv_cache(key, value, *views, slots)
        assert all(map(same_bytes, caches, want)), layout
        module.write_kv_cache(key, value, *views, slots[:0])
        assert all(map(same_bytes, caches, want))


CHECKS = (mixed, more, chunks, places, shared_pages, zeros, outside, given_out, strided)
