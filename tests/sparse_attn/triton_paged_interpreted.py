"""The Triton kernels of paged attention in Triton's interpreter, and their mutants.

Collected by test_triton_paged.py only, which starts the process that the interpreter needs.
"""

from __future__ import annotations

import os

import pytest

from cute_kernels.sparse_attn.triton import paged
from tests.sparse_attn import paged_batches
from tests.sparse_attn import triton_paged_cases as cases
from tests.sparse_attn.triton_paged_cases import copy_of
from tests.triton_in_numpy import same_on_every_machine  # noqa: F401
from tests.triton_runner import device_guard  # noqa: F401

assert os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda check: check.__name__)
def test_bytes(check):
    check(paged, interpret=True)


@pytest.mark.parametrize("seed", range(10))
def test_drawn_batches(seed):
    cases.dense(paged_batches.draw(seed), paged, interpret=True)


def test_writes():
    cases.writes(paged)


KEYS = "(n >= first_key) & (n < end_key)"
MUTANTS = {
    "page of another sequence": (
        "table_ptr += sequence.to(tl.int64) * TABLE",
        "table_ptr += tl.maximum(sequence - 1, 0).to(tl.int64) * TABLE",
        cases.mixed,
    ),
    "page before": (
        "tl.load(table_ptr + n // PAGE,",
        "tl.load(table_ptr + n // (PAGE + 1),",
        cases.mixed,
    ),
    "key of a page": (
        "(n % PAGE).to(tl.int64) * v_strides[1]",
        "(n % 16).to(tl.int64) * v_strides[1]",
        cases.mixed,
    ),
    "tail of the last page": (
        KEYS,
        "(n >= first_key) & (n < (end_key + PAGE - 1) // PAGE * PAGE)",
        cases.mixed,
    ),
    "head of the first page": (
        KEYS,
        "(n >= first_key // PAGE * PAGE) & (n < end_key)",
        cases.mixed,
    ),
    "all keys of a block": (KEYS, "n < kv_len", cases.mixed),
    "a key less": (KEYS, "(n > first_key) & (n < end_key)", cases.mixed),
    "left edge too narrow": ("(gap >= lo)", "(gap > lo)", cases.mixed),
    "left edge too wide": ("(gap >= lo)", "(gap >= lo - 1)", cases.mixed),
    "right edge too narrow": ("(gap <= hi)", "(gap < hi)", cases.mixed),
    "right edge too wide": ("(gap <= hi)", "(gap <= hi + 1)", cases.mixed),
    "no right edge": ("(gap <= hi)", "(gap <= hi + 10000)", cases.more),
    "positions from the first query": (
        "shift = kv_len - (end - begin)",
        "shift = kv_len * 0",
        cases.mixed,
    ),
    "tile of another sequence": (
        "_first_slot(cu_ptr, middle, GROUP, BLOCK_M) <= slot",
        "_first_slot(cu_ptr, middle, GROUP, BLOCK_M) < slot",
        cases.mixed,
    ),
    "slots without the sequences before": (
        "start * GROUP // BLOCK_M + sequence",
        "start * GROUP // BLOCK_M",
        cases.mixed,
    ),
    "heads of another group": (
        "kv_head * GROUP + r % GROUP",
        "kv_head + r % GROUP * KV_HEADS",
        cases.mixed,
    ),
    "blocks counted from the window": (
        "n = step * BLOCK_N + tl.arange",
        "n = first_key + (step - first_key // BLOCK_N) * BLOCK_N + tl.arange",
        cases.mixed,
    ),
    "blocks backwards": (
        "n = step * BLOCK_N + tl.arange",
        "n = (first_key // BLOCK_N + (end_key - 1) // BLOCK_N - step) * BLOCK_N + tl.arange",
        cases.mixed,
    ),
    "one maximum for the tile": (
        "tl.max(s, axis=1) * factor",
        "tl.max(tl.max(s, axis=1), axis=0) * factor",
        cases.mixed,
    ),
    "no rescaling": ("acc * shrink[:, None]", "acc", cases.mixed),
    "P not rounded": ("tl.dot(through(p, v, ROUND)", "tl.dot(p.to(v.dtype)", cases.mixed),
    "-0 is kept": (
        "tl.where(acc == 0.0, 0.0, acc / total[:, None])",
        "acc / total[:, None]",
        cases.zeros,
    ),
    "a sink of no sequence": (
        "mask=is_row & is_sequence, other",
        "mask=is_row, other",
        cases.mixed,
    ),
    "no sink": ("        total += 1.0\n", "", cases.mixed),
    "layouts exchanged": (
        "_strides(k), _strides(v), _strides(result",
        "_strides(k.transpose(1, 2)), _strides(v), _strides(result",
        cases.places,
    ),
}


#: By day every sixth one.
DAY_AND_NIGHT = [
    pytest.param(name, marks=pytest.mark.nightly if number % 6 else ())
    for number, name in enumerate(MUTANTS)
]


@pytest.mark.parametrize("name", DAY_AND_NIGHT)
def test_killed(tmp_path, name):
    old, new, check = MUTANTS[name]
    with pytest.raises(AssertionError):
        check(copy_of(tmp_path, (old, new)), interpret=True)
