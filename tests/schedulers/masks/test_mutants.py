"""Rules on every small block and window against brute force; mutants of block masks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import (
    algebra,
    bits,
    build,
    document,
    mask,
    rules,
)
from cute_kernels.schedulers.masks.document import SameDocument, document_ids
from tests.schedulers.masks import oracle

Grid, Band = rules.Grid, rules.Band


def small_rules(q_len, kv_len, rng):
    """(rule, the same by NumPy on (batch, query, key)) of every leaf."""
    for lo, hi in itertools.product([None, -2, 0, 1], [None, -1, 0, 2]):

        def band(b, q, kv, lo=lo, hi=hi):
            return (lo is None or kv - q >= lo) & (hi is None or kv - q <= hi)

        yield rules.Band(lo, hi), np.vectorize(band)
    for step in (1, 2, 3):
        for phase in range(step):
            yield (
                rules.Dilated(step, phase),
                lambda b, q, kv, step=step, phase=phase: (kv - q) % step == phase,
            )
    length = rng.integers(0, kv_len + 1, 2).astype(np.int32)
    yield rules.Prefix(torch.from_numpy(length)), lambda b, q, kv: kv < length[b]
    if q_len == kv_len:
        for ids in documents(rng, 2, q_len):
            rule = SameDocument(document_ids(torch.from_numpy(ids)))
            yield rule, lambda b, q, kv, ids=ids: ids[b, q] == ids[b, kv]


def documents(rng, batch, length):
    """int64 ids [batch, length]: each batch in runs, scattered or one document, in any mixture."""
    kinds = {
        "runs": lambda: np.sort(rng.integers(0, 4, length)),
        "scattered": lambda: rng.integers(0, 5, length),
        "one": lambda: np.full(length, 3),
    }
    for mixture in itertools.product(kinds, repeat=batch):
        yield np.stack([kinds[kind]() for kind in mixture])


def windows_have_one_rule():
    """All sides up to past the ends.  Windows of equal elements have equal hashes, and no others:
    a bound that holds for every element is left out."""
    sides = [None, *range(6)]
    for q_len, kv_len in ((1, 1), (1, 4), (4, 1), (3, 3), (2, 4), (4, 2)):
        elements, hashes = {}, {}
        q, kv = np.ogrid[:q_len, :kv_len]
        distance = kv - q - (kv_len - q_len)
        for left, right in itertools.product(sides, sides):
            dense = np.ones((1, 1, q_len, kv_len), bool)
            dense &= True if left is None else distance >= -left
            dense &= True if right is None else distance <= right
            mask = BlockMask.sliding_window(q_len, kv_len, left=left, right=right, block_size=2)
            assert np.array_equal(mask.to_dense().numpy(), dense), (q_len, kv_len, left, right)
            elements.setdefault(dense.tobytes(), set()).add(mask.hash())
            hashes.setdefault(mask.hash(), set()).add(dense.tobytes())
        assert {len(out) for out in (*elements.values(), *hashes.values())} == {1}


def rules_know_small_blocks():
    """Blocks down to one element, where what is partial elsewhere is full."""
    rng = np.random.default_rng(31)
    for q_len, kv_len in ((5, 5), (4, 6), (6, 3)):
        for block_size in ((1, 1), (1, 2), (2, 1), (3, 2)):
            grid = rules.Grid(q_len, kv_len, block_size)
            shape = (2, grid.num_q_blocks)
            b, m = (torch.from_numpy(part.reshape(-1)) for part in np.indices(shape))
            for rule, allowed in small_rules(q_len, kv_len, rng):
                dense = oracle.dense_of(
                    lambda b, h, q, kv, allowed=allowed: allowed(b, q, kv), q_len, kv_len, 2
                )
                want = oracle.block_lists(dense, block_size)
                want = oracle.classes(want, grid.num_kv_blocks)
                got = rule.classify(grid, b, torch.zeros_like(b), m)
                assert np.array_equal(got.numpy(), want), (rule, q_len, kv_len, block_size)


@pytest.mark.parametrize("chunk", [1, 9])
def test_documents_of_every_mixture_in_small_chunks(monkeypatch, chunk):
    """Scattered documents are looked at a few at a time, down to one."""
    monkeypatch.setattr(rules, "CHUNK", chunk)
    rng = np.random.default_rng(chunk)
    for ids in documents(rng, 3, 11):
        mask = BlockMask.document(torch.from_numpy(ids), block_size=(4, 3))
        same = ids[:, None, :, None] == ids[:, None, None, :]
        oracle.check_exact(mask, same, (4, 3))


def constructors():
    oracle.battery((16, 32), seed=21, count=4)


def combinations():
    """Blocks that two partial parts make full, or empty."""
    upper = BlockMask.sliding_window(64, 64, left=0, right=None, block_size=64)
    lower = BlockMask.causal(64, 64, block_size=64)
    oracle.check_exact(upper | lower, (upper.to_dense() | lower.to_dense()).numpy(), (64, 64))
    documents = BlockMask.document(torch.arange(64) // 32, block_size=(32, 64))
    far = BlockMask.sliding_window(64, 64, left=None, right=-0, block_size=(32, 64))
    oracle.check_exact(documents & far, (documents.to_dense() & far.to_dense()).numpy(), (32, 64))


def bound_of_the_last_distance_dropped(q_len, kv_len, left, right, original=mask._window):
    band = original(q_len, kv_len, left, right)
    return Band(band.lo, None if band.hi == kv_len - 2 else band.hi)


def last_key_block_full(self, grid, b, h, m, original=Band.classify):
    kind = original(self, grid, b, h, m)
    kind[:, -1:] = torch.where(kind[:, -1:] > 0, rules.FULL, 0).byte()
    return kind


def last_query_block_full(self, grid, b, h, m, original=Band.classify):
    kind = original(self, grid, b, h, m)
    last = (m == grid.num_q_blocks - 1)[:, None]
    return torch.where(last & (kind > 0), rules.FULL, kind).byte()


def kv_span_over_the_end(self, device):
    first = torch.arange(self.num_kv_blocks, device=device) * self.block_size[1]
    return first, first + self.block_size[1] - 1


def last_count_short(row, *values, shape, original=build.compact):
    count, *lists = original(row, *values, shape=shape)
    if count.numel():
        count[..., -1] = (count[..., -1] - 1).clamp(min=0)
    return count, *lists


def not_sorted(entries, grid):
    head, m = entries.row // grid.num_q_blocks, entries.row % grid.num_q_blocks
    return build.Entries(head * grid.num_kv_blocks + entries.col, m, entries.full)


MUTANTS = {
    "last query block dropped": (
        Grid,
        "num_q_blocks",
        property(lambda self: self.q_len // self.block_size[0]),
        constructors,
    ),
    "last key block dropped": (
        Grid,
        "num_kv_blocks",
        property(lambda self: self.kv_len // self.block_size[1]),
        constructors,
    ),
    "one key block too many": (
        Grid,
        "num_kv_blocks",
        property(lambda self: self.kv_len // self.block_size[1] + 1),
        constructors,
    ),
    "bottom-right alignment dropped": (
        mask,
        "_window",
        lambda q_len, kv_len, left, right, original=mask._window: original(
            kv_len, kv_len, left, right
        ),
        constructors,
    ),
    "window one short": (
        mask,
        "Band",
        lambda lo, hi: Band(lo, None if hi is None else hi - 1),
        constructors,
    ),
    "partial key tail flagged full": (Band, "classify", last_key_block_full, constructors),
    "partial query tail flagged full": (Band, "classify", last_query_block_full, constructors),
    "positions past q_len count": (
        Grid,
        "q_span",
        lambda self, m: (m * self.block_size[0], (m + 1) * self.block_size[0] - 1),
        constructors,
    ),
    "positions past kv_len count": (Grid, "kv_span", kv_span_over_the_end, constructors),
    "bits stored past the lengths": (
        Grid,
        "inside",
        lambda self, q_idx, kv_idx: (q_idx < 1 << 40) & (kv_idx < 1 << 40),
        constructors,
    ),
    "window bound of the last distance dropped": (
        mask,
        "_window",
        bound_of_the_last_distance_dropped,
        windows_have_one_rule,
    ),
    "dilation measured from the wrong end": (
        mask,
        "Dilated",
        lambda step, phase: rules.Dilated(step, -phase % step),
        constructors,
    ),
    "batch ignored": (document, "take", lambda i, size: torch.zeros_like(i), constructors),
    "documents taken for runs": (
        document.SameDocument,
        "contiguous",
        property(lambda self: True),
        constructors,
    ),
    "the first batch's runs taken for all batches": (
        document.SameDocument,
        "contiguous",
        property(lambda self: bool((self.ids[:1, 1:] >= self.ids[:1, :-1]).all())),
        rules_know_small_blocks,
    ),
    "bits in reverse": (
        bits,
        "pack",
        lambda x, original=bits.pack: original(x.flip(-1)),
        constructors,
    ),
    "last count short": (build, "compact", last_count_short, constructors),
    "transpose is not sorted": (build, "transpose", not_sorted, constructors),
    "two partial parts left undecided": (algebra, "UNKNOWN", rules.PARTIAL, combinations),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(monkeypatch, name):
    owner, attribute, mutant, killer = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises(
        (AssertionError, ValueError, IndexError, RuntimeError, pytest.fail.Exception)
    ):
        killer()


@pytest.mark.parametrize(
    "killer", [constructors, combinations, windows_have_one_rule, rules_know_small_blocks]
)
def test_the_unmutated_code_passes(killer):
    killer()
