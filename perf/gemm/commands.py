"""The command line of products: `perf bench|profile gemm`, `perf tune`."""

from __future__ import annotations

import itertools
import os
from typing import Annotated

import typer

from ..core import commands as verbs
from ..core import record
from ..core.commands import (
    Commit,
    Output,
    Target,
    bench_suite,
    chosen,
    counted,
    need_gpu,
    numbers,
    say,
    stop,
)
from . import targets


@verbs.bench.command("gemm")
def bench_gemm(
    shape: Annotated[str, typer.Option(help="qkv,o_proj,...; default: the status page's")] = "",
    m: Annotated[str, typer.Option(help="row counts, 512,1024; default: each shape's own")] = "",
    product: Annotated[str, typer.Option(help="of fwd,dx,dw")] = ",".join(targets.PRODUCTS),
    rivals: Annotated[str, typer.Option(help="who is measured; see perf/gemm/rivals.py")] = "",
    rounds: Annotated[int, typer.Option(min=50, help="samples of each rival")] = 50,
    output: Output = None,
    check_only: Annotated[bool, typer.Option(help="correctness and bits, no time")] = False,
    commit: Commit = None,
) -> None:
    """Checks every rival against float64, then times them in turns.  Appends one line per case."""
    need_gpu("bench")
    from .bench import SUITE
    from .cases import cases
    from .rivals import DEFAULT

    shapes = chosen("--shape", shape, targets.SHAPES)
    todo = cases(shapes, numbers("--m", m), chosen("--product", product, targets.PRODUCTS))
    options = {"output": output, "rounds": 0 if check_only else rounds, "commit": commit}
    bench_suite(SUITE, todo, rivals or DEFAULT, **options)


@verbs.bench.command("decode")
def bench_decode(
    group: Annotated[str, typer.Option(help="of few,middle,dense")] = "few,middle,dense",
    shape: Annotated[str, typer.Option(help="qkv,o_proj,...; default: all")] = "",
    rounds: Annotated[int, typer.Option(min=50, help="samples of each system")] = 50,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Few rows in both orders and in arrival order, checked, then timed in turns with cuBLAS."""
    need_gpu("bench")
    from . import decode

    groups = chosen("--group", group, ("few", "middle", "dense"))
    shapes = chosen("--shape", shape, decode.SHAPES)
    todo = [case for case in decode.cases(groups) if not shapes or case.shape in shapes]
    options = {"output": output, "rounds": rounds, "commit": commit}
    bench_suite(decode.SUITE, todo, "", **options)


@verbs.bench.command("tensor-parallel")
def bench_tensor_parallel(
    rows: Annotated[str, typer.Option(help="row counts")] = "4096,64",
    weight: Annotated[str, typer.Option(help="NxK of the weight; ranks cut K")] = "4096x14336",
    rounds: Annotated[int, typer.Option(min=1, help="samples of each system")] = 50,
    graph: Annotated[bool, typer.Option(help="replay CUDA graphs: without the host")] = False,
    cpu: Annotated[bool, typer.Option(help="over gloo, to try the command itself")] = False,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Under torchrun: a row-parallel linear on every path beside matmul and NCCL's all_reduce."""
    if not cpu:
        need_gpu("bench")
    if "RANK" not in os.environ:
        command = "torchrun --nproc-per-node 4 -m perf bench tensor-parallel"
        raise stop("bench", f"needs ranks: {command}")
    import torch
    import torch.distributed as dist

    from . import tensor_parallel

    shape = numbers("--weight", weight.replace("x", ","))
    if len(shape) != 2:
        raise typer.BadParameter(f"--weight: expected NxK, got {weight!r}")
    todo = [tensor_parallel.Case(m, *shape) for m in numbers("--rows", rows)]
    if not cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if cpu else "cpu:gloo,cuda:nccl")
    try:
        device = "cpu" if cpu else "cuda"
        measured = tensor_parallel.bench(
            todo, dist.group.WORLD, device, rounds=rounds, graph=graph, commit=commit
        )
        bad = 0
        for _, group in itertools.groupby(measured, key=lambda body: body["shape"]):
            bodies = list(group)
            bad += sum(body["status"] != "ok" for body in bodies)
            if dist.get_rank() == 0:
                typer.echo("\n".join(tensor_parallel.lines(bodies)))
                for body in bodies if output else ():
                    record.append(output, body)
    finally:
        dist.destroy_process_group()
    if bad:
        raise typer.Exit(1)


@verbs.app.command("tune")
def tune_gemm(
    kernel: Annotated[str, typer.Argument(help="gemm, tiles")] = "gemm",
    shape: Annotated[str, typer.Option()] = "qkv,mlp_down",
    product: Annotated[str, typer.Option(help="of fwd,dx,dw")] = "fwd",
    variant: Annotated[list[str] | None, typer.Option(help="tile_n=192,cluster_m=1")] = None,
    rounds: Annotated[int, typer.Option(min=50)] = 50,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Variants of a kernel's configuration: the same bits, then their times in turns.

    ``tiles``: what an SM takes for each tile, of which the launcher's choice is made.
    """
    need_gpu("tune")
    from . import tune
    from .cases import cases

    chosen("KERNEL", kernel, ("gemm", "tiles"))
    if kernel == "tiles":
        from . import tile_costs

        path = output or record.RESULTS / "tiles.jsonl"
        for line in tile_costs.measure(path, rounds, commit):
            say(line)
        return
    shapes = chosen("--shape", shape, targets.SHAPES)
    products = chosen("--product", product, targets.PRODUCTS)
    variants, path = list(variant or tune.VARIANTS), output or record.RESULTS / "tune.jsonl"
    for case in cases(shapes, [], products):
        say("\n".join(tune.write(case, variants, path, rounds, commit)))


@verbs.profile.command("gemm")
def profile_gemm(
    shape: Annotated[str, typer.Option()] = "qkv",
    product: Annotated[str, typer.Option(help="one of fwd,dx,dw")] = "fwd",
    system: Annotated[str, typer.Option(help="whose kernel")] = "ours",
    output: Output = None,
    commit: Commit = None,
    target: Target = False,
) -> None:
    """Counters of one launch: achieved against the floor, and where warps stall."""
    need_gpu("profile")
    from .bench import SUITE
    from .cases import cases

    (one_shape,) = chosen("--shape", shape, targets.SHAPES)
    (one_product,) = chosen("--product", product, targets.PRODUCTS)
    chosen("--system", system, SUITE.rivals)
    counted(SUITE, cases([one_shape], [], [one_product]), system, target, output, commit)
