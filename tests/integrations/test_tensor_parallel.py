"""Parallel linears, dense and of experts: the bytes of one rank, for 1, 2, 4 and 8; refusals.

Ranks are threads of this process, with collectives of the tests, or four processes over gloo
(tensor_parallel_rank.py), whose groups have 1, 2 and 4 of them.
"""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from unittest import mock

import pytest
import torch

import cute_kernels as ck
from cute_kernels import contracts
from cute_kernels.errors import ShapeError, UnsupportedTransformError
from cute_kernels.gemm import op
from cute_kernels.integrations import grouped_tensor_parallel as gtp
from cute_kernels.integrations import tensor_parallel as tp
from cute_kernels.moe import op as moe_op
from cute_kernels.schedulers.tiles import leaves
from perf.gemm import tensor_parallel as bench
from tests import contract, ranks
from tests.integrations import tensor_parallel_rank
from tests.integrations.parallel_cases import (
    BF16,
    CUTS,
    FP32,
    GROUPED_CUTS,
    SIZES,
    Case,
    GroupedCase,
    Whole,
    cases,
    differing,
    forced,
    operands,
    part,
    paths,
    signed_zeros,
    whole,
)
from tests.moe import cases as experts
from tests.ranks import threads

ROW, COLUMN = GROUPED_CUTS
UNEVEN = GroupedCase("uneven", BF16)
FUNCTIONS = pytest.mark.parametrize("function", CUTS, ids=lambda f: f.__name__)
ALL_FUNCTIONS = pytest.mark.parametrize("function", CUTS | GROUPED_CUTS, ids=lambda f: f.__name__)


@pytest.fixture
def threaded():
    with threads.collectives():
        yield


def wrong(function, case: Case, degree: int, of: Whole | None = None, **options) -> set[str]:
    """The results of a case that differ on some rank."""
    of = of or whole(case)
    found = threads.together(
        degree, lambda rank: differing(function, of, rank, degree, rank.rank(), **options)
    )
    return {name for names in found for name in names}


@pytest.fixture
def minus_zeros():
    with signed_zeros():
        yield


# ---- bytes --------------------------------------------------------------------------------------


def grouped_cases() -> list[GroupedCase]:
    pairs = enumerate(itertools.product(experts.LOADS, (BF16, FP32)))
    return [GroupedCase(load, dtype, i % 2 == 0, i % 3 == 0) for i, (load, dtype) in pairs]


@ALL_FUNCTIONS
@pytest.mark.parametrize(
    "degree", [2, 8, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 4))]
)
def test_every_degree_has_the_bytes_of_one(threaded, minus_zeros, degree, function):
    for case in cases(degree) if function in CUTS else grouped_cases():
        assert not wrong(function, case, degree), case


@ALL_FUNCTIONS
def test_neither_the_exchange_nor_blocks_of_rows_show(threaded, monkeypatch, function):
    """Every path, rows that do not divide evenly, and several exchanges."""
    chosen = [(2, 3), (4, 70), (8, 9), (8, 7)] if function in CUTS else [(2, 0), (8, 0)]
    for degree, rows in chosen:
        case = Case((rows,), *SIZES[0], FP32, True) if function in CUTS else UNEVEN
        of = whole(case)
        for block, path in itertools.product((1 << 28, 1 << 14), paths(degree)[1:]):
            monkeypatch.setattr(tp, "BLOCK_BYTES", block)
            with forced(path):
                assert not wrong(function, case, degree, of), (degree, rows, path)


#: (cases of these functions, degree, options): chains as long as those in which MKL's order follows
#: the number of columns, one rank, which takes any size, and calls that compare nothing, or all.
OTHERS = [
    (CUTS, Case((1000,), 256, 256, FP32, True), 8, {}),
    (CUTS, Case((5,), 256, 8192, FP32, False), 8, {}),
    (CUTS, Case((5,), 30, 100, FP32, True), 1, {}),
    (CUTS, Case((3,), *SIZES[0], BF16, True), 2, {"verify": False}),
    (GROUPED_CUTS, UNEVEN, 2, {"verify": False}),
    (GROUPED_CUTS, UNEVEN, 2, {"verify": "all"}),
]


@pytest.mark.parametrize(("functions", "case", "degree", "options"), OTHERS)
def test_other_cases(threaded, functions, case, degree, options):
    of = whole(case)
    for function in functions:
        assert not wrong(function, case, degree, of, **options), function


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@FUNCTIONS
def test_sizes_of_a_model(threaded, function, dtype):
    for n, k in ((5632, 2048), (2048, 5632)):
        for rows, degree in ((1, 8), (1376, 8), (64, 2)):
            assert not wrong(function, Case((rows,), n, k, dtype, True), degree)


@FUNCTIONS
def test_main_grad_has_the_bytes_of_one(threaded, function):
    """Two micro-batches into the state of each rank, and weight.grad stays None."""
    case = Case((70,), *SIZES[0], BF16, False)
    of, degree = whole(case), 4
    want = torch.zeros(case.n, case.k)
    weight = of.weight.clone().requires_grad_()
    cut = CUTS[function]

    def work(rank):
        mine = [part(t, axis, degree, rank.rank()) for t, axis in zip(of[:8], cut, strict=True)]
        shard, state = mine[1].clone().requires_grad_(), torch.zeros(mine[1].shape)
        for rows in (slice(0, 32), slice(32, 70)):
            y = function(mine[0][rows], shard, mesh=rank, main_grad=state)
            y.backward(mine[3][rows])
        assert shard.grad is None
        return state

    ck.linear(of.x, weight, order="tree", main_grad=want).backward(of.dy)
    got = torch.cat(threads.together(degree, work), cut[1])
    assert contract.same_bytes(got, want)


def test_autocast_casts_as_linear_does(threaded):
    case = Case((3,), *SIZES[0], FP32, True)
    with torch.autocast("cpu", BF16):
        want = ck.linear(*operands(case)[:3], order="tree")
    x, weight, bias, _ = operands(case)

    def work(rank):
        state = [part(t, axis, 2, rank.rank()) for t, axis in ((x, -1), (weight, 1), (bias, None))]
        with torch.autocast("cpu", BF16):
            return tp.row_parallel_linear(*state, mesh=rank)

    for got in threads.together(2, work):
        assert contract.same_bytes(got, want) and got.dtype is BF16


# ---- mutants ------------------------------------------------------------------------------------


def pairwise(parts: torch.Tensor) -> torch.Tensor:
    """(l0 + l1) + (l2 + l3), and so on: as a tree of ranks would."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts


def with_bias_of_ranks(parts: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Leaves of two ranks, to the first of each of which a bias is added."""
    parts = parts.clone()
    if bias is not None:
        parts[:: len(parts) // 2] += bias.float()
    return parts


pad = torch.nn.functional.pad
#: name -> (op, what stands in its place, of the true one).  The third adds ranks after leaves:
#: another order from the third leaf on.
MUTANTS = {
    "rounded_partials": ("leaf_sums", lambda true, *a: true(*a).bfloat16().float()),
    "local_length": ("leaf_sums", lambda true, a, b, _: true(a, b, leaves.length(a.shape[1]))),
    "ranks_added_first": ("leaf_sums", lambda true, *a: op.add_leaves(true(*a), None, FP32)[None]),
    "added_pairwise": ("add_leaves", lambda true, p, *a: true(pairwise(p), *a)),
    "added_by_sum": ("add_leaves", lambda true, p, *a: true(p.sum(0, keepdim=True), *a)),
    "started_from_zero": ("add_leaves", lambda true, p, *a: true(pad(p, (0, 0, 0, 0, 1, 0)), *a)),
    "bias_on_ranks": ("add_leaves", lambda true, p, b, d: true(with_bias_of_ranks(p, b), None, d)),
    "ranks_descending": ("add_leaves", lambda true, p, *a: true(p.flip(0), *a)),
}


@pytest.fixture(scope="module")
def wholes() -> dict[Case, Whole]:
    with signed_zeros():
        return {case: whole(case) for case in cases(2)}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(threaded, minus_zeros, wholes, monkeypatch, name):
    """By a case of test_every_degree_has_the_bytes_of_one; the sign of zero alone kills one."""
    function, mutant = MUTANTS[name]
    monkeypatch.setattr(op, function, functools.partial(mutant, getattr(op, function)))
    killed = (case for case, of in wholes.items() if wrong(tp.row_parallel_linear, case, 2, of))
    if name == "started_from_zero":
        assert list(killed) == [case for case in wholes if case.minus_zeros]
    else:
        assert any(killed)


def rounded_sum(true, leaves_of, shape, bias, like, group):
    """Rounds to bf16 before the bias is added."""
    return true(leaves_of, shape, bias, like, group).to(BF16).to(like.dtype)


def all_reduce(_, leaves_of, shape, bias, like, group):
    """Partial sums that are rounded, as an all-reduce of bf16 has them."""
    total = leaves_of(slice(0, shape[0]), 16).sum(0).to(BF16)
    return sum(group.everybody(total)).to(like.dtype)


#: name -> (owner, function, what stands in its place, of the true one, case, what differs).  The
#: first two have leaves by the length of the rank's part, and in the other order.
GROUPED_MUTANTS = {
    "lengths": (
        moe_op, "grouped_leaf_sums",
        lambda true, a, b, at, length: true(a, b, at, max(16, length // 2)),
        GroupedCase("uneven", FP32), {ROW: "y"},
    ),
    "descending": (
        moe_op, "grouped_leaf_sums", lambda true, *args: true(*args).flip(0).contiguous(),
        GroupedCase("uneven", FP32), {ROW: "y"},
    ),
    "rounded_sum": (tp, "sum_over_ranks", rounded_sum, UNEVEN, {ROW: "y"}),
    "all_reduce": (
        tp, "sum_over_ranks", all_reduce, UNEVEN._replace(bias=False), {ROW: "y", COLUMN: "dx"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "case", "differ"), GROUPED_MUTANTS.values(), ids=GROUPED_MUTANTS
)
def test_a_mutant_of_experts_is_killed(threaded, owner, name, mutant, case, differ):
    with mock.patch.object(owner, name, functools.partial(mutant, getattr(owner, name))):
        for function, result in differ.items():
            try:
                assert result in wrong(function, case, 2)
            except RuntimeError:  # of the adds: another number of leaves
                assert name == "grouped_leaf_sums"


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "degree", "length", "works"),
    [
        (320, 2, 48, "1 rank only"),
        (192, 4, 32, "1 or 2 ranks"),
        (64, 8, 16, "1 or 2 or 4 ranks"),
        (100, 2, 16, "1 rank only"),
    ],
)
def test_a_cut_inside_a_leaf_is_refused(size, degree, length, works):
    with pytest.raises(ShapeError, match=rf"^K: .*leaves of {size} are {length} .*by {works}"):
        tp.cut_at_leaves("K", size, degree)


def test_multiples_of_128_can_be_cut_by_every_degree():
    for degree in tp.DEGREES:
        for size in range(128, 4096, 128):
            tp.cut_at_leaves("K", size, degree)
    assert tp.DEGREES == (1, 2, 4, 8)


def test_a_compiled_graph_is_refused_by_name_and_a_broken_one_has_the_bytes(threaded):
    case = Case((3,), *SIZES[0], FP32, True)
    x, weight, bias, _ = operands(case)
    want = ck.linear(x.relu(), weight, bias, order="tree")

    def work(rank):
        return lambda x: tp.row_parallel_linear(x.relu(), weight, bias, mesh=rank)

    (function,) = threads.together(1, work)
    with pytest.raises(Exception, match=r"row_parallel_linear: a graph of torch\.compile"):
        torch.compile(function, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dynamo's, if it made graphs of what is below
        got = torch.compile(function, backend="eager")(x)
    assert contract.same_bytes(got, want)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("function", "case"),
    [(tp.row_parallel_linear, Case((3,), *SIZES[0], FP32, False)), (ROW, GroupedCase("few", BF16))],
)
def test_a_double_backward_and_a_transform_are_refused(threaded, function, case):
    of = whole(case)

    def work(rank):
        axes = (CUTS | GROUPED_CUTS)[function]
        x, weight = (part(t, axis, 2, rank.rank()) for t, axis in zip(of[:2], axes, strict=False))
        more = () if of.offsets is None else (of.offsets,)
        y = function(x.requires_grad_(), weight, *more, mesh=rank)
        with pytest.raises(UnsupportedTransformError, match=r"double backward|create_graph=True"):
            torch.autograd.grad(y.sum(), x, create_graph=True)

    threads.together(2, work)
    if of.offsets is not None:
        with pytest.raises(UnsupportedTransformError, match=r"torch\.compile"):
            torch.func.vmap(lambda x: function(x, of.weight, of.offsets, mesh=1))(of.x[None])


def refused(function, degree: int, change) -> list[str]:
    """What each rank raises for arguments that ``change(rank, arguments)`` has changed."""
    of, axes = whole(GroupedCase("few", BF16)), GROUPED_CUTS[function]

    def of_rank(mesh):
        x, weight, bias = (
            part(t, axis, degree, mesh.rank()) for t, axis in zip(of[:3], axes, strict=False)
        )
        arguments = {"x": x, "weight": weight, "expert_offsets": of.offsets, "bias": bias}
        change(mesh.rank(), arguments)
        try:
            function(**arguments, mesh=mesh)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return threads.together(degree, of_rank)


OTHER = torch.tensor([0, 2, 2, 4, 4, 5, 8], dtype=torch.int32)
#: (function, changed arguments, the ranks that have them, the error of each rank).
REFUSED = [
    (ROW, {"order": "chain"}, (0, 1), ["ArgumentValueError: order:.*'tree'"] * 2),
    (ROW, {"bias": torch.zeros(6, 256)}, (0, 1), ["DtypeError: bias:"] * 2),
    (ROW, {"expert_offsets": OTHER[:3]}, (0, 1), ["ShapeError: expert_offsets:"] * 2),
    (ROW, {"expert_offsets": OTHER}, (1,), ["RankError: expert_offsets:.*digest"] * 2),
    (ROW, {"bias": None}, (1,), ["RankError: bias:"] * 2),
    (COLUMN, {"x": torch.zeros(8, 384)}, (1,), ["RankError: ", "DtypeError: "]),
]


@pytest.mark.parametrize(("function", "values", "where", "errors"), REFUSED)
def test_every_rank_refuses(threaded, function, values, where, errors):
    said = refused(function, 2, lambda rank, a: a.update(values if rank in where else {}))
    assert all(map(re.match, errors, said)), said


@pytest.mark.parametrize("function", GROUPED_CUTS)
def test_a_sum_that_is_not_cut_at_leaves(threaded, function):
    """160 has leaves of 32, which two ranks would cut; the message says which degrees do."""
    with pytest.raises(ShapeError, match="leaves of 160 are 32 long"):
        wrong(function, UNEVEN._replace(n=160, k=160), 2)


# ---- names --------------------------------------------------------------------------------------


def test_guarantees():
    """Those of the function of one rank and tp_invariant, under ids of their own names."""
    names = {"linear": (tp.ROW, tp.COLUMN), "grouped_linear": (gtp.ROW, gtp.COLUMN)}
    for name, dtype in itertools.product(names, (BF16, FP32)):
        kept = ck.guarantees(name, "cpu", dtype)
        assert contracts.TP_INVARIANT not in kept
        for parallel in names[name]:
            assert ck.guarantees(parallel, "cpu", dtype) == kept | {contracts.TP_INVARIANT}
            assert ck.contract_id(parallel, "cpu").startswith(f"{parallel}/cpu/")
    assert not {tp.ROW, tp.COLUMN} & ck.info()["ops"].keys()


# ---- four processes -----------------------------------------------------------------------------

four = ranks.pool(tensor_parallel_rank.WORLD)


PARTS = "compare_bytes", "compare_modules", "refuse", "leave_uncompared", "run_script"


@pytest.mark.parametrize("part", [*PARTS, "time_systems"])
def test_processes(four, part):
    """Meshes of 1, 2 and 4, of one and of two dimensions, neighbours or not, and a group."""
    four.run(getattr(tensor_parallel_rank, part))


def test_the_bench_compares_its_adds_with_torchs():
    zeros = torch.zeros(2, 3).bfloat16()
    calls = dict.fromkeys(("add_leaves", "add_leaves/torch"), lambda _: zeros)
    assert bench.differing(calls, None, None) == []
    assert bench.differing(calls | {"add_leaves": lambda _: -zeros}, None, None) == ["add_leaves"]
