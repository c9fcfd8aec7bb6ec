"""Experts cut over ranks: the bytes of one rank, for 1, 2, 4 and 8; refusals on all; mutants.

Ranks are threads of this process, with collectives of the tests, or processes over gloo
(expert_parallel_rank.py).
"""

from __future__ import annotations

import functools

import pytest
import torch

import cute_kernels as ck
from cute_kernels.moe import exchange, routing_op
from tests.contract import same_bytes
from tests.ranks import run
from tests.ranks import threads as threaded_ranks

from . import expert_parallel_rank
from .cases import BF16, FP32, drawn, generator
from .parallel_cases import (
    cases,
    differing,
    layer,
    orders_by_sources_descending,
    random_case,
    whole,
)


def by_night(degree: int):
    return pytest.param(degree, marks=pytest.mark.nightly)


def wrong(case, degree: int, of=None, twice: bool = False) -> set[str]:
    """The results of a case that differ on some rank."""
    of = of or whole(case, twice=twice)
    found = threaded_ranks.together(
        degree, lambda rank: differing(case, of, rank, rank.rank(), degree, twice)
    )
    return {name for names in found for name in names}


@pytest.mark.parametrize("degree", [by_night(1), 2, by_night(4), 8])
def test_every_degree_has_the_bytes_of_one(threaded, degree):
    for case in cases(degree):
        assert not wrong(case, degree), case


def test_the_layer_twice_in_one_graph(threaded):
    case = cases(4)[0]
    assert not wrong(case, 4, twice=True)


def test_tokens_that_need_no_gradient(threaded):
    """As those of a first layer: rows are not sent back, and gradients of experts are."""
    case = cases(2)[0]
    of = whole(case)
    x, dy, _ = of.batches[0]
    first = case.tokens[0][0]

    def gradients(x, dy, experts, group=None):
        p = {name: t[experts] if name != "router" else t for name, t in of.parameters.items()}
        p = {name: t.clone().requires_grad_(name == "up") for name, t in p.items()}
        layer(x, p, case, None, group)[0].backward(dy)
        return p["up"].grad

    def work(rank):
        span = slice(first, None) if rank.rank() else slice(0, first)
        half = case.experts // 2 * rank.rank()
        experts = slice(half, half + case.experts // 2)
        return gradients(x[span], dy[span], experts, rank)

    got = torch.cat(threaded_ranks.together(2, work))
    assert same_bytes(got, gradients(x, dy, slice(None)))


def test_autocast(threaded):
    """Rows travel in fp32, and products and their gradients are cast as on one rank."""
    case = next(case for case in cases(2) if case.dtype == FP32)
    with torch.autocast("cpu", BF16):
        of = whole(case)
    assert of.results["y"][0].dtype == BF16

    def work(rank):
        with torch.autocast("cpu", BF16):
            return differing(case, of, rank, rank.rank(), 2)

    assert threaded_ranks.together(2, work) == [[], []]


@pytest.mark.nightly
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_drawn_routings(threaded, degree):
    for seed in range(40):
        case = random_case(seed, degree)
        assert not wrong(case, degree, twice=seed % 3 == 0), (seed, case)


def test_dispatch_alone_is_permute_and_differentiable_twice(threaded):
    """Rows of one rank are those of `permute`; a second gradient is that of one rank."""
    x, other = drawn(9, 8, seed=1), drawn(9, 8, seed=2)
    indices = torch.randint(0, 4, (9, 3), generator=generator(3), dtype=torch.int32)

    def second(rows_of):
        leaf = x.clone().requires_grad_()
        rows, placed = rows_of(leaf)
        y = ck.moe.combine(rows * rows * rows, None, placed)
        (grad,) = torch.autograd.grad(y, leaf, other, create_graph=True)
        return torch.autograd.grad(grad, leaf, other)[0]

    want = second(lambda leaf: ck.moe.permute(leaf, indices, 4))
    rows, permutation = ck.moe.permute(x, indices, 4)

    def one(group):
        got, dispatched = ck.moe.dispatch(x, indices, 4, group=group)
        assert same_bytes(got, rows) and same_bytes(dispatched.offsets, permutation.offsets)
        return True

    assert threaded_ranks.together(1, one) == [True]

    def two(group):
        span = slice(0, 4) if group.rank() == 0 else slice(4, 9)

        def rows_of(leaf):
            return ck.moe.dispatch(leaf[span], indices[span], 4, group=group)

        leaf = x.clone().requires_grad_()
        rows, placed = rows_of(leaf)
        y = ck.moe.combine(rows * rows * rows, None, placed)
        (grad,) = torch.autograd.grad(y, leaf, other[span], create_graph=True)
        return torch.autograd.grad(grad, leaf, other)[0][span]

    assert same_bytes(torch.cat(threaded_ranks.together(2, two)), want)


# ---- mutants -------------------------------------------------------------------------------------


def sources_descending(monkeypatch):
    """An expert has the rows of the last rank first, as if they came in that order."""
    monkeypatch.setattr(exchange, "_orders", orders_by_sources_descending)


def rows_of_a_source_descending(monkeypatch):
    """Rows of an expert from one rank are in the order of (token, choice) backwards."""
    true = routing_op.sort

    def sort(indices, experts):
        _, order, positions = true(indices.flip(0).flip(1), experts)
        order = indices.numel() - 1 - order
        positions.view(-1)[order.long()] = torch.arange(len(order), dtype=torch.int32)
        return true(indices, experts)[0], order, positions

    monkeypatch.setattr(routing_op, "sort", sort)


def offsets_one_row_later(monkeypatch):
    true = exchange._plan

    def plan(*args):
        made, offsets = true(*args)
        offsets[1:-1] = (offsets[1:-1] + 1).clamp(max=int(offsets[-1]))
        return made, offsets

    monkeypatch.setattr(exchange, "_plan", plan)


def experts_of_the_next_rank(monkeypatch):
    """Counts are read one expert too far: offsets of a neighbour."""
    true = exchange._plan

    def plan(*args):
        made, offsets = true(*args)
        sizes = offsets.diff().roll(1)
        return made, torch.cat([offsets[:1], sizes.cumsum(0).int()])

    monkeypatch.setattr(exchange, "_plan", plan)


def added_by_rank(monkeypatch):
    """A token's results are added from the last rank's experts on, then those of rank 0, ..."""
    true = routing_op.combine

    def combine(rows, weights, offsets, order, positions):
        if not torch.is_grad_enabled() or not rows.numel() or weights is None:
            return true(rows, weights, offsets, order, positions)
        ranked = (positions - 2 * len(rows) // 3) % len(rows)
        each = rows[positions.long()].float() * weights[..., None].float()
        each = each.gather(1, ranked.argsort(1)[..., None].expand(each.shape))
        total = each[:, 0]
        for slot in range(1, each.shape[1]):
            total = total + each[:, slot]
        return total.to(rows.dtype)

    monkeypatch.setattr(routing_op, "combine", combine)


def gradients_of_rows_added_by_choice(monkeypatch):
    """dx of a token is summed in the order of its choices."""

    def backward(ctx, dy):
        (positions,) = ctx.saved_tensors
        total = None
        for slot in positions.long().unbind(1):
            total = dy[slot].float() if total is None else total + dy[slot].float()
        return total.to(dy.dtype), None, None, None

    def gather(x, offsets, order, positions):
        return Gather.apply(x, offsets, order, positions)

    true = routing_op.gather

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, offsets, order, positions):
            ctx.save_for_backward(positions)
            return true(x, offsets, order, positions)

    Gather.backward = staticmethod(backward)
    monkeypatch.setattr(routing_op, "gather", gather)


def results_back_as_they_lie(monkeypatch):
    """Results are sent back in the order of experts instead of that in which rows came."""

    def back(rows, plan):
        return exchange._all_to_all(rows, plan.sent, plan.received, plan.group)

    monkeypatch.setattr(exchange, "_to_tokens", back)


MUTANTS = [
    sources_descending,
    rows_of_a_source_descending,
    offsets_one_row_later,
    experts_of_the_next_rank,
    added_by_rank,
    gradients_of_rows_added_by_choice,
    results_back_as_they_lie,
]


@functools.cache
def of_two() -> list[tuple]:
    """The cases of two ranks, and what one rank has of each."""
    return [(case, whole(case)) for case in cases(2)]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_mutant_is_killed(threaded, monkeypatch, mutant):
    """By the cases of test_every_degree_has_the_bytes_of_one, of degree 2."""
    listed = of_two()
    mutant(monkeypatch)
    assert any(wrong(case, 2, of) for case, of in listed)


# ---- processes -----------------------------------------------------------------------------------


def check_processes(world: int, seeds: int, least: int) -> None:
    heard = run(world, expert_parallel_rank.report, seeds)
    for rank, report in enumerate(heard):
        assert report["bytes"]["differing"] == [] and report["bytes"]["compared"] >= least
        assert all(report["recomputed"].values()) and len(report["recomputed"]) == 3
        kind = "ArgumentValueError: indices" if rank == 1 else "RankError: arguments: expected"
        assert report["refusal"]["said"].startswith(kind)
        assert report["refusal"]["differing"] == []
        assert len(report["script"]) == 2 and not any(report["script"].values())


def test_two_processes_have_the_bytes_of_one():
    check_processes(2, 2, 12)


@pytest.mark.nightly
def test_four_processes_have_the_bytes_of_one():
    """Also as two pairs of neighbours, and as two pairs of others."""
    check_processes(4, 40, 140)
