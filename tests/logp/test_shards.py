"""A vocabulary cut over ranks: the bytes of one rank, and errors on every rank.

Ranks are threads of this process, with a collective of the tests, or four processes over gloo
(shards_rank.py), whose groups have 1, 2 and 4 of them.
"""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import UnsupportedTransformError
from cute_kernels.logp import shards
from tests import ranks as processes
from tests.contract import same_bytes
from tests.logp import shards_rank
from tests.logp.cases import FP32
from tests.logp.shard_cases import (
    Cut,
    at_leaves,
    case_of,
    cuts_of,
    differing,
    forward_cuts_of,
    whole_of,
)
from tests.ranks import threads as threaded_ranks

WORLD = 4


def by_night(degree: int):
    return pytest.param(degree, marks=pytest.mark.nightly)


def wrong(cut: Cut, **options) -> set[str]:
    """The results of a cut that differ on some rank."""
    whole_of(cut)
    found = threaded_ranks.together(
        len(cut.starts), lambda rank: differing(cut, rank, rank.rank(), **options)
    )
    return {name for names in found for name in names}


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [*map(by_night, (1, 2, 4)), 8])
def test_every_degree_has_the_bytes_of_one(threaded, degree):
    for i, cut in enumerate(cuts_of(degree)):
        assert not wrong(cut, main_grad=i % 2 == 0), cut


@pytest.mark.parametrize("degree", [3, *map(by_night, (2, 5, 8))])
def test_forward_cuts_at_any_multiple_of_16(threaded, degree):
    """Also three and five ranks; log p, entropy, dW and dbias."""
    for cut in forward_cuts_of(degree):
        assert not wrong(cut, hidden=False), cut


def test_uneven_shards_of_any_number_of_ranks(threaded):
    """Five and seven ranks of whole leaves; a chain of one rank in a group."""
    for counts in ([0, 3, 4, 6, 7], [0, 1, 2, 3, 4, 5, 7]):
        assert not wrong(at_leaves(case_of(1000, 1024), counts)), counts
    assert not wrong(Cut(case_of(1000, 1024, order="chain"), (0,)))


def test_blocks_of_tokens_that_are_exchanged_do_not_show(threaded, monkeypatch):
    cut = at_leaves(case_of(1000, 1024, FP32, tokens=70), [0, 2, 4, 6])
    for size in (1, 8 * 40 * 4 * 16, 8 * 40 * 4 * 33):
        monkeypatch.setattr(shards, "_BLOCK_BYTES", size)
        assert not wrong(cut), size


@pytest.mark.parametrize("vocab", [1024, 1000])
def test_without_verification(threaded, vocab):
    """Shards of equal rows, the last one with padding or not."""
    cut = at_leaves(case_of(vocab, 1024), [0, 2, 4, 6])
    assert not wrong(cut, verify=False)


# ---- transforms ---------------------------------------------------------------------------------


def one_rank(rank) -> dict:
    return {"group": rank, "vocab_start": 0, "vocab_size": 48, "order": "tree"}


def test_a_compiled_graph_is_refused_and_a_broken_one_has_the_bytes(threaded):
    hidden, weight, target = torch.randn(5, 8), torch.randn(48, 8), torch.arange(5)
    want = ck.linear_logp(hidden.relu(), weight, target, order="tree")

    def work(rank):
        return lambda h: ck.linear_logp(h.relu(), weight, target, **one_rank(rank))

    (function,) = threaded_ranks.together(1, work)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"linear_logp: with a group, a graph of torch\.compile"):
        torch.compile(function, fullgraph=True, backend="eager")(hidden)
    torch.compiler.reset()
    assert same_bytes(torch.compile(function, backend="eager")(hidden), want)


def test_a_double_backward_and_vmap_are_refused(threaded):
    weight, target = torch.randn(48, 8), torch.arange(5)

    def work(rank):
        hidden = torch.randn(5, 8).requires_grad_()
        logp = ck.linear_logp(hidden, weight, target, **one_rank(rank))
        with pytest.raises(UnsupportedTransformError, match="create_graph=True"):
            torch.autograd.grad(logp.sum(), hidden, create_graph=True)
        with pytest.raises(UnsupportedTransformError, match=r"torch\.func"):
            torch.func.vmap(lambda h: ck.linear_logp(h, weight, target, **one_rank(rank)))(
                torch.randn(3, 5, 8)
            )

    threaded_ranks.together(1, work)


def test_autocast_casts_as_one_rank_does(threaded):
    cut = at_leaves(case_of(256, 256, FP32, bias=True), [0, 4])
    x, _ = whole_of(cut)
    with torch.autocast("cpu", torch.bfloat16):
        want = ck.linear_logp(x.hidden, x.weight, x.target, x.bias, order="tree")

    def work(rank):
        own = cut.span(rank.rank())
        with torch.autocast("cpu", torch.bfloat16):
            return ck.linear_logp(
                x.hidden, x.weight[own], x.target, x.bias[own], order="tree", group=rank,
                vocab_start=own.start, vocab_size=256,
            )  # fmt: skip

    assert all(same_bytes(got, want) for got in threaded_ranks.together(2, work))


# ---- four processes -----------------------------------------------------------------------------


def test_processes_have_the_bytes_of_one_and_every_rank_raises():
    """Groups of 4, 2, 2 and 1, meshes among them; many inputs are bad on one rank only."""
    for rank in processes.run(WORLD, shards_rank.report):
        assert rank["bytes"]["differing"] == [] and rank["bytes"]["compared"] > 18
        assert rank["bytes"]["sizes"] == [4, 2, 2, 1]
        # Values that are not asked for are not compared; no tokens; good calls after bad ones.
        assert rank["uncompared"] == []
        assert rank["empty"] == {"shapes": [[0], [0, 8]], "any": False}
        assert rank["after"] == [[], []]
        assert len(rank["refused"]) >= 30
        for name, case in rank["refused"].items():
            assert case["type"] in case["want"].split(" or "), (name, case)
            assert all(fragment in case["said"] for fragment in case["fragments"]), (name, case)


def test_a_rank_that_is_killed_ends_the_others():
    """With an error: no gradient is made of two thirds of a vocabulary."""
    ended = processes.Pool(WORLD - 1, shards_rank.__name__).outcomes(shards_rank.killed)
    assert ended[1].error == processes.GONE
    for found in (ended[0].value, ended[2].value):
        assert found["ended"] not in ("well", "") and not found["grad"], found
