"""Bad inputs of experts cut over ranks: all ranks raise, by name."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ShapeError,
    UnsupportedTransformError,
)
from cute_kernels.moe import checks, exchange
from tests.ranks import threads as threaded_ranks

from .cases import BF16, INT32

X = torch.ones(3, 8)
INDICES = torch.tensor([[0, 3], [1, 2], [3, 0]], dtype=INT32)


def dispatch(x=X, indices=INDICES, experts=4, **options):
    return lambda group: ck.moe.dispatch(x, indices, experts, group=group, **options)


def combine(rows=lambda t: t, weights=None, x=X):
    def call(group):
        received, dispatched = ck.moe.dispatch(x, INDICES, 4, group=group)
        return ck.moe.combine(rows(received), weights, dispatched)

    return call


def both(first, second):
    return first, second


#: (calls of the two ranks, errors of the two ranks, what both messages have).
ANY = "RankError"
TABLE = {
    "experts": (both(dispatch(experts=5), dispatch(experts=5)), "ArgumentValueError",
                ["experts: expected a multiple of 2, the ranks of group, got 5"]),
    "verify": (both(dispatch(verify="some"), dispatch(verify="some")), "ArgumentTypeError",
               ["verify: expected True or False, got str"]),
    "x": (both(dispatch(x=[1.0]), dispatch(x=[1.0])), "ArgumentTypeError", ["x", "list"]),
    "rows of indices": (both(dispatch(indices=INDICES[:2]), dispatch(indices=INDICES[:2])),
                        "ShapeError", ["indices: expected 3 rows"]),
    "an index of one": (both(dispatch(indices=INDICES + 1), dispatch()),
                        "ArgumentValueError or RankError", ["expected"]),
    "shape on one": (both(dispatch(), dispatch(x=X[0])), "ShapeError or RankError", ["expected"]),
    "numbers of experts": (both(dispatch(), dispatch(experts=6)), ANY,
                           ["experts", "same on every rank of group", "4, 6"]),
    "k": (both(dispatch(), dispatch(indices=INDICES[:, :1])), ANY, ["k of indices", "2, 1"]),
    "columns": (both(dispatch(), dispatch(x=X[:, :5])), ANY, ["columns", "8, 5"]),
    "dtypes": (both(dispatch(), dispatch(x=X.to(BF16))), ANY,
               ["dtype", "torch.float32, torch.bfloat16"]),
    "gradients of one": (both(dispatch(), dispatch(x=X.clone().requires_grad_())), ANY,
                         ["requires_grad", "0, 1"]),
    "rows": (both(combine(lambda t: t[1:]), combine()), "ShapeError or RankError", ["expected"]),
    "rows, both": (both(*[combine(lambda t: t[1:])] * 2), "ShapeError",
                   ["rows: expected 6 rows, those of the dispatch, got 5"]),
    "weights": (both(combine(weights=torch.ones(3, 3)), combine(weights=torch.ones(3, 2))),
                "ShapeError or RankError", ["expected"]),
    "columns of rows": (both(combine(lambda t: t[:, :4]), combine()), ANY, ["columns", "4, 8"]),
    "dtype of rows": (both(combine(lambda t: t.half()), combine()), ANY, ["dtype", "float16"]),
    "gradient of rows": (both(combine(lambda t: t.clone().requires_grad_()), combine()), ANY,
                         ["requires_grad", "1, 0"]),
    "function": (both(lambda group: (dispatch()(group), dispatch()(group)), combine()), ANY,
                 ["function", "dispatch, combine"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_every_rank_raises(threaded, name):
    calls, types, fragments = TABLE[name]

    def work(group):
        try:
            calls[group.rank()](group)
        except Exception as error:
            return type(error).__name__, str(error)
        return "nothing", ""

    for kind, text in threaded_ranks.together(2, work):
        assert kind in types.split(" or "), (kind, text)
        assert all(fragment in text for fragment in fragments), text


def test_unverified_arguments_are_still_checked(threaded):
    with pytest.raises(ArgumentValueError, match="experts: expected a multiple of 2"):
        threaded_ranks.together(2, dispatch(experts=5, verify=False))
    with pytest.raises(ArgumentValueError, match="0 to 3, experts, got 4"):
        threaded_ranks.together(1, dispatch(indices=INDICES + 1, verify=False))


def test_a_group_is_needed():
    with pytest.raises(TypeError, match="group"):
        ck.moe.dispatch(X, INDICES, 4)
    with pytest.raises(ArgumentValueError, match="init_process_group first"):
        ck.moe.dispatch(X, INDICES, 4, group=None)


def test_counts_of_rows_that_no_rank_can_take():
    """On a GPU an index that is no expert is seen in the counts, by every rank."""
    with pytest.raises(ArgumentValueError, match=r"0 to 7, experts, on every rank.*on rank 1"):
        exchange._check_counts([[1, 2], [3, 0]], [4, 3], 8)
    most = checks.MAX_SIZE
    exchange._check_counts([[most - 1, 1], [0, 5]], [most - 1, 6], 8)
    with pytest.raises(ShapeError, match=rf"at most {most} rows.*got {most + 1} for rank 0"):
        exchange._check_counts([[most, 1], [0, 5]], [most, 6], 8)


def test_graphs_and_transforms_are_refused(threaded):
    x = X.clone()

    def work(group):
        with pytest.raises(UnsupportedTransformError, match=r"moe\.dispatch: with a group"):
            torch.func.vmap(lambda t: dispatch(x=t)(group)[0])(x[None])
        compiled = torch.compile(lambda t: dispatch(x=t + 1)(group)[0], backend="eager")
        got = compiled(x)
        torch._dynamo.reset()
        full = torch.compile(lambda t: dispatch(x=t + 1)(group)[0], backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=r"moe\.dispatch: with a group"):
            full(x)
        torch._dynamo.reset()
        return got

    # In this thread: after torch.compile in one that has ended, torch 2.11's opcheck crashes.
    got = work(threaded_ranks.Rank(threaded_ranks.Board(1), 0))
    assert torch.equal(got, ck.moe.permute(x + 1, INDICES, 4)[0])


def test_another_type_than_a_permutation_is_named():
    rows, permutation = ck.moe.permute(X, INDICES, 4)
    with pytest.raises(ArgumentTypeError, match="or the Dispatch of dispatch, got tuple"):
        ck.moe.combine(rows, None, tuple(permutation))
