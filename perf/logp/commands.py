"""The command line of `linear_logp`: python -m perf bench logp."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core import commands as verbs
from ..core.commands import Commit, Output, bench_suite, chosen, need_gpu
from . import cases


@verbs.bench.command("logp")
def bench_logp(
    shape: Annotated[str, typer.Option(help="of 128k,152k")] = ",".join(cases.SHAPES),
    passes: Annotated[str, typer.Option(help="of fwd,bwd,both")] = ",".join(cases.PASSES),
    rivals: Annotated[str, typer.Option(help="who is measured; see perf/logp/rivals.py")] = "",
    rounds: Annotated[int, typer.Option(min=10, help="samples of each rival")] = 50,
    decode: Annotated[bool, typer.Option(help="also steps of decoding")] = True,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Log-probabilities and their gradients: checked, then timed in turns with the rivals."""
    need_gpu("bench")
    from . import bench

    shapes = chosen("--shape", shape, cases.SHAPES)
    todo = cases.cases(shapes, chosen("--passes", passes, cases.PASSES))
    todo = [case for case in todo if decode or case.label in cases.SHAPES]
    options = {"output": output, "rounds": rounds, "commit": commit}
    bench_suite(bench.SUITE, todo, rivals, **options)
