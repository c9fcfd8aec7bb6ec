"""Parallel linears: the bytes of one rank, for 1, 2, 4 and 8; refusals on all ranks; mutants.

Ranks are threads of this process, with collectives of the tests, or four processes over gloo
(tensor_parallel_rank.py), whose groups have 1, 2 and 4 of them.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import cute_kernels as ck
from cute_kernels import contracts
from cute_kernels.errors import ShapeError, UnsupportedTransformError
from cute_kernels.gemm import op
from cute_kernels.integrations import tensor_parallel as tp
from cute_kernels.schedulers.tiles import leaves
from perf.gemm import tensor_parallel as bench
from tests import contract
from tests.integrations import gpu_tensor_parallel, threaded_ranks
from tests.integrations.parallel_cases import (
    BF16,
    CUTS,
    FP32,
    SIZES,
    Case,
    cases,
    differing,
    forced,
    operands,
    part,
    paths,
    signed_zeros,
    whole,
)
from tests.ranks import reports

WORLD = 4


@pytest.fixture
def threaded():
    with threaded_ranks.collectives():
        yield


def wrong(function, case: Case, degree: int, **options) -> set[str]:
    """The results of a case that differ on some rank."""
    of = whole(case)
    found = threaded_ranks.together(
        degree, lambda rank: differing(function, of, rank, degree, rank.rank(), **options)
    )
    return {name for names in found for name in names}


@pytest.fixture
def minus_zeros():
    with signed_zeros():
        yield


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", CUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "degree", [2, 8, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 4))]
)
def test_every_degree_has_the_bytes_of_one(threaded, minus_zeros, degree, function):
    for case in cases(degree):
        assert not wrong(function, case, degree), case


@pytest.mark.parametrize("function", CUTS, ids=lambda f: f.__name__)
def test_neither_the_exchange_nor_blocks_of_rows_show(threaded, monkeypatch, function):
    """Every path, rows that do not divide evenly, and several exchanges."""
    n, k = SIZES[0]
    for degree, rows in ((2, 3), (4, 70), (8, 9), (8, 7)):
        for block in (1 << 28, leaves.count(k) // degree * n * 4 * 20):
            monkeypatch.setattr(tp, "BLOCK_BYTES", block)
            for path in paths(degree)[1:]:
                with forced(path):
                    case = Case((rows,), n, k, FP32, True)
                    assert not wrong(function, case, degree), (degree, rows, path)


@pytest.mark.parametrize("function", CUTS, ids=lambda f: f.__name__)
def test_without_verification(threaded, function):
    assert not wrong(function, Case((3,), *SIZES[0], BF16, True), 2, verify=False)


#: Chains as long as those in which MKL's order follows the number of columns.
LONG = [Case((1000,), 256, 256, FP32, True), Case((5,), 256, 8192, FP32, False)]


@pytest.mark.parametrize("function", CUTS, ids=lambda f: f.__name__)
def test_long_chains_of_few_columns(threaded, function):
    for case in LONG:
        assert not wrong(function, case, 8), case


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("function", CUTS, ids=lambda f: f.__name__)
def test_sizes_of_a_model(threaded, function, dtype):
    for n, k in ((5632, 2048), (2048, 5632)):
        for rows, degree in ((1, 8), (1376, 8), (64, 2)):
            assert not wrong(function, Case((rows,), n, k, dtype, True), degree)


def test_one_rank_takes_any_size(threaded):
    for function in CUTS:
        assert not wrong(function, Case((5,), 30, 100, FP32, True), 1)


@pytest.mark.parametrize("function", CUTS, ids=lambda f: f.__name__)
def test_main_grad_has_the_bytes_of_one(threaded, function):
    """Two micro-batches into the state of each rank, and weight.grad stays None."""
    case = Case((70,), *SIZES[0], BF16, False)
    of, degree = whole(case), 4
    want = torch.zeros(case.n, case.k)
    weight = of.weight.clone().requires_grad_()
    cut = CUTS[function]

    def work(rank):
        mine = [part(t, axis, degree, rank.rank()) for t, axis in zip(of, cut, strict=True)]
        shard, state = mine[1].clone().requires_grad_(), torch.zeros(mine[1].shape)
        for rows in (slice(0, 32), slice(32, 70)):
            y = function(mine[0][rows], shard, mesh=rank, main_grad=state)
            y.backward(mine[3][rows])
        assert shard.grad is None
        return state

    ck.linear(of.x, weight, order="tree", main_grad=want).backward(of.dy)
    got = torch.cat(threaded_ranks.together(degree, work), cut[1])
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

    for got in threaded_ranks.together(2, work):
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


#: name -> (op, what stands in its place, of the true one).  The third adds ranks after leaves:
#: another order from the third leaf on.
MUTANTS = {
    "rounded_partials": (
        "leaf_sums",
        lambda true: lambda *args: true(*args).bfloat16().float(),
    ),
    "length_of_the_local_size": (
        "leaf_sums",
        lambda true: lambda a, b, _: true(a, b, leaves.length(a.shape[1])),
    ),
    "ranks_added_first": (
        "leaf_sums",
        lambda true: lambda *args: op.add_leaves(true(*args), None, FP32).unsqueeze(0),
    ),
    "added_pairwise": (
        "add_leaves",
        lambda true: lambda parts, *rest: true(pairwise(parts), *rest),
    ),
    "added_by_sum": (
        "add_leaves",
        lambda true: lambda parts, *rest: true(parts.sum(0, keepdim=True), *rest),
    ),
    "started_from_zero": (
        "add_leaves",
        lambda true: (
            lambda parts, *rest: true(torch.cat([torch.zeros_like(parts[:1]), parts]), *rest)
        ),
    ),
    "bias_on_every_rank": (
        "add_leaves",
        lambda true: lambda parts, bias, dtype: true(with_bias_of_ranks(parts, bias), None, dtype),
    ),
    "ranks_descending": (
        "add_leaves",
        lambda true: lambda parts, *rest: true(parts.flip(0), *rest),
    ),
}


def killers(monkeypatch, name: str) -> list[Case]:
    """The cases of degree 2, of test_every_degree_has_the_bytes_of_one, that a mutant fails."""
    wholes = {case: whole(case) for case in cases(2)}
    function, mutant = MUTANTS[name]
    monkeypatch.setattr(op, function, mutant(getattr(op, function)))

    def differs(case: Case) -> bool:
        return any(
            threaded_ranks.together(
                2,
                lambda rank: differing(tp.row_parallel_linear, wholes[case], rank, 2, rank.rank()),
            )
        )

    return list(filter(differs, wholes))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(threaded, minus_zeros, monkeypatch, name):
    """The sign of zero alone kills a sum from zero."""
    killed_by = killers(monkeypatch, name)
    assert killed_by
    if name == "started_from_zero":
        assert killed_by == [case for case in cases(2) if case.minus_zeros]


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

    (function,) = threaded_ranks.together(1, work)
    with pytest.raises(Exception, match=r"row_parallel_linear: a graph of torch\.compile"):
        torch.compile(function, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dynamo's, if it made graphs of what is below
        got = torch.compile(function, backend="eager")(x)
    assert contract.same_bytes(got, want)
    torch._dynamo.reset()


def test_a_double_backward_is_refused(threaded):
    case = Case((3,), *SIZES[0], FP32, False)
    x, weight, _, _ = operands(case)

    def work(rank):
        mine = part(x, -1, 2, rank.rank()).requires_grad_()
        y = tp.row_parallel_linear(mine, part(weight, 1, 2, rank.rank()), mesh=rank)
        with pytest.raises(UnsupportedTransformError, match="create_graph=True"):
            torch.autograd.grad(y.sum(), mine, create_graph=True)

    threaded_ranks.together(2, work)


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [tp.ROW, tp.COLUMN])
def test_the_guarantees_are_those_of_linear_and_one_more(name):
    for dtype in (BF16, FP32):
        kept = ck.guarantees("linear", "cpu", dtype) | {contracts.TP_INVARIANT}
        assert ck.guarantees(name, "cpu", dtype) == kept
    assert ck.contract_id(name, "cpu").startswith(f"{name}/cpu/")
    assert name not in ck.info()["ops"]


# ---- four processes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each of four processes reports: tensor_parallel_rank.py."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("needs torch.distributed with gloo")
    folder = tmp_path_factory.mktemp("ranks")
    return reports("tests.integrations.tensor_parallel_rank", WORLD, folder)


def test_processes_have_the_bytes_of_one(ranks):
    """Meshes of 1, 2 and 4, of one and of two dimensions, neighbours or not, and a group."""
    for rank in ranks:
        assert rank["bytes"]["differing"] == [] and rank["bytes"]["compared"] > 150
        assert rank["bytes"]["meshes"] == [4, 2, 2, 2, 1]


def test_modules_have_the_bytes_of_one(ranks):
    """Cut from a whole linear; under no_grad; recomputed under activation checkpointing."""
    for rank in ranks:
        assert rank["modules"] == {"no_grad": [], "plain": [], "checkpoint": [], "reentrant": []}


def test_an_empty_batch_and_a_good_call_after_a_refused_one(ranks):
    assert all(rank["after"] == [] for rank in ranks)


def test_every_rank_raises(ranks):
    """The table of bad inputs, some of which are bad on one rank only."""
    names = ranks[0]["refused"]
    assert len(names) >= 20
    for name in names:
        for rank in ranks:
            case = rank["refused"][name]
            assert case["type"] in case["want"].split(" or "), (name, case)
            assert all(fragment in case["said"] for fragment in case["fragments"]), (name, case)


def test_values_that_are_not_asked_for_are_not_compared(ranks):
    assert all(rank["uncompared"] == [] for rank in ranks)


def test_the_script_for_gpus_skips_what_four_ranks_cannot_cut(ranks):
    """By name, with the reason; it fails where nothing is left."""
    for rank in ranks:
        script = rank["script"]
        assert script["ran"] == {tp.ROW: 8, tp.COLUMN: 8}
        assert script["failed"] == [False, True]
        assert script["none"] == [{tp.ROW: 0, tp.COLUMN: 0}, 2, 0]
        for name, size in ((tp.ROW, "K: "), (tp.COLUMN, "N: ")):
            lines = [line for line in script["skipped"] if line.startswith(name)]
            assert len(lines) == 3
            assert all("x [192, 96]" in line and size in line for line in lines), lines


@pytest.mark.parametrize(
    ("ran", "different", "failed"),
    [({"a": 1, "b": 2}, 0, False), ({"a": 1, "b": 2}, 1, True), ({"a": 1, "b": 0}, 0, True)],
)
def test_when_the_script_for_gpus_fails(ran, different, failed):
    assert gpu_tensor_parallel.Tally(ran, [], different).failed() is failed


def test_the_bench_times_what_has_the_right_bytes(ranks):
    """Over gloo; a system with other bytes has a record that says so, and no time."""
    for rank in ranks:
        good, bad = rank["bench"]["statuses"]
        assert {"nccl", "ours", "gathered", "scattered"} < set(good)
        assert set(good.values()) == {"ok"} and bad == good | {"scattered": "wrong"}
        assert rank["bench"]["untimed"] == ["scattered"] and rank["bench"]["ordered"]
        assert rank["bench"]["lines"] == [2 + 2 * len(good), True]


def test_the_bench_compares_its_adds_with_torchs():
    calls = dict.fromkeys(
        ("add_leaves", "add_leaves/torch"), lambda _: torch.zeros(2, 3).bfloat16()
    )
    assert bench.differing(calls, None, None) == []
    calls["add_leaves"] = lambda _: -torch.zeros(2, 3).bfloat16()
    assert bench.differing(calls, None, None) == ["add_leaves"]
