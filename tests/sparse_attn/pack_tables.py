"""Tables that ``kernel_varlen_tables_sm90`` must make of offsets, sequence by sequence in Python.

`oracle` says what is right.  `drawn` is shared by the simulator's tests and the card's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

BLOCK, FAR = 128, 2**30
#: The sequences among which those with most blocks come first.
CHUNK = 256
SIZES = (0, 0, 1, 2, 127, 128, 129, 255, 256, 257, 300, 513, 700, 1500)
WINDOWS = [
    *((None, 0), (None, None), (0, 0), (70, 0), (None, 9), (40, 9), (1, None), (128, 128)),
    *((127, 1), (129, 0), (1, 129), (300, 255), (0, None), (256, 640)),
]


class Case(NamedTuple):
    """bounds [N, 2] among ``tokens``; window: (left, right); KV heads, and query heads to each."""

    bounds: torch.Tensor
    tokens: int
    window: tuple[int | None, int | None]
    kv_heads: int = 2
    group: int = 1

    @property
    def blocks(self) -> int:
        """Rows of a table that are enough for any bounds; none are read as one of nothing."""
        return self.tokens // BLOCK + max(1, len(self.bounds)) + 1

    @property
    def band(self) -> tuple[int, int]:
        left, right = self.window
        return -FAR if left is None else -left, FAR if right is None else right


class Tables(NamedTuple):
    """table int32 [blocks + 1, 4]; tickets [in use, 4]; sequences: (first block, tokens)."""

    table: np.ndarray
    tickets: np.ndarray
    sequences: list[tuple[int, int]]


def between(offsets: torch.Tensor) -> torch.Tensor:
    """[N, 2]: from offsets[i] to offsets[i + 1], without a copy."""
    step = offsets.stride(0)
    return offsets.as_strided((len(offsets) - 1, 2), (step, step))


def oracle(case: Case) -> Tables:
    """Table and tickets of any bounds, sequence by sequence."""
    lo, hi = case.band
    parts, behind = [], 0
    for begin, end in case.bounds.tolist():
        begin, end = (min(max(index, 0), case.tokens) for index in (begin, end))
        begin = max(begin, behind)
        behind = max(behind, end)
        parts.append((begin, max(end - begin, 0)))
    parts.append((behind, case.tokens - behind))
    rows, sequences, block = [], [], 0
    for i, (begin, size) in enumerate(parts):
        count = -(-size // BLOCK)
        ends = (block, block + count - 1) if i < len(parts) - 1 else (1, 0)
        row = (block * BLOCK - begin, block * BLOCK + size, *ends)
        rows += [row] * count
        sequences.append((block, size))
        block += count
    used = len(rows)
    assert used <= case.blocks
    rows += [(0, 0, 1, 0)] * (case.blocks - used) + [(0, 0, used, -1)]
    tickets = []
    for chunk in range(0, len(parts), CHUNK):
        of_chunk = range(chunk, min(chunk + CHUNK, len(parts)))
        for i in sorted(of_chunk, key=lambda i: (i == len(parts) - 1, -sequences[i][1] // BLOCK)):
            tickets += _tickets(case, *sequences[i], i == len(parts) - 1, (lo, hi))
    assert len(tickets) == used * case.kv_heads
    tickets = np.array(tickets, np.int32).reshape(-1, 4)
    return Tables(np.array(rows, np.int32).reshape(-1, 4), tickets, sequences)


def _tickets(case: Case, first: int, size: int, rest: bool, band: tuple[int, int]) -> list[tuple]:
    count, flight, out = -(-size // BLOCK), max(1, 4 // case.group), []
    for section in range(0, case.kv_heads, flight):
        for column in range(count)[::-1]:
            # Which query blocks have a pair in the band, pair by pair of distances.
            recorded = [] if rest else [m for m in range(count) if meets(column - m, band)]
            begin, end = (first + recorded[0], first + recorded[-1] + 1) if recorded else (0, 0)
            for head in range(section, min(section + flight, case.kv_heads)):
                out.append((head, first + column, begin, end))
    return out


def meets(away: int, band: tuple[int, int]) -> bool:
    """Whether a key block so many behind a query block has a pair in the band."""
    least, most = away * BLOCK - (BLOCK - 1), away * BLOCK + BLOCK - 1
    return max(least, band[0]) <= min(most, band[1])


def drawn(seed: int, device: str = "cpu") -> Case:
    """Offsets as packs have them: some with tokens behind the last, few of many sequences."""
    g = np.random.default_rng(seed)
    count = int(g.integers(0, 12))
    sizes = [
        int(g.choice(SIZES)) if g.integers(2) else int(g.integers(0, 700)) for _ in range(count)
    ]
    if seed % 50 == 49:
        sizes = g.integers(0, 9, int(g.integers(200, 900))).tolist()
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    behind = int(g.integers(1, 400)) if seed % 3 == 0 else 0
    dtype = (torch.int32, torch.int64)[seed % 2]
    out = torch.from_numpy(offsets).to(device, dtype)
    if seed % 5 == 4:
        out = torch.stack((out, out + 7), 1)[:, 0]
    window = WINDOWS[seed % len(WINDOWS)]
    group = int(g.choice((1, 2, 3, 4, 8)))
    return Case(between(out), int(offsets[-1]) + behind, window, int(g.integers(1, 10)), group)


def wild(seed: int, device: str = "cpu") -> Case:
    """Bounds that no pack has: below 0, beyond all tokens, descending, overlapping."""
    g = np.random.default_rng(seed)
    tokens, count = int(g.integers(1, 2000)), int(g.integers(1, 600 if seed % 10 == 0 else 12))
    least, most = (-300, tokens + 300) if seed % 2 else (-(2**31), 2**31)
    bounds = torch.from_numpy(g.integers(least, most, (count, 2)))
    if seed % 2 == 0 and seed % 4:
        bounds = bounds * 2**20
    dtype = torch.int64 if seed % 4 == 2 else torch.int32
    return Case(bounds.to(device, dtype), tokens, WINDOWS[seed % len(WINDOWS)])


def entries(case: Case, tables: Tables) -> tuple[np.ndarray, ...]:
    """(column, query block, rank) of each visit of head 0, ticket by ticket, by the formulas."""
    _, hi = case.band
    out = []
    for head, column, begin, end in tables.tickets.tolist():
        if head == 0:
            last = tables.table[column, 3]
            reach = (hi + BLOCK - 1) // BLOCK
            out += [(column, m, min(last, m + reach) - column) for m in range(begin, end)]
    return tuple(np.array(out, np.int32).reshape(-1, 3).T)
