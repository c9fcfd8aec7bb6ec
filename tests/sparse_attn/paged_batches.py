"""Mixed batches over paged caches, and each sequence's rows in a dense forward.

A sequence is (start, end, length): of so many tokens those from start to end are in the batch,
over the keys up to end.  Sequences of one length have the same tokens: they may be parts of one.
Rows are wanted as they are in one dense forward of all tokens, or of those up to end where a query
sees keys after itself.  What a cache holds besides is NaN: pages of nobody, the ends of pages, and
keys from end on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.sparse_attn import masks
from cute_kernels.sparse_attn.config import VALUE_DIMS
from tests.contract import same_bytes

Sequence = tuple[int, int, int]
NHD, HND = LAYOUTS = ("NHD", "HND")
#: One token behind others, a chunk, a whole prompt, four speculative rows, one token alone,
#: no token, and no key.
MIXED = (
    (150, 151, 170),
    (60, 131, 131),
    (0, 70, 70),
    (93, 97, 120),
    (0, 1, 1),
    (9, 9, 9),
    (0, 0, 0),
)


@dataclass(frozen=True)
class Case:
    """A batch, drawn from a seed.

    kept: Tokens of no sequence, after all others.
    """

    seed: int = 0
    sequences: tuple[Sequence, ...] = MIXED
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    heads: tuple[int, int] = (4, 2)
    page: int = 16
    layout: str = NHD
    window: tuple[int | None, int | None] = (None, 0)
    softcap: float = 0.0
    sinks: bool = False
    rest: int = 0

    @property
    def scale(self) -> float:
        return self.dim**-0.5


def draw(seed: int, dims: tuple[int, ...] = tuple(VALUE_DIMS)) -> Case:
    """A case of a few short sequences."""
    g = torch.Generator().manual_seed(1000 + seed)

    def pick(*values):
        return values[torch.randint(len(values), (1,), generator=g).item()]

    def number(low: int, high: int) -> int:
        return torch.randint(low, high + 1, (1,), generator=g).item()

    sequences = []
    for _ in range(number(1, 4)):
        length = number(1, 200)
        end = number(1, length)
        queries = min(end, pick(1, 1, 1, number(2, 6), number(7, 80), end))
        sequences.append((end - queries, end, length))
    return Case(
        seed,
        tuple(sequences),
        dims[seed % len(dims)],
        pick(torch.bfloat16, torch.float16),
        pick((2, 2), (4, 1), (6, 2), (5, 1), (16, 1)),
        pick(16, 32, 64, 128, 256),
        pick(*LAYOUTS),
        pick(
            (None, 0), (None, 0), (number(0, 90), 0), (number(0, 90), number(0, 40)), (None, None)
        ),
        pick(0.0, 0.0, 3.0),
        pick(False, True),
        pick(0, 3),
    )


@dataclass
class Batch:
    """Arguments of ``paged_attention`` up to cu_seqlens_q, and the sinks."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seqlens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    sinks: torch.Tensor | None

    def run(self, attend: Callable, case: Case, **options) -> tuple[torch.Tensor, torch.Tensor]:
        *tensors, sinks = vars(self).values()
        tensors[1:3] = by_key(case.layout, *tensors[1:3])
        return attend(*tensors, case.scale, case.window, case.softcap, sinks, **options)


def by_key(layout: str, *caches: torch.Tensor) -> list[torch.Tensor]:
    """Views [pages, page, heads, head size] of caches of a layout, as the op makes them."""
    return [t.transpose(1, 2) if layout == HND else t for t in caches]


def tokens_of(case: Case, length: int) -> tuple[torch.Tensor, ...]:
    """q, k, v of all tokens of the sequence of a length: [length, heads, head size]."""
    g = torch.Generator().manual_seed(1000 * case.seed + length)
    heads, kv_heads = case.heads
    q, k = (
        torch.randn(length, heads, case.dim, generator=g),
        torch.randn(length, kv_heads, case.dim, generator=g),
    )
    k = k * torch.randn(length, kv_heads, 1, generator=g).exp2()
    v = torch.randn(length, kv_heads, VALUE_DIMS[case.dim], generator=g)
    return tuple(t.to(case.dtype) for t in (q, k, v))


def sinks_of(case: Case) -> torch.Tensor | None:
    g = torch.Generator().manual_seed(case.seed)
    return torch.randn(case.heads[0], generator=g) if case.sinks else None


def pages_of(case: Case, order: int | None = 0) -> list[list[int]]:
    """The pages of each sequence, shuffled, with some of nobody; ``order`` None: as they come."""
    counts = [-(-end // case.page) for _, end, _ in case.sequences]
    total = sum(counts) + 3
    g = torch.Generator().manual_seed(case.seed + (order or 0))
    pages = list(range(total)) if order is None else torch.randperm(total, generator=g).tolist()
    return [[pages.pop() for _ in range(count)] for count in counts]


def batch_of(case: Case, order: int | None = 0, *, unseen: bool = True) -> Batch:
    """The batch of a case.

    unseen: Keys that the sequence's window excludes are NaN, and their whole pages are page -1.
    """
    nan, page, width = torch.nan, case.page, VALUE_DIMS[case.dim]
    pages = pages_of(case, order)
    total = sum(map(len, pages)) + 3
    caches = [
        torch.full((total, page, case.heads[1], d), nan, dtype=case.dtype)
        for d in (case.dim, width)
    ]
    table = torch.full((len(pages), max(map(len, pages), default=0) + 2), -7, dtype=torch.int32)
    queries = []
    for i, (start, end, length) in enumerate(case.sequences):
        q, *kv = tokens_of(case, length)
        queries.append(q[start:end])
        left = case.window[0]
        first = max(0, start - left) if unseen and left is not None and end > start else 0
        for at in range(first, end):
            for cache, t in zip(caches, kv, strict=True):
                cache[pages[i][at // page], at % page] = t[at]
        for at in range(first // page, len(pages[i])):
            table[i, at] = pages[i][at]
    if case.layout == HND:
        caches = [t.transpose(1, 2).contiguous() for t in caches]
    queries.append(torch.full((case.rest, case.heads[0], case.dim), nan, dtype=case.dtype))
    lengths = torch.tensor([0, *(end - start for start, end, _ in case.sequences)])
    ends = torch.tensor([end for _, end, _ in case.sequences], dtype=torch.int32)
    offsets = lengths.cumsum(0).int()
    return Batch(torch.cat(queries), *caches, table, ends, offsets, sinks_of(case))


def wanted(case: Case, forward: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, row by row out of dense forwards: ``forward`` of the Triton launcher."""
    sinks, (left, right) = sinks_of(case), case.window
    outs, sums = [], []
    for start, end, length in case.sequences:
        q, k, v = tokens_of(case, length)
        if right != 0 or not length:
            q, k, v, length = q[:end], k[:end], v[:end], end
        if start == end:
            continue
        mask = BlockMask.sliding_window(length, length, left=left, right=right)
        out, lse = forward(
            q[None], k[None], v[None], masks.lower(mask), case.scale, case.softcap, sinks
        )
        outs.append(out[0, start:end])
        sums.append(lse[0, :, start:end])
    heads = case.heads[0]
    outs.append(torch.zeros(case.rest, heads, VALUE_DIMS[case.dim], dtype=case.dtype))
    sums.append(torch.full((heads, case.rest), -torch.inf))
    return torch.cat(outs), torch.cat(sums, 1)


def check(attend: Callable, forward: Callable, case: Case, order: int | None = 0, **options):
    """Every row has the bytes of its row in a dense forward; returns them."""
    out, lse = batch_of(case, order).run(attend, case, **options)
    want = wanted(case, forward)
    assert same_bytes(out, want[0]) and same_bytes(lse, want[1]), case
    return out, lse
