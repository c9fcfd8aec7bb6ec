"""Drawn mixed batches over paged caches, and the rows that they must have."""

from __future__ import annotations

import dataclasses
import math
import random

import torch
from torch import Tensor

from cute_kernels.sparse_attn import config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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

    def operands(self) -> tuple:
        """Operands of the launcher."""
        caches = self.q, self.k_cache, self.v_cache
        lists = self.block_table, self.seqlens_k, self.cu_seqlens_q
        return *caches, *lists, self.scale, self.window, self.softcap, self.sinks

    def options(self) -> dict[str, object]:
        """Keyword arguments of the public op, beside its six tensors."""
        named = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
        left, right = self.window
        causal = {"causal": right == 0, "window_size": (left, right or None)}
        return {**named, **causal, "return_lse": True}

    def by_row(self) -> Batch:
        """Each token of a causal batch as a sequence of its own, which ends with its key."""
        rows = self.cu_seqlens_q.diff().long()
        ends = self.seqlens_k.repeat_interleave(rows) - (
            self.cu_seqlens_q[1:].repeat_interleave(rows) - 1 - torch.arange(int(rows.sum()))
        )
        return dataclasses.replace(
            self,
            block_table=self.block_table.repeat_interleave(rows, dim=0),
            seqlens_k=ends.int(),
            cu_seqlens_q=torch.arange(len(ends) + 1, dtype=torch.int32),
        )

    def only(self, n: int) -> Batch:
        """One sequence alone."""
        q = self.q[self.queries(n)]
        lists = {"block_table": self.block_table[n : n + 1], "seqlens_k": self.seqlens_k[n : n + 1]}
        starts = torch.tensor([0, len(q)], dtype=torch.int32)
        return dataclasses.replace(self, q=q, cu_seqlens_q=starts, **lists)

    def queries(self, n: int) -> slice:
        """Tokens of a sequence."""
        return slice(int(self.cu_seqlens_q[n]), int(self.cu_seqlens_q[n + 1]))


def drawn(
    lengths: list[tuple[int, int]],
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
) -> Batch:
    """Random batch; lengths: (queries, keys) of each sequence; heads: (Hq, Hkv, D).

    Pages are in random order, and all that is no key of a sequence is poison.  padding: tokens
    after the last sequence.  slope: how much scores of the last query rise (fall if negative) from
    the first key to the last, on average.  A sequence's own numbers follow its length alone.
    """
    (hq, hkv, width), order = heads, random.Random(seed)
    value_dim, torch_dtype = config.VALUE_DIMS[width], DTYPES[dtype]
    counts = [-(-keys // page) for _, keys in lengths]
    total = sum(counts) + 3
    pages = order.sample(range(total), sum(counts))
    k_cache = torch.full((total, page, hkv, width), poison, dtype=torch_dtype)
    v_cache = torch.full((total, page, hkv, value_dim), poison, dtype=torch_dtype)
    table = torch.full((len(lengths), max(1, *counts) + 1), total - 1, dtype=torch.int32)
    queries, all_keys, all_values = [], [], []
    for n, (rows, keys) in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * keys + 7)
        k, v, q = (
            torch.randn(keys, count, columns, generator=generator).to(torch_dtype)
            for count, columns in ((hkv, width), (hkv, value_dim), (hq, width))
        )
        if slope and keys:
            ends = (0.0, slope) if slope > 0 else (-slope, 0.0)
            direction = q[-1].float().view(hkv, hq // hkv, width).sum(1) / (1.5 * width**0.5)
            k += (torch.linspace(*ends, keys)[:, None, None] * direction).to(torch_dtype)
        of_sequence, pages = pages[: counts[n]], pages[counts[n] :]
        table[n, : counts[n]] = torch.tensor(of_sequence, dtype=torch.int32)
        for position in range(keys):
            place = of_sequence[position // page], position % page
            k_cache[place], v_cache[place] = k[position], v[position]
        queries.append(q[keys - rows :]), all_keys.append(k), all_values.append(v)
    queries.append(torch.zeros(padding, hq, width, dtype=torch_dtype))
    starts = torch.tensor([0, *(rows for rows, _ in lengths)]).cumsum(0).to(torch.int32)
    sinks = torch.linspace(-1.0, 1.5, hq) if with_sinks else None
    seqlens = torch.tensor([keys for _, keys in lengths], dtype=torch.int32)
    return Batch(
        *(torch.cat(queries), k_cache, v_cache, table, seqlens, starts, all_keys, all_values),
        *(1.5 * width**-0.5, window, softcap, sinks),
    )


#: Slots of four tokens in four pages of 16.
SLOTS = ([5, -1, 40, 16], [-1, -7, 0, 63], [-1] * 4, [3, 2, 1, 0])


def written(slots: list[int], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """(operands of `write_kv_cache`, the buffer of both caches, what it must hold afterwards).

    Tokens are every second one of a tensor; NaN and -0 are among them.
    """
    generator = torch.Generator().manual_seed(4)
    key, value = (torch.randn(8, 2, 64, generator=generator).bfloat16()[::2] for _ in range(2))
    key[0, 0, :2] = torch.tensor([math.nan, -0.0])
    both = torch.randn(4, 2, 16, 2, 64, generator=generator).bfloat16()
    both[0] = math.nan
    want = both.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            want[slot // 16, 0, slot % 16], want[slot // 16, 1, slot % 16] = key[row], value[row]
    return (key, value, *both.unbind(1), torch.tensor(slots, dtype=dtype)), both, want
