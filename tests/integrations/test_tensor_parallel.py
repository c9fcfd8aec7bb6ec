"""Parallel linears, dense and of experts: the bytes of one rank, for 1, 2, 4 and 8; refusals.

Ranks are threads of this process, with collectives of the tests, or four processes over gloo, whose
groups have 1, 2 and 4 of them.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from unittest import mock

import pytest
import torch
import torch._dynamo  # checkpoint imports it: here once, before the ranks are forked
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import cute_kernels as ck
from cute_kernels import contracts
from cute_kernels.errors import ShapeError, UnsupportedTransformError
from cute_kernels.gemm import op
from cute_kernels.integrations import grouped_tensor_parallel as gtp
from cute_kernels.integrations import leaf_exchange
from cute_kernels.integrations import tensor_parallel as tp
from cute_kernels.moe import op as moe_op
from cute_kernels.schedulers.tiles import leaves
from perf.gemm import tensor_parallel as bench
from tests import contract, ranks
from tests.integrations import gpu_tensor_parallel as script
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

ROW, COLUMN = CUTS
EXPERT_ROW, EXPERT_COLUMN = GROUPED_CUTS
UNEVEN, UNEVEN_FP32 = (GroupedCase("uneven", dtype) for dtype in (BF16, FP32))
ALL_FUNCTIONS = pytest.mark.parametrize("function", CUTS | GROUPED_CUTS, ids=lambda f: f.__name__)


def wrong(function, case: Case, degree: int, results: Whole | None = None, **options) -> set[str]:
    """The results of a case that differ on some rank."""
    results = results or whole(case)
    names_of_ranks = threads.together(
        degree, lambda rank: differing(function, results, rank, degree, rank.rank(), **options)
    )
    return {name for names in names_of_ranks for name in names}


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
        results = whole(case)
        for block, path in itertools.product((1 << 28, 1 << 14), paths(degree)[1:]):
            monkeypatch.setattr(tp, "BLOCK_BYTES", block)
            with forced(path):
                assert not wrong(function, case, degree, results), (degree, rows, path)


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
    results = whole(case)
    for function in functions:
        assert not wrong(function, case, degree, results, **options), function


@pytest.mark.parametrize("function", CUTS, ids=lambda f: f.__name__)
def test_main_grad_has_the_bytes_of_one(threaded, function):
    """Two micro-batches into the state of each rank, and weight.grad stays None."""
    case = Case((70,), *SIZES[0], BF16, False)
    results, degree = whole(case), 4
    want = torch.zeros(case.n, case.k)
    weight = results.weight.clone().requires_grad_()
    cut = CUTS[function]

    def work(rank):
        mine = [
            part(t, axis, degree, rank.rank()) for t, axis in zip(results[:8], cut, strict=True)
        ]
        shard, state = mine[1].clone().requires_grad_(), torch.zeros(mine[1].shape)
        for rows in (slice(0, 32), slice(32, 70)):
            y = function(mine[0][rows], shard, mesh=rank, main_grad=state)
            y.backward(mine[3][rows])
        assert shard.grad is None
        return state

    ck.linear(results.x, weight, order="tree", main_grad=want).backward(results.dy)
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
            return ROW(*state, mesh=rank)

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


def rounded_sum(true, leaves_of, shape, bias, like, group):
    """Rounds to bf16 before the bias is added."""
    return true(leaves_of, shape, bias, like, group).to(BF16).to(like.dtype)


def all_reduce(_, leaves_of, shape, bias, like, group):
    """Partial sums that are rounded, as an all-reduce of bf16 has them."""
    total = leaves_of(slice(0, shape[0]), 16).sum(0).to(BF16)
    return sum(group.everybody(total)).to(like.dtype)


pad = torch.nn.functional.pad
DENSE, ZEROS = Case((70,), *SIZES[0], FP32, True), Case((5,), *SIZES[0], BF16, False, True)
DENSE_Y, EXPERTS_Y = {ROW: (DENSE, "y")}, {EXPERT_ROW: (UNEVEN_FP32, "y")}
PLAIN = UNEVEN._replace(bias=False)
#: name -> (owner, function, what stands in its place, of the true one; what differs then).  Adding
#: ranks before leaves is another order from the third leaf on.  Leaves of experts are too short,
#: and descend.
MUTANTS = {
    "rounded_partials": (op, "leaf_sums", lambda true, *a: true(*a).bfloat16().float(), DENSE_Y),
    "local_length": (
        op, "leaf_sums", lambda true, a, b, _: true(a, b, leaves.length(a.shape[1])), DENSE_Y,
    ),
    "ranks_added_first": (
        op, "leaf_sums", lambda true, *a: op.add_leaves(true(*a), None, FP32)[None], DENSE_Y,
    ),
    "added_pairwise": (op, "add_leaves", lambda true, p, *a: true(pairwise(p), *a), DENSE_Y),
    "started_from_zero": (
        op, "add_leaves", lambda true, p, *a: true(pad(p, (0, 0, 0, 0, 1, 0)), *a),
        {ROW: (ZEROS, "y")},
    ),
    "bias_on_ranks": (
        op, "add_leaves", lambda true, p, b, d: true(with_bias_of_ranks(p, b), None, d), DENSE_Y,
    ),
    "ranks_descending": (op, "add_leaves", lambda true, p, *a: true(p.flip(0), *a), DENSE_Y),
    "lengths": (
        moe_op, "grouped_leaf_sums",
        lambda true, a, b, at, length: true(a, b, at, max(16, length // 2)), EXPERTS_Y,
    ),
    "descending": (
        moe_op, "grouped_leaf_sums", lambda true, *a: true(*a).flip(0).contiguous(), EXPERTS_Y,
    ),
    "rounded_sum": (tp, "sum_over_ranks", rounded_sum, {EXPERT_ROW: (UNEVEN, "y")}),
    "all_reduce": (
        tp, "sum_over_ranks", all_reduce, {EXPERT_ROW: (PLAIN, "y"), EXPERT_COLUMN: (PLAIN, "dx")},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "mutant", "differ"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_killed(threaded, minus_zeros, owner, name, mutant, differ):
    wholes = {case: whole(case) for case, _ in differ.values()}
    with mock.patch.object(owner, name, functools.partial(mutant, getattr(owner, name))):
        for function, (case, result) in differ.items():
            try:
                assert result in wrong(function, case, 2, wholes[case])
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
        return lambda x: ROW(x.relu(), weight, bias, mesh=rank)

    (function,) = threads.together(1, work)
    with pytest.raises(Exception, match=r"row_parallel_linear: .* a graph of torch\.compile"):
        torch.compile(function, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dynamo's, if it made graphs of what is below
        got = torch.compile(function, backend="eager")(x)
    assert contract.same_bytes(got, want)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("function", "case"),
    [(ROW, Case((3,), *SIZES[0], FP32, False)), (EXPERT_ROW, GroupedCase("few", BF16))],
)
def test_a_double_backward_and_a_transform_are_refused(threaded, function, case):
    results = whole(case)

    def work(rank):
        axes = (CUTS | GROUPED_CUTS)[function]
        x, weight = (
            part(t, axis, 2, rank.rank()) for t, axis in zip(results[:2], axes, strict=False)
        )
        more = () if results.offsets is None else (results.offsets,)
        y = function(x.requires_grad_(), weight, *more, mesh=rank)
        with pytest.raises(UnsupportedTransformError, match=r"double backward|create_graph=True"):
            torch.autograd.grad(y.sum(), x, create_graph=True)

    threads.together(2, work)
    if results.offsets is not None:
        with pytest.raises(UnsupportedTransformError, match=r"torch\.compile"):
            torch.func.vmap(lambda x: function(x, results.weight, results.offsets, mesh=1))(
                results.x[None]
            )


# ---- names --------------------------------------------------------------------------------------


def test_guarantees():
    """Guarantees are those of one rank's function and tp_invariant; ids have their own names."""
    names = {"linear": (tp.ROW, tp.COLUMN), "grouped_linear": (gtp.ROW, gtp.COLUMN)}
    for name, dtype in itertools.product(names, (BF16, FP32)):
        kept = ck.guarantees(name, "cpu", dtype)
        assert contracts.TP_INVARIANT not in kept
        for parallel in names[name]:
            assert ck.guarantees(parallel, "cpu", dtype) == kept | {contracts.TP_INVARIANT}
            assert ck.contract_id(parallel, "cpu").startswith(f"{parallel}/cpu/")
    assert not {tp.ROW, tp.COLUMN} & ck.info()["ops"].keys()


# ---- four processes -----------------------------------------------------------------------------

WORLD = 4


@functools.cache
def meshes() -> list:
    """A mesh of 4 ranks, two meshes and a group of 2, and a group of this rank alone."""
    one = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    alone = [dist.new_group([each]) for each in range(WORLD)]
    return [one, two["tp"], two["dp"], pairs[dist.get_rank() // 2], alone[dist.get_rank()]]


def compare_bytes() -> None:
    """Some cases on each mesh, and those with rows on each path."""
    groups = [m.get_group() if isinstance(m, DeviceMesh) else m for m in meshes()]
    assert [group.size() for group in groups] == [4, 2, 2, 2, 1]
    for at, (mesh, group) in enumerate(zip(meshes(), groups, strict=True)):
        degree = group.size()
        for path in paths(degree):
            # Other paths run where they have something to carry.
            least = 0 if path == leaf_exchange.GATHERED else 37
            chosen = [case for case in cases(degree) if sum(case.rows) >= least]
            for case in chosen[at % 5 :: 5]:
                results = whole(case)
                for function in CUTS:
                    with forced(path):
                        wrong = differing(function, results, mesh, degree, group.rank())
                    assert not wrong, (function, case, degree, path, wrong)


def compare_modules() -> None:
    """A column-parallel linear, relu and a row-parallel one, against whole ones."""
    torch.manual_seed(5)
    first, second, x = torch.nn.Linear(128, 256), torch.nn.Linear(256, 128), torch.randn(9, 128)
    leaf = x.clone().requires_grad_()
    hidden = ck.linear(leaf, first.weight, first.bias, order="tree").relu()
    want = ck.linear(hidden, second.weight, second.bias, order="tree")
    want.square().sum().backward()
    rank = dist.get_rank()
    gradients = {
        "dx": leaf.grad,
        "0.weight": first.weight.grad.chunk(WORLD)[rank],
        "0.bias": first.bias.grad.chunk(WORLD)[rank],
        "2.weight": second.weight.grad.chunk(WORLD, 1)[rank],
        "2.bias": second.bias.grad,
    }
    mesh = meshes()[0]
    one = tp.ColumnParallelLinear.from_linear(first, mesh)
    cut = torch.nn.Sequential(one, torch.nn.ReLU(), tp.RowParallelLinear.from_linear(second, mesh))
    with torch.no_grad():
        assert contract.same_bytes(cut(x), want)
    runs = [cut] + [
        functools.partial(checkpoint, cut, use_reentrant=reentrant) for reentrant in (False, True)
    ]
    for run in runs:
        cut.zero_grad()
        mine = x.clone().requires_grad_()
        y = run(mine)
        y.square().sum().backward()
        got = {"dx": mine.grad} | {name: p.grad for name, p in cut.named_parameters()}
        wrong = [name for name, t in gradients.items() if not contract.same_bytes(got[name], t)]
        assert not wrong and contract.same_bytes(y, want), wrong


#: Fragments of a message about differing values.
SHARED = ("same values on every rank of mesh", "ranks 0, 1, 2 with", "rank 3 with")
RANK, ANY, SHAPE = "RankError", "RankError or ", "ShapeError"
VALUE, KIND = "ArgumentValueError", "ArgumentTypeError"


def t(*shape: int, dtype: torch.dtype = BF16, **options) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, **options)


def bad_inputs(rank: int, mesh) -> list[tuple]:
    """(call, its arguments, changed options, the errors that ranks may raise, their fragments)."""
    trio = dist.new_group([0, 1, 2])
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    backwards = DeviceMesh("cpu", [3, 2, 1, 0])
    last = rank == WORLD - 1
    x, w, b, column_w = t(5, 64), t(48, 64), t(48), t(32, 64)  # K = 256, or N = 128
    thin = 32 if last else 64
    ids = torch.tensor([0, 1, 3, 3, 5, 6, 8], dtype=torch.int32)
    other_ids = torch.tensor([0, 2, 2, 4, 4, 5, 8], dtype=torch.int32)
    rows, up, down, expert_b = t(8, 64), t(6, 32, 64), t(6, 48, 64), t(6, 48)
    ramp = torch.arange(48).to(BF16)
    lazy = x.clone().requires_grad_(not last)
    whole_x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    row, column = tp.RowParallelLinear.from_linear, tp.ColumnParallelLinear.from_linear
    halves, wide = (x.half(), w.half()), torch.nn.Linear(320, 100)
    main_grad = t(48, 256, dtype=FP32)
    return [
        # the mesh
        (ROW, (x, w), {"mesh": trio}, VALUE, ["mesh: expected"]),
        (ROW, (x, w), {"mesh": square}, VALUE, ["mesh", "1 dimension", "('a', 'b')"]),
        (ROW, (x, w), {"mesh": backwards}, VALUE, ["mesh", "ascending", "[3, 2, 1, 0]"]),
        (ROW, (x, w), {"mesh": 4}, KIND, ["mesh", "DeviceMesh", "int"]),
        # sizes that ranks have alike
        (ROW, (t(5, 40), t(48, 40)), {}, SHAPE, ["K", "160", "32 long", "1 rank only"]),
        (COLUMN, (x, t(12, 64)), {}, SHAPE, ["N", "got 48", "16 long", "1 rank only"]),
        (ROW, (t(5, 32), w), {}, SHAPE, ["x", "last dimension 64"]),
        (COLUMN, (x, column_w, t(128)), {}, SHAPE, ["bias", "[32]", "[128]"]),
        (ROW, (x, t(1, 48, 64)), {}, SHAPE, ["weight", "2 dimensions"]),
        (ROW, (x, w), {"main_grad": main_grad}, SHAPE, ["main_grad", "[48, 64]"]),
        # kinds that ranks have alike
        (ROW, (x, w), {"order": "chain"}, VALUE, ["order", "'tree'", "'chain'"]),
        (COLUMN, (x, column_w), {"order": "ring"}, VALUE, ["order", "'ring'"]),
        (ROW, (x, w.float()), {}, "DtypeError", ["weight", "bfloat16", "float32"]),
        (ROW, (x.double(), w.double()), {}, "DtypeError", ["x", "float64"]),
        (ROW, ([1.0], w), {}, KIND, ["x", "torch.Tensor", "list"]),
        (ROW, (whole_x, w), {}, KIND, ["x", "to_local()", "DTensor"]),
        (ROW, (x.to("meta"), w.to("meta")), {}, "BackendUnavailable", ["linear", "meta"]),
        (ROW, (x, w, t(3)), {"verify": False}, SHAPE, ["bias", "[48]", "[3]"]),
        # what ranks have not alike: all raise, those that have nothing wrong themselves too
        (ROW, (x, w, t(3) if last else b), {}, ANY + SHAPE, ["expected"]),
        (ROW, (x, w.half() if last else w), {}, ANY + "DtypeError", ["expected"]),
        (ROW, (t(5, thin), t(48, thin)), {}, RANK, ["K of weight", "64, 64, 64, 32"]),
        (ROW, (t(5 + last, 64), w), {}, RANK, ["rows of x", "5, 5, 5, 6"]),
        (ROW, halves if last else (x, w), {}, RANK, ["dtype", "torch.bfloat16, torch.float16"]),
        (ROW, (x, w, None if last else b), {}, RANK, ["bias", "1, 1, 1, 0"]),
        (ROW, (x, w, b + last), {}, RANK, ["bias", *SHARED]),
        (ROW, (x, w, ramp.flip(0) if last else ramp), {}, RANK, ["bias", *SHARED]),
        (COLUMN, (x + last, column_w), {"verify": "all"}, RANK, ["x", *SHARED]),
        (ROW, (x, w), {"verify": "some"}, VALUE, ["verify", "True", "'all'", "'some'"]),
        (COLUMN if last else ROW, (x, w), {}, RANK, ["function", "column_parallel"]),
        (COLUMN, (lazy, column_w), {}, RANK, ["x.requires_grad", "1, 1, 1, 0"]),
        # experts
        (EXPERT_ROW, (rows, down, ids), {"order": "chain"}, VALUE, ["order", "'tree'"]),
        (EXPERT_ROW, (rows, down, ids, expert_b.float()), {}, "DtypeError", ["bias"]),
        (EXPERT_ROW, (rows, down, ids[:3]), {}, SHAPE, ["expert_offsets"]),
        (EXPERT_ROW, (rows, down, other_ids if last else ids), {}, RANK, ["expert_off", *SHARED]),
        (EXPERT_ROW, (rows, down, ids, None if last else expert_b), {}, RANK, ["bias", "1, 1, 0"]),
        (EXPERT_COLUMN, (rows.float() if last else rows, up, ids), {}, ANY + "DtypeError", []),
        (EXPERT_ROW, (t(8, 40), t(6, 48, 40), ids), {}, SHAPE, ["leaves of 160 are 32 long"]),
        # modules
        (row, (torch.nn.Identity(),), {}, KIND, ["linear", "torch.nn.Linear", "Identity"]),
        (row, (wide,), {}, SHAPE, ["in_features", "320", "48 long"]),
        (column, (wide,), {}, SHAPE, ["out_features", "100", "16 long"]),
    ]


def refuse() -> None:
    """Every row is refused on this rank, and nothing is left over of its collectives."""
    mesh = meshes()[0]
    for function, arguments, options, kinds, fragments in bad_inputs(dist.get_rank(), mesh):
        row = function, options, fragments
        try:
            function(*arguments, **{"mesh": mesh} | options)
        except Exception as error:
            assert type(error).__name__ in kinds.split(" or "), (row, error)
            assert all(fragment in str(error) for fragment in fragments), (row, error)
        else:
            raise AssertionError(f"{row}: nothing is raised")
    for rows in ((3,), (0,), (70,)):
        results = whole(Case(rows, *SIZES[0], FP32, True))
        for function in CUTS:
            assert not differing(function, results, mesh, WORLD, dist.get_rank()), (function, rows)


def leave_uncompared() -> None:
    """Calls pass though values differ: the comparison is not asked for, or they may differ."""
    rank, mesh = dist.get_rank(), meshes()[0]
    x, w = t(5, 64) + rank, t(48, 64)
    assert COLUMN(x, t(32, 64), mesh=mesh).shape == (5, 32)
    assert COLUMN(t(5, 64), t(32, 64), t(32) + rank, mesh=mesh, verify="all").shape == (5, 32)
    assert ROW(x, w, t(48), mesh=mesh, verify="all").shape == (5, 48)
    assert ROW(t(5, 64), w, t(48) + rank, mesh=mesh, verify=False).shape == (5, 48)


def run_script() -> None:
    """The script for GPUs counts what differs: nothing, or what the last rank has otherwise."""
    cases = script.listed("cpu", WORLD)[1:2]
    assert script.compare("cpu", cases) == 0
    with mock.patch.object(contract, "same_bytes", lambda a, b: dist.get_rank() < WORLD - 1):
        assert script.compare("cpu", cases) > 0


def time_systems() -> None:
    """The bench over gloo: a path with other bytes has a record that says so, and no time."""

    def run() -> dict[str, dict]:
        options = {"rounds": 1, "commit": "of a test"}
        records = bench.bench([bench.Case(9, 128, 256)], dist.group.WORLD, "cpu", **options)
        return {body["system"]: body for body in records}

    good, scattered = run(), lambda total: leaf_exchange.gathered(total) * -1
    with mock.patch.object(leaf_exchange, "scattered", scattered):
        bad = run()
    assert {"nccl", "ours", "gathered", "scattered"} < set(good)
    assert all(0 < body["p10"] <= body["us"] <= body["p90"] for body in good.values())
    statuses = [{name: body["status"] for name, body in some.items()} for some in (good, bad)]
    assert set(statuses[0].values()) == {"ok"}
    assert statuses[1] == statuses[0] | {"scattered": "wrong"} and "us" not in bad["scattered"]


four = ranks.pool(WORLD)


PARTS = compare_bytes, compare_modules, refuse, leave_uncompared, run_script, time_systems


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_processes(four, part):
    """Meshes of 1, 2 and 4, of one and of two dimensions, neighbours or not, and a group."""
    four.run(part)


def test_the_bench_compares_its_adds_with_torchs():
    zeros = torch.zeros(2, 3).bfloat16()
    calls = dict.fromkeys(("add_leaves", "add_leaves/torch"), lambda _: zeros)
    assert bench.differing(calls, None, None) == []
    assert bench.differing(calls | {"add_leaves": lambda _: -zeros}, None, None) == ["add_leaves"]
