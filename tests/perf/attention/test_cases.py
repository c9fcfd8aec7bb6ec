"""Cases of the attention bench: masks, work, inputs, the suite."""

from __future__ import annotations

import pytest
import torch

from perf.attention import suite, targets
from perf.attention.cases import BLOCK, Case, Problem, drawn_lengths
from tests.perf.attention.stand_ins import case

MASKS = tuple(targets.MASKS)
ANY = {"s": [], "d": [], "heads": [], "group": []}


@pytest.mark.parametrize("mask", [*MASKS, targets.PACK])
def test_elements_count_what_the_mask_allows(mask):
    # A length that is no multiple of the block, but for the mask that is made of blocks.
    problem = Problem(case(mask, s=256 if mask == "random" else 300, heads=4), "cpu")
    dense = problem.mask.to_dense()
    share = problem.case.batch * 4 // (dense.shape[0] * dense.shape[1])
    assert problem.elements == int(dense.sum()) * share
    assert problem.flops("fwd") == 4 * 64 * problem.elements
    assert problem.flops("bwd") == 10 * 64 * problem.elements
    q_idx, kv_idx = torch.arange(dense.shape[2])[:, None], torch.arange(dense.shape[3])
    b = dense.shape[0] - 1
    assert (problem.allowed(b, 3, q_idx, kv_idx) == dense[b, 0]).all()


def test_the_work_of_heads_whose_v_is_narrower():
    """S, dQ and dK multiply over 192 columns, O, dP and dV over 128."""
    problem = Problem(Case("causal", 256, 192, 4, 2, 256), "cpu")
    pairs = 4 * 256 * 257 // 2
    assert problem.flops("fwd") == 2 * (192 + 128) * pairs
    assert problem.flops("bwd") == 2 * (3 * 192 + 2 * 128) * pairs
    assert problem.case.bytes("fwd") == 2 * 256 * (4 + 2) * (192 + 128)
    assert [t.shape[2:] for t in problem.drawn(0)] == [(4, 192), (2, 192), (2, 128), (4, 128)]


def test_masks_are_drawn_as_the_suite_says():
    window = Problem(Case("window", 512, 64, 1, 1, 512), "cpu")
    assert window.case.window == 128 == window.mask.to_dense().sum(-1).max()
    ids = Problem(Case("document", 8192, 64, 1, 1), "cpu").ids
    count = ids.amax(1) + 1
    assert ((8192 / count >= 1024) & (8192 / count <= 2048)).all()
    assert len({tuple(row.tolist()) for row in ids}) == 4 == len(ids)
    random = Problem(Case("random", 8192, 64, 1, 1), "cpu")
    blocks = random.blocks
    assert blocks.diagonal().all() and 0.22 < blocks.float().mean() < 0.30
    assert random.mask.num_full == random.mask.num_blocks == int(blocks.sum())
    assert random.elements == 4 * int(blocks.sum()) * BLOCK * BLOCK


def test_the_sequences_of_a_pack_are_drawn_as_trainers_fill_rows():
    problem = Problem(Case("pack", 8192, 64, 2, 1), "cpu")
    lengths, offsets = drawn_lengths(problem.case), problem.offsets
    assert offsets.dtype == torch.int32 and offsets.device.type == "cpu"
    assert offsets.diff().tolist() == lengths and int(offsets[-1]) == 32768
    assert {8192 * i for i in range(1, 5)} <= set(offsets.tolist())
    assert max(lengths) <= 4000 and 30 <= len(lengths) <= 40
    others = [drawn_lengths(problem.case, number) for number in range(1, 21)]
    assert len({tuple(x) for x in others}) == 20 and lengths not in others
    assert 900 < sum(map(sum, others)) / sum(map(len, others)) < 1100
    # What trainers count: a token sees itself and those before it in its sequence.
    assert problem.elements == 2 * sum(n * (n + 1) // 2 for n in lengths)


@pytest.mark.parametrize(
    ("masks", "options", "sizes"),
    [
        ([], {}, targets.cases()),
        ([], {"quick": True}, targets.cases(quick=True)),
        ([], {"d": [192, 256]}, targets.WIDE),
        ([], {"held_out": True}, targets.HELD_OUT),
        (["pack"], {}, targets.PACKS),
        (
            ["full", "causal"],
            {"s": [2048], "d": [64], "heads": [16], "group": [4]},
            [("full", 2048, 64, 16, 4), ("causal", 2048, 64, 16, 4)],
        ),
    ],
)
def test_options_choose_from_the_suite(masks, options, sizes):
    labels = [c.label for c in suite.chosen(masks, **ANY | options)]
    assert labels == [Case(*size).label for size in sizes]
    assert len(set(labels)) == len(labels)
