"""Checks of rules on every small block and window, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import rules
from cute_kernels.schedulers.masks.document import SameDocument, document_ids
from tests.schedulers.masks import oracle as oracle


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
