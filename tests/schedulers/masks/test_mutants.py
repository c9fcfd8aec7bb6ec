"""Mutants of block masks: each error, put into the code, is found by the tests."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.schedulers import BlockMask
from cute_kernels.schedulers.masks import (
    algebra,
    bits,
    build,
    document,
    flex,
    mask,
    rules,
)
from tests.schedulers.masks import flex_checks, made, oracle, rule_checks

Grid, Band = rules.Grid, rules.Band


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


def captures():
    flex_checks.captured_as_it_is("document causal", (384, 500))


def writes():
    for name in ("prefix_lm", "from_blocks with a rule", "BlockMask"):
        made.keeps_its_elements(name)


def first_batch_in_runs(self):
    return bool((self.ids[:1, 1:] >= self.ids[:1, :-1]).all())


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
        rule_checks.windows_have_one_rule,
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
        property(first_batch_in_runs),
        rule_checks.rules_know_small_blocks,
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
    "flex: full blocks forgotten": (
        flex,
        "capture",
        lambda grid, heads, row, col, full, elements, original=flex.capture: original(
            grid, heads, row[~full], col[~full], full[~full], elements
        ),
        captures,
    ),
    "flex: nothing evaluated": (
        flex,
        "_evaluate",
        lambda mod, grid, b, h, m, n: torch.ones(m.numel(), *grid.tile, dtype=torch.bool),
        captures,
    ),
    "the caller's tensors kept": (BlockMask, "_copy_tensors", lambda self: None, writes),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(monkeypatch, name):
    owner, attribute, mutant, killer = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises(
        (AssertionError, ValueError, IndexError, RuntimeError, pytest.fail.Exception)
    ):
        killer()


@pytest.mark.parametrize("killer", [constructors, combinations, captures, writes])
def test_the_unmutated_code_passes(killer):
    killer()
