"""Cases of the attention bench: masks, work, inputs, the suite."""

from __future__ import annotations

import pytest
import torch

from perf.attention import suite, targets
from perf.attention.cases import BLOCK, Case, Problem, drawn_lengths
from tests.perf.attention.stand_ins import case

MASKS = tuple(targets.MASKS)


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


def test_a_query_of_the_window_sees_so_many_keys():
    problem = Problem(Case("window", 512, 64, 1, 1, 512), "cpu")
    assert problem.case.window == 128
    assert problem.mask.to_dense().sum(-1).max() == 128
    assert Case("window", 8192, 64, 1, 1).window == 1024


def test_documents_are_1_to_2_thousand_tokens_and_other_ones_in_each_batch():
    ids = Problem(Case("document", 8192, 64, 1, 1), "cpu").ids
    assert ids.shape == (4, 8192)
    count = ids.amax(1) + 1
    assert ((8192 / count >= 1024) & (8192 / count <= 2048)).all()
    assert len({tuple(row.tolist()) for row in ids}) == 4
    assert (ids == Problem(Case("document", 8192, 128, 2, 2), "cpu").ids).all()


def test_the_sequences_of_a_pack_are_drawn_as_trainers_fill_rows():
    problem = Problem(Case("pack", 8192, 64, 2, 1), "cpu")
    lengths = drawn_lengths(problem.case)
    offsets = problem.offsets
    assert offsets.dtype == torch.int32 and offsets.device.type == "cpu"
    assert offsets.diff().tolist() == lengths and int(offsets[-1]) == 32768
    rows = [8192 * i for i in range(1, 5)]
    assert set(rows) <= set(offsets.tolist())
    whole = [n for n, end in zip(lengths, offsets[1:].tolist(), strict=True) if end not in rows]
    assert min(whole) >= 100 and max(lengths) <= 4000
    assert 30 <= len(lengths) <= 40
    assert Problem(Case("pack", 8192, 128, 4, 4), "cpu").offsets.equal(offsets)
    others = [drawn_lengths(problem.case, number) for number in range(1, 21)]
    assert len({tuple(x) for x in others}) == 20 and lengths not in others
    assert 900 < sum(map(sum, others)) / sum(map(len, others)) < 1100
    # What trainers count: a token sees itself and those before it in its sequence.
    assert problem.elements == 2 * sum(n * (n + 1) // 2 for n in lengths)
    small = drawn_lengths(problem.case.small)
    assert sum(small) == 2048 and 10 <= len(small) <= 20 and max(small) > 128


def test_a_quarter_of_the_blocks_is_random_and_none_is_partial():
    problem = Problem(Case("random", 8192, 64, 1, 1), "cpu")
    blocks = problem.blocks
    assert blocks.shape == (64, 64) and blocks.diagonal().all()
    assert 0.22 < blocks.float().mean() < 0.30
    assert problem.mask.num_full == problem.mask.num_blocks == int(blocks.sum())
    assert problem.elements == 4 * int(blocks.sum()) * BLOCK * BLOCK


def test_inputs_are_random_and_each_set_is_another():
    problem = Problem(case("full", heads=4, kv_heads=2), "cpu")
    one, two = problem.drawn(0), problem.drawn(1)
    assert [t.shape[2] for t in one] == [4, 2, 2, 4]
    for x, y in zip(one, two, strict=True):
        assert x.dtype == torch.bfloat16 and (x != y).float().mean() > 0.9
        assert (x != 0).float().mean() > 0.99


def test_a_short_case_keeps_the_class_and_the_group():
    small = Case("window", 8192, 128, 32, 8).small
    assert (small.mask, small.s, small.dim, small.heads, small.kv_heads) == (
        "window",
        1024,
        128,
        8,
        2,
    )
    assert small.batch == 2 and small.window < small.s


def test_a_case_names_what_reports_and_compare_go_by():
    items = Case("prefix", 8192, 64, 16, 4).items("bwd")
    assert (items["product"], items["shape"]) == ("bwd", "prefix/s8192/d64/h16/kv4")
    assert items["batch"] == 4 and items["pass"] == "bwd"


def test_the_suite_is_the_acceptance_tables():
    sizes = {"s": [], "d": [], "heads": [], "group": []}
    todo = suite.chosen([], **sizes)
    assert len(todo) == len(targets.cases()) == 56 == len(set(todo))
    assert {(c.dim, c.heads, c.heads // c.kv_heads) for c in todo} == {
        (d, h, g) for d in (64, 128) for h in (16, 32) for g in (1, 4)
    }
    assert all(c.batch * c.s == 32768 for c in todo)
    assert {(c.mask, c.s) for c in todo} == {
        ("full", 4096),
        *((mask, 8192) for mask in MASKS),
    }
    quick = suite.chosen([], **sizes, quick=True)
    assert {(c.dim, c.heads, c.kv_heads) for c in quick} == {(128, 16, 16)}
    assert {c.mask for c in quick} == set(MASKS) and len(quick) == 7


def test_wide_heads_are_measured_where_they_are_asked_for():
    sizes = {"s": [], "heads": [], "group": []}
    assert not {c.dim for c in suite.chosen([], d=[], **sizes)} - {64, 128}
    todo = suite.chosen([], d=[192, 256], **sizes)
    assert len(todo) == len(targets.WIDE) == 18 == len(set(todo))
    assert {(c.dim, c.value_dim, c.heads, c.kv_heads) for c in todo} == {
        (192, 128, 16, 16),
        (256, 256, 16, 16),
        (256, 256, 16, 4),
    }
    assert {(c.mask, c.s) for c in todo} == {(mask, 8192) for mask in MASKS}
    assert suite.chosen([], d=[192], **sizes, quick=True) == []
    assert [
        c.label for c in suite.chosen(["causal"], d=[128, 192], s=[4096], heads=[16], group=[1])
    ] == [
        "causal/s4096/d128/h16/kv16",
        "causal/s4096/d192/h16/kv16",
    ]
    wanted = targets.rival_wanted
    assert wanted("fa4", "causal", (192, 16, 16)) and not wanted("fa4", "random", (192, 16, 16))
    assert not wanted("flex", "causal", (256, 16, 16))


def test_held_out_cases_are_a_suite_of_their_own():
    sizes = {"d": [], "heads": [], "group": []}
    todo = suite.chosen([], s=[], held_out=True, **sizes)
    assert [c.label for c in todo] == [Case(*size).label for size in targets.HELD_OUT]
    assert not set(targets.HELD_OUT) & {*targets.cases(), *targets.WIDE}
    assert {c.mask for c in todo} < set(MASKS) and all(c.batch >= 1 for c in todo)
    assert {c.dim for c in todo} >= {64, 96, 128} and {c.s for c in todo} >= {3000, 16384, 32768}
    one = suite.chosen(["causal"], s=[], d=[96], heads=[], group=[], held_out=True)
    assert [c.label for c in one] == ["causal/s8192/d96/h16/kv16"]
    assert targets.rival_wanted("fa4", "causal", (96, 16, 16))
    assert not targets.rival_wanted("fa4", "document", (96, 16, 16))


def test_cudnn_is_measured_where_sdpa_takes_the_mask():
    wanted = targets.rival_wanted
    every = [s for s in (*targets.cases(), *targets.HELD_OUT) if wanted("cudnn", s[0], s[2:])]
    assert {s[0] for s in every} == {"full", "causal"} and len(every) == 24 + 8
    assert not wanted("cudnn", targets.PACK, (128, 16, 16))


def test_the_work_of_heads_whose_v_is_narrower():
    """S, dQ and dK multiply over 192 columns, O, dP and dV over 128."""
    problem = Problem(Case("causal", 256, 192, 4, 2, 256), "cpu")
    pairs = 4 * 256 * 257 // 2
    assert problem.flops("fwd") == 2 * (192 + 128) * pairs
    assert problem.flops("bwd") == 2 * (3 * 192 + 2 * 128) * pairs
    assert problem.case.bytes("fwd") == 2 * 256 * (4 + 2) * (192 + 128)
    assert [t.shape[2:] for t in problem.drawn(0)] == [(4, 192), (2, 192), (2, 128), (4, 128)]


def test_packs_are_measured_where_they_are_asked_for():
    sizes = {"s": [], "d": [], "heads": [], "group": []}
    assert targets.PACK not in {c.mask for c in suite.chosen([], **sizes)}
    todo = suite.chosen(["causal", "pack"], **sizes)
    packs = [c for c in todo if c.mask == "pack"]
    assert len(todo) == 8 + 3 and [c.label for c in packs] == [
        "pack/s8192/d128/h16/kv16",
        "pack/s8192/d128/h32/kv8",
        "pack/s8192/d64/h16/kv16",
    ]
    assert suite.chosen(["pack"], s=[4096], d=[128], heads=[], group=[4])[0].batch == 8
    assert suite.chosen(["pack"], **sizes, quick=True) == []
    wanted = targets.rival_wanted
    for name in targets.RIVAL_TEXT:
        assert wanted(name, "pack", (128, 16, 16)) == (name in targets.PACK_RIVALS)
    own = set(targets.PACK_RIVALS) - {"ours"}
    assert not any(
        wanted(name, *size[::2]) for name in own for size in [("full", 0, (128, 16, 16))]
    )


def test_sizes_choose_cases_and_lengths_are_free():
    out = suite.chosen(["full", "causal"], s=[2048], d=[64], heads=[16], group=[4])
    assert [c.label for c in out] == ["full/s2048/d64/h16/kv4", "causal/s2048/d64/h16/kv4"]
    assert suite.chosen([], s=[], d=[96], heads=[], group=[]) == []


def test_rivals_that_compile_for_long_are_measured_in_some_cases_only():
    wanted = targets.rival_wanted
    assert all(wanted("ours", *place) for place in (("random", (64, 32, 8)), ("full", (64, 16, 4))))
    assert wanted("fa4", "random", (64, 32, 32)) and not wanted("fa4", "random", (64, 32, 8))
    assert wanted("flex", "document", (128, 16, 16)) and not wanted("flex", "full", (128, 16, 16))
    assert not wanted("fa4_ordered", "causal", (128, 32, 32))
