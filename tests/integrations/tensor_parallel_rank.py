"""One of four ranks of parallel linears, over gloo on a CPU.

``python -m tests.integrations.tensor_parallel_rank RANK STORE`` prints one JSON object: which
results differed from one rank's, and what was refused.  test_tensor_parallel.py starts all four.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
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
from tests.ranks import joined

WORLD = 4
ROW, COLUMN = tp.row_parallel_linear, tp.column_parallel_linear


def meshes(rank: int) -> list:
    """Of 4; of 2 neighbours, 2 others and a group of 2, each of two; of this rank alone."""
    one = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    alone = [dist.new_group([each]) for each in range(WORLD)]
    return [one, two["tp"], two["dp"], pairs[rank // 2], alone[rank]]


def group_of(mesh) -> dist.ProcessGroup:
    return mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh


def bytes_compared(every: list) -> dict:
    wrong, compared, wholes = [], 0, {}
    sizes = [group_of(mesh).size() for mesh in every]
    for at, mesh in enumerate(every):
        group = group_of(mesh)
        degree, rank = group.size(), group.rank()
        # Meshes of one size share its cases; alone, a rank has nothing to exchange.
        number, place = sizes.count(degree), sizes[:at].count(degree)
        chosen = list(cases(degree))[place :: number if degree > 1 else 4]
        for path in paths(degree):
            for case in chosen:
                # Again only where the other exchanges have something to carry.
                if path != leaf_exchange.GATHERED and sum(case.rows) < 37:
                    continue
                of = wholes.setdefault(case, whole(case))
                for function in CUTS:
                    with forced(path):
                        names = differing(function, of, mesh, degree, rank)
                    wrong += [f"{function.__name__} {case} of {degree}: {name}" for name in names]
                    compared += 1
    return {"differing": wrong, "compared": compared, "meshes": sizes}


def layers() -> tuple[torch.nn.Linear, torch.nn.Linear]:
    torch.manual_seed(5)
    return torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)


def modules(mesh) -> dict:
    """A column-parallel linear, relu and a row-parallel one, against whole ones."""
    first, second = layers()
    x = torch.randn(9, 128)

    def alone(x):
        hidden = ck.linear(x, first.weight, first.bias, order="tree").relu()
        return ck.linear(hidden, second.weight, second.bias, order="tree")

    of = x.clone().requires_grad_()
    want = alone(of)
    want.square().sum().backward()
    rank, degree = dist.get_rank(), WORLD
    gradients = {
        "dx": of.grad,
        "first.weight": first.weight.grad.chunk(degree)[rank],
        "first.bias": first.bias.grad.chunk(degree)[rank],
        "second.weight": second.weight.grad.chunk(degree, 1)[rank],
        "second.bias": second.bias.grad,
    }
    one = tp.ColumnParallelLinear.from_linear(first, mesh)
    two = tp.RowParallelLinear.from_linear(second, mesh)

    def cut(x):
        return two(one(x).relu())

    def differ(run) -> list[str]:
        for module in (one, two):
            module.zero_grad()
        mine = x.clone().requires_grad_()
        y = run(mine)
        y.square().sum().backward()
        got = {"dx": mine.grad} | {
            f"{name}.{key}": parameter.grad
            for name, module in (("first", one), ("second", two))
            for key, parameter in module.named_parameters()
        }
        wrong = [name for name, t in gradients.items() if not contract.same_bytes(got[name], t)]
        return wrong + ["y"] * (not contract.same_bytes(y, want))

    with torch.no_grad():
        same = contract.same_bytes(cut(x), want)
    return {
        "no_grad": [] if same else ["y"],
        "plain": differ(cut),
        "checkpoint": differ(lambda x: checkpoint(cut, x, use_reentrant=False)),
        "reentrant": differ(lambda x: checkpoint(cut, x, use_reentrant=True)),
    }


#: What a message about differing values has besides the argument.
SHARED = ("same values on every rank of mesh", "ranks 0, 1, 2 with", "rank 3 with")


def ramp(size: int, reverse: bool) -> torch.Tensor:
    """0, 1, ..., in this order or the other."""
    values = torch.arange(size).to(BF16)
    return values.flip(0) if reverse else values


def t(*shape: int, dtype: torch.dtype = BF16, **options) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, **options)


def bad_inputs(rank: int, mesh) -> list[tuple]:
    """(what is wrong, a call, the exceptions that ranks may raise, fragments of all messages)."""
    trio = dist.new_group([0, 1, 2])
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    backwards = DeviceMesh("cpu", [3, 2, 1, 0])
    last = rank == WORLD - 1
    x, w, b = t(5, 64), t(48, 64), t(48)  # K = 256
    column_w = t(32, 64)  # N = 128

    def row(*args, mesh=mesh, **options):
        return lambda: ROW(*args, mesh=mesh, **options)

    def column(*args, mesh=mesh, **options):
        return lambda: COLUMN(*args, mesh=mesh, **options)

    def dtensor(local):
        return DTensor.from_local(local, mesh, [Replicate()], run_check=False)

    any_rank = "RankError or "
    value, kind, shape = "ArgumentValueError", "ArgumentTypeError", "ShapeError"
    return [
        # the mesh
        ("three ranks", row(x, w, mesh=trio), value, ["mesh: expected"]),
        ("three ranks, column", column(x, column_w, mesh=trio), value, ["mesh: expected"]),
        ("two dimensions", row(x, w, mesh=square), value, ["mesh", "1 dimension", "('a', 'b')"]),
        (
            "ranks backwards",
            row(x, w, mesh=backwards),
            value,
            ["mesh", "ascending", "[3, 2, 1, 0]"],
        ),
        ("mesh None", row(x, w, mesh=None), kind, ["mesh", "DeviceMesh", "NoneType"]),
        ("mesh 4", row(x, w, mesh=4), kind, ["mesh", "DeviceMesh", "int"]),
        # sizes that ranks have alike
        (
            "K inside a leaf",
            row(t(5, 40), t(48, 40)),
            shape,
            ["K", "160", "32 long", "1 rank only"],
        ),
        ("K for two", row(t(5, 48), t(48, 48)), shape, ["K", "192", "32 long", "1 or 2 ranks"]),
        ("N inside a leaf", column(x, t(12, 64)), shape, ["N", "got 48", "16 long", "1 rank only"]),
        ("K of x and weight", row(t(5, 32), w), shape, ["x", "last dimension 64"]),
        ("bias of K", row(x, w, t(64)), shape, ["bias", "[48]", "[64]"]),
        ("bias of all columns", column(x, column_w, t(128)), shape, ["bias", "[32]", "[128]"]),
        ("weight 3-D", row(x, t(1, 48, 64)), shape, ["weight", "2 dimensions"]),
        (
            "main_grad",
            row(x, w, main_grad=t(48, 256, dtype=FP32)),
            shape,
            ["main_grad", "[48, 64]"],
        ),
        # kinds that ranks have alike
        ("order chain", row(x, w, order="chain"), value, ["order", "'tree'", "'chain'"]),
        ("order unknown", column(x, column_w, order="ring"), value, ["order", "'ring'"]),
        ("weight fp32", row(x, w.float()), "DtypeError", ["weight", "bfloat16", "float32"]),
        ("fp64", row(x.double(), w.double()), "DtypeError", ["x", "float64"]),
        ("x a list", row([1.0], w), kind, ["x", "torch.Tensor", "list"]),
        ("x a DTensor", row(dtensor(x), w), kind, ["x", "to_local()", "DTensor"]),
        ("weight a DTensor", column(x, dtensor(w)), kind, ["weight", "to_local()"]),
        ("meta", row(x.to("meta"), w.to("meta")), "BackendUnavailable", ["linear", "meta"]),
        ("unverified", row(x, w, t(3), verify=False), shape, ["bias", "[48]", "[3]"]),
        # what ranks have not alike: all raise, those that have nothing wrong themselves too
        ("bias on one rank", row(x, w, t(3) if last else b), any_rank + shape, ["expected"]),
        ("dtype of one", row(x, w.half() if last else w), any_rank + "DtypeError", ["expected"]),
        (
            "uneven shards",
            row(t(5, 32 if last else 64), t(48, 32 if last else 64)),
            "RankError",
            ["K of weight", "same on every rank", "64, 64, 64, 32"],
        ),
        ("rows", row(t(5 + last, 64), w), "RankError", ["rows of x", "5, 5, 5, 6"]),
        (
            "dtypes",
            row(*((x.half(), w.half()) if last else (x, w))),
            "RankError",
            ["dtype", "torch.bfloat16, torch.float16"],
        ),
        ("bias of some", row(x, w, None if last else b), "RankError", ["bias", "1, 1, 1, 0"]),
        ("bias", row(x, w, b + last), "RankError", ["bias", *SHARED]),
        ("order of bias", row(x, w, ramp(48, last)), "RankError", ["bias", *SHARED]),
        ("x", column(x + last, column_w, verify="all"), "RankError", ["x", *SHARED]),
        (
            "order of x",
            column(ramp(5, last)[:, None].expand(5, 64), column_w, verify="all"),
            "RankError",
            ["x", *SHARED],
        ),
        ("verify", row(x, w, verify="some"), value, ["verify", "True", "'all'", "'some'"]),
        ("function", (column if last else row)(x, w), "RankError", ["function", "column_parallel"]),
        (
            "gradients of some",
            column(x.clone().requires_grad_(not last), column_w),
            "RankError",
            ["x.requires_grad", "1, 1, 1, 0"],
        ),
        # modules
        (
            "no linear",
            lambda: tp.RowParallelLinear.from_linear(torch.nn.Identity(), mesh),
            kind,
            ["linear", "torch.nn.Linear", "Identity"],
        ),
        (
            "in_features",
            lambda: tp.RowParallelLinear.from_linear(torch.nn.Linear(320, 8), mesh),
            shape,
            ["in_features", "320", "48 long"],
        ),
        (
            "out_features",
            lambda: tp.ColumnParallelLinear.from_linear(torch.nn.Linear(8, 100), mesh),
            shape,
            ["out_features", "100", "16 long"],
        ),
    ]


def refused(rank: int, mesh) -> dict:
    said = {}
    for name, call, want, fragments in bad_inputs(rank, mesh):
        result = {"type": "nothing", "said": "", "want": want, "fragments": fragments}
        try:
            call()
        except Exception as error:
            result |= {"type": type(error).__name__, "said": str(error)}
        said[name] = result
    return said


def after(mesh) -> list[str]:
    """That nothing is left over of the collectives of refused calls, and an empty batch."""
    found = []
    for rows in ((3,), (0,), (70,)):
        of = whole(Case(rows, *SIZES[0], FP32, True))
        for function in CUTS:
            found += differing(function, of, mesh, WORLD, dist.get_rank())
    return found


def uncompared(rank: int, mesh) -> list[str]:
    """Calls that pass though a rank's values differ: not asked for, or not the same by right."""
    x, bias = t(5, 64) + rank, t(32) + rank
    calls = {
        "x of column": lambda: COLUMN(x, t(32, 64), mesh=mesh),
        "its bias": lambda: COLUMN(t(5, 64), t(32, 64), bias, mesh=mesh, verify="all"),
        "x of row": lambda: ROW(x, t(48, 64), t(48), mesh=mesh, verify="all"),
        "unverified": lambda: ROW(x, t(48, 64), t(48) + rank, mesh=mesh, verify=False),
    }
    return [name for name, call in calls.items() if call().shape[0] != 5]


def scripted() -> dict:
    """The script for GPUs, of which four ranks can cut some cases: once all, once none."""
    tally = script.compare("cpu", script.listed(cpu=True))
    none = script.compare("cpu", [Case((3,), 192, 96, BF16, True)])
    return {
        "ran": tally.ran,
        "skipped": tally.skipped,
        "failed": [tally.failed(), none.failed()],
        "none": [none.ran, len(none.skipped), none.different],
    }


def timed() -> dict:
    """The bench over gloo: as it is, and where one path has other bytes."""

    def scattered(total):
        return leaf_exchange.gathered(total) * -1

    def run() -> list[dict]:
        cases = [bench.Case(9, 128, 256)]
        options = {"rounds": 2, "commit": "of a test"}
        return list(bench.bench(cases, dist.group.WORLD, "cpu", **options))

    good = run()
    with mock.patch.object(leaf_exchange, "scattered", scattered):
        bad = run()
    table = bench.lines(bad)
    return {
        "statuses": [{body["system"]: body["status"] for body in some} for some in (good, bad)],
        "untimed": [body["system"] for body in bad if "us" not in body],
        "ordered": all(0 < body["p10"] <= body["us"] <= body["p90"] for body in good),
        "lines": [len(table), [json.loads(line) for line in table[2 + len(bad) :]] == bad],
    }


def main(rank: int, store: str) -> None:
    with joined(rank, store, WORLD):
        every = meshes(rank)
        report = {"bytes": bytes_compared(every), "modules": modules(every[0])}
        report |= {"refused": refused(rank, every[0]), "after": after(every[0])}
        report |= {"bench": timed(), "script": scripted(), "uncompared": uncompared(rank, every[0])}
        print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
