"""Batches over paged caches, the rows that they must have, and checks that each backend passes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks.rules import Band
from cute_kernels.sparse_attn import config, masks
from tests.contract import same_bytes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: (queries, keys): one token behind others, a chunk, a whole prompt, speculative rows, one token
#: alone, no query, no key.
MIXED = [(1, 151), (71, 131), (70, 70), (4, 97), (1, 1), (0, 9), (0, 0)]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A mixed batch: what `paged_attention` takes, and the keys and values of each sequence."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    scale: float
    window: tuple[int | None, int | None]
    softcap: float = 0.0
    sinks: Tensor | None = None
    layout: str = "NHD"

    def operands(self) -> tuple:
        """Operands of a launcher, whose caches are [pages, page size, heads, head size]."""
        caches = by_key(self.layout, self.k_cache, self.v_cache)
        lists = self.block_table, self.seqlens_k, self.cu_seqlens_q
        return self.q, *caches, *lists, self.scale, self.window, self.softcap, self.sinks

    def call(self, **options: object) -> tuple[Tensor, Tensor]:
        """(out, lse) of the public op."""
        left, right = self.window
        named = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
        named |= {"causal": right == 0, "window_size": (left, right or None), "return_lse": True}
        lists = self.block_table, self.seqlens_k, self.cu_seqlens_q
        tensors = self.q, self.k_cache, self.v_cache, *lists
        return ck.paged_attention(*tensors, **named | {"layout": self.layout} | options)

    def changed(self, **fields: object) -> Batch:
        return dataclasses.replace(self, **fields)

    def by_row(self) -> Batch:
        """Each token of a causal batch as a sequence of its own, which ends with its key."""
        rows = self.cu_seqlens_q.diff().long()
        ends = self.seqlens_k.repeat_interleave(rows) - (
            self.cu_seqlens_q[1:].repeat_interleave(rows) - 1 - torch.arange(int(rows.sum()))
        )
        return self.changed(
            block_table=self.block_table.repeat_interleave(rows, dim=0),
            seqlens_k=ends.int(),
            cu_seqlens_q=torch.arange(len(ends) + 1, dtype=torch.int32),
        )

    def only(self, n: int) -> Batch:
        """One sequence alone."""
        q = self.q[self.queries(n)]
        lists = {"block_table": self.block_table[n : n + 1], "seqlens_k": self.seqlens_k[n : n + 1]}
        return self.changed(q=q, cu_seqlens_q=torch.tensor([0, len(q)]).int(), **lists)

    def queries(self, n: int) -> slice:
        """Tokens of a sequence."""
        return slice(int(self.cu_seqlens_q[n]), int(self.cu_seqlens_q[n + 1]))


def on_card(batch: Batch) -> Batch:
    """The batch on the GPU."""

    def moved(value: object) -> object:
        if isinstance(value, list):
            return [moved(t) for t in value]
        return value.cuda() if isinstance(value, Tensor) else value

    return batch.changed(**{name: moved(value) for name, value in vars(batch).items()})


def by_key(layout: str, *caches: Tensor) -> list[Tensor]:
    """Views [pages, page size, heads, head size] of caches of a layout, or back."""
    return [t.transpose(1, 2) if layout == "HND" else t for t in caches]


def drawn(
    lengths: list[tuple[int, ...]],
    heads: tuple[int, int, int],
    page: int,
    *,
    seed: int = 0,
    dtype: str = "bf16",
    window: tuple[int | None, int | None] = (None, 0),
    softcap: float = 0.0,
    with_sinks: bool = False,
    padding: int = 0,
    poison: float = math.nan,
    slope: float = 0.0,
    layout: str = "NHD",
    unseen: bool = False,
) -> Batch:
    """Random batch; lengths: (queries, keys) of each sequence, or of its first keys (.., .., all).

    heads: (Hq, Hkv, D).  Pages are in random order, and all that is no key of a sequence is poison.
    padding: tokens after the last sequence.  slope: how much scores of the last query rise (fall if
    negative) from the first key to the last, on average.  A sequence's own numbers follow its
    length alone.  unseen: keys before the window are poison too, their pages and those behind
    a sequence are outside the cache.
    """
    (hq, hkv, width), order = heads, random.Random(seed)
    value_dim, torch_dtype = config.VALUE_DIMS[width], DTYPES[dtype]
    counts = [-(-keys // page) for _, keys, *_ in lengths]
    total = sum(counts) + 3
    pages = order.sample(range(total), sum(counts))
    k_cache = torch.full((total, page, hkv, width), poison, dtype=torch_dtype)
    v_cache = torch.full((total, page, hkv, value_dim), poison, dtype=torch_dtype)
    shape = len(lengths), max([1, *counts]) + 1
    table = torch.full(shape, -7 if unseen else total - 1, dtype=torch.int32)
    queries, all_keys, all_values = [], [], []
    for n, (rows, keys, *whole) in enumerate(lengths):
        (size,) = whole or (keys,)
        generator = torch.Generator().manual_seed(1000 * size + 7)
        k, v, q = (
            torch.randn(size, count, columns, generator=generator).to(torch_dtype)
            for count, columns in ((hkv, width), (hkv, value_dim), (hq, width))
        )
        if slope and keys:
            ends = (0.0, slope) if slope > 0 else (-slope, 0.0)
            direction = q[-1].float().view(hkv, hq // hkv, width).sum(1) / (1.5 * width**0.5)
            k += (torch.linspace(*ends, keys)[:, None, None] * direction).to(torch_dtype)
        of_sequence, pages = pages[: counts[n]], pages[counts[n] :]
        left = window[0] if unseen and rows else None
        first = 0 if left is None else max(0, keys - rows - left)
        skipped = first // page
        table[n, skipped : counts[n]] = torch.tensor(of_sequence[skipped:], dtype=torch.int32)
        for position in range(first, keys):
            place = of_sequence[position // page], position % page
            k_cache[place], v_cache[place] = k[position], v[position]
        queries.append(q[keys - rows : keys])
        all_keys.append(k[:keys])
        all_values.append(v[:keys])
    queries.append(torch.zeros(padding, hq, width, dtype=torch_dtype))
    starts = torch.tensor([0, *(rows for rows, *_ in lengths)]).cumsum(0).to(torch.int32)
    sinks = torch.linspace(-1.0, 1.5, hq) if with_sinks else None
    seqlens = torch.tensor([keys for _, keys, *_ in lengths], dtype=torch.int32)
    caches = [t.contiguous() for t in by_key(layout, k_cache, v_cache)]
    return Batch(
        *(torch.cat(queries), *caches, table, seqlens, starts, all_keys, all_values),
        *(1.5 * width**-0.5, window, softcap, sinks, layout),
    )


def draw(seed: int, most: int = 200) -> dict:
    """Arguments of `drawn`: a few sequences of at most so many keys under any rule."""
    source = random.Random(seed)
    lengths = []
    for _ in range(source.randint(1, 4)):
        keys = source.randint(1, most)
        rows = source.choice((1, 1, 1, source.randint(2, 6), source.randint(7, 80), keys))
        lengths.append((min(rows, keys), keys))
    group = source.choice(((2, 2), (4, 1), (6, 2), (5, 1), (16, 1)))
    near, after = source.randint(0, 90), source.randint(0, 40)
    return {
        "lengths": lengths,
        "heads": (*group, config.HEAD_DIMS[seed % len(config.HEAD_DIMS)]),
        "page": source.choice(config.PAGE_SIZES),
        "seed": seed,
        "dtype": source.choice(("bf16", "fp16")),
        "window": source.choice(((None, 0), (None, 0), (near, 0), (near, after), (None, None))),
        "softcap": source.choice((0.0, 0.0, 3.0)),
        "with_sinks": source.random() < 0.4,
        "padding": source.choice((0, 3)),
        "layout": source.choice(("NHD", "HND")),
        "unseen": True,
    }


# ---- rows of a batch -----------------------------------------------------------------------------


def dense(batch: Batch, n: int, forward: Callable) -> tuple[Tensor, Tensor]:
    """(out [rows, Hq, Dv], lse [Hq, rows]) of a sequence by the dense launcher of a backend."""
    q, keys = batch.q[batch.queries(n)], batch.keys[n]
    left, right = batch.window
    first = len(keys) - len(q)
    lo, hi = (None if left is None else first - left), (None if right is None else first + right)
    mask = masks.lower(BlockMask.from_rule(Band(lo, hi), len(q), len(keys)))
    operands = q[None], keys[None], batch.values[n][None], mask
    out, lse = forward(*operands, batch.scale, batch.softcap, batch.sinks)
    return out[0], lse[0]


def wrong_rows(batch: Batch, out: Tensor, lse: Tensor, forward: Callable) -> list[int]:
    """Sequences whose rows are not those of a dense forward; -1: tokens of no sequence."""
    end = int(batch.cu_seqlens_q[-1])
    wrong = [] if (out[end:] == 0).all() and (lse[:, end:] == -math.inf).all() else [-1]
    for n in range(len(batch.seqlens_k)):
        rows = batch.queries(n)
        if rows.start < rows.stop:
            want, want_lse = dense(batch, n, forward)
            same = same_bytes(out[rows], want) and same_bytes(lse[:, rows].contiguous(), want_lse)
            wrong += [] if same else [n]
    return wrong


@dataclasses.dataclass(frozen=True)
class Engine:
    """Launchers of a backend: of paged caches, and its dense forward.

    skips: Whether slots behind the cache are skipped, not refused.
    """

    paged_attention: Callable
    forward: Callable
    write_kv_cache: Callable
    skips: bool = True

    def attend(self, batch: Batch, *out: Tensor) -> tuple[Tensor, Tensor]:
        return self.paged_attention(*batch.operands(), *out)

    def check(self, batch: Batch) -> None:
        """Every row has the bytes of its row in a dense forward."""
        assert wrong_rows(batch, *self.attend(batch), self.forward) == []


#: Mixed batches: a window whose edge lies in a block, one with keys after a query, sinks, a
#: softcap, groups that do not divide a tile, tokens of no sequence.
UNSEEN, SINKS_HND = {"unseen": True}, {"with_sinks": True, "layout": "HND"}
BATCHES = (
    {"heads": (4, 2, 64), "page": 16},
    {"heads": (3, 1, 64), "page": 32, "window": (40, 0), "padding": 3, **SINKS_HND, **UNSEEN},
    {"heads": (2, 2, 64), "page": 128, "window": (70, 5), "dtype": "fp16", "softcap": 2, **UNSEEN},
    {"heads": (5, 1, 64), "page": 256, "window": (None, None), "padding": 200, **SINKS_HND},
)


def mixed(engine: Engine, chosen: slice = slice(2)) -> None:
    for arguments in BATCHES[chosen]:
        engine.check(drawn(MIXED, **arguments))


def more(engine: Engine) -> None:
    mixed(engine, slice(2, 4))


def chunks(engine: Engine) -> None:
    """A prompt in chunks of any length; two rows on either side of the edge of a block of keys."""
    size = 150
    cuts = [[*range(0, size, step), size] for step in (7, 16, 97)]
    parts = [[(b - a, b, size) for a, b in itertools.pairwise(cut)] for cut in cuts]
    out, lse = dense(drawn([(size, size)], (2, 1, 64), 16), 0, engine.forward)
    for lengths in parts:
        got = engine.attend(drawn(lengths, (2, 1, 64), 16))
        assert same_bytes(got[0], out) and same_bytes(got[1], lse), lengths
    got = engine.attend(drawn([(2, 65, size), (2, 129, size)], (2, 1, 64), 16))
    assert same_bytes(got[0], out[[63, 64, 127, 128]])


def places(engine: Engine) -> None:
    """Other pages, page sizes, layouts and neighbours of a row, and none: the same bytes."""
    row, heads = (1, 97), (4, 2, 64)
    want = engine.attend(drawn([row, (9, 9)], heads, 16))
    for page, layout, others in (
        *((16, "NHD", [(9, 9)]), (16, "HND", [(10, 10)]), (64, "HND", [(9, 9)])),
        *((256, "NHD", [(70, 70)]), (16, "NHD", [])),
    ):
        out, lse = engine.attend(drawn([row, *others], heads, page, seed=page, layout=layout))
        assert same_bytes(out[:1], want[0][:1]) and same_bytes(lse[:, :1], want[1][:, :1]), page


def shared_pages(engine: Engine) -> None:
    """A prefix that is in another sequence's pages, and nowhere else."""
    batch = drawn([(64, 64, 130), (66, 130), (1, 130)], (4, 2, 64), 16)
    for sequence in (1, 2):
        for cache in (batch.k_cache, batch.v_cache):
            cache[batch.block_table[sequence, :4].long()] = math.nan
        batch.block_table[sequence, :4] = batch.block_table[0, :4]
    engine.check(batch)


def zeros(engine: Engine) -> None:
    """A sum that underflows to -0 is +0, as it is where a neighbour needs another block."""
    batch = drawn([(1, 128)], (1, 1, 64), 16)
    batch.q[:] = 8.0
    pages = batch.block_table[0, :8].long()
    batch.k_cache[pages] = 0.0
    batch.k_cache[pages, :, 0, 0] = -30.0 / (8 * batch.scale * 1.4427)
    batch.k_cache[pages[4], 0] = 0.0
    batch.v_cache[pages] = -(2.0**-133)
    batch.v_cache[pages[4], 0] = 0.0
    out, _ = engine.attend(batch)
    assert same_bytes(out, torch.zeros_like(out))


def given_out(engine: Engine) -> None:
    """The result goes where the caller says, and to nothing around it."""
    batch = drawn(MIXED[:2], **BATCHES[1])
    tokens, heads, dim = batch.q.shape
    room = torch.full((tokens, heads + 1, dim), 7.0, dtype=batch.q.dtype)
    out, _ = engine.attend(batch, room[:, :heads])
    assert out.data_ptr() == room.data_ptr() and (room[:, heads] == 7).all()
    assert same_bytes(out.contiguous(), engine.attend(batch)[0])


def strided(engine: Engine) -> None:
    """Queries and sinks that are not contiguous, K and V of a page side by side, a wider table."""
    batch = drawn(MIXED, **BATCHES[1])
    fused = torch.full((len(batch.q), 9, 65), math.nan, dtype=batch.q.dtype)
    fused[:, 3:6, :64] = batch.q
    columns = batch.block_table.shape[1]
    k_cache, v_cache = torch.stack([batch.k_cache, batch.v_cache], 1).unbind(1)
    other = batch.changed(
        q=fused[:, 3:6, :64],
        sinks=torch.stack([batch.sinks, batch.sinks + 1], 1)[:, 0],
        block_table=torch.cat([batch.block_table, batch.block_table - 1], 1)[:, :columns],
        k_cache=k_cache,
        v_cache=v_cache,
        seqlens_k=batch.seqlens_k.long(),
        cu_seqlens_q=batch.cu_seqlens_q.long(),
    )
    assert all(map(same_bytes, engine.attend(other), engine.attend(batch)))


def drawn_writes(dim: int, heads: int, dtype: torch.dtype, layout: str, slots: Tensor) -> tuple:
    """(operands of `write_kv_cache`, caches, what these must hold): strided rows, NaN and -0."""
    g, value_dim = torch.Generator().manual_seed(dim), config.VALUE_DIMS[dim]
    fused = torch.randn(23, heads, dim + value_dim, generator=g).to(dtype)
    fused[3] = math.nan
    fused[0, 0, 0] = -0.0
    key, value = fused[..., :dim], fused[..., dim:]
    shapes = ((9, 16, heads, d) for d in (dim, value_dim))
    caches = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    want = [cache.clone() for cache in caches]
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < 9 * 16:
            want[0][slot // 16, slot % 16] = key[token]
            want[1][slot // 16, slot % 16] = value[token]
    caches = [t.contiguous() for t in by_key(layout, *caches)]
    want = [t.contiguous() for t in by_key(layout, *want)]
    return (key, value, *by_key(layout, *caches), slots), caches, want


def writes(engine: Engine) -> None:
    """Each token goes to its slot, byte for byte; nothing else is written."""
    slots = torch.randperm(9 * 16, generator=torch.Generator().manual_seed(1))[:21]
    slots[5], slots[8], slots[9] = -1, -17, 9 * 16 if engine.skips else -2
    for dim, heads, dtype, layout, chosen in (
        (64, 2, torch.bfloat16, "NHD", slots),
        (192, 11, torch.float16, "HND", slots.int()),
        (96, 1, torch.bfloat16, "HND", slots[:0]),
        (64, 2, torch.bfloat16, "NHD", torch.full((4,), -1)),
    ):
        operands, caches, want = drawn_writes(dim, heads, dtype, layout, chosen)
        engine.write_kv_cache(*operands)
        assert all(map(same_bytes, caches, want)), (dim, layout)


CHECKS = (mixed, more, chunks, places, shared_pages, zeros, given_out, strided, writes)


def other_layouts(batch: Batch) -> list[Batch]:
    """Head-major pages, and views of one buffer of keys and values."""
    caches = batch.k_cache, batch.v_cache
    by_head = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in caches]
    both = torch.stack(caches, dim=1)
    return [
        dataclasses.replace(batch, k_cache=k_cache, v_cache=v_cache)
        for k_cache, v_cache in (by_head, both.unbind(1))
    ]
