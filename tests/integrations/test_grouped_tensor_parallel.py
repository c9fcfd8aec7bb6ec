"""Experts cut over ranks: the bytes of one rank, for 1, 2, 4 and 8; refusals on all ranks; mutants.

Ranks are threads of this process, with collectives of the tests.  Processes over gloo run whole
models: tests/model/parallel.
"""

from __future__ import annotations

import functools
import itertools
import re
from unittest import mock

import pytest
import torch

import cute_kernels as ck
from cute_kernels import contracts
from cute_kernels.errors import ShapeError, UnsupportedTransformError
from cute_kernels.integrations import grouped_tensor_parallel as gtp
from cute_kernels.integrations import tensor_parallel as tp
from cute_kernels.moe import op
from tests.integrations.parallel_cases import BF16, FP32, Whole, forced, part, paths, unlike
from tests.moe import cases
from tests.ranks import threads

#: Function -> the axis that ranks cut of: x, weight, bias, dy, y, dx, dW, dbias.
CUTS = {
    gtp.row_parallel_grouped_linear: (-1, 2, None, None, None, -1, 2, None),
    gtp.column_parallel_grouped_linear: (None, 1, 1, -1, -1, None, 1, 1),
}
FUNCTIONS = pytest.mark.parametrize("function", CUTS, ids=lambda f: f.__name__)
N, K = 256, 384


@pytest.fixture
def threaded():
    with threads.collectives():
        yield


def whole(load: str, dtype: torch.dtype, bias: bool, main_grad: bool, n: int = N, k: int = K):
    """(`Whole`, offsets) of ``ck.grouped_linear(order="tree")``; with a main_grad dW is that."""
    x, weight, offsets, bias_rows, dy = cases.operands(load, dtype, n, k)
    bias_rows = bias_rows if bias else None
    given = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias_rows)]
    into = start_of(weight) if main_grad else None
    y = ck.grouped_linear(given[0], given[1], offsets, given[2], order="tree", main_grad=into)
    y.backward(dy)
    dx, dw, db = (None if t is None else t.grad for t in given)
    dw = into if main_grad else dw
    return Whole(x, weight, bias_rows, dy, y.detach(), dx, dw, db), offsets


def start_of(weight: torch.Tensor) -> torch.Tensor:
    return cases.drawn(*weight.shape, seed=7)


def differing(function, of: Whole, offsets, mesh, main_grad: bool, **options) -> list[str]:
    """The results of a rank that are not, byte for byte, its parts of the whole's."""
    degree, rank = mesh.size(), mesh.rank()
    axes = CUTS[function]
    mine = [part(t, axis, degree, rank) for t, axis in zip(of, axes, strict=True)]
    x, weight, bias, dy, *want = mine
    into = part(start_of(of.weight), axes[1], degree, rank) if main_grad else None
    given = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    y = function(*given[:2], offsets, given[2], mesh=mesh, main_grad=into, **options)
    y.backward(dy)
    got = [y.detach(), *(None if t is None else t.grad for t in given)]
    if main_grad:
        assert got[2] is None
        got[2] = into
    return unlike(got, want)


def wrong(function, degree: int, load="uneven", dtype=BF16, bias=True, main_grad=False, **options):
    """The results of a case that differ on some rank."""
    sizes = {name: options.pop(name) for name in ("n", "k") if name in options}
    of, offsets = whole(load, dtype, bias, main_grad, **sizes)
    found = threads.together(
        degree, lambda rank: differing(function, of, offsets, rank, main_grad, **options)
    )
    return {name for names in found for name in names}


# ---- bytes --------------------------------------------------------------------------------------


@FUNCTIONS
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_every_degree_has_the_bytes_of_one(threaded, degree, function):
    for i, (load, dtype) in enumerate(itertools.product(cases.LOADS, (BF16, FP32))):
        options = {"bias": i % 2 == 0, "main_grad": i % 3 == 0}
        assert not wrong(function, degree, load, dtype, **options), (load, dtype)


@FUNCTIONS
def test_neither_the_exchange_nor_blocks_of_rows_show(threaded, monkeypatch, function):
    """Every path, rows that do not divide evenly, and several exchanges."""
    for degree, block in itertools.product((2, 8), (1 << 28, 1 << 16)):
        monkeypatch.setattr(tp, "BLOCK_BYTES", block)
        for path in paths(degree):
            with forced(path):
                assert not wrong(function, degree), (degree, path, block)


@FUNCTIONS
@pytest.mark.parametrize("verify", [False, "all"])
def test_without_verification(threaded, function, verify):
    assert not wrong(function, 2, verify=verify)


def test_contracts():
    """Both have an id of their own name and keep tp_invariant; grouped_linear does not."""
    for name in (gtp.ROW, gtp.COLUMN):
        assert contracts.TP_INVARIANT in ck.guarantees(name, "cpu")
        assert ck.contract_id(name, "cpu") != ck.contract_id("row_parallel_linear", "cpu")
    assert contracts.TP_INVARIANT not in ck.guarantees("grouped_linear", "cpu")


# ---- refusals -----------------------------------------------------------------------------------


def refused(function, degree: int, change) -> list[str]:
    """What each rank raises for arguments that ``change(rank, arguments)`` has changed."""
    of, offsets = whole("few", BF16, True, False)
    axes = CUTS[function]

    def of_rank(mesh):
        x, weight, bias = (
            part(t, axis, degree, mesh.rank()) for t, axis in zip(of[:3], axes, strict=False)
        )
        arguments = {"x": x, "weight": weight, "expert_offsets": offsets, "bias": bias}
        change(mesh.rank(), arguments)
        try:
            function(**arguments, mesh=mesh)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return threads.together(degree, of_rank)


OTHER = torch.tensor([0, 2, 2, 4, 4, 5, 8], dtype=torch.int32)
ROW, COLUMN = CUTS
#: (function, changed arguments, the ranks that have them, the error of each rank).
REFUSED = [
    (ROW, {"order": "chain"}, (0, 1), ["ArgumentValueError: order:.*'tree'"] * 2),
    (ROW, {"bias": torch.zeros(6, N)}, (0, 1), ["DtypeError: bias:"] * 2),
    (ROW, {"expert_offsets": OTHER[:3]}, (0, 1), ["ShapeError: expert_offsets:"] * 2),
    (ROW, {"expert_offsets": OTHER}, (1,), ["RankError: expert_offsets:.*digest"] * 2),
    (ROW, {"bias": None}, (1,), ["RankError: bias:"] * 2),
    (COLUMN, {"x": torch.zeros(8, K)}, (1,), ["RankError: ", "DtypeError: "]),
]


@pytest.mark.parametrize(("function", "values", "where", "errors"), REFUSED)
def test_every_rank_refuses(threaded, function, values, where, errors):
    said = refused(function, 2, lambda rank, a: a.update(values if rank in where else {}))
    assert all(map(re.match, errors, said)), said


@FUNCTIONS
def test_a_sum_that_is_not_cut_at_leaves(threaded, function):
    """160 has leaves of 32, which two ranks would cut; the message says which degrees do."""
    with pytest.raises(ShapeError, match="leaves of 160 are 32 long"):
        wrong(function, 2, n=160, k=160)


def test_graphs_and_double_backward_are_refused(threaded):
    of, offsets = whole("few", BF16, False, False)

    def twice(mesh):
        x = part(of.x, -1, 2, mesh.rank()).requires_grad_()
        weight = part(of.weight, 2, 2, mesh.rank())
        y = gtp.row_parallel_grouped_linear(x, weight, offsets, mesh=mesh)
        with pytest.raises(UnsupportedTransformError, match="double backward"):
            torch.autograd.grad(y.sum(), x, create_graph=True)

    threads.together(2, twice)
    with pytest.raises(UnsupportedTransformError, match=r"torch\.compile"):
        torch.func.vmap(lambda x: gtp.row_parallel_grouped_linear(x, of.weight, offsets, mesh=1))(
            of.x[None]
        )


# ---- mutants ------------------------------------------------------------------------------------


#: Leaves by the length of the rank's part, and in the other order.
MUTANTS = {
    "lengths": lambda true, a, b, at, length: true(a, b, at, max(16, length // 2)),
    "descending": lambda true, *operands: true(*operands).flip(0).contiguous(),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_leaves_is_killed(threaded, name):
    mutant = functools.partial(MUTANTS[name], op.grouped_leaf_sums)
    with mock.patch.object(op, "grouped_leaf_sums", mutant):
        try:
            found = wrong(gtp.row_parallel_grouped_linear, 2, dtype=FP32)
        except (RuntimeError, AssertionError):
            return
    assert "y" in found


def test_a_bias_after_the_rounding_is_killed(threaded):
    """Sums are not rounded to bf16 before the bias is added."""
    true = tp.sum_over_ranks

    def rounded(leaves_of, shape, bias, like, group):
        return true(leaves_of, shape, bias, like, group).to(BF16).to(like.dtype)

    with mock.patch.object(tp, "sum_over_ranks", rounded):
        assert "y" in wrong(gtp.row_parallel_grouped_linear, 2, dtype=BF16)


def test_partial_sums_that_are_rounded_are_killed(threaded):
    """What an all-reduce of bf16 would give."""

    def all_reduce(leaves_of, shape, bias, like, group):
        total = leaves_of(slice(0, shape[0]), 16).sum(0).to(BF16)
        return sum(group.everybody(total)).to(like.dtype)

    with mock.patch.object(tp, "sum_over_ranks", all_reduce):
        assert {"y"} <= wrong(gtp.row_parallel_grouped_linear, 2, bias=False)
        assert {"dx"} <= wrong(gtp.column_parallel_grouped_linear, 2, bias=False)
