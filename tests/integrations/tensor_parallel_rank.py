"""Parallel linears as one of four ranks over gloo: test_tensor_parallel.py calls functions."""

from __future__ import annotations

import functools
from unittest import mock

import torch
import torch._dynamo  # checkpoint imports it: here once, before the ranks are forked
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import cute_kernels as ck
from cute_kernels.integrations import leaf_exchange
from cute_kernels.integrations import tensor_parallel as tp
from perf.gemm import tensor_parallel as bench
from tests import contract
from tests.integrations import gpu_tensor_parallel as script
from tests.integrations.parallel_cases import (
    BF16,
    CUTS,
    FP32,
    SIZES,
    Case,
    cases,
    differing,
    forced,
    paths,
    whole,
)

WORLD = 4
ROW, COLUMN = tp.row_parallel_linear, tp.column_parallel_linear


@functools.cache
def meshes() -> list:
    """Of 4; of 2 neighbours, 2 others and a group of 2, each of two; of this rank alone."""
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
            # Again only where the other exchanges have something to carry.
            least = 0 if path == leaf_exchange.GATHERED else 37
            chosen = [case for case in cases(degree) if sum(case.rows) >= least]
            for case in chosen[at % 5 :: 5]:
                of = whole(case)
                for function in CUTS:
                    with forced(path):
                        wrong = differing(function, of, mesh, degree, group.rank())
                    assert not wrong, (function, case, degree, path, wrong)


def compare_modules() -> None:
    """A column-parallel linear, relu and a row-parallel one, against whole ones."""
    torch.manual_seed(5)
    first, second, x = torch.nn.Linear(128, 256), torch.nn.Linear(256, 128), torch.randn(9, 128)
    of = x.clone().requires_grad_()
    hidden = ck.linear(of, first.weight, first.bias, order="tree").relu()
    want = ck.linear(hidden, second.weight, second.bias, order="tree")
    want.square().sum().backward()
    rank = dist.get_rank()
    gradients = {
        "dx": of.grad,
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


#: What a message about differing values has besides the argument.
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
        of = whole(Case(rows, *SIZES[0], FP32, True))
        for function in CUTS:
            assert not differing(function, of, mesh, WORLD, dist.get_rank()), (function, rows)


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
